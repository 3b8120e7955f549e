"""Whether code was called by a certain consumer or worker: then it must not wait for it."""

from __future__ import annotations

from contextvars import ContextVar

_owner: ContextVar[object] = ContextVar("kafkamq_inside", default=None)


def enter(owner: object) -> None:
    """All that this thread or task calls from here on, and the tasks that it makes, is inside."""
    _owner.set(owner)


def is_inside(owner: object) -> bool:
    """Whether a handler or hook of this owner is running here."""
    return _owner.get() is owner
