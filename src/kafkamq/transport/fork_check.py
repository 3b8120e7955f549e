"""librdkafka does not survive a fork: objects made before one refuse to work in the child."""

from __future__ import annotations

import os

from kafkamq.errors import StateError

_generation = 0


def _count() -> None:
    global _generation  # noqa: PLW0603 - a fork is a fact about the whole process
    _generation += 1


os.register_at_fork(after_in_child=_count)


def generation() -> int:
    """A number that differs between a process and its forked children."""
    return _generation


class ForkCheck:
    """Remembers the process that made an object."""

    __slots__ = ("_generation", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._generation = _generation

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of the process that made the object."""
        return self._generation != _generation

    def check(self) -> None:
        """Refuse in a forked child."""
        if self._generation != _generation:
            raise StateError(
                f"this {self._what} was made before a fork and belongs to the parent process; "
                "make a new Service in the child"
            )
