"""Whether a queue was ever used: it exists by its messages alone, a mistyped name is a new one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress

from kafkamq.config import ServiceConfig
from kafkamq.errors import WireError
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.wire.keys import split_key
from kafkamq.transport.admin import Admin
from kafkamq.transport.log_reader import scan
from kafkamq.transport.record import Record

MAX_READ = 100_000  # records of a topic; more: nobody is told anything
_TIMEOUT_S = 10.0


class QueueSearch:
    """Looks for a queue by its group, its messages and its delayed messages; commits nothing.

    A context manager. Every method raises ``BrokerError`` or ``DeadlineExceededError``.
    """

    def __init__(self, config: ServiceConfig, queue_id: str, group: str) -> None:
        self._config = config
        self._queue_id = queue_id
        self._group = group
        self._next: dict[tuple[str, int], int] = {}  # offset, by topic and partition
        self._seen: set[str] = set()
        self._admin = Admin(config, timeout_s=_TIMEOUT_S)

    def __enter__(self) -> QueueSearch:
        return self

    def __exit__(self, *_: object) -> None:
        self._admin.close()

    @property
    def others(self) -> tuple[str, ...]:
        """The queues that were seen meanwhile."""
        return tuple(sorted(self._seen))

    def is_used(self) -> bool:
        """Whether it has a group, a message or a marker, or there is too much to read."""
        return (
            self._group in self._admin.groups()
            or self.has_new_message()
            or self._is_in(self._config.marker_topic, _queue_of_marker)
        )

    def has_new_message(self) -> bool:
        """Whether a message of it came since this was asked last; the first time: ever."""
        return self._is_in(self._config.message_topic, _queue_of_message)

    def _is_in(self, topic: str, queue_of: Callable[[Record], str]) -> bool:
        count = self._admin.require_topic(topic).partitions
        bounds = self._admin.log_bounds(topic, range(count))
        starts = {
            partition: max(first, self._next.get((topic, partition), 0))
            for partition, (first, _) in bounds.items()
        }
        left = {part: bounds[part][1] - start for part, start in starts.items()}
        if sum(left.values()) > MAX_READ:
            return True
        behind = {part: start for part, start in starts.items() if left[part] > 0}
        with closing(scan(self._config, topic, behind)) as records:
            for record in records:
                found = queue_of(record)
                if found == self._queue_id:
                    return True
                if found:
                    self._seen.add(found)
        self._next |= {(topic, part): end for part, (_, end) in bounds.items()}
        return False


def _queue_of_message(record: Record) -> str:
    return split_key(record.key())[0].decode("utf-8", "replace")


def _queue_of_marker(record: Record) -> str:
    """Empty for those that name none; a START or a SCHEDULE does."""
    with suppress(WireError):
        return split_key(decode_marker(record.value()).key)[0].decode("utf-8", "replace")
    return ""
