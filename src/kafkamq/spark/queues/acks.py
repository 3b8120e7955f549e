"""Verdicts of rows, as ENDs: what to write, where to, and which of them came too late."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kafkamq.config import Backoff, ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.markers.rules.attempts import Attempts
from kafkamq.markers.rules.batching import delay_by_reference_ms
from kafkamq.markers.rules.handout import nack_delay_ms
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.wire.markers import MAX_DURATION_MS, encode_known_end, encode_named
from kafkamq.queue.wire.headers import cut_text
from kafkamq.queue.wire.keys import marker_key
from kafkamq.spark.marker_log import MarkerLog
from kafkamq.spark.queues.tokens import AckToken, decode_token
from kafkamq.transport.record import LOG_APPEND_TIME
from kafkamq.types import Outcome

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
"""What a task reports: ENDs, rows written and passed over, late messages, some of their places."""

_MAX_NAMED = 100
_OUTCOMES = {"ack": Outcome.ACK, "nack": Outcome.NACK, "reject": Outcome.REJECT}
MAX_DELAY_S = 366 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class AckSettings:
    """What travels to the workers."""

    config: ServiceConfig
    backoff: Backoff = field(default_factory=Backoff)


@dataclass(frozen=True, slots=True)
class End:
    """A verdict to write."""

    token: AckToken
    outcome: Outcome
    delay_ms: int | None = None  # of a NACK; None: the back-off
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
    ends: Iterable[End], settings: AckSettings, log: MarkerLog
) -> list[tuple[int, bytes, bytes]]:
    """ENDs that say these verdicts: one for all that it can name (R30)."""
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
            first = named[0]
            delay_ms = _delay_ms(named, settings, log) if first.outcome is Outcome.NACK else 0
            known = first.outcome, token.consumer_id, delay_ms, first.reason
            key = marker_key(first.partition, first.offset)
            records.append((token.marker_partition, key, encode_known_end(identity, *known)))
    return records


def _delay_ms(ends: Sequence[End], settings: AckSettings, log: MarkerLog) -> int:
    """Of a NACK; its jitter is drawn once for the record (R30)."""
    facts = log.facts()
    delay_ms = nack_delay_ms(
        ends[0].delay_ms,
        backoff=settings.backoff,
        delivery_count=ends[0].token.delivery_count,
        retention_ms=facts.marker_retention_ms,
        random_unit=random.random(),
    )
    times = [end.token.message_ms for end in ends]
    oldest_ms = min((each for each in times if each is not None and each >= 0), default=None)
    if oldest_ms is not None:
        now_ms = log.broker_ms() or max(end.token.start_ms for end in ends)
        kept_ms = facts.message_retention_ms
        delay_ms = delay_by_reference_ms(delay_ms, oldest_ms, now_ms, retention_ms=kept_ms)
    return min(delay_ms, MAX_DURATION_MS)


def report(
    ends: int, late: Sequence[AckToken], written: int = 0, skipped: int = 0
) -> pa.RecordBatch:
    """What a task has done, as ``RESULT_SCHEMA``."""
    import pyarrow as pa

    places = [f"{token.message_id.partition}/{token.message_id.offset}" for token in late]
    numbers = {"ends": ends, "written": written, "skipped": skipped, "late": len(late)}
    kinds = [*((name, pa.int64()) for name in numbers), ("places", pa.list_(pa.string()))]
    row = {**numbers, "places": places[:_MAX_NAMED]}
    return pa.RecordBatch.from_pylist([row], schema=pa.schema(kinds))


def check_columns(schema: StructType) -> None:
    """Refuse rows that cannot be acknowledged."""
    types = {field.name: field.dataType.simpleString().upper() for field in schema.fields}
    if "ack_token" not in types:
        raise ConfigError(
            f"the rows have the columns {', '.join(types)}: acknowledging needs ack_token, as "
            "read_queue() gives it; keep it through your transformations"
        )
    for name, kind in ACK_COLUMNS.items():
        found = types.get(name, kind)
        is_number = kind == "DOUBLE" and not found.startswith(("STRING", "BINARY", "STRUCT"))
        if found != kind and not is_number:
            raise ConfigError(f"column {name} is {found}: it must be {kind}")


def read_verdicts(rows: Iterable[Mapping[str, Any]]) -> list[End]:
    """One END for each message: of its last row that names a verdict other than ack."""
    found: dict[str, End] = {}
    for row in rows:
        text = row["ack_token"]
        if text not in found or str(row.get("verdict") or "ack").lower() != "ack":
            found[text] = read_end(row)
    return list(found.values())


def read_end(row: Mapping[str, Any]) -> End:
    """The verdict of a row; raises as ``read_verdicts``."""
    token = decode_token(row["ack_token"])
    text = row.get("verdict") or "ack"
    outcome = _OUTCOMES.get(str(text).lower())
    if outcome is None:
        raise ConfigError(f"verdict is {text!r}: it must be ack, nack or reject")
    delay_ms = None
    reason = ""
    if outcome is not Outcome.ACK:
        reason = cut_text(row.get("reason") or "")
    if outcome is Outcome.NACK:
        delay_s = row.get("delay")
        if delay_s is not None and not 0.0 <= float(delay_s) <= MAX_DELAY_S:
            raise ConfigError(f"delay is {delay_s}: it must be seconds, from 0 to a year's")
        delay_ms = None if delay_s is None else round(float(delay_s) * 1000)
    return End(token, outcome, delay_ms, reason)


def find_late(log: MarkerLog, ends: Sequence[End], ended_ms: int = 0) -> list[AckToken]:
    """Those whose ENDs came too late (R9), judged as a tracker does: by folding the log.

    Args:
        log: Of the markers.
        ends: The verdicts.
        ended_ms: Broker time of ENDs that are in a transaction, where readers do not see them yet:
            late is what by the log is not renewed up to then.
    """
    tokens = [end.token for end in ends if end.token.start_offset >= 0]
    if not tokens:
        return []
    at_ms = min(token.start_ms + token.timeout_ms // 2 for token in tokens)
    reached = log.reached(sorted({token.marker_partition for token in tokens}), at_ms)
    late: set[tuple[int, int]] = set()
    oldest: dict[int, int] = {}
    for token in tokens:
        if token.marker_partition in reached:
            first = oldest.get(token.marker_partition, token.start_offset)
            oldest[token.marker_partition] = min(first, token.start_offset)
        elif token.start_ms + token.timeout_ms < ended_ms:
            late.add(token.place)
    for partition, upto in log.ends(sorted(oldest)).items():
        attempts = Attempts(RedeliveryTracker(oldest[partition], partition=partition))
        known_ms = 0
        for offset, timestamp_ms, kind, marker in log.read(partition, oldest[partition], upto):
            log_ms = timestamp_ms if kind == LOG_APPEND_TIME else -1
            known_ms = max(known_ms, log_ms)
            attempts.apply(offset, timestamp_ms, log_ms, marker)
            late |= _late(attempts)
        late |= _due(attempts, max(0, ended_ms - known_ms))
    return [end.token for end in ends if end.token.place in late]


def _late(attempts: Attempts) -> set[tuple[int, int]]:
    ended: Iterable[Any] = attempts.take_ended()
    tracker = (Outcome.REDELIVERED, Outcome.DEAD_LETTERED)
    return {
        (each.message_id.partition, each.message_id.offset)
        for each in ended
        if each.is_late or each.outcome in tracker
    }


def _due(attempts: Attempts, passed_ms: int) -> set[tuple[int, int]]:
    """Whose ENDs are late, though a transaction's are not to be read yet."""
    return {
        (each.attempt.message_id.partition, each.attempt.message_id.offset)
        for each in attempts.open()
        if each.attempt.outcome is None and (each.state == "due" or each.remaining_ms < passed_ms)
    }
