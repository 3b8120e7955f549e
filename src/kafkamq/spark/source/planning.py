"""Which ranges of a topic a query reads: begin, end, partitions; and what filters leave out.

Filters that Spark pushes down to a batch only leave out what cannot match; Spark applies each again
to the rows. So a filter that is not understood, or that a view cannot use, costs time and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from kafkamq.markers.tracker.ledger import LedgerKey, read_ledgers
from kafkamq.spark.options import EARLIEST, LATEST, Offsets, SourceOptions, chosen_partitions
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
    partitions: frozenset[int] | None = None
    min_offset: int = 0
    max_offset: int = _MAX_OFFSET
    min_ms: int | None = None
    max_ms: int | None = None


NOTHING_PUSHED = Pushed()

# By view: columns that are the partition, offset and time of the records that are read.
_PLACES = {
    "records": ("partition", "offset", "timestamp", ""),
    "messages": ("partition", "offset", "timestamp", "timestamp"),
    "dead_letters": ("partition", "offset", "timestamp", "timestamp"),
    "markers": ("marker_partition", "marker_offset", "timestamp", "timestamp"),
    # Folded from the beginning: rows that ended before a time need nothing behind it.
    "deliveries": ("marker_partition", "", "", "ended_at"),
    "in_flight": ("marker_partition", "", "", ""),
}


def push(filters: Iterable[Filter], options: SourceOptions) -> Pushed:
    if options.view not in _PLACES:
        return NOTHING_PUSHED
    partition, offset, lower_time, upper_time = _PLACES[options.view]
    queue_ids, partitions = list[frozenset[str]](), list[frozenset[int]]()
    offsets_from, offsets_to = [0], [_MAX_OFFSET]
    times_from, times_to = list[int](), list[int]()
    for each in filters:
        kind = type(each).__name__
        name, value = ".".join(getattr(each, "attribute", ())), getattr(each, "value", None)
        values = _values(kind, value)
        low, high = _range(kind, value)
        if not name:
            continue
        if name == "queue_id" and values is not None:
            # How the view shows bytes that are no text: any key may be meant.
            if not any(_UNREADABLE in str(one) for one in values):
                queue_ids.append(frozenset(map(str, values)))
        elif name == partition and values is not None:
            partitions.append(frozenset(map(int, values)))
        elif name == offset:
            offsets_from += [] if low is None else [int(low)]
            offsets_to += [] if high is None else [int(high)]
        else:
            times_from += _ms(low) if name == lower_time else []
            times_to += _ms(high) if name == upper_time else []
    return Pushed(
        queue_ids=frozenset.intersection(*queue_ids) if queue_ids else None,
        partitions=frozenset.intersection(*partitions) if partitions else None,
        min_offset=max(offsets_from),
        max_offset=min(offsets_to),
        min_ms=max(times_from, default=None),
        max_ms=min(times_to, default=None),
    )


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


def _ms(value: Any) -> list[int]:
    """Return a time in milliseconds; nothing for what is none."""
    if not isinstance(value, datetime):
        return []
    moment = value if value.tzinfo is not None else value.replace(tzinfo=timezone.utc)
    return [int(moment.timestamp() * 1000)]


def resolve(
    reader: LogReader, topic: str, numbers: Sequence[int], wanted: str | Offsets | int
) -> dict[int, int]:
    """Return offsets for names, times and JSON, which may leave partitions out."""
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
    numbers = chosen_partitions(options, reader.partition_count(topic))
    if pushed.partitions is not None:
        numbers = [number for number in numbers if number in pushed.partitions]
    starts = _starts(options, reader, numbers, pushed)
    ends = resolve(reader, topic, numbers, options.ending)
    if pushed.max_ms is not None:
        cuts = reader.offsets_at(topic, numbers, pushed.max_ms + CLOCK_SLACK_MS)
        ends = {number: min(ends[number], cuts[number]) for number in numbers}
    ends = {number: min(end, pushed.max_offset + 1) for number, end in ends.items()}
    total = sum(max(0, ends[number] - starts[number]) for number in numbers)
    size = max(1, -(-total // options.min_partitions))
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
    """Return ends about ``limit`` offsets behind the starts, by backlog; all advance."""
    backlogs = {partition: max(0, end - starts[partition]) for partition, end in ends.items()}
    total = sum(backlogs.values())
    if limit is None or total <= limit:
        return {partition: starts[partition] + backlog for partition, backlog in backlogs.items()}
    return {
        partition: starts[partition] + min(backlog, -(-backlog * limit // total))
        for partition, backlog in backlogs.items()
    }
