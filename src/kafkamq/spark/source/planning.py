"""Which ranges of a topic a query reads: begin, end, partitions; asked of the cluster."""

from __future__ import annotations

from collections.abc import Sequence

from kafkamq.markers.tracker.ledger import LedgerKey, read_ledgers
from kafkamq.spark.options import (
    EARLIEST,
    LATEST,
    Offsets,
    SourceOptions,
    chosen_partitions,
)
from kafkamq.spark.source.filters import CLOCK_SLACK_MS, NOTHING_PUSHED, Pushed
from kafkamq.transport.admin import Admin
from kafkamq.transport.log_reader import LogRange, LogReader, log_reader


def resolve(
    reader: LogReader, topic: str, numbers: Sequence[int], wanted: str | Offsets | int
) -> dict[int, int]:
    """Offsets for names, times and JSON; partitions that the JSON leaves out begin with the log."""
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
    """The topic's id in hexadecimal; empty: the broker does not tell."""
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
