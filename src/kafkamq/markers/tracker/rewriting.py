"""What a plan's actions become: the records of copies, dead letters, ENDs and carried SCHEDULEs.

Each START is judged as it was read again (R14, R18, R19). No transaction is open meanwhile: one
begins when its records are ready (R22).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import KafkaMQError
from kafkamq.markers.rules.batching import join
from kafkamq.markers.rules.delivery import (
    Carry,
    Copy,
    DeadLetter,
    DueCause,
    Settle,
    cut,
    decide,
    size_of,
)
from kafkamq.markers.rules.hold import lowest
from kafkamq.markers.tracker.reading import Found, FoundAction, Rereader
from kafkamq.markers.wire.marker_writer import (
    encode_batches,
    encode_known_end,
    encode_schedule,
    identity_encoder,
)
from kafkamq.queue.wire.headers import (
    DELIVERY_COUNT,
    JUDGED,
    ORIGIN,
    Origin,
    copy_headers,
    cut_text,
    dead_letter_headers,
    stamped_copy_headers,
    unstamped,
)
from kafkamq.queue.wire.keys import key_partition, marker_key, split_key
from kafkamq.transport.admin import TopicInfo
from kafkamq.transport.settings import size_limit
from kafkamq.transport.transactions import NewRecord
from kafkamq.types import (
    DeadLetterReason,
    Header,
    Headers,
    Marker,
    MarkerType,
    MessageBatch,
    MessageId,
    Outcome,
)

_log = logging.getLogger(__name__)

_OVERHEAD_BYTES = 128
_HEADER_BYTES = 8
_PART_S = 2.0
# With an origin, which names a topic, and a count.
_COPY_BYTES = _OVERHEAD_BYTES + 400
_RowKey = tuple[int, int, MessageId]
"""A row's marker partition, the offset of its START, and its message."""

_NOTHING = Marker(MarkerType.START)
_LOST = DeadLetterReason.PAYLOAD_LOST


@dataclass(slots=True)
class Part:
    """The records of one transaction.

    Attributes:
        partition: Of the markers, that the rows are of.
        rows: How many are done with it, those that are awaited among them.
        awaited: Of these.
        identities: Encoders of ``encode_identity``, by log.
    """

    partition: int
    rows: int = 0
    awaited: list[Settle | Carry] = field(default_factory=list)
    size_bytes: int = 0
    records: list[NewRecord] = field(default_factory=list)
    copies: int = 0
    dead_letters: int = 0
    carried: int = 0
    payload_lost: int = 0
    # By outcome and reason: messages whose START was of batches, and whose END will be, too (R32).
    ended: dict[tuple[Outcome, str], list[tuple[MessageBatch, None]]] = field(default_factory=dict)
    identities: dict[tuple[int, bytes, int], Callable[[int], bytes]] = field(default_factory=dict)

    def add(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
        size_bytes: int = 0,
    ) -> None:
        """Count one record; 0: its size is not known yet."""
        self.records.append((topic, partition, key, value, headers))
        self.size_bytes += size_bytes or _size(key, value, headers)

    def end_batch(self, outcome: Outcome, reason: str, first: MessageId, bits: int) -> None:
        if bits:
            batch = MessageBatch(first.partition, *first.log, first.offset, bits)
            self.ended.setdefault((outcome, reason), []).append((batch, None))


class Rewriter:
    """Prepares the records of windows; one owner thread.

    ``rereader``: Whose topics the copies go to.
    """

    def __init__(self, config: ServiceConfig, tracker: TrackerConfig, rereader: Rereader) -> None:
        self._config = config
        self._tracker = tracker
        self._rereader = rereader
        # It spreads copies over partitions, and decides nothing.
        self._random = random.Random()
        self._max_bytes = 0
        # The row that a broker refused last, by its place, and how often. It is the next one to be
        # written; if another one's refusal is remembered instead, it is refused once more.
        self._refused: tuple[_RowKey | None, int] = None, 0
        # Of the START that is rewritten: its topic, unless it is the namespace's (R37), what marks
        # our records there (R38), and why nothing can be written to it.
        self._topic, self._stamp, self._lack = "", b"", ""

    def part(self, partition: int, window: Sequence[FoundAction], *, max_bytes: int) -> Part:
        """Return the records of as many rows of a window as one transaction may hold (R16), at
        least one.

        Args:
            partition: Of the markers, that the rows are of.
            window: What was read of the rows.
            max_bytes: Of the records; the last row may go beyond it.

        Raises:
            BrokerError, DeadlineExceededError: Brokers did not tell what the topics are.
        """
        part = Part(partition)
        self._max_bytes = max_bytes
        self._aim(None)
        full_s = time.monotonic() + _PART_S
        for found in window:
            if part.rows and time.monotonic() > full_s:
                # Each topic is asked for, which takes time.
                break
            if not self._rewrite_action(part, found):
                break
        self._end_batches(part)
        return part

    def refused(self, partition: int, row: Settle | Carry) -> None:
        """A broker refused the records of one row for their size.

        It becomes a dead letter by reference (R11), and if even that is too large, one without the
        user's key and headers.
        """
        place = _place(partition, row)
        refused, times = self._refused
        self._refused = place, 1 + (times if place == refused else 0)

    def _rewrite_action(self, part: Part, found: FoundAction) -> bool:
        """Add the records of as many messages as the part has room for; whether it has more."""
        row, start, known = found.row, found.start, found.known
        if isinstance(row, Settle) and row.cause is DueCause.ALREADY_ENDED:
            for number in range(known):
                self._end(part, found.message(number), Outcome.ALREADY_ENDED)
            part.rows += known
            return part.size_bytes < self._max_bytes
        if (start.message_topic if start else "") != self._topic or self._topic:
            known = known if self._aim(start) else 0
        of_batches = known and start is not None and start.batches
        before, usual = part.rows, self._usual(part, found) if of_batches else None
        if usual is not None:
            self._copy_all(part, found, usual)
        else:
            for number in range(known):
                if part.size_bytes >= self._max_bytes:
                    break
                message = found.message(number)
                if self._rewrite(part, message):
                    part.rows += 1
                else:
                    self._await(part, message.row)
        if part.rows - before < known:
            return False
        if known < found.size:
            self._await(part, cut(found.row, known))
        return part.size_bytes < self._max_bytes

    def _await(self, part: Part, row: Settle | Carry) -> None:
        """Count these messages as done, without a record."""
        # Its partition may have a leader again, or its topic be there.
        self._rereader.ask_again()
        part.awaited.append(row)
        part.rows += size_of(row)

    def _usual(self, part: Part, found: FoundAction) -> Copy | None:
        """Return what becomes of those messages of a batch that say nothing of deliveries."""
        row, start = found.row, found.start
        if start is None or self._topic or not found.refers:
            return None
        if self._is_refused(part, row.start_offset):
            return None
        assert isinstance(row, Settle), "it refers to messages"
        usual = decide(
            row,
            Marker(MarkerType.START, max_deliveries=start.max_deliveries),
            start_timestamp_ms=found.timestamp_ms,
            max_deliveries=self._tracker.max_deliveries,
        )
        return usual if isinstance(usual, Copy) else None

    def _aim(self, start: Marker | None) -> bool:
        """Return where the copies of this START's messages go; None: the namespace's topic.

        False: that is awaited. A START's writer chooses the topic, so no error of it is ours.
        """
        self._topic = "" if start is None else start.message_topic
        self._stamp, self._lack = b"", ""
        if not self._topic:
            self._messages = self._rereader.messages.topic(self._config.message_topic)
        elif self._topic in self._config.topics.values() or self._topic.startswith("__"):
            self._lack = f"{self._topic} is no topic of a queue"
        else:
            lookup = self._rereader.lookup_of(start)
            try:
                topic = lookup.place()
            except KafkaMQError:
                return False
            if topic is not None:
                self._messages, self._stamp = topic, lookup.stamp
            elif lookup.is_gone():
                self._lack = f"topic {self._topic} does not exist any more"
            else:
                return False
        self._max_message_bytes = _limit(self._messages.settings)
        self._targets = _targets(self._messages)
        return True

    def _is_refused(self, part: Part, start_offset: int) -> bool:
        place, _ = self._refused
        return place is not None and place[:2] == (part.partition, start_offset)

    def _copy_all(self, part: Part, found: FoundAction, usual: Copy) -> None:
        """Copy messages of a batch, most of which say nothing that a delivery is judged by."""
        row = found.row
        first = row.message_id
        bits, other, copies = row.bits, 0, 0
        offset = first.offset - 1
        topic, number, lost = self._messages, first.partition, self._messages.leaderless
        target = self._any(self._targets)
        place = f"{topic.name}/{number}/".encode("ascii")
        counted: list[Header] = []
        if usual.delivery_count > 1:
            counted.append((DELIVERY_COUNT, b"%d" % usual.delivery_count))
        add, size_bytes = part.records.append, part.size_bytes
        full, largest = self._max_bytes, self._max_message_bytes
        for at, record in enumerate(found.records):
            skipped = (bits & -bits).bit_length()
            bits >>= skipped
            offset += skipped
            if size_bytes >= full:
                break
            is_bound = lost and record is not None and self._is_to(lost, record.key())
            if record is not None and not is_bound:
                headers: Headers = record.headers() or ()  # type: ignore[assignment]  # a list
                key, value = record.key() or b"", record.value()
                size, is_usual = _COPY_BYTES + len(key) + len(value or b""), True
                for name, content in headers:
                    size += _HEADER_BYTES + len(name) + len(content or b"")
                    if name in JUDGED:
                        is_usual = False
                if is_usual and size <= largest:
                    origin = b"%b%d/%d" % (place, offset, record.timestamp()[1])
                    to = self._spread(key, topic) if b"\0" in key else target
                    add((topic.name, to, key, value, (*headers, (ORIGIN, origin), *counted)))
                    size_bytes += size
                    copies += 1
                    part.rows += 1
                    continue
            part.size_bytes = size_bytes
            if self._rewrite(part, found.message(at)):
                part.rows += 1
            else:
                self._await(part, cut(row, at, at + 1))
            size_bytes = part.size_bytes
            other |= 1 << offset - first.offset
        part.size_bytes = size_bytes
        part.copies += copies
        taken = lowest(row.bits, copies + other.bit_count())
        part.end_batch(Outcome.REDELIVERED, "", first, taken ^ other)

    def _rewrite(self, part: Part, found: Found) -> bool:
        """Get the records of one row; False: nobody leads the partition where its copy must go."""
        row, start, error = found.row, found.start, found.error
        refused, refusals = self._refused
        if refusals and _place(part.partition, row) != refused:
            refusals = 0
        lack = ""
        if start is None:
            where = f"{self._config.marker_topic}[{part.partition}]@{row.start_offset}"
            start, lack, error = _NOTHING, f"the START at {where} is gone", ""
        elif self._lack and not (isinstance(row, Settle) and row.cause is DueCause.REJECTED):
            lack = self._lack
        elif found.is_lost:
            lack = "the message was deleted before"
        if lack:
            self._bury(part, found, start, DeadLetter(_LOST, _joined(lack, error)), refusals)
            return True
        if isinstance(row, Carry):
            topic = self._config.marker_topic
            is_done = not refusals and self._carry(part, row, start, found)
        else:
            decision = decide(
                row,
                start,
                start_timestamp_ms=found.timestamp_ms,
                max_deliveries=self._tracker.max_deliveries,
                error=error,
            )
            if isinstance(decision, DeadLetter):
                self._bury(part, found, start, decision, refusals, has_payload=True)
                return True
            if self._messages.leaderless and self._has_no_leader(row, start):
                return False
            topic = self._messages.name
            is_done = not refusals and self._copy(part, row, start, found, decision)
        if not is_done:
            # It is never a stall (R11): the payload lives as long as the record that has it.
            text = f"its copy is larger than {size_limit(self._config, topic)}"
            lost = DeadLetter(_LOST, _joined(text, error))
            self._bury(part, found, start, lost, max(1, refusals), has_payload=True)
        return True

    def _copy(self, part: Part, row: Settle, start: Marker, found: Found, copy: Copy) -> bool:
        """Return a copy at the queue's tail and its END; False: the topic would refuse it."""
        topic, count, value = self._messages, copy.delivery_count, found.value
        origin, key = self._origin(found), start.key
        to_key: bytes | None = key
        if self._topic:
            # Key and headers stay the sender's, and the partition, too (R37).
            headers = stamped_copy_headers(
                start.headers, self._stamp, delivery_count=count, origin=origin
            )
            to_key, to = split_key(key)[1], row.message_id.partition % topic.partitions
        else:
            first = None if row.of_schedule else origin
            headers = copy_headers(start.headers, delivery_count=count, origin=first)
            to = self._spread(key, topic)
        size_bytes = _size(to_key, value, headers)
        if size_bytes > self._max_message_bytes:
            return False
        part.add(topic.name, to, to_key, value, headers, size_bytes)
        self._end(part, found, Outcome.REDELIVERED)
        part.copies += 1
        return True

    def _carry(self, part: Part, row: Carry, start: Marker, found: Found) -> bool:
        """Return a SCHEDULE again, with what remains of its delay (R19)."""
        first = row.message_id
        value = encode_schedule(
            start.key,
            found.value,
            redeliver_after_ms=row.remaining_ms,
            headers=start.headers,
            expires_at_ms=start.expires_at_ms,
            consumer_id=start.consumer_id,
            first=first,
        )
        key = marker_key(first.partition, first.offset)
        part.add(self._config.marker_topic, part.partition, key, value)
        part.carried += 1
        return True

    def _bury(
        self,
        part: Part,
        found: Found,
        start: Marker,
        why: DeadLetter,
        refusals: int,
        *,
        has_payload: bool = False,
    ) -> None:
        """A dead letter and its END; ``refusals`` say what it must do without."""
        topic = self._rereader.messages.topic(self._config.dead_letter_topic)
        key: bytes | None = None if found.start is None or refusals >= 2 else start.key
        value = None if refusals else found.value
        ours = unstamped(start.headers, self._stamp) if self._topic else start.headers
        headers = dead_letter_headers(
            ours if refusals < 2 else (),
            reason=why.reason,
            error=why.error,
            delivery_count=max(1, start.delivery_count),
            origin=self._origin(found),
            queue_id=split_key(start.key)[0],
            payload_at=self._payload_at(part, found) if has_payload and refusals else None,
        )
        if not refusals and _size(key, value, headers) > _limit(topic.settings):
            self._bury(part, found, start, why, 1, has_payload=has_payload)
            return
        if has_payload and refusals:
            _log.warning(
                "a dead letter refers to its payload: it did not fit",
                extra={
                    "topic": self._config.marker_topic,
                    "partition": part.partition,
                    "offset": found.row.start_offset,
                },
            )
        to = self._spread(key, topic)
        if to in topic.leaderless:
            # Nobody is promised an order of dead letters.
            to = self._any(_targets(topic))
        part.add(topic.name, to, key, value, headers)
        self._end(part, found, Outcome.DEAD_LETTERED, cut_text(why.error))
        part.dead_letters += 1
        part.payload_lost += why.reason is _LOST

    def _end(self, part: Part, found: Found, outcome: Outcome, reason: str = "") -> None:
        """The END of a row, to the partition of its START; with others where the START was."""
        message_id, start = found.row.message_id, found.start
        if start is not None and start.batches:
            part.end_batch(outcome, reason, message_id, 1)
            return
        log = message_id.partition, *message_id.log
        identify = part.identities.get(log)
        if identify is None:
            identify = part.identities[log] = identity_encoder(*log)
        end_fields = outcome, "", 0, reason, found.row.of_schedule
        value = encode_known_end(identify(message_id.offset), *end_fields)
        key = marker_key(message_id.partition, message_id.offset)
        part.add(self._config.marker_topic, part.partition, key, value)

    def _end_batches(self, part: Part) -> None:
        """The ENDs of batches of the whole part (R32)."""
        for (outcome, reason), ended in part.ended.items():
            for batches, _ in join(ended):
                value = encode_known_end(encode_batches(batches), outcome, "", reason=reason)
                key = marker_key(batches[0].partition, batches[0].base_offset)
                part.add(self._config.marker_topic, part.partition, key, value)

    def _origin(self, found: Found) -> Origin:
        """Return where the message stands, for headers of one that names no first copy."""
        row, start = found.row, found.start
        topic, timestamp_ms = self._topic or self._config.message_topic, 0
        if row.of_schedule:
            topic, timestamp_ms = self._config.marker_topic, max(0, found.timestamp_ms)
        elif start is not None:
            timestamp_ms = start.message_timestamp_ms
        return Origin(topic, row.message_id.partition, row.message_id.offset, timestamp_ms)

    def _payload_at(self, part: Part, found: Found) -> Origin:
        if not found.row.of_schedule:
            return self._origin(found)
        timestamp_ms = max(0, found.timestamp_ms)
        at = found.row.start_offset
        return Origin(self._config.marker_topic, part.partition, at, timestamp_ms)

    def _has_no_leader(self, row: Settle | Carry, start: Marker | None) -> bool:
        """Return whether nobody leads the partition where a copy of the message must go."""
        lost = self._messages.leaderless
        if self._lack or start is None:
            return False
        if self._topic:
            return row.message_id.partition % self._messages.partitions in lost
        return self._is_to(lost, start.key)

    def _is_to(self, partitions: Container[int], key: bytes | None) -> bool:
        """Return whether a copy with this key goes to one of these, and to no other one."""
        is_given = key is not None and split_key(key)[1] is not None
        return is_given and key_partition(key or b"", self._messages.partitions) in partitions

    def _spread(self, key: bytes | None, topic: TopicInfo) -> int:
        """Partition of a copy or letter: by its key when the sender gave one, else any."""
        if key is not None and split_key(key)[1] is not None:
            return key_partition(key, topic.partitions)
        return self._any(self._targets if topic is self._messages else _targets(topic))

    def _any(self, partitions: Sequence[int]) -> int:
        return partitions[int(self._random.random() * len(partitions))]


def _place(partition: int, row: Settle | Carry) -> _RowKey:
    return partition, row.start_offset, row.message_id


def _size(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    size = _OVERHEAD_BYTES + len(key or b"") + len(value or b"")
    for name, content in headers:
        size += _HEADER_BYTES + len(name) + len(content or b"")
    return size


def _targets(topic: TopicInfo) -> Sequence[int]:
    numbers = range(topic.partitions)
    if not topic.leaderless:
        return numbers
    return [number for number in numbers if number not in topic.leaderless] or numbers


def _limit(settings: Mapping[str, str]) -> int:
    return int(settings.get("max.message.bytes", "1048588"))


def _joined(text: str, error: str) -> str:
    return f"{text}: {error}" if error else text
