"""Delivery reports of a batch's STARTs, for one marker partition at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kafkamq.markers.rules.lease import Lease
from kafkamq.queue.wire.partitions import marker_key
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import KafkaError
from kafkamq.transport.record import Record


class RouteStarts:
    """The STARTs that a batch writes to one marker partition; each begins some leases.

    A report only keeps its record: what it says is read when all are there, not in the callback.
    """

    __slots__ = (
        "_delivered",
        "_on_late",
        "error",
        "failed",
        "groups",
        "values",
        "written_ms",
    )

    def __init__(self) -> None:
        self.groups: list[Sequence[Lease]] = []
        self.values: list[bytes] = []  # the START of each group
        self.error: KafkaError | None = None  # the first one
        self.failed = 0
        self._delivered: list[Record] = []  # the STARTs in the log
        self.written_ms = 0  # monotonic; not after they were written
        self._on_late: Callable[[Lease, int, int], None] | None = None

    def report(self, error: KafkaError | None, record: Record) -> None:
        """Kafka's delivery report of one of them."""
        if error is not None:
            self.failed += 1
            self.error = self.error or error
            return
        self._delivered.append(record)
        if self._on_late is not None:
            for lease in self.groups[self.values.index(record.value() or b"")]:
                offset = record.offset()
                self._on_late(lease, record.timestamp()[1], -1 if offset is None else offset)

    def starts(self) -> list[dict[str, Any]]:
        """As produce_batch takes them, at once: no lease may begin later for the worker."""
        self.written_ms = monotonic_ms()
        report = self.report
        return [
            {
                "value": value,
                "key": marker_key(leases[0].partition, leases[0].offsets[0]),
                "callback": report,
            }
            for value, leases in zip(self.values, self.groups, strict=True)
        ]

    @property
    def is_reported(self) -> bool:
        """Whether each is known to be in the log or failed."""
        return len(self._delivered) + self.failed == len(self.values)

    def delivered(self) -> Iterable[tuple[Sequence[Lease], int, int]]:
        """The leases whose STARTs are in the log, with log times and offsets (-1: unknown)."""
        found = list(map(Record.value, self._delivered))
        times = [kind_and_ms[1] for kind_and_ms in map(Record.timestamp, self._delivered)]
        found_at = map(Record.offset, self._delivered)
        offsets = [-1 if offset is None else offset for offset in found_at]
        groups = self.groups
        if found != self.values:  # not all of them, or not in their order
            known = dict(zip(self.values, groups, strict=False))
            groups = [known[value or b""] for value in found]
        return zip(groups, times, offsets, strict=False)  # interrupted: one more group

    def give_up(self, on_late: Callable[[Lease, int, int], None]) -> None:
        """The batch has failed: tell of STARTs that prove to be in the log after all.

        Args:
            on_late: Gets the lease, the log time and the offset; called while reports are served.
        """
        self._on_late = on_late
