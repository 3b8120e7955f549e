"""The verdict on a namespace, from its logs alone: what was lost, repeated, and left unexplained.

Reads the three topics of a namespace as plain records, of the in-memory log or of a real Kafka, and
never asks a tracker. It judges every message that stands in the messages topic, and every SCHEDULE:

- lost: neither acked, nor copied, nor dead-lettered;
- copies and dead letters: one for each END of a tracker, with the right count, reason and content,
  and none without one;
- every END of a tracker is explained by the log before it: a lease that had ended by the log's
  clock, a nack, a release, a rejection, or a delay that was over. So a message that was acked in
  time is not redelivered; the one exception is R12's, a START that came after the END. Such a START
  has an END behind it, too: who reads from there on must not take the message for open.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from kafkamq.config import Options
from kafkamq.errors import KafkaMQError
from kafkamq.queue.wire import headers as names
from kafkamq.queue.wire.headers import MessageHeaders, Origin, read_message_headers
from kafkamq.testing.history import Ending, LogRecord, MessageHistory, Timeline, Why, read_timelines
from kafkamq.types import DeadLetterReason, Marker, MarkerType, RecordId

_MAX_SHOWN = 20


class CheckFailedError(KafkaMQError, AssertionError):
    """The logs break a promise; the text names the first places."""


@dataclass(frozen=True, slots=True)
class Problem:
    kind: str
    place: RecordId
    text: str

    def __str__(self) -> str:
        topic, partition, offset = self.place
        return f"{self.kind}: {topic}[{partition}]@{offset}: {self.text}"


@dataclass(slots=True)
class Verdict:
    """What the logs say. Messages are counted once, however many copies they had."""

    # First copies, also delayed ones that are not in the queue yet.
    sent: int = 0
    acked: int = 0
    redelivered: int = 0
    dead_lettered: int = 0
    cancelled: int = 0
    lost: int = 0
    # Acked more than once, or acked and dead-lettered.
    processed_twice: int = 0
    # A START that came after the END explains them (R12).
    extra_copies: int = 0
    late_verdicts: int = 0
    lateness_ms: list[int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return not self.problems

    def require_ok(self, context: str = "") -> None:
        """Raise when a promise was broken.

        Raises:
            CheckFailedError: with ``context`` and the first problems.
        """
        if self.problems:
            shown = "\n".join(map(str, self.problems[:_MAX_SHOWN]))
            raise CheckFailedError(f"{context}{len(self.problems)} problems:\n{shown}")


@dataclass(slots=True)
class _Message:
    record: LogRecord
    headers: MessageHeaders
    origin: RecordId

    @property
    def content(self) -> tuple[object, ...]:
        """Return what every copy has in common (R14)."""
        record = self.record
        return (record.key, record.value, self.headers.id, self.headers.user)


@dataclass(kw_only=True)
class Checker:
    """Judges one namespace; give it all records of its topics, in any order."""

    messages: Iterable[LogRecord]
    markers: Iterable[LogRecord]
    dead_letters: Iterable[LogRecord]
    confirmed: Collection[RecordId]
    deleted: Collection[tuple[int, int]]
    max_deliveries: int
    max_lease_ms: int
    must_be_settled: bool

    def __post_init__(self) -> None:
        self.verdict = Verdict()
        self._messages: dict[tuple[int, int], _Message] = {}
        self._families: dict[RecordId, list[_Message]] = defaultdict(list)
        self._message_topic = ""
        self._marker_topic = ""
        for record in self.messages:
            self._take_message(record)
        self._there = self._messages.keys() - set(self.deleted)
        marker_records = list(self.markers)
        if marker_records:
            self._marker_topic = marker_records[0].topic
        self._places: set[RecordId] = set()
        if self.confirmed:
            self._places = {(r.topic, r.partition, r.offset) for r in marker_records}
            self._places |= {(self._message_topic, *number) for number in self._messages}
        self._timelines = read_timelines(marker_records, max_lease_ms=self.max_lease_ms)
        self._histories = defaultdict[tuple[int, int], list[tuple[Timeline, MessageHistory]]](list)
        self._buried: dict[RecordId, list[LogRecord]] = defaultdict(list)
        for record in self.dead_letters:
            self._take_dead_letter(record)
        # By the origin of the family: what the ENDs of trackers say must be there.
        self._copies_due: dict[RecordId, Counter[int]] = defaultdict(Counter)
        self._burials_due: dict[RecordId, list[tuple[int, frozenset[DeadLetterReason]]]] = (
            defaultdict(list)
        )
        self._fired: list[tuple[RecordId, Marker]] = []

    # ---- reading

    def _take_message(self, record: LogRecord) -> None:
        headers = read_message_headers(record.headers)
        place = (record.topic, record.partition, record.offset)
        if headers.origin is not None:
            place = (headers.origin.topic, headers.origin.partition, headers.origin.offset)
        self._message_topic = record.topic
        message = _Message(record, headers, place)
        self._messages[record.partition, record.offset] = message
        self._families[place].append(message)

    def _take_dead_letter(self, record: LogRecord) -> None:
        first = Origin.read(_header(record, names.ORIGIN))
        if first is None:
            place = (record.topic, record.partition, record.offset)
            self._problem("dead letter", place, "it names no origin")
            return
        self._buried[first.topic, first.partition, first.offset].append(record)

    def _problem(self, kind: str, place: RecordId, text: str) -> None:
        self.verdict.problems.append(Problem(kind, place, text))

    # ---- judging

    def check(self) -> Verdict:
        for timeline in self._timelines.values():
            for history in timeline.histories():
                self._check_history(timeline, history)
        for place, family in self._families.items():
            self._check_family(place, family)
        for place in self._copies_due.keys() - self._families.keys():
            self._problem("lost", place, "its copy is missing")
        self._check_fired()
        for place in self._burials_due.keys() | self._buried.keys():
            self._check_burials(place)
        for place in self.confirmed:
            if place not in self._places:
                self._problem("lost", place, "it was confirmed and is not in the log")
        verdict = self.verdict
        verdict.lost = len({p.place for p in verdict.problems if p.kind == "lost"})
        verdict.lateness_ms.sort()
        return verdict

    def _check_history(self, timeline: Timeline, history: MessageHistory) -> None:
        message_id = history.message_id
        number = (message_id.partition, message_id.offset)
        place = (self._marker_topic if history.of_schedule else self._message_topic, *number)
        if not history.of_schedule:
            self._histories[number].append((timeline, history))
            message = self._messages.get(number)
            if message is not None and not self._is_unread(timeline, history):
                place = message.origin
                if history.ending is Ending.ACKED and history.begin == history.end:
                    self._problem("lost", place, f"{number} was acked, and nobody had STARTed it")
            else:
                # Retention has deleted the message, or it is lost: its START knows the headers.
                origin = read_message_headers(timeline.marker(history.begin).headers).origin
                if origin is not None:
                    place = (origin.topic, origin.partition, origin.offset)
        elif not history.is_extra:
            self.verdict.sent += history.ending is not Ending.REDELIVERED
            self.verdict.cancelled += history.ending is Ending.CANCELLED
            self.verdict.dead_lettered += history.ending is Ending.DEAD_LETTERED
            if history.ending is Ending.OPEN and self.must_be_settled:
                self._problem("lost", place, "the SCHEDULE never fired")
        at = timeline.offsets[history.begin]
        if history.is_extra and history.ending is Ending.OPEN and self.must_be_settled:
            self._problem("unexplained", place, f"it had ended before its START at {at}: no END")
        if history.ending is Ending.ALREADY_ENDED and not history.is_extra:
            self._problem("lost", place, f"its START at {at} was said to come behind its END")
        self.verdict.late_verdicts += len(history.late_at)
        if history.ending in (Ending.REDELIVERED, Ending.DEAD_LETTERED):
            self._check_settlement(timeline, history, place)

    def _check_settlement(
        self, timeline: Timeline, history: MessageHistory, place: RecordId
    ) -> None:
        """An END of a tracker: could it be written, and what must there be because of it?"""
        at = f"END at {self._marker_topic}[{timeline.partition}]@{timeline.offsets[history.end]}"
        is_buried = history.ending is Ending.DEAD_LETTERED
        if history.others:
            history = self._most_likely(timeline, history, place)
        start = self._start(timeline, history)
        is_loss = is_buried and self._is_payload_lost(place, start)
        if is_loss and (untrue := self._why_not_lost(timeline, history, start)):
            self._problem("lost", place, f"{at}: {untrue}")
        must_die, reasons = False, frozenset[DeadLetterReason]()
        if history.is_explained:
            self.verdict.extra_copies += history.is_extra
            if history.is_extra and all(map(timeline.was_remembered, (history, *history.others))):
                text = "it had ended less than 60 s before, and no engine started since"
                self._problem("unexplained", place, f"{at}: {history.ending.value}, but {text}")
            self.verdict.lateness_ms.append(timeline.clocks[history.end] - history.deadline_ms)
            must_die, reasons = self._reasons(timeline, history, start)
        elif not (is_loss and start.type is MarkerType.END):
            text = "nobody held it"
            if start.type is not MarkerType.END:
                now_ms = timeline.before(history)
                text = f"it was held until {history.deadline_ms}, the log's clock was {now_ms}"
            self._problem("unexplained", place, f"{at}: {history.ending.value}, but {text}")
        count = max(1, start.delivery_count)
        if is_buried:
            if is_loss:
                reasons |= {DeadLetterReason.PAYLOAD_LOST}
            elif history.is_explained and not reasons:
                self._problem("unexplained", place, f"{at}: a dead letter without a reason")
            self._burials_due[place].append((count, reasons))
            return
        if must_die:
            words = ", ".join(sorted(reason.value for reason in reasons))
            self._problem("unexplained", place, f"{at}: a copy of what had to die ({words})")
        if history.of_schedule:
            self._fired.append((place, start))
        else:
            self.verdict.redelivered += 1
            self._copies_due[place][count + (history.why is not Why.RELEASED)] += 1

    def _most_likely(
        self, timeline: Timeline, of: MessageHistory, place: RecordId
    ) -> MessageHistory:
        """Return the one that the copy fits of the histories that explain an extra END (R12)."""
        for one in (of, *of.others):
            start = self._start(timeline, one)
            count = max(1, start.delivery_count)
            if one.ending is Ending.REDELIVERED:
                count += one.why is not Why.RELEASED
                written = [copy.headers.delivery_count for copy in self._families.get(place, ())]
                if written.count(count) > self._copies_due[place][count]:
                    return one
            else:
                _, reasons = self._reasons(timeline, one, start)
                claimed = [reason for _, reason in self._burials_due.get(place, ())]
                letters = [_reason_of(letter) for letter in self._buried.get(place, ())]
                if any(
                    letters.count(reason.value) > claimed.count(frozenset({reason}))
                    for reason in reasons
                ):
                    return one
        return of

    def _reasons(
        self, timeline: Timeline, history: MessageHistory, start: Marker
    ) -> tuple[bool, frozenset[DeadLetterReason]]:
        """Return whether it had to die, and the reasons that its dead letter may name (R14)."""
        reasons: set[DeadLetterReason] = set()
        limit = start.max_deliveries or self.max_deliveries
        if history.why is Why.REJECTED:
            reasons = {DeadLetterReason.REJECTED}
        elif history.why not in (Why.RELEASED, Why.SCHEDULED) and start.delivery_count >= limit:
            is_max_lease = history.why is Why.MAX_LEASE
            reasons = {
                DeadLetterReason.MAX_LEASE if is_max_lease else DeadLetterReason.MAX_DELIVERIES
            }
        if not start.expires_at_ms:
            return bool(reasons), frozenset(reasons)
        left_ms = start.expires_at_ms - timeline.timestamps[history.begin]
        if left_ms < 0:
            return True, frozenset({DeadLetterReason.EXPIRED})
        if history.why is not Why.REJECTED:
            expiry_ms = timeline.clocks[history.begin] + left_ms
            if timeline.clocks[history.due] > expiry_ms:
                return True, frozenset({DeadLetterReason.EXPIRED})
            if timeline.before(history) > expiry_ms:
                # It expired while it was due: as the tracker planned it.
                return bool(reasons), frozenset({*reasons, DeadLetterReason.EXPIRED})
        return bool(reasons), frozenset(reasons)

    def _start(self, timeline: Timeline, history: MessageHistory) -> Marker:
        """Return what a history begins with; for batches the message says the rest (R29)."""
        start = timeline.marker(history.begin)
        message = self._messages.get((history.message_id.partition, history.message_id.offset))
        if message is None or not start.batches or self._is_unread(timeline, history):
            return start
        ttl_ms, origin = message.headers.ttl_ms, message.headers.origin
        sent_ms = message.record.timestamp_ms if origin is None else origin.timestamp_ms
        return replace(
            start,
            headers=message.record.headers,
            delivery_count=message.headers.delivery_count,
            expires_at_ms=sent_ms + ttl_ms if ttl_ms else 0,
        )

    def _is_unread(self, timeline: Timeline, history: MessageHistory) -> bool:
        """Return whether its START was of a batch, and its message lost before it was read."""
        start, one = timeline.marker(history.begin), history.message_id
        place = (self._message_topic, one.partition, one.offset)
        is_buried = history.ending is Ending.DEAD_LETTERED
        return bool(start.batches) and is_buried and self._is_payload_lost(place, start)

    def _is_payload_lost(self, place: RecordId, start: Marker) -> bool:
        """A dead letter of this delivery says that the payload is lost, and it can be."""
        return any(
            _reason_of(letter) == DeadLetterReason.PAYLOAD_LOST.value
            and _count_of(letter) == max(1, start.delivery_count)
            and (
                start.type is MarkerType.END
                or start.by_reference
                or _header(letter, names.PAYLOAD_AT) is not None
            )
            for letter in self._buried.get(place, ())
        )

    def _why_not_lost(self, timeline: Timeline, history: MessageHistory, start: Marker) -> str:
        """Return why it is untrue that the payload is lost; empty: it may be."""
        one = history.message_id
        if start.type is MarkerType.END:
            is_whole = timeline.offsets[0] == 0
            return "its START is called gone, and nothing was deleted there" if is_whole else ""
        is_by_reference = start.by_reference or bool(start.batches)
        if is_by_reference and (one.partition, one.offset) in self._there:
            return "its payload is called lost, and it is there"
        return ""

    # ---- families: a message and its copies

    def _check_family(self, place: RecordId, family: list[_Message]) -> None:
        first = next((one for one in family if one.headers.origin is None), None)
        copies = [one for one in family if one is not first]
        self.verdict.sent += first is not None
        written = Counter(copy.headers.delivery_count for copy in copies)
        for count in (self._copies_due[place] - written).elements():
            self._problem("lost", place, f"its copy with delivery count {count} is missing")
        for count in (written - self._copies_due[place]).elements():
            text = f"a copy with delivery count {count} that no END of a tracker explains"
            self._problem("unexplained", place, text)
        if first is not None and any(copy.content != first.content for copy in copies):
            self._problem("content", place, "a copy differs from the message")
        acks = sum(self._acks_of(place, one) for one in family)
        letters = len(self._buried.get(place, ()))
        self.verdict.acked += acks > 0
        self.verdict.dead_lettered += letters > 0
        self.verdict.processed_twice += acks + letters > 1

    def _acks_of(self, place: RecordId, message: _Message) -> int:
        """Judges one record of the messages topic; how often it was acked."""
        record = message.record
        histories = self._histories.get((record.partition, record.offset), [])
        if self.must_be_settled and all(history.ending is Ending.OPEN for _, history in histories):
            last = "it is open" if histories else "nobody STARTed it"
            at = f"{record.topic}[{record.partition}]@{record.offset}"
            self._problem("lost", place, f"{at}: {last}")
        for timeline, history in histories:
            start = timeline.marker(history.begin)
            count = message.headers.delivery_count
            is_told = start.type is MarkerType.START and not start.batches
            if is_told and max(1, start.delivery_count) != count:
                text = f"delivery count {count} was STARTed as {start.delivery_count}"
                self._problem("count", place, text)
        return sum(each.ending is Ending.ACKED or bool(each.late_at) for _, each in histories)

    def _check_fired(self) -> None:
        """Each SCHEDULE that fired is in the queue, once when it has an id of its own."""
        firsts = Counter(
            one.content for one in self._messages.values() if one.headers.origin is None
        )
        fired: Counter[tuple[object, ...]] = Counter()
        for place, start in self._fired:
            headers = read_message_headers(start.headers)
            content = (start.key, start.value, headers.id, headers.user)
            fired[content] += 1
            if firsts[content] < fired[content]:
                self._problem("lost", place, "the SCHEDULE fired, its message is missing")
            elif headers.id and firsts[content] > 1:
                self._problem("unexplained", place, "the SCHEDULE fired more than once")

    def _check_burials(self, place: RecordId) -> None:
        due = list(self._burials_due.get(place, ()))
        for letter in self._buried.get(place, ()):
            reason = _reason_of(letter)
            count = _count_of(letter)
            fitting = [
                one
                for one in due
                if one[0] == count and reason in {allowed.value for allowed in one[1]}
            ]
            if fitting:
                # Others need the wider one.
                due.remove(min(fitting, key=lambda one: len(one[1])))
            elif any(one[0] == count for one in due):
                due.remove(next(one for one in due if one[0] == count))
                text = f"a dead letter with reason {reason!r} that the log does not bear out"
                self._problem("reason", place, text)
            else:
                text = f"a dead letter ({reason}, delivery count {count}) without its END"
                self._problem("unexplained", place, text)
            self._check_letter(place, letter)
        for count, _ in due:
            self._problem("lost", place, f"its dead letter (delivery count {count}) is missing")

    def _check_letter(self, place: RecordId, letter: LogRecord) -> None:
        family, headers = self._families.get(place), read_message_headers(letter.headers)
        is_lost = _header(letter, names.REASON) == DeadLetterReason.PAYLOAD_LOST.value.encode()
        is_unread = is_lost and headers.id == "/".join(map(str, place))
        if not family or is_unread or _header(letter, names.PAYLOAD_AT) is not None:
            return
        first = family[0]
        same = (
            letter.key == first.record.key
            and (is_lost or letter.value == first.record.value)
            and headers.user == first.headers.user
            and (not first.headers.id or headers.id == first.headers.id)
        )
        if not same:
            self._problem("content", place, "its dead letter differs from the message")


def _reason_of(letter: LogRecord) -> str:
    return (_header(letter, names.REASON) or b"").decode("utf-8", "replace")


def _count_of(letter: LogRecord) -> int:
    return int(_header(letter, names.DELIVERY_COUNT) or b"0")


def _header(record: LogRecord, name: str) -> bytes | None:
    return next((value for key, value in reversed(record.headers) if key == name), None)


def check_logs(
    *,
    messages: Iterable[LogRecord],
    markers: Iterable[LogRecord],
    dead_letters: Iterable[LogRecord],
    confirmed: Collection[RecordId] = (),
    deleted: Collection[tuple[int, int]] = (),
    max_deliveries: int = Options.max_deliveries.default,
    max_lease_ms: int = Options.max_lease.default_ms,
    must_be_settled: bool = True,
) -> Verdict:
    """Judge the logs of one namespace, each given as all its committed records in any order.

    Args:
        confirmed: Places whose sends were confirmed; all must be in the logs.
        deleted: Partition and offset of those that are among ``messages``, and not in the log now.
        max_deliveries: The trackers' default, for STARTs that name no limit.
        max_lease_ms: The same for the longest lease.
        must_be_settled: False while workers and trackers still run.
    """
    return Checker(
        messages=messages,
        markers=markers,
        dead_letters=dead_letters,
        confirmed=confirmed,
        deleted=deleted,
        max_deliveries=max_deliveries,
        max_lease_ms=max_lease_ms,
        must_be_settled=must_be_settled,
    ).check()
