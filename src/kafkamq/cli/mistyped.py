"""What is said about a queue that nobody has used: its name may be mistyped."""

from __future__ import annotations

import threading
import time

from kafkamq.cli import output
from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import KafkaMQError
from kafkamq.markers.overview import QueueSearch
from kafkamq.queue.names import group_of, group_of_workers

_SHOWN = 10
_PAUSE_S = 0.5


def is_used(
    config: ServiceConfig, queue: QueueConfig, stopping: threading.Event, patience: float
) -> bool:
    """Whether to consume a queue: at once if it was ever used, or when its first message comes.

    Until then there is a warning and no group, so that a mistyped name leaves nothing behind.
    """
    if queue.topic:  # its topic is asked for by that name
        return True
    deadline_s = time.monotonic() + patience
    with QueueSearch(config, queue.queue_id, group_of_workers(config, queue)) as search:
        if _is_known(search):
            return True
        _warn(config, queue.queue_id, search.others)
        try:
            while time.monotonic() < deadline_s and not stopping.wait(_PAUSE_S):
                if search.has_new_message():
                    return True
        except KeyboardInterrupt:
            output.note("Stopping.")
    return False


def warn_of_unused(config: ServiceConfig, queue_id: str, group: str = "") -> None:
    """Say so when nothing was ever sent to a queue of markers."""
    with QueueSearch(config, queue_id, group or group_of(config, queue_id)) as search:
        if not _is_known(search):
            _warn(config, queue_id, search.others)


def _is_known(search: QueueSearch) -> bool:
    """Where that cannot be asked, the command itself says why."""
    try:
        return search.is_used()
    except KafkaMQError:
        return True


def _warn(config: ServiceConfig, queue_id: str, others: tuple[str, ...]) -> None:
    names = ", ".join(others[:_SHOWN]) + (", ..." if len(others) > _SHOWN else "")
    seen = f"; queues there: {names}" if names else ""
    output.note(f"warning: nothing was ever sent to {queue_id} in {config.namespace}{seen}")
