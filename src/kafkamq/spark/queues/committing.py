"""Output and ENDs of a batch in one transaction per slot: what an acknowledgement commits with.

Rows go to slots by their messages' places: so all rows of a message, its END among them, are in one
transaction, and a repeated batch finds each message in the slot where it was. The transaction also
commits which batch it was (a ledger), of which plan, and a digest of its messages. A slot whose
batch the ledger holds with these messages is not written again, but its ENDs are: a repeated batch
may have STARTed the messages again.

Whether a lease ended before its END was in the log follows from the brokers' times of the ENDs,
when they are written and not committed (R9); then all is aborted, and made again without it. The
log is folded for that before the transaction begins, and only what came since is read inside.

The rows of a repeated batch may be others than before. Then the log tells, message by message: one
with a verdict had it in the transaction that the ledger speaks of, and its output; one without was
STARTed again, and had no output. Who was thought dead may have committed after that. So the log is
asked again behind these STARTs, when nobody but this task can commit any more.

A transaction begins when its rows are ready, and ENDs come last: while it is open, nobody reads on
in the partitions that it has written.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, FencedError, StateError
from kafkamq.markers.tracker.ledger import Ledger, LedgerKey, is_later_start, read_ledgers
from kafkamq.markers.wire.records import Position
from kafkamq.queue.wire.keys import key_partition
from kafkamq.spark.checkpoint import CheckpointNote
from kafkamq.spark.marker_log import marker_log
from kafkamq.spark.parallelism import in_slots, with_columns
from kafkamq.spark.queues.acks import (
    ACK_COLUMNS,
    ENDED,
    NACKED,
    AckSettings,
    AckToken,
    End,
    LateEnds,
    decode_token,
    end_records,
    first_starts,
    read_verdicts,
    report,
)
from kafkamq.spark.queues.starting import BATCH, VERDICTS
from kafkamq.spark.sink.rows import SINK_COLUMNS
from kafkamq.transport.admin import Admin
from kafkamq.transport.errors import KafkaError, OutcomeUnknownError, TransactionAbortedError
from kafkamq.transport.log_reader import log_reader
from kafkamq.transport.record import Record
from kafkamq.transport.settings import transactional_settings
from kafkamq.transport.transactions import NewRecord
from kafkamq.types import MarkerType, Outcome, expand

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

_SLOT = "_slot"
# Beside ENDED and NACKED: a message without a verdict of this batch.
_OPEN = 0
_TIMEOUT_S = 30.0
_TRIES = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CommitSettings(AckSettings):
    topic: str
    engine: str
    epoch: int


_Output: TypeAlias = "tuple[AckToken, NewRecord]"
"""A row of output, and whose it is."""


def _key(config: ServiceConfig, engine: str, slot: int) -> LedgerKey:
    return LedgerKey(f"kafkamq.{config.ledger_topic}.{engine}.{slot}", config.ledger_topic, 0)


def next_epoch(config: ServiceConfig, note: CheckpointNote) -> int:
    """Return one more than that of any earlier start of this query; each slot's ledger has it then.

    An earlier start that goes on after a pause finds it there, whether this one has committed a
    batch in the slot by then or not. What such a start has left open is aborted: it would hold back
    who reads the markers, and the repeated batch has to.

    Raises:
        FencedError: A later start of the query was found on the way.
        BrokerError, DeadlineExceededError: A slot could not be had in time.
    """
    slots = range(max(note.tasks, note.most))
    keys = [_key(config, note.engine, slot) for slot in slots]
    with Admin(config, timeout_s=_TIMEOUT_S) as admin:
        held = read_ledgers(admin, keys, stable=False).values()
        epoch = max((each.epoch for each in held), default=0) + 1
        for slot, key in zip(slots, keys, strict=True):
            ledger = Ledger(config, key, engine=note.engine, epoch=epoch, admin=admin)
            try:
                _begin_at(ledger, is_first=not slot)
            finally:
                ledger.close()
            epoch = ledger.epoch
    return epoch


def _begin_at(ledger: Ledger, *, is_first: bool) -> None:
    """Put the ledger's epoch beside what it holds; the first slot says which of two is later."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    while True:
        is_overdue = time.monotonic() > deadline_s
        try:
            if is_first:
                ledger.fence()
            else:
                ledger.open()
            last = ledger.last or Position(position=0, epoch=0)
            ledger.epoch = max(ledger.epoch, last.epoch + is_first)
            ledger.begin()
            ledger.commit(
                last.position, batch=last.batch, rows_done=0, source_hash=last.source_hash
            )
            return
        except (FencedError, TransactionAbortedError, OutcomeUnknownError) as error:
            if is_later_start(error) or is_overdue:
                raise
            # Two that start, or one that goes on after a pause, would fence each other forever.
            _pause()


def _pause() -> None:
    time.sleep(random.uniform(0.02, 0.3))


def with_slots(frame: DataFrame, slots: int) -> DataFrame:
    """Verdicts and output of each row, those of a slot together in one task."""
    from pyspark.sql import functions as fn

    # The message's place in the token: partition and offset.
    parts = fn.split("ack_token", "/")
    place = fn.concat_ws("/", parts[1], parts[2])
    rows = with_columns(frame, {**ACK_COLUMNS, **SINK_COLUMNS})
    return in_slots(rows, _SLOT, fn.xxhash64(place), slots)


def commit_slots(
    batches: Iterator[pa.RecordBatch], settings: CommitSettings, batch: int
) -> Iterator[pa.RecordBatch]:
    """Commit in a worker the rows of a slot; of several, where Spark placed them together."""
    slots: dict[int, list[dict[str, Any]]] = {}
    for rows in batches:
        for row in rows.to_pylist():
            slots.setdefault(row[_SLOT], []).append(row)
    for number, rows in sorted(slots.items()):
        yield _commit(number, rows, settings, batch)


def _commit(
    number: int, rows: Sequence[dict[str, Any]], settings: CommitSettings, batch: int
) -> pa.RecordBatch:
    """Get the rows of one slot, once; tried again where the ledger tells what happened.

    A task of the same run that was thought dead takes the slot's producer away, and so does an
    earlier driver that has looked into the ledger before; who was fenced looks who is the later.
    """
    ends = read_verdicts(rows)
    records = _records(rows, ends, settings)
    tries = 0
    while True:
        tries += 1
        try:
            return _transact(number, records, ends, settings, batch)
        except (FencedError, TransactionAbortedError, OutcomeUnknownError) as error:
            may_try = error.is_retriable or isinstance(error, FencedError)
            if not may_try or is_later_start(error) or tries == _TRIES:
                raise
            _log.info("a transaction is made again", extra={"slot": number, "error": str(error)})
            if isinstance(error, FencedError):
                # Two attempts that are as quick as each other would fence each other each time.
                _pause()


def _transact(
    number: int,
    records: Sequence[_Output],
    ends: Sequence[End],
    settings: CommitSettings,
    batch: int,
) -> pa.RecordBatch:
    """One transaction; returns what a task reports."""
    config = settings.config
    log = marker_log(config)
    # A ledger of its own for each batch: workers take turns, and a producer that was kept could
    # have been fenced by the worker that had the slot in between.
    key = _key(config, settings.engine, number)
    ledger = Ledger(config, key, engine=settings.engine, epoch=settings.epoch, reports=True)
    late_ends, late, ended_ms, begun_s = LateEnds(log, ends), set[AckToken](), 0, math.inf
    try:
        before = _before(ledger.open(looks_first=True), ends, settings, batch, number)
        while True:
            timely = [end for end in ends if end.token not in late]
            # An ack of what was nacked would be one without its output, which is not written again.
            left = [end for end in timely if before(end.token) != NACKED]
            own = [each for each in records if each[0] not in late]
            output = [record for token, record in own if before(token) == _OPEN]
            late_ends.fold(ended_ms)
            begun_s = time.monotonic()
            ledger.begin()
            ended_ms = _write(ledger, output, end_records(left, settings, log), config)
            found = late_ends.find(left, ended_ms)
            if found is not None and not found:
                break
            late.update(found or ())
            ledger.abort()
            if not ledger.is_open:
                raise TransactionAbortedError("its abort had no answer", is_retriable=True)
        ledger.commit(
            batch + 1,
            batch=batch,
            rows_done=len(ends),
            source_hash=" ".join((f"{len(timely)}:{_digest(ends)}", *_plans(ends))),
        )
    except (FencedError, TransactionAbortedError) as error:
        open_s = time.monotonic() - begun_s
        limit = transactional_settings(config, transactional_id="")["transaction.timeout.ms"]
        if is_later_start(error) or open_s * 1000 < int(str(limit)):
            raise
        raise TransactionAbortedError(
            f"slot {number}: Kafka ended its transaction, open for {open_s:.0f} s and so longer "
            f"than transaction.timeout.ms ({limit}); take fewer rows in a batch, or more slots",
            is_retriable=True,
        ) from error
    finally:
        ledger.close()
    return report(len(timely), list(late), len(output), len(own) - len(output))


def _write(
    ledger: Ledger,
    output: Sequence[NewRecord],
    ends: Sequence[tuple[int, bytes, bytes]],
    config: ServiceConfig,
) -> int:
    """Write into the open transaction; returns the broker time of the last END, 0: none."""
    times: list[int] = []

    def told(error: KafkaError | None, message: Record) -> None:
        if error is None:
            times.append(message.timestamp()[1])

    ledger.producer.produce_records(output, timeout_s=_TIMEOUT_S)
    if output:
        ledger.producer.flush()
    markers = [(config.marker_topic, partition, key, value, ()) for partition, key, value in ends]
    ledger.producer.produce_records(markers, timeout_s=_TIMEOUT_S, on_delivery=told)
    ledger.producer.flush()
    if len(times) < len(markers):
        raise TransactionAbortedError("ENDs were not confirmed in time", is_retriable=True)
    return max(times, default=0)


def _before(
    last: Position | None, ends: Sequence[End], settings: CommitSettings, batch: int, number: int
) -> Callable[[AckToken], int]:
    """Return what an earlier transaction of the batch said of a message: ENDED or NACKED."""
    if last is None or last.position <= batch:
        # Or Kafka has forgotten it, and the log has not.
        return lambda token: token.start_offset if token.start_offset < 0 and token.plan else _OPEN
    ours, (digest, *plans) = _digest(ends), last.source_hash.split(" ")
    is_same = last.batch == batch and digest.partition(":")[2] == ours
    # What was late has neither END nor output.
    is_whole = is_same and digest.startswith(f"{len(ends)}:")
    # Where this start has not committed anything here its epoch stands beside what others have.
    is_ours = last.epoch == settings.epoch and last.rows_done > 0
    is_planned = last.batch == batch and not set(plans).isdisjoint(_plans(ends))
    if not is_whole and (not is_planned or (is_ours and not is_same)):
        raise StateError(
            "checkpoint older than its ledger, or rows that changed while the query ran: slot "
            f"{number} of {last.engine} has written batch {last.batch} ({last.source_hash}), the "
            f"query is at batch {batch} ({len(ends)}:{ours}); start the query again, and if that "
            "repeats restore the newest checkpoint, or start with an empty one"
        )
    since = _verdicts_since(ends, settings.config)
    otherwise = ENDED if is_whole else _OPEN

    def before(token: AckToken) -> int:
        if token.start_offset < 0:
            return token.start_offset
        return since.get(token.place, otherwise)

    return before


def _verdicts_since(ends: Sequence[End], config: ServiceConfig) -> dict[tuple[int, int], int]:
    """Verdicts of this batch behind the STARTs of these messages: ENDED or NACKED, by place.

    Call it when earlier runs are fenced. It waits for transactions that are open there.
    """
    first = first_starts(end.token for end in ends if end.token.start_offset >= 0)
    if not first:
        return {}
    log = marker_log(config)
    ours = tuple(f"{BATCH}{plan}-" for plan in _plans(ends))
    found: dict[tuple[int, int], int] = {}
    for partition, upto in log.tops(first).items():
        for _, _, _, marker in log.read(partition, first[partition], upto):
            if marker is None or marker.type is not MarkerType.END or marker.of_schedule:
                continue
            if not marker.consumer_id.startswith(ours) or marker.outcome not in VERDICTS:
                continue
            for one in (each.message_id for each in expand(marker)):
                if one is not None:
                    place = one.partition, one.offset
                    is_nack = marker.outcome is Outcome.NACK and found.get(place) != ENDED
                    found[place] = NACKED if is_nack else ENDED
    return found


def _plans(ends: Sequence[End]) -> list[str]:
    """Return the plans of a batch: one, but with several queues in a query."""
    return sorted({end.token.plan for end in ends} - {""})


def _digest(ends: Sequence[End]) -> str:
    """Return a digest of the messages; verdicts may differ when a batch is repeated."""
    places = " ".join(
        f"{partition}/{offset}" for partition, offset in sorted(end.token.place for end in ends)
    )
    return blake2b(places.encode(), digest_size=8).hexdigest()


def _records(
    rows: Sequence[Mapping[str, Any]], ends: Sequence[End], settings: CommitSettings
) -> list[_Output]:
    nacked = {end.token for end in ends if end.outcome is Outcome.NACK}
    reader = log_reader(settings.config)
    counts: dict[str, int] = {}
    records: list[_Output] = []
    for row in rows:
        key, value, token = row["key"], row["value"], decode_token(row["ack_token"])
        if value is None or token in nacked:
            continue
        topic = row["topic"] or settings.topic
        if not topic:
            raise ConfigError("a row names no topic, and the query has none: give one of them")
        if topic not in counts:
            counts[topic] = reader.partition_count(topic)
        partition = row["partition"]
        if partition is None:
            partition = -1 if key is None else key_partition(key, counts[topic])
        headers = tuple((each["key"], each["value"]) for each in row["headers"] or ())
        records.append((token, (topic, partition, key, value, headers)))
    return records
