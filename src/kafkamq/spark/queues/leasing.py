"""Plans the batches of a queue that is acknowledged, STARTs them and keeps their leases alive.

This runs in the process that Spark keeps beside the driver for a stream's source (docs/spark.md,
"How a batch goes"). Spark asks it for a batch's tasks, more than once where a frame is used in
several branches: the first time it STARTs the messages (``starting.py``), and it gives the same
tasks each time. A thread renews what the batch's consumer_id holds (R7) until the next batch is
asked for. In the first minute each message is renewed by its id as well: a START of an earlier
owner that arrives late takes the holder's place, and a renewal of everything would pass it over.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from kafkamq.config import QueueConfig
from kafkamq.errors import ConfigError, KafkaMQError
from kafkamq.markers.membership import warn_of_mqgo_workers
from kafkamq.markers.rules.handout import is_last_delivery
from kafkamq.markers.rules.leases import NEW_PARTITION_MS
from kafkamq.markers.wire.marker_writer import encode_keepalive, encode_known_keepalive
from kafkamq.queue.names import group_of
from kafkamq.queue.namespace import NamespaceFacts
from kafkamq.queue.topics import require_topics
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.spark.backlog import Backlog
from kafkamq.spark.marker_log import MarkerLog, marker_log
from kafkamq.spark.options import SourceOptions
from kafkamq.spark.queues.acks import AckToken
from kafkamq.spark.queues.owner import QueueOwner
from kafkamq.spark.queues.starting import (
    BATCH,
    Start,
    Starter,
    StartPlan,
    Waiting,
    addressed,
    identity_of,
)
from kafkamq.spark.source.columns import arrow_columns
from kafkamq.spark.source.rows import RangePartition, made_of
from kafkamq.spark.source.streaming import StreamOffsets, StreamReader, of_another
from kafkamq.transport.admin import Admin
from kafkamq.transport.log_reader import LogRange, LogReader, Record, log_reader
from kafkamq.transport.record import headers_of

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROWS = 10_000
"""Messages of a batch, where ``maxRowsPerTrigger`` says nothing."""

RENEWALS_PER_TIMEOUT = 3  # R7
_MARKERS = ":markers"
_PLAN = ":plan"
_PLAN_BYTES = 4
_FROM = ":from"
_FACTS_S = 5.0
PASS_S = 10.0
_log = logging.getLogger(__name__)


class QueuePartition(RangePartition):
    """One task: messages of one partition that are STARTed; it reads them and writes nothing."""

    def __init__(
        self, topic: str, number: int, consumer_id: str, of: dict[Start, list[int]]
    ) -> None:
        first, last = min(map(min, of.values())), max(map(max, of.values()))
        super().__init__(LogRange(topic, number, first, last + 1))
        self.consumer_id = consumer_id
        self.starts = [(start, array("q", offsets)) for start, offsets in of.items()]


class KeepAlive:
    """Renews one batch's leases until it is closed; its thread ends with the process.

    Attributes:
        named: Messages that are renewed by their ids as well, by marker partition; set once.
    """

    def __init__(
        self,
        log: MarkerLog,
        consumer_id: str,
        partitions: Iterable[int],
        options: QueueConfig,
        named_until_s: float,
    ) -> None:
        self.named: Mapping[int, Sequence[Waiting]] = {}
        self._log = log
        self._consumer_id = consumer_id
        self._timeout_ms = options.redelivery_timeout_ms
        self._together = options.batch_markers
        data = encode_keepalive(None, consumer_id=consumer_id, redeliver_after_ms=self._timeout_ms)
        self._markers = [(number, consumer_id.encode(), data) for number in sorted(partitions)]
        self._named_until_s = named_until_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kafkamq-leases", daemon=True)
        self._thread.start()

    def _encode(self, identity: bytes) -> bytes:
        return encode_known_keepalive(identity, self._consumer_id, self._timeout_ms)

    def _run(self) -> None:
        period_s = self._timeout_ms / RENEWALS_PER_TIMEOUT / 1000
        while not self._ended.wait(period_s):
            try:
                self._log.write(self._markers)
                if time.monotonic() < self._named_until_s:
                    self._log.write(addressed(self.named, self._encode, together=self._together))
            except KafkaMQError as error:  # noqa: PERF203 - the next one may go through
                _log.warning("leases could not be renewed", extra={"error": str(error)})

    def close(self) -> None:
        """Renew no more; what is being written is waited for (bounded)."""
        self._ended.set()
        self._thread.join(self._timeout_ms / 1000)


class QueueReader(StreamReader):
    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        acknowledge = options.acknowledge
        assert acknowledge is not None, "a stream that acknowledges"
        self._acknowledge: QueueConfig = acknowledge
        # By this process.
        self._planned: StreamOffsets | None = None
        # What was STARTed last: where the batch begins and ends, and its tasks.
        self._batch: tuple[StreamOffsets, StreamOffsets, Sequence[QueuePartition]] = {}, {}, []
        self._keep_alive: KeepAlive | None = None
        self._backlog = Backlog(options.topic, self._look, of=self._waiting, is_last=self._is_last)
        self._group = acknowledge.group_id or group_of(options.config, options.queue_id)
        self._moved_on: dict[int, int] = {}
        self._begins: dict[int, int] = {}
        self._pass_s = 0.0
        self._asked_s = 0.0
        self._is_owner = False
        self._gained_s: float | None = None

    @cached_property
    def _owner(self) -> QueueOwner:
        """Spark pickles a reader before it is used, and clients cannot be."""
        return QueueOwner(self.options.config, self.options.queue_id, self._group)

    # ---- where to begin, how far to go

    def initialOffset(self) -> dict[str, dict[str, int | str]]:  # noqa: N802
        """Return where the queue's group stands; of a new queue where the options say."""
        topic = self.options.topic
        self._check()
        offsets = super().initialOffset()
        topic_id = self._facts().message_topic_id
        numbers = list(map(int, offsets[topic]))
        position = self._owner.find(numbers, topic_id)
        if position:
            # The queue is not new: partitions that were added since begin where their logs do.
            added = [number for number in numbers if number not in position]
            position |= log_reader(self.options.config).log_starts(topic, added)
        offsets[topic] |= {str(number): at for number, at in position.items()}
        self._owner.commit(_numbers(offsets[topic]), topic_id)
        return offsets

    def latestOffset(  # noqa: N802
        self, start: StreamOffsets, limit: ReadLimit
    ) -> dict[str, dict[str, int | str]]:
        """Return where the next batch ends; the one before is done when this is called."""
        self._renew_no_more()
        self._require_own(start)
        self._require_same_claims(start)
        self._check()
        topic = self.options.topic
        self._moved_on = {}
        if not self._begins:
            # Workers of the queue may have gone on where an earlier run of the query stopped.
            known = map(int, start.get(topic, {}))
            self._moved_on = self._owner.find(known, self._facts().message_topic_id)
        self._start_unplanned(start)
        found = super().latestOffset(start, limit)
        self._pass_others()
        if found[topic] == start.get(topic):
            return {name: dict(values) for name, values in start.items()}
        self._owner.require_alone()
        ends = marker_log(self.options.config).ends(range(self._facts().marker_partitions))
        found[_PLAN] = {self.options.queue_id: secrets.token_hex(_PLAN_BYTES)}
        found[_MARKERS] = {str(number): at for number, at in ends.items()}
        found[_FROM] = {str(number): at for number, at in self._begins.items()}
        self._planned = found
        return found

    def _require_own(self, offsets: StreamOffsets) -> None:
        super()._require_own(offsets)
        planned = offsets.get(_PLAN, {})
        if planned and self.options.queue_id not in planned:
            raise of_another("queue", ", ".join(planned), self.options.queue_id)

    def _cut(
        self, starts: dict[int, int], ends: dict[int, int], rows: int | None
    ) -> dict[int, int]:
        """About ``rows`` messages of this queue, or one that must be alone (R6)."""
        found = self._backlog.cut(starts, ends, rows or MAX_ROWS)
        self._begins = self._backlog.begins(starts)
        return found

    def _look(self, wanted: LogRange, *, is_done: bool = False) -> Iterator[list[Record]]:
        lossy = is_done or not self.options.fail_on_data_loss
        return log_reader(self.options.config, is_short=True).read(wanted, skips_lost=lossy)

    def _waiting(self, record: Record) -> Waiting | None:
        return Waiting.of(record) if self._owner.is_own(record) else None

    def _is_last(self, one: Waiting) -> bool:
        return is_last_delivery(one.delivery_count, self._acknowledge.max_deliveries)

    def _starts(
        self, reader: LogReader, start: StreamOffsets, ends: Mapping[int, int]
    ) -> dict[int, int]:
        starts = super()._starts(reader, start, ends)
        known = start.get(self.options.topic, {})
        if not self._is_same(start) or any(
            at < int(known.get(str(n), 0)) for n, at in starts.items()
        ):
            self._backlog.clear()
            self._moved_on, self._pass_s = {}, 0.0
        untold = [number for number in ends if str(number) not in known]
        if known and untold and self._is_same(start):
            self._moved_on |= self._owner.find(untold, self._facts().message_topic_id)
        return {number: max(at, self._moved_on.get(number, 0)) for number, at in starts.items()}

    def _ranges(self, start: StreamOffsets, end: StreamOffsets) -> list[LogRange]:
        """Return what the batch was planned with, which stands in its end.

        Where batch 0 is repeated Spark asks again where the queue begins, and the position has
        passed the batch by then.
        """
        if start == end:
            # There is nothing to read, as at a restart, of the batch before.
            return []
        if _FROM not in end and _PLAN in end:
            # It was planned before that was written down.
            return super()._ranges(start, end)
        ends = _numbers(end[self.options.topic])
        return [
            LogRange(self.options.topic, number, begin, ends[number])
            for number, begin in _numbers(end.get(_FROM, {})).items()
            if begin < ends[number]
        ]

    # ---- a batch

    def partitions(self, start: StreamOffsets, end: StreamOffsets) -> Sequence[InputPartition]:
        """STARTs the batch, and renews its leases from now on; one task for each partition of it.

        Spark asks once for each use of a frame; the same batch has the same tasks.
        """
        self._require_own(end)
        self._require_same_claims(start)
        if self._batch[:2] == (start, end):
            return self._batch[2]
        ranges = self._ranges(start, end)
        if not ranges:
            return []
        self._check()
        self._renew_no_more()
        is_repeated = self._planned != end
        plan = self._plan_of(end, is_repeated=is_repeated)
        if self._gained_s is None:
            self._gained_s = time.monotonic()
        log, until_s = marker_log(self.options.config), self._gained_s + NEW_PARTITION_MS / 1000
        self._keep_alive = KeepAlive(
            log, plan.consumer_id, plan.routes(ranges), self._acknowledge, until_s
        )
        starter = Starter(plan, ranges, self.options, log, self._check)
        handed = starter.start(self._messages(ranges))
        self._keep_alive.named = starter.held
        self._commit(ranges, end, is_repeated=is_repeated)
        tasks = [
            QueuePartition(self.options.topic, number, plan.consumer_id, of)
            for number, of in sorted(handed.items())
        ]
        self._batch = start, end, tasks
        return tasks

    def _messages(self, ranges: Iterable[LogRange], *, is_done: bool = False) -> list[Waiting]:
        """Return the queue's messages in these ranges; of a done batch some may be deleted."""
        found: list[Waiting] = []
        for each in ranges:
            known = self._backlog.messages(each.partition, each.start, each.end)
            if known is None:
                chunks = self._look(each, is_done=is_done)
                read = (self._waiting(one) for records in chunks for one in records)
                known = [one for one in read if one is not None]
            found += known
        return found

    def _plan_of(self, end: StreamOffsets, *, is_repeated: bool) -> StartPlan:
        plan, config = str(end.get(_PLAN, {}).get(self.options.queue_id, "")), self.options.config
        facts = self._facts()
        if log_reader(config).partition_count(config.marker_topic) != facts.marker_partitions:
            facts = self._facts(max_age_s=0.0)
        return StartPlan(
            # Of this run alone (R7); the plan is the same in all runs of the batch.
            consumer_id=f"{BATCH}{plan}{'-' if plan else ''}{secrets.token_hex(12)}",
            facts=facts,
            marker_ends=_numbers(end.get(_MARKERS, {})),
            is_repeated=is_repeated,
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield in a task the rows of messages that are STARTed, with their tokens."""
        from pyspark.sql.pandas.types import to_arrow_schema

        if not isinstance(partition, QueuePartition):
            # It is Spark's placeholder for "no partitions".
            return
        schema = to_arrow_schema(self._schema, timezone="UTC")
        starts = {offset: start for start, offsets in partition.starts for offset in offsets}

        def batch(records: list[Record]) -> pa.RecordBatch | None:
            mine = [each for each in records if each.offset() in starts]
            tokens = [
                self._token(each, starts[each.offset()], partition.consumer_id) for each in mine
            ]
            return arrow_columns("messages", mine, schema, tokens) if mine else None

        yield from made_of(self._look(partition.wanted), batch)

    def _token(self, record: Record, start: Start, consumer_id: str) -> str:
        headers = headers_of(record)
        message_ms = record.timestamp()[1] if start.is_reference else -1
        return AckToken(
            identity_of(record, start.topic_id),
            start.marker_partition,
            consumer_id,
            read_message_headers(headers).delivery_count if headers else 1,
            self._acknowledge.redelivery_timeout_ms,
            start.start_offset,
            start.start_ms,
            message_ms if self._acknowledge.batch_markers else None,
        ).encode()

    def _commit(self, ranges: Iterable[LogRange], end: StreamOffsets, *, is_repeated: bool) -> None:
        """Commit that all of a batch is STARTed, before anybody sees its rows (R5)."""
        if _FROM not in end or not self._is_of_topic(end):
            return
        topic_id, done = self._facts().message_topic_id, {one.partition: one.end for one in ranges}
        # Workers may have gone on where an earlier run of the batch stopped.
        found = self._owner.find(done, topic_id) if is_repeated else {}
        passed = {number: max(at, found.get(number, 0)) for number, at in done.items()}
        self._owner.commit(passed, topic_id)

    def _pass_others(self) -> None:
        """Commit now and then that other queues' messages are passed.

        Alone they are no batch, so the checkpoint does not pass them. If the position stood still
        before them it would be outside of the log when they are deleted: the next start would miss
        records.
        """
        if time.monotonic() >= self._pass_s:
            self._pass_s = time.monotonic() + PASS_S
            self._owner.commit(self._begins, self._facts().message_topic_id)

    def _is_of_topic(self, offsets: StreamOffsets) -> bool:
        """Return whether these say something of the topic that is there: not of one before it."""
        topic_id = self._facts().message_topic_id.hex()
        return not topic_id or self._id_of(offsets) in ("", topic_id)

    def _start_unplanned(self, end: StreamOffsets) -> None:
        """START what has no START of the batch that ends there, where nobody has asked for it.

        Spark need not ask for the tasks of a frame that nothing uses, and an earlier process may
        have been killed before it was asked. Behind the queue's position nobody would look for
        these messages, so they are STARTed before it passes them (R5); nobody renews them.
        """
        if self._batch[1] == end or not self._is_of_topic(end):
            return
        known = _numbers(end.get(self.options.topic, {}))
        ranges = []
        for number, at in _numbers(end.get(_FROM, {})).items():
            begin = max(at, self._moved_on.get(number, 0), self._begins.get(number, 0))
            if begin < known.get(number, 0):
                ranges.append(LogRange(self.options.topic, number, begin, known[number]))
        if ranges:
            plan = self._plan_of(end, is_repeated=True)
            log = marker_log(self.options.config)
            starter = Starter(plan, ranges, self.options, log, self._check)
            starter.start(self._messages(ranges, is_done=True), lambda *_: 0)
            self._commit(ranges, end, is_repeated=False)
        self._batch = {}, end, []

    def _renew_no_more(self) -> None:
        if self._keep_alive is not None:
            self._keep_alive.close()
            self._keep_alive = None

    def stop(self) -> None:
        self._renew_no_more()
        if "_owner" in vars(self):
            # To make one here could fail, and hide what the query failed with.
            self._owner.close()

    # ---- the cluster

    def _check(self) -> None:
        """No query started later; at first: topics that will do (R23), no worker beside us."""
        if self._is_owner:
            self._owner.check()
            return
        config = self.options.config
        require_topics(config, max_lease_ms=self._acknowledge.max_lease_ms)
        group, queue_id = self._group, self.options.queue_id
        warn_of_mqgo_workers(config, queue_id, group)
        with Admin(config) as admin:
            if any(admin.group_assignments(group)):
                raise ConfigError(
                    f"queue {queue_id!r} has live workers (group {group}): Spark "
                    "reads all of a queue, and both would hand out the same messages; stop them"
                )
        self._owner.take()
        self._is_owner = True

    def _facts(self, max_age_s: float = _FACTS_S) -> NamespaceFacts:
        now_s, namespace = time.monotonic(), marker_log(self.options.config).namespace
        if now_s - self._asked_s > max_age_s:
            namespace.ask_again()
            self._asked_s = now_s
        return namespace.facts()


def _numbers(offsets: Mapping[str, int | str]) -> dict[int, int]:
    return {int(number): int(at) for number, at in offsets.items()}
