"""The Kafka sink runs inside Spark's tasks: rows come in, transactions go out."""

from __future__ import annotations

import os
import uuid
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, cast

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from kafkamq.config import QueueConfig
from kafkamq.errors import ConfigError, StateError
from kafkamq.markers.producer import MarkersProducer
from kafkamq.spark.batches import BATCH_ID, QUERY_ID, RUN_ID, task_property
from kafkamq.spark.sink.ledger import TASKS, Cell, SinkLedger
from kafkamq.spark.sink.rows import (
    Guarantee,
    Rows,
    SinkOptions,
    read_rows,
    sink_name,
    slot_column,
    slots_of,
)
from kafkamq.transport.errors import KafkaError, broker_error
from kafkamq.transport.log_reader import log_reader
from kafkamq.transport.producer import IdempotentProducer
from kafkamq.transport.record import Record
from kafkamq.transport.settings import producer_settings
from kafkamq.transport.transactions import NewRecord, TransactionalProducer
from kafkamq.types import Headers

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkamq.queue.producer import Notes, Sender

DEDUP_HEADER = "kafkamq-sink-row"
"""With ``guarantee=at-least-once``: ``sink/batch/cell/identity/n``, equal on copies of one row."""

_FLUSH_S = 120.0
_MAX_LEDGERS = 8
_MAX_AHEAD_BYTES = 64 * 1024 * 1024


@dataclass
class Written(WriterCommitMessage):
    """What a task did: rows that it wrote, and rows that were written before."""

    rows: int
    skipped: int


class StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        batch, query, run = map(task_property, (BATCH_ID, QUERY_ID, RUN_ID))
        if not (batch and query and run):
            raise StateError(
                f"Spark does not tell the batch (task properties {BATCH_ID}, {QUERY_ID}, {RUN_ID}"
                "): exactly-once writing needs a streaming query on PySpark 4.2"
            )
        return _write(self._options, self._options.sink_id or query, int(batch), run, iterator)


class BatchWriter(DataSourceArrowWriter):
    """It writes for ``df.write``; within ``foreachBatch`` it belongs to that query's batch."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._token = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        batch = task_property(BATCH_ID)
        name = self._options.sink_id or (task_property(QUERY_ID) if batch else "")
        return _write(self._options, name, int(batch or 0), self._token, iterator)


def _write(
    options: SinkOptions, name: str, batch: int, run: str, batches: Iterator[pa.RecordBatch]
) -> WriterCommitMessage:
    sink = sink_name(name or f"write-{run}", options.queue_id)
    if options.guarantee is Guarantee.AT_LEAST_ONCE:
        return _write_marked(options, f"{sink}/{batch}", batches)
    # Outside of streams and without a name no other run repeats it.
    ledger = _ledger(options, sink, is_alone=not name)
    targets: _Targets | _Messages = _Targets(options)
    if options.queue_id:
        targets, batches = _Messages(options.queue_id, ledger), _made_ahead(batches)
    cells: dict[int, Cell] = {}
    done = Written(0, 0)
    try:
        for number, cut, part in _by_cell(batches):
            cell = cells.get(number)
            if cell is None:
                cell = cells[number] = Cell(ledger, number, batch=batch, cut=cut, run=run)
            rows = read_rows(part)
            cell.count(len(rows), int(rows.identities.sum(dtype="uint64")))
            if not cell.is_repeated:
                targets.send(rows, cell.producer)
        for cell in cells.values():
            is_new = cell.commit()
            done.rows += cell.rows if is_new else 0
            done.skipped += 0 if is_new else cell.rows
    finally:
        for cell in cells.values():
            cell.close()
    return done


def _made_ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows, made first: nobody reads on behind a transaction while it is open."""
    made, size = [], 0
    for batch in batches:
        made.append(batch)
        size += batch.nbytes
        if size > _MAX_AHEAD_BYTES:
            break
    return chain(made, batches)


def _by_cell(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, str, pa.RecordBatch]]:
    """Number of the cell, name of the cut, and the rows; none for batches without rows."""
    import pyarrow.compute as pc

    context = TaskContext.get()
    assert context is not None, "Spark writes in tasks"
    for batch in batches:
        if not len(batch):
            continue
        slots = slots_of(batch.schema.names)
        if slots is None:
            yield context.partitionId(), TASKS, batch
            continue
        column = batch.column(slot_column(slots))
        numbers = pc.unique(column).to_pylist()
        for number in numbers:
            rows = batch if len(numbers) == 1 else batch.filter(pc.equal(column, number))
            yield number, f"slots={slots}", rows


class _Targets:
    def __init__(self, options: SinkOptions) -> None:
        self._config = options.config
        self._topic = options.topic
        self._counts: dict[str, int] = {}

    def send(self, rows: Rows, sender: TransactionalProducer) -> None:
        sender.produce_records(self.records(rows))

    def records(self, rows: Rows) -> Iterator[NewRecord]:
        return zip(
            self._topics(rows),
            self._partitions(rows),
            rows.keys or repeat(None),
            rows.values,
            rows.headers or repeat(()),
            strict=False,
        )

    def _topics(self, rows: Rows) -> Iterable[str]:
        topics = [each or self._topic for each in rows.topics or ()] or repeat(self._topic)
        if not self._topic and (rows.topics is None or not all(topics)):
            raise ConfigError("a row names no topic, and the query has none: give one of them")
        return topics

    def _partitions(self, rows: Rows) -> list[int]:
        """Return the given ones; -1 with a key (librdkafka's murmur2); else by the content."""
        given = rows.partitions or repeat(None)
        if rows.partitions is None and rows.keys is not None and None not in rows.keys:
            return [-1] * len(rows)
        if rows.topics is None:
            chosen = (rows.identities % self._count(self._topic)).tolist()
        else:
            identities = rows.identities.tolist()
            topics = self._topics(rows)
            chosen = [
                one % self._count(topic) for one, topic in zip(identities, topics, strict=False)
            ]
        for number, topic in zip(rows.partitions or (), self._topics(rows), strict=False):
            if number is not None and not 0 <= number < self._count(topic):
                raise ConfigError(
                    f"column partition has {number}: topic {topic} has {self._count(topic)} "
                    "partitions, from 0; null leaves the choice to key or content"
                )
        keys = rows.keys or repeat(None)
        return [
            partition if partition is not None else (one if key is None else -1)
            for partition, key, one in zip(given, keys, chosen, strict=False)
        ]

    def _count(self, topic: str) -> int:
        count = self._counts.get(topic)
        if count is None:
            count = self._counts[topic] = log_reader(self._config).partition_count(topic)
        return count


class _Messages:
    """Sends rows to a queue as its own producer does, within a transaction."""

    def __init__(self, queue_id: str, ledger: SinkLedger) -> None:
        self.namespace = ledger.namespace
        self.namespace.refresh_if_old()
        self.recorder = self
        self._made: list[NewRecord] = []
        queue = QueueConfig(queue_id=queue_id)
        self._producer = MarkersProducer(cast("Sender", self), queue)

    def notes_of(self, queue_id: str, *, is_delayed: bool) -> Notes:
        """Return notes of deliveries, which a transaction does not report."""
        return deque(maxlen=0)

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int,
        headers: Headers | None,
        report: object,
    ) -> None:
        """Take what the producer has made of a message, or of a delayed one."""
        self._made.append((topic, partition, key, value, headers or ()))

    def send(self, rows: Rows, sender: TransactionalProducer) -> None:
        keys, headers = rows.keys or repeat(None), rows.headers or repeat(())
        for payload, key, of_row, id, delay, ttl in zip(
            rows.values, keys, headers, *rows.labels or (), strict=False
        ):
            self._producer.send(
                payload,
                key=key,
                headers=of_row,
                delay=float(delay or 0),
                ttl=None if ttl is None else float(ttl),
                id=id,
            )
        made, self._made = self._made, []
        sender.produce_records(made)


_ledgers: dict[tuple[object, ...], SinkLedger] = {}


def _ledger(options: SinkOptions, sink: str, *, is_alone: bool) -> SinkLedger:
    """This process's; a worker writes many batches in its life."""
    config, topic = options.config, options.ledger_topic
    places = config.bootstrap_servers, *sorted(config.kafka.items()), config.namespace, topic, sink
    key = os.getpid(), *places
    found = _ledgers.get(key)
    if found is None:
        while len(_ledgers) >= _MAX_LEDGERS:
            _ledgers.pop(next(iter(_ledgers))).close()
        found = _ledgers[key] = SinkLedger(config, topic=topic, sink=sink, is_alone=is_alone)
    return found


def _write_marked(
    options: SinkOptions, name: str, batches: Iterable[pa.RecordBatch]
) -> WriterCommitMessage:
    """Write at least once: each row with a header that is equal on all its copies."""
    settings = producer_settings(options.config, linger_ms=20, partitioner="murmur2_random")
    producer = IdempotentProducer(options.config, settings, max_block_s=_FLUSH_S)
    targets = _Targets(options)
    reported, failed = 0, list[KafkaError]()

    def told(error: KafkaError | None, message: Record) -> None:
        nonlocal reported
        reported += 1
        if error is not None:
            failed.append(error)

    def check() -> None:
        if failed:
            raise broker_error(failed[0], "writing rows")

    seen: Counter[int] = Counter()
    done = Written(0, 0)
    for number, _, batch in _by_cell(batches):
        rows = read_rows(batch)
        marks = []
        for identity in rows.identities.tolist():
            mark = f"{name}/{number}/{identity:016x}/{seen[identity]}"
            marks.append((DEDUP_HEADER, mark.encode()))
            seen[identity] += 1
        headers = rows.headers or [()] * len(rows)
        rows.headers = [(*each, mark) for each, mark in zip(headers, marks, strict=True)]
        for topic, partition, key, value, of_row in targets.records(rows):
            producer.produce(topic, value, key, partition, of_row, told)
            check()
        done.rows += len(rows)
    producer.confirm(lambda: reported == producer.queued, "writing rows", _FLUSH_S)
    check()
    producer.close()
    return done
