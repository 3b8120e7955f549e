"""librdkafka does not survive a fork: objects made before one refuse to work in the child."""

from __future__ import annotations

import os
from weakref import WeakSet

from kafkamq.errors import StateError

_checks: WeakSet[ForkCheck] = WeakSet()


def _fork() -> None:
    for check in list(_checks):
        check.is_forked = True


os.register_at_fork(after_in_child=_fork)


class ForkCheck:
    """Remembers the process that made an object.

    Attributes:
        is_forked: Whether this is a forked child of that process.
    """

    __slots__ = ("__weakref__", "_what", "is_forked")

    def __init__(self, what: str) -> None:
        self._what = what
        self.is_forked = False
        _checks.add(self)

    def check(self) -> None:
        """Refuse in a forked child."""
        if self.is_forked:
            raise StateError(
                f"this {self._what} was made before a fork and belongs to the parent process; "
                "make a new Service in the child"
            )
