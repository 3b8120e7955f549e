"""Which ranges of a topic a query reads: begin, end, partitions; and what filters leave out.

Filters that Spark pushes down to a batch only leave out what cannot match; Spark applies each again
to the rows. So a filter that is not understood, or that a view cannot use, costs time and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from kafkamq.markers.tracker.ledger import LedgerKey, read_ledgers
from kafkamq.spark.options import (
    EARLIEST,
    LATEST,
    Offsets,
    SourceOptions,
    chosen_partitions,
)
from kafkamq.transport.admin import Admin
from kafkamq.transport.log_reader import LogRange, LogReader, log_reader

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter


CLOCK_SLACK_MS = 600_000
"""A topic's times may step back by this (clocks of brokers differ); what is cut at the upper end
of a time range keeps that distance."""

_MAX_OFFSET = 2**63 - 1
_UNREADABLE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Pushed:
    """What rows must satisfy; None: anything. Bounds are inclusive."""

    queue_ids: frozenset[str] | None = None
    partitions: frozenset[int] | None = None  # of the topic that is read
    min_offset: int = 0
    max_offset: int = _MAX_OFFSET
    min_ms: int | None = None  # of the records' times
    max_ms: int | None = None

    def keeps(self, partition: int) -> bool:
        """Return whether a partition has to be read."""
        return self.partitions is None or partition in self.partitions


NOTHING_PUSHED = Pushed()

# By view: columns that are the partition, offset and time of the records that are read.
_PLACES = {
    "records": ("partition", "offset", "timestamp", ""),  # senders' times may be in any order
    "messages": ("partition", "offset", "timestamp", "timestamp"),
    "dead_letters": ("partition", "offset", "timestamp", "timestamp"),
    "markers": ("marker_partition", "marker_offset", "timestamp", "timestamp"),
    # Folded from the beginning: rows that ended before a time need nothing behind it.
    "deliveries": ("marker_partition", "", "", "ended_at"),
    "in_flight": ("marker_partition", "", "", ""),
}


def push(filters: Iterable[Filter], options: SourceOptions) -> Pushed:
    """Return what the filters leave to read."""
    result = NOTHING_PUSHED
    if options.view not in _PLACES:
        return result
    partition, offset, lower_time, upper_time = _PLACES[options.view]
    for each in filters:
        kind = type(each).__name__
        name, value = ".".join(getattr(each, "attribute", ())), getattr(each, "value", None)
        values = _values(kind, value)
        low, high = _range(kind, value)
        if not name:
            continue
        if name == "queue_id" and values is not None:
            if any(_UNREADABLE in str(each) for each in values):
                continue  # how the view shows bytes that are no text: any key may be meant
            result = replace(result, queue_ids=_both(result.queue_ids, map(str, values)))
        elif name == partition and values is not None:
            result = replace(result, partitions=_both(result.partitions, map(int, values)))
        elif name == offset:
            result = _with_offsets(result, low, high)
        elif name in (lower_time, upper_time):
            result = _with_times(
                result,
                low if name == lower_time else None,
                high if name == upper_time else None,
            )
    return result


def _values(kind: str, value: Any) -> Sequence[Any] | None:
    if kind in ("EqualTo", "EqualNullSafe") and value is not None:
        return (value,)
    return [each for each in value if each is not None] if kind == "In" else None


def _range(kind: str, value: Any) -> tuple[Any, Any]:
    """Lower and upper bound, inclusive or wider."""
    if kind in ("EqualTo", "EqualNullSafe"):
        return value, value
    if kind in ("GreaterThan", "GreaterThanOrEqual"):
        return value, None
    if kind in ("LessThan", "LessThanOrEqual"):
        return None, value
    return None, None


def _both(known: frozenset[Any] | None, more: Iterable[Any]) -> frozenset[Any]:
    found = frozenset(more)
    return found if known is None else known & found


def _with_offsets(before: Pushed, low: Any, high: Any) -> Pushed:
    return replace(
        before,
        min_offset=before.min_offset if low is None else max(before.min_offset, int(low)),
        max_offset=before.max_offset if high is None else min(before.max_offset, int(high)),
    )


def _with_times(before: Pushed, low: Any, high: Any) -> Pushed:
    min_ms, max_ms = _ms(low), _ms(high)
    if before.min_ms is not None:
        min_ms = before.min_ms if min_ms is None else max(min_ms, before.min_ms)
    if before.max_ms is not None:
        max_ms = before.max_ms if max_ms is None else min(max_ms, before.max_ms)
    return replace(before, min_ms=min_ms, max_ms=max_ms)


def _ms(value: Any) -> int | None:
    if not isinstance(value, datetime):
        return None
    moment = value if value.tzinfo is not None else value.replace(tzinfo=timezone.utc)
    return int(moment.timestamp() * 1000)


def resolve(
    reader: LogReader, topic: str, numbers: Sequence[int], wanted: str | Offsets | int
) -> dict[int, int]:
    """Return offsets for names, times and JSON; partitions that the JSON leaves out begin with the
    log.
    """
    if wanted == LATEST:
        return reader.log_ends(topic, numbers)
    if isinstance(wanted, int):
        return reader.offsets_at(topic, numbers, wanted)
    given = {} if isinstance(wanted, str) else wanted.get(topic, {})
    found = {number: int(given.get(str(number), -2)) for number in numbers}
    if -2 in found.values():
        starts = reader.log_starts(topic, numbers)
        found = {number: starts[number] if at == -2 else at for number, at in found.items()}
    if -1 in found.values():
        ends = reader.log_ends(topic, numbers)
        found = {number: ends[number] if at == -1 else at for number, at in found.items()}
    return found


def batch_ranges(options: SourceOptions, pushed: Pushed = NOTHING_PUSHED) -> list[LogRange]:
    """Ranges between the offsets that hold now; large ones split into ``minPartitions``."""
    reader = log_reader(options.config)
    topic = options.topic
    numbers = [
        number
        for number in chosen_partitions(options, reader.partition_count(topic))
        if pushed.keeps(number)
    ]
    starts = _starts(options, reader, numbers, pushed)
    ends = resolve(reader, topic, numbers, options.ending)
    if pushed.max_ms is not None:
        cuts = reader.offsets_at(topic, numbers, pushed.max_ms + CLOCK_SLACK_MS)
        ends = {number: min(ends[number], cuts[number]) for number in numbers}
    ends = {number: min(end, pushed.max_offset + 1) for number, end in ends.items()}
    total = sum(max(0, ends[number] - starts[number]) for number in numbers)
    size = max(1, -(-total // (1 if options.is_folded else options.min_partitions)))
    return [
        LogRange(topic, number, start, min(start + size, ends[number]))
        for number in numbers
        for start in range(starts[number], ends[number], size)
    ]


def _starts(
    options: SourceOptions, reader: LogReader, numbers: Sequence[int], pushed: Pushed
) -> dict[int, int]:
    topic = options.topic
    starts = resolve(reader, topic, numbers, options.starting)
    if options.view == "in_flight" and options.starting == EARLIEST:
        # R20: from there on a tracker rebuilds every open entry, and so do we.
        starts |= _tracker_positions(options, numbers, starts)
    if not options.fail_on_data_loss:
        begins = reader.log_starts(topic, numbers)
        starts = {number: max(starts[number], begins[number]) for number in numbers}
    if pushed.min_ms is not None:
        cuts = reader.offsets_at(topic, numbers, pushed.min_ms)
        starts = {number: max(starts[number], cuts[number]) for number in numbers}
    return {number: max(start, pushed.min_offset) for number, start in starts.items()}


def _tracker_positions(
    options: SourceOptions, numbers: Sequence[int], starts: dict[int, int]
) -> dict[int, int]:
    keys = {LedgerKey.of_markers(options.config, number): number for number in numbers}
    with Admin(options.config) as admin:
        found = read_ledgers(admin, list(keys), stable=False)
    return {keys[key]: max(position.position, starts[keys[key]]) for key, position in found.items()}


def topic_id(options: SourceOptions) -> str:
    """Return the topic's id in hexadecimal; empty: the broker does not tell."""
    with Admin(options.config) as admin:
        return admin.topic_id(options.topic).hex()


def shared_out(starts: dict[int, int], ends: dict[int, int], limit: int | None) -> dict[int, int]:
    """Ends that lie about ``limit`` offsets behind the starts, shared out by backlog, and all
    advance.
    """
    backlogs = {partition: max(0, end - starts[partition]) for partition, end in ends.items()}
    total = sum(backlogs.values())
    if limit is None or total <= limit:
        return {partition: starts[partition] + backlog for partition, backlog in backlogs.items()}
    return {
        partition: starts[partition] + min(backlog, -(-backlog * limit // total))
        for partition, backlog in backlogs.items()
    }
