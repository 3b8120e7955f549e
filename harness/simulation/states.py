"""States that the seeds must reach, each at least once, or they test less than they seem to.

Most are told by the lines that the shells log; the others by the logs of Kafka.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from harness.simulation.processes import FIRST_INVENTED, INVENTED, LATER
from kafkamq.markers.wire.marker_writer import encode_keepalive
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.wire.headers import REASON, read_message_headers
from kafkamq.testing.history import LogRecord, MessageHistory, Timeline, Why, read_timelines
from kafkamq.types import MarkerType, MessageId, Outcome, expand

_LINES = {
    "a START waits while others go on": "STARTs are not confirmed, others go on",
    "revoked between START and commit": "partitions went to others with STARTs not committed",
    "a commit of offsets is made again": "a commit failed and is made again",
    "a transaction of STARTs is made again": "a transaction of STARTs is made again",
    "a group's offsets are gone, the ledger has them": "the group's offsets are gone",
    "a lease was lost": "a lease was lost",
    "a producer failed for good": "a producer failed for good and was recreated",
    "a plan retried": "settling again",
    "a settlement failed": "a settlement failed",
    "a partition moved from a tracker": "partitions revoked",
    "a partition cannot start yet": "a partition cannot start yet",
    "a pause outlives its assignment": "a partition comes back that was paused",
    "stale metadata": "an answer was stale",
}
ADDED = "a marker partition is added while batches are held"
MIXED = "workers that write batches beside one that does not"
IDLE = "a worker is asked for nothing for long"
GATHERED = "killed between a gathered ACK and its END"
TOOK_OVER = "a tracker in batches that stood by takes over"
_DELAYED = "messages of a batch are nacked with a delay"
_EXTENDED = "a message of a batch is extended"
_FENCED = "fenced while firing"
_PART = "part of a plan retried"
_STATUS = "a status was lost"
_FULL_TOPICS = {
    "messages": "a message",
    "tracker": "a status",
    "ledger": "a position",
}
_FULL_MARKERS = ("START", "KEEPALIVE", "END", "SCHEDULE", "TICK")
_FULL = tuple(f"a full queue at {each}" for each in (*_FULL_TOPICS.values(), *_FULL_MARKERS))
_OF_LOGS = (
    "a message was carried forward",
    "a late verdict",
    "a START behind its END (R12)",
    "held longer than max_lease",
    "released",
    "a schedule was cancelled",
    "two STARTs of one message",
    "R17 with due entries",
    "dead letter: max-deliveries",
    "dead letter: rejected",
    "dead letter: expired",
    "dead letter: max-lease",
    "dead letter: payload-lost",
    "a batch of STARTs",
    "a batch of ENDs of a worker",
    "a batch of ENDs of a tracker",
    "a batch that ended in parts",
    "STARTs with and without the topic's id",
)
_OF_BATCHES = (ADDED, MIXED, GATHERED, _DELAYED, _EXTENDED)
STATES = frozenset(
    [*_LINES, IDLE, TOOK_OVER, _FENCED, _PART, _STATUS, *_FULL, *_OF_LOGS, *_OF_BATCHES]
)


def of_line(message: str, extra: Mapping[str, object]) -> list[str]:
    found = [state for state, begin in _LINES.items() if message.startswith(begin)]
    if extra.get("actions") and extra.get("error") == "FencedError":
        found.append(_FENCED)
    if extra.get("transactions_done"):
        found.append(_PART)
    if message == "a record found the queue full":
        found += _full(str(extra["topic"]), extra["value"])
    topics = extra.get("topics")
    if isinstance(topics, set) and any(topic.endswith(".tracker") for topic in topics):
        found.append(_STATUS)
    return found


def _full(topic: str, value: object) -> list[str]:
    *_, name = topic.split(".")
    what = _FULL_TOPICS.get(name)
    if name == "markers" and isinstance(value, bytes):
        what = decode_marker(value).type.name
    return [] if what is None else [f"a full queue at {what}"]


def of_logs(markers: Sequence[LogRecord], dead_letters: Sequence[LogRecord]) -> Counter[str]:
    found: Counter[str] = Counter()
    for letter in dead_letters:
        reason = dict(letter.headers).get(REASON) or b""
        found[f"dead letter: {reason.decode()}"] += 1
    for timeline in read_timelines(markers).values():
        found.update(_of_batches(timeline))
        ids: dict[tuple[bool, int, int], set[bytes]] = {}
        for (of_schedule, message_id), own in timeline.of_message.items():
            place = of_schedule, message_id.partition, message_id.offset
            ids.setdefault(place, set()).add(message_id.topic_id)
            kinds = Counter(timeline.marker(at).type for at in own)
            found["two STARTs of one message"] += kinds[MarkerType.START] > 1
            if of_schedule:
                carried = sum(timeline.marker(at).carried_forward for at in own)
                found["a message was carried forward"] += carried
        is_mixed = any(len(each) > 1 for each in ids.values())
        found["STARTs with and without the topic's id"] += is_mixed
        for history in timeline.histories():
            found.update(_of_history(timeline, history))
    return +found


def _of_batches(timeline: Timeline) -> Iterator[str]:
    """Return states of records of several messages, and what becomes of these; in parts: by
    several ENDs.
    """
    parts: Counter[int] = Counter()  # by START: such ENDs
    starts: dict[MessageId, int] = {}
    for at, marker in enumerate(timeline.records):
        if marker is None:
            continue
        if not marker.batches:
            if marker.type is MarkerType.KEEPALIVE and marker.message_id in starts:
                yield _EXTENDED
            continue
        ids = [each.message_id for each in expand(marker) if each.message_id is not None]
        is_end = marker.type is MarkerType.END
        is_tracker = is_end and marker.outcome in (Outcome.REDELIVERED, Outcome.DEAD_LETTERED)
        if marker.type is MarkerType.START and len(ids) > 1:
            starts.update(dict.fromkeys(ids, at))
        elif is_tracker:
            parts.update({starts[each] for each in ids if each in starts})
        if is_end and marker.reason == LATER and any(each in starts for each in ids):
            yield _DELAYED
        if len(ids) > 1 and marker.type is not MarkerType.KEEPALIVE:
            writer = "a tracker" if is_tracker else "a worker"
            yield f"a batch of ENDs of {writer}" if is_end else "a batch of STARTs"
    yield from ("a batch that ended in parts" for count in parts.values() if count > 1)


def without_inventions(markers: Sequence[LogRecord]) -> Iterator[LogRecord]:
    """Return the same, with records that only move the clock in place of STARTs of what does not
    exist.
    """
    nothing = encode_keepalive(None, consumer_id=INVENTED, redeliver_after_ms=1)
    for record in markers:
        marker = decode_marker(record.value)
        one = marker.message_id
        is_ours = one is None or one.offset < FIRST_INVENTED
        yield record if is_ours else replace(record, value=nothing)


def is_invented(letter: LogRecord) -> bool:
    """Return whether a dead letter is of such a START."""
    origin = read_message_headers(letter.headers).origin
    return origin is not None and origin.offset >= FIRST_INVENTED


def holds_batches(markers: Sequence[LogRecord]) -> bool:
    """Return whether some message of a START of several has no END."""
    is_open: dict[MessageId | None, bool] = {}
    for record in markers:
        marker = decode_marker(record.value)
        ids = [each.message_id for each in expand(marker)]
        if marker.type is MarkerType.START and len(ids) > 1:
            is_open.update({each: is_open.get(each, True) for each in ids})
        elif marker.type is MarkerType.END:
            is_open.update(dict.fromkeys(ids, False))
    return any(is_open.values())


def acked(markers: Sequence[LogRecord]) -> set[MessageId | None]:
    """Return messages with an ACK in the logs, in time or not."""
    decoded = [decode_marker(record.value) for record in markers]
    return {
        each.message_id
        for marker in decoded
        if marker.type is MarkerType.END and marker.outcome is Outcome.ACK
        for each in expand(marker)
    }


def _of_history(timeline: Timeline, history: MessageHistory) -> Counter[str]:
    started = [at for at in timeline.starts_of_engines if 0 <= history.due < at < history.end]
    return Counter(
        {
            "a late verdict": len(history.late_at),
            "a START behind its END (R12)": history.is_extra,
            "held longer than max_lease": history.why is Why.MAX_LEASE,
            "released": history.why is Why.RELEASED,
            "a schedule was cancelled": history.ending.value == "was cancelled",
            "R17 with due entries": len(started),
        }
    )
