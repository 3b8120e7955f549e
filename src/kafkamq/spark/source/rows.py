"""Runs in Spark's workers: the rows of one task, as Arrow batches."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from kafkamq.errors import WireError
from kafkamq.markers.rules.attempts import Attempt
from kafkamq.markers.tracker.records import Quarantine
from kafkamq.queue.wire.headers import Origin
from kafkamq.queue.wire.keys import split_key
from kafkamq.spark.batches import QUERY_ID, of_process, task_property
from kafkamq.spark.blocks import encode_block
from kafkamq.spark.options import SourceOptions
from kafkamq.spark.parallelism import group_key
from kafkamq.spark.source.columns import (
    arrow_columns,
    deliveries_batch,
    fold_rows,
    in_flight_batch,
)
from kafkamq.spark.source.folding import FoldedLog, MessageFacts
from kafkamq.spark.source.planning import NOTHING_PUSHED, Pushed
from kafkamq.transport.log_reader import LogRange, Record, log_reader

if TYPE_CHECKING:
    import pyarrow as pa

# Records in one Arrow batch of the view: each may name thousands of messages.
_MAX_MARKERS = 512


@dataclass(eq=False)
class RangePartition(InputPartition):
    """One task: one range of one partition."""

    wanted: LogRange
    # Of a stream of ``deliveries``: where its fold begins, and of which topic.
    begin: int | None = None
    topic_id: str = ""


def read_rows(
    partition: InputPartition,
    options: SourceOptions,
    schema: StructType,
    pushed: Pushed = NOTHING_PUSHED,
) -> Iterator[pa.RecordBatch]:
    from pyspark.sql.pandas.types import to_arrow_schema

    if not isinstance(partition, RangePartition):
        # It is Spark's placeholder for "no partitions".
        return
    wanted = partition.wanted
    arrow_schema = to_arrow_schema(schema, timezone="UTC")
    if options.view == "blocks":
        yield from _read_blocks(wanted, options, arrow_schema)
    elif options.is_folded:
        yield from _read_folded(partition, options, arrow_schema, pushed)
    else:
        keeps = _chooser(options, pushed)
        reader = log_reader(options.config)

        def batch(records: list[Record]) -> pa.RecordBatch | None:
            chosen = records if keeps is None else [each for each in records if keeps(each.key())]
            return arrow_columns(options.view, chosen, arrow_schema) if chosen else None

        chunks = reader.read(wanted, skips_lost=not options.fail_on_data_loss)
        if options.view == "markers":
            chunks = (
                records[at : at + _MAX_MARKERS]
                for records in chunks
                for at in range(0, len(records), _MAX_MARKERS)
            )
        yield from made_of(chunks, batch)


def made_of(
    chunks: Iterator[list[Record]], make: Callable[[list[Record]], pa.RecordBatch | None]
) -> Iterator[pa.RecordBatch]:
    """What ``make`` makes of each chunk, if anything, while the collector of cycles rests."""
    was_enabled = gc.isenabled()
    while True:
        gc.disable()
        try:
            records = next(chunks, None)
            if records is None:
                return
            made = make(records)
            del records
        finally:
            if was_enabled:
                gc.enable()
        if made is not None:
            yield made


def _queue_keys(options: SourceOptions, pushed: Pushed) -> frozenset[bytes] | None:
    """Return the queues that are wanted, as in keys; None: every one."""
    wanted = [frozenset([options.queue_id])] if options.queue_id else []
    if pushed.queue_ids is not None:
        wanted.append(pushed.queue_ids)
    return frozenset(map(str.encode, frozenset.intersection(*wanted))) if wanted else None


def _chooser(options: SourceOptions, pushed: Pushed) -> Callable[[bytes | None], bool] | None:
    """Return whether a message with that record key is wanted; None: every one."""
    keys = _queue_keys(options, pushed)
    if options.view != "messages" or keys is None:
        return None
    # An empty one stands for records without a key.
    return lambda key: key in keys or split_key(key)[0] in keys


def _read_folded(
    partition: RangePartition, options: SourceOptions, schema: pa.Schema, pushed: Pushed
) -> Iterator[pa.RecordBatch]:
    """``deliveries``: what ended in the range, in a batch also what is open; ``in_flight``."""
    wanted = partition.wanted
    log = FoldedLog(
        options.config,
        wanted,
        begin=wanted.start if partition.begin is None else partition.begin,
        topic_id=partition.topic_id,
        query=task_property(QUERY_ID),
        skips_lost=not options.fail_on_data_loss,
    )
    keys, facts = _queue_keys(options, pushed), of_process(MessageFacts, options.config)

    def chosen(attempts: Iterable[Any], of: Callable[[Any], Attempt]) -> list[Any]:
        found = [each for each in attempts if keys is None or split_key(of(each).key)[0] in keys]
        facts.put_into([of(each) for each in found])
        return found

    topic, number = options.config.message_topic, wanted.partition
    rows = partial(deliveries_batch, schema=schema, message_topic=topic, marker_partition=number)
    for ended in log.ended():
        if options.view == "deliveries" and (found := chosen(ended, lambda each: each)):
            yield rows(found)
    if partition.begin is not None:
        log.keep()
    elif options.view == "in_flight":
        found = chosen(log.attempts.open(), lambda each: each.attempt)
        yield in_flight_batch(found, schema, marker_partition=number)
    else:
        unfinished = [each for each in log.attempts.attempts.values() if each.outcome is None]
        yield rows(chosen(unfinished, lambda each: each))


def _read_blocks(
    wanted: LogRange, options: SourceOptions, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield one row for some thousand markers; where there are none, one without."""
    import pyarrow as pa

    key = group_key(wanted.topic, wanted.partition, options.tasks)

    def batch(first_offset: int, block: bytes) -> pa.RecordBatch:
        row = (key, wanted.topic, wanted.partition, wanted.start, wanted.end, first_offset, block)
        named = dict(zip(schema.names, row, strict=True))
        return pa.RecordBatch.from_pylist([named], schema=schema)

    quarantine = of_process(Quarantine, options.config)

    def refuse(record: Record, error: WireError) -> None:
        """A record that is no marker: kept in the quarantine, passed by the tracker (R21)."""
        place = Origin(record.topic(), record.partition(), record.offset(), record.timestamp()[1])
        quarantine.put(place, key=record.key(), value=record.value(), error=error.reason)

    def packed(records: list[Record]) -> pa.RecordBatch:
        rows = fold_rows(records, refuse)
        quarantine.flush()
        return batch(rows[0][0], encode_block(rows))

    is_empty = True
    for made in made_of(log_reader(options.config).read(wanted), packed):
        is_empty = False
        yield made
    if is_empty:
        yield batch(wanted.start, encode_block([]))
