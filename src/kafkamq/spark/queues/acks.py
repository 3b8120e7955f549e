"""Verdicts of rows, as ENDs: which message is whose row, what to write, and what came too late.

An ack token is what a row must carry so that its message can be acknowledged anywhere, later. An
END is idempotent: a repeated batch writes its ENDs again, and they change nothing. With the option
``mode`` = ``ack`` a query writes them and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import NullType, NumericType

from kafkamq.config import Backoff, ServiceConfig
from kafkamq.errors import ConfigError, StateError
from kafkamq.markers.rules.attempts import Attempts
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.state import nack_ms
from kafkamq.markers.wire.marker_writer import encode_known_end, encode_named
from kafkamq.queue.wire.headers import cut_text
from kafkamq.queue.wire.keys import marker_key
from kafkamq.spark.marker_log import MarkerLog, marker_log
from kafkamq.spark.options import parse_service
from kafkamq.spark.parallelism import check_spelling
from kafkamq.types import MessageId, Outcome

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

ACK_COLUMNS: Mapping[str, str] = {
    "ack_token": "STRING",
    "verdict": "STRING",  # ack, nack, reject; null or no such column: ack
    "delay": "DOUBLE",  # of a nack, in s; null: the back-off
    "reason": "STRING",  # of a nack or a reject
}
"""Columns that say what becomes of a row's message; ``ack_token`` must be there."""

RESULT_SCHEMA = "ends BIGINT, written BIGINT, skipped BIGINT, late BIGINT, places ARRAY<STRING>"
"""What a task reports: ENDs, rows written and passed over, late messages and their places."""

# Stands in place of a start_offset: the message has its verdict and was not STARTed again.
ENDED = -1
# The same, where the verdict was a nack.
NACKED = -2

_VERSION = "1"
_OF_BATCHES = "2"
_PLANNED = 3
_SHOWN = 40

# Late messages in one line of the log.
MAX_NAMED = 100
_BY_TRACKER = (Outcome.REDELIVERED, Outcome.DEAD_LETTERED)
_OUTCOMES = {"ack": Outcome.ACK, "nack": Outcome.NACK, "reject": Outcome.REJECT}
MAX_DELAY_S = 366 * 86_400.0
_KNOWN = {"mode", "namespace", "checkpointlocation", "path", "queryname"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AckToken:
    """One delivery of one message; opaque to users, readable to people."""

    message_id: MessageId
    # Where its START is, and its END must go (R7, R26).
    marker_partition: int
    consumer_id: str
    delivery_count: int
    timeout_ms: int
    start_offset: int
    start_ms: int
    # Broker time of a message whose START refers to it (R28), -1 of another one; None: markers of
    # its batch are of one message each.
    message_ms: int | None = None

    @property
    def place(self) -> tuple[int, int]:
        return self.message_id.partition, self.message_id.offset

    @property
    def plan(self) -> str:
        """Return what all runs of its batch share; empty: it was handed out by no plan."""
        parts = self.consumer_id.split("-")
        return parts[1] if len(parts) == _PLANNED else ""

    def encode(self) -> str:
        one = self.message_id
        is_single = self.message_ms is None
        return "/".join(
            (
                _VERSION if is_single else _OF_BATCHES,
                f"{one.partition}/{one.offset}/{one.leader_epoch}/{one.topic_id.hex()}",
                f"{self.marker_partition}/{self.consumer_id}/{self.delivery_count}",
                f"{self.timeout_ms}/{self.start_offset}/{self.start_ms}",
                *(() if is_single else (str(self.message_ms),)),
            )
        )


def decode_token(text: str | None) -> AckToken:
    try:
        parts = (text or "").split("/")
        message_ms = int(parts.pop()) if parts[0] == _OF_BATCHES else None
        version, partition, offset, epoch, topic_id, route, consumer, *numbers = parts
        count, timeout_ms, start, start_ms = map(int, numbers)
        if version not in (_VERSION, _OF_BATCHES):
            raise ValueError
        one = MessageId(int(partition), int(offset), bytes.fromhex(topic_id), int(epoch))
        known = int(route), consumer, count, timeout_ms, start, start_ms, message_ms
        return AckToken(one, *known)
    except ValueError:
        shown = "null" if text is None else repr(text[:_SHOWN])
        raise StateError(
            f"ack_token is {shown}: rows must keep the column ack_token of read_queue() as it is"
        ) from None


@dataclass(frozen=True, kw_only=True)
class AckSettings:
    config: ServiceConfig
    backoff: Backoff = field(default_factory=Backoff)


@dataclass(frozen=True, slots=True)
class End:
    token: AckToken
    outcome: Outcome
    delay_ms: int | None = None
    reason: str = ""

    @property
    def partition(self) -> int:
        return self.token.message_id.partition

    @property
    def offset(self) -> int:
        return self.token.message_id.offset

    @property
    def log(self) -> tuple[bytes, int]:
        return self.token.message_id.log


def end_records(
    ends: Sequence[End], settings: AckSettings, log: MarkerLog
) -> list[tuple[int, bytes, bytes]]:
    """ENDs that say these verdicts: one for all that it can name (R30).

    Raises:
        ConfigError: The messages are of another namespace, where nobody would read these ENDs.
    """
    if not log.is_of({end.token.message_id.topic_id for end in ends}):
        config = settings.config
        raise ConfigError(
            f"the rows are of another topic than {config.message_topic} at "
            f"{config.bootstrap_servers}: acknowledge with the ServiceConfig that read_queue() had "
            "(or the topic was recreated: start the query again)"
        )
    groups: dict[tuple[object, ...], list[End]] = {}
    for end in ends:
        token = end.token
        count = token.delivery_count if end.outcome is Outcome.NACK else 0
        verdict = end.outcome, end.delay_ms, end.reason, count
        same = token.marker_partition, token.consumer_id, token.message_ms is None, verdict
        groups.setdefault(same, []).append(end)
    records = []
    for members in groups.values():
        token = members[0].token
        for identity, named in encode_named(members, together=token.message_ms is not None):
            first, delay_ms = named[0], 0
            if first.outcome is Outcome.NACK:
                times = [-1 if (ms := end.token.message_ms) is None else ms for end in named]
                log.namespace.refresh_if_old()
                # Its jitter is drawn once for the record (R30).
                delay_ms = nack_ms(
                    log.namespace,
                    settings.backoff,
                    first.delay_ms,
                    delivery_count=token.delivery_count,
                    message_ms=min((each for each in times if each >= 0), default=-1),
                    since_ms=max(end.token.start_ms for end in named),
                )
            known = first.outcome, token.consumer_id, delay_ms, first.reason
            key = marker_key(first.partition, first.offset)
            records.append((token.marker_partition, key, encode_known_end(identity, *known)))
    return records


def report(
    ends: int, late: Sequence[AckToken], written: int = 0, skipped: int = 0
) -> pa.RecordBatch:
    """Return what a task has done, as ``RESULT_SCHEMA``."""
    import pyarrow as pa

    places = [f"{token.message_id.partition}/{token.message_id.offset}" for token in late]
    numbers = {"ends": ends, "written": written, "skipped": skipped, "late": len(late)}
    kinds = [*((name, pa.int64()) for name in numbers), ("places", pa.list_(pa.string()))]
    row = {**numbers, "places": places}
    return pa.RecordBatch.from_pylist([row], schema=pa.schema(kinds))


def check_columns(schema: StructType) -> None:
    types = {field.name: field.dataType for field in schema.fields}
    check_spelling(types, ACK_COLUMNS)
    if "ack_token" not in types:
        raise ConfigError(
            f"the rows have the columns {', '.join(types)}: acknowledging needs ack_token, as "
            "read_queue() gives it; keep it through your transformations"
        )
    for name, kind in ACK_COLUMNS.items():
        if name not in types:
            continue
        found = types[name].simpleString().upper()
        is_number = kind == "DOUBLE" and isinstance(types[name], (NumericType, NullType))
        if found != kind and not is_number:
            raise ConfigError(f"column {name} is {found}: it must be {kind}")


def read_verdicts(rows: Iterable[Mapping[str, Any]]) -> list[End]:
    """Return one END for each message: of its last row that names a verdict other than ack."""
    found: dict[str, End] = {}
    for row in rows:
        text = row["ack_token"]
        if text not in found or str(row.get("verdict") or "ack").lower() != "ack":
            found[text] = _read_end(row)
    return list(found.values())


def _read_end(row: Mapping[str, Any]) -> End:
    token = decode_token(row["ack_token"])
    text = row.get("verdict") or "ack"
    outcome = _OUTCOMES.get(str(text).lower())
    if outcome is None:
        raise ConfigError(f"verdict is {text!r}: it must be ack, nack or reject")
    reason = "" if outcome is Outcome.ACK else cut_text(row.get("reason") or "")
    delay_s = row.get("delay") if outcome is Outcome.NACK else None
    if delay_s is not None and not 0.0 <= float(delay_s) <= MAX_DELAY_S:
        raise ConfigError(f"delay is {delay_s}: it must be seconds, from 0 to a year's")
    return End(token, outcome, None if delay_s is None else round(float(delay_s) * 1000), reason)


class LateEnds:
    """Whose ENDs came too late (R9), judged as a tracker does: by folding the log.

    What was folded once is not read again, so that little is left for an open transaction.
    """

    def __init__(self, log: MarkerLog, ends: Iterable[End]) -> None:
        tokens = [end.token for end in ends if end.token.start_offset >= 0]
        self._log = log
        self._next = first_starts(tokens)
        self._half_ms = min((each.start_ms + each.timeout_ms // 2 for each in tokens), default=0)
        self._folded: dict[int, Attempts] = {}
        self._known_ms = dict.fromkeys(self._next, 0)
        self._late: set[tuple[int, int]] = set()

    def fold(self, ended_ms: int = 0) -> None:
        """Read up to the logs' ends, where half of a lease is over by the log or ``ended_ms``."""
        unread = sorted(self._next.keys() - self._folded.keys())
        if unread and ended_ms < self._half_ms:
            unread = sorted(self._log.reached(unread, self._half_ms))
        for partition in unread:
            tracker = RedeliveryTracker(self._next[partition], partition=partition)
            self._folded[partition] = Attempts(tracker)
        self._read_on()

    def find(self, ends: Sequence[End], ended_ms: int = 0) -> list[AckToken] | None:
        """Return those of ``ends`` that came too late; None: ``fold`` must tell of ``ended_ms``.

        ``ended_ms``: Broker time of ENDs that are in a transaction, where readers do not see them
        yet: late is what by the log is not renewed up to then.
        """
        if ended_ms >= self._half_ms and self._next.keys() != self._folded.keys():
            return None
        if ended_ms:
            self._read_on()
        late = set(self._late)
        for partition, attempts in self._folded.items():
            passed_ms = max(0, ended_ms - self._known_ms[partition])
            for each in attempts.open():
                # Their ENDs are late, though a transaction's are not to be read yet.
                if each.attempt.outcome is None and (
                    each.state == "due" or each.remaining_ms < passed_ms
                ):
                    late.add((each.attempt.message_id.partition, each.attempt.message_id.offset))
        return [end.token for end in ends if end.token.place in late]

    def _read_on(self) -> None:
        for partition, upto in self._log.ends(sorted(self._folded)).items():
            attempts, start = self._folded[partition], self._next[partition]
            # After a change of leaders a log ends earlier for a while.
            self._next[partition] = max(start, upto)
            for offset, timestamp_ms, log_ms, marker in self._log.read(partition, start, upto):
                self._known_ms[partition] = max(self._known_ms[partition], log_ms)
                attempts.apply(offset, timestamp_ms, log_ms, marker)
            for ended in attempts.take_ended():
                if ended.is_late or ended.outcome in _BY_TRACKER:
                    self._late.add((ended.message_id.partition, ended.message_id.offset))


def first_starts(tokens: Iterable[AckToken]) -> dict[int, int]:
    """Return the offset of the first START of these, by marker partition."""
    found: dict[int, int] = {}
    for token in tokens:
        known = found.get(token.marker_partition, token.start_offset)
        found[token.marker_partition] = min(known, token.start_offset)
    return found


def parse_ack_options(options: Mapping[str, str], service: ServiceConfig | None) -> AckSettings:
    given = {name.lower(): value for name, value in options.items()}
    if given.get("mode") != "ack":
        raise ConfigError(
            f"mode is {given.get('mode', '')!r}: to acknowledge it must be ack; to write rows "
            "leave it out, and name a topic or a queue"
        )
    unknown = sorted(name for name in given if name not in _KNOWN and not name.startswith("kafka."))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]}: known are mode, namespace and kafka.NAME")
    return AckSettings(config=parse_service(given, service))


def write_ends(
    batches: Iterable[pa.RecordBatch], settings: AckSettings
) -> Iterator[pa.RecordBatch]:
    """Write, in a worker, ENDs without a transaction; writing them twice changes nothing."""
    rows: list[dict[str, object]] = []
    for batch in batches:
        wanted = [name for name in batch.schema.names if name in ACK_COLUMNS]
        rows += batch.select(wanted).to_pylist()
    ends = read_verdicts(rows)
    log = marker_log(settings.config)
    log.write(end_records(ends, settings, log))
    late_ends = LateEnds(log, ends)
    late_ends.fold()
    yield report(len(ends), late_ends.find(ends) or ())


@dataclass
class _Ended(WriterCommitMessage):
    late: int
    named: list[str]


class _EndWriter:
    """Writes the ENDs of rows whose output is written elsewhere and before."""

    def __init__(self, settings: AckSettings, schema: StructType) -> None:
        check_columns(schema)
        self._settings = settings

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        (done,) = next(write_ends(iterator, self._settings)).to_pylist()
        return _Ended(done["late"], done["places"][:MAX_NAMED])

    def commit(
        self,
        messages: Iterable[WriterCommitMessage | None],
        batchId: int = 0,  # noqa: N803
    ) -> None:
        done = [message for message in messages if isinstance(message, _Ended)]
        if late := sum(message.late for message in done):
            _log.warning(
                "%d verdicts came after their leases' ends: these messages are delivered again "
                "(partition/offset: %s)",
                late,
                ", ".join(place for message in done for place in message.named),
            )


class StreamEndWriter(_EndWriter, DataSourceStreamArrowWriter): ...


class BatchEndWriter(_EndWriter, DataSourceArrowWriter): ...
