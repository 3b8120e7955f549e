"""The backend ``share``: the broker's share group (KIP-932) hands out and remembers.

The broker gives a record up, in silence, when its last delivery ends with anything but an
acknowledgement, and no lock can be renewed. So what is not done and comes to its last delivery
must be written elsewhere before that ends, as a dead letter or as a copy to the tail (``Moves``):

- M1. Who is given up is a dead letter first; the record is acknowledged when that is in Kafka.
- M2. While a dead letter is refused its record is held. Shortly before its lock ends, in its last
  delivery after a few seconds, the message is copied to the tail of its queue with what was decided
  of it: no handler is asked again. What comes first, letter or copy, counts.
- M3. What is to be delivered again, and has no more delivery but the last one, is copied as well.
- M4. Nothing of this is forgotten when a lock has ended: a record that comes again is acknowledged
  by what became of it.

The client gives records in batches, and no more before each record of a batch has its verdict: what
is slow holds back the rest of its own batch alone. So there are few members while batches are
quick, and more when handlers are idle while members are held back.
"""

from __future__ import annotations

import logging
import queue as queues
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import DeadlineExceededError
from kafkamq.queue.backend import ConsumerPlan, TopicBackend
from kafkamq.queue.dead_letter_writer import (
    RequeueWriter,
    Verdict,
    carried_verdict,
    earlier_deliveries,
)
from kafkamq.queue.message import Message
from kafkamq.queue.names import group_of_workers
from kafkamq.queue.topic_consumer import MessageState, TopicConsumer, TopicMessage
from kafkamq.share.settings import (
    ShareLimits,
    configure_group,
    read_limits,
    share_lock_ms,
    shorten_session,
)
from kafkamq.transport.admin import Admin
from kafkamq.transport.clients import open_share_consumer
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import (
    KafkaError,
    KafkaException,
    Meaning,
    broker_error,
    is_fatal,
    is_retriable,
    kafka_error,
    meaning,
)
from kafkamq.transport.record import AcknowledgeType, Record, TopicPartition
from kafkamq.transport.settings import share_settings
from kafkamq.types import DeadLetterReason, PartitionOffset

# The records of one poll, about: whole batches of producers come.
MAX_POLL = 500
QUIET_S = 2.0
# What closing waits for letters and copies; members wait longer for their leave.
MOVE_S = 5.0
# What is left of a lock less than this is not begun.
MARGIN_MS = 1500
_CONFIRM_SLICE_S = 0.01
_MAX_UNSEEN = 100_000
# The wait for a copy before its lock ends; of a shorter lock, a third.
_PATIENCE_MS = 5000
_Key = tuple[int, int, int]
_POLL_S = 0.25
_TURN_S = 0.02
_COMMIT_S = 10.0
_LEAVE_S = 10.0
AGAIN_S = 0.5
# The patience with errors that waiting rarely mends, as of a topic that is gone.
PATIENCE_S = 60.0
# A group takes 200 members by default.
MAX_MEMBERS = 24
HELD_BACK_MS = 100
_UNKNOWN = (4, 8)
_HANDLERS_OF_ONE = 12
_HANDLERS_AT_LEAST = 4
_log = logging.getLogger(__name__)


class ShareMessage(TopicMessage["Member"]):
    """A delivery of a share group.

    Attributes:
        broker_count: Deliveries of this record; ``delivery_count`` is of the message: with those of
            former copies, without those that no handler saw.
        is_seen: It is, or was, handed out.
    """

    __slots__ = ("broker_count", "is_seen")

    broker_count: int
    is_seen: bool

    @property
    def member(self) -> Member:
        return self.place

    @property
    def key_of_place(self) -> tuple[int, int, int]:
        """Return what names its record; in a topic that was created again it has another time."""
        place = self.message_id
        return place.partition, place.offset, self.timestamp_ms


class Member:
    """One member of the group, and the thread that owns its client."""

    def __init__(
        self, settings: Mapping[str, object], topic: str, owner: ShareConsumer, *, number: int
    ) -> None:
        self._settings = dict(settings)
        self._topic = topic
        self._owner = owner
        self._verdicts: queues.SimpleQueue[tuple[ShareMessage, int, bool]] = queues.SimpleQueue()
        self._open: dict[PartitionOffset, ShareMessage] = {}
        self._unconfirmed: dict[PartitionOffset, ShareMessage] = {}
        self._closing = threading.Event()
        self._is_quiet = threading.Event()
        self._may_leave = threading.Event()
        self._client: Any = None
        self._failing_since_ms = 0
        self._fetched_ms = 0
        self._thread = threading.Thread(
            target=self._run, name=f"kafkamq-share-{number}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def add(self, message: ShareMessage) -> None:
        """It will get a verdict; by the member's thread, in ``arrived``."""
        self._open[_place_of(message)] = message

    def acknowledge(self, message: ShareMessage, kind: int, *, is_late: bool = False) -> None:
        """Acknowledge a message so, from any thread; ``is_late``: its lock has ended."""
        if not is_late:
            # From here on it waits for its answer, wherever it is meanwhile.
            self._unconfirmed[_place_of(message)] = message
        self._verdicts.put((message, kind, is_late))

    def messages(self) -> list[ShareMessage]:
        return list(self._open.values())

    @property
    def held_since_ms(self) -> int | None:
        """Since when it fetches nothing because its batch lacks verdicts; None: it may."""
        return self._fetched_ms if self._open else None

    @property
    def unconfirmed_count(self) -> int:
        return len(self._unconfirmed)

    def stop(self) -> None:
        """Fetch no more; ``await_quiet`` waits for that."""
        self._closing.set()

    def await_quiet(self, timeout_s: float) -> None:
        """After ``stop``: wait until it fetches no more.

        When all members of a process are there, each may leave: what one gives back would
        otherwise be fetched, given back and counted by the next one.
        """
        self._is_quiet.wait(timeout_s)

    def leave(self) -> None:
        """Give back what is held, and leave the group; ``join`` waits for that."""
        self._may_leave.set()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The thread.

    def _run(self) -> None:
        try:
            self._client = open_share_consumer(self._settings)
            self._client.set_acknowledgement_commit_callback(self._answered)
            self._client.subscribe([self._topic])
            while not self._closing.is_set():
                self._turn_or_wait()
        except BaseException as error:  # noqa: BLE001 - raised by receive
            self._owner.failed(self, _as_ours(error))
        finally:
            self._is_quiet.set()
            self._may_leave.wait(_LEAVE_S if self._closing.is_set() else 0.0)
            self._leave()

    def _turn_or_wait(self) -> None:
        """An error that may pass, as in an outage, does not end a member: its client goes on."""
        try:
            self._turn()
        except KafkaException as error:
            now_ms = monotonic_ms()
            self._failing_since_ms = self._failing_since_ms or now_ms
            lasts_s = (now_ms - self._failing_since_ms) / 1000
            # An outage may be of any length.
            is_outage = is_retriable(_as_ours(error))
            if is_fatal(kafka_error(error)) or (lasts_s > PATIENCE_S and not is_outage):
                raise
            _log.warning("a member of a share group goes on", extra={"error": str(error)})
            self._closing.wait(AGAIN_S)
        else:
            self._failing_since_ms = 0

    def _turn(self) -> None:
        if self._open:
            self._serve(_TURN_S)
            self._owner.look_after(self)
        elif self._owner.has_room():
            self._fetch()
        else:
            self._serve(_TURN_S)

    def _fetch(self) -> None:
        self._serve(0.0)
        # A lock is at least as long as from here.
        asked_ms = monotonic_ms()
        records = self._client.poll(_POLL_S)
        good: list[Record] = []
        failure: KafkaError | None = None
        for record in records:
            error = record.error()
            if error is None:
                good.append(record)
            else:
                failure = failure or error
        if good:
            fetched_ms = max(asked_ms, monotonic_ms() - int(_POLL_S * 1000))
            self._fetched_ms = monotonic_ms()
            self._owner.arrived(self, good, fetched_ms)
        if failure is not None:
            raise KafkaException(failure)

    def _serve(self, timeout_s: float) -> None:
        late: list[ShareMessage] = []
        count = 0
        try:
            item = (
                self._verdicts.get(timeout=timeout_s) if timeout_s else self._verdicts.get_nowait()
            )
            while True:
                message, kind, is_late = item
                if is_late:
                    late.append(message)
                else:
                    count += self._acknowledge(message, kind)
                item = self._verdicts.get_nowait()
        except queues.Empty:
            pass
        if count:
            self._commit()
        if late:
            # Each goes alone: the broker refuses what is sent together with one that is late.
            for message in late:
                self._acknowledge(message, AcknowledgeType.RELEASE, is_watched=False)
            self._commit()

    def _commit(self) -> None:
        """Send, and wait: while one commit is under way the broker refuses the next one."""
        self._client.commit_sync(_COMMIT_S)

    def _acknowledge(self, message: ShareMessage, kind: int, *, is_watched: bool = True) -> int:
        key = _place_of(message)
        if self._open.get(key) is not message:
            if self._unconfirmed.get(key) is message:
                del self._unconfirmed[key]
            return 0
        del self._open[key]
        try:
            self._client.acknowledge(message._record, kind)
        except KafkaException:
            self._unconfirmed.pop(key, None)
            if is_watched:
                self._owner.came_late((message,))
            return 0
        return 1

    def _answered(
        self, offsets: Mapping[TopicPartition, set[int]], error: KafkaException | None
    ) -> None:
        late = []
        for partition, found in offsets.items():
            for offset in found:
                message = self._unconfirmed.pop((partition.partition, offset), None)
                if message is not None and error is not None:
                    late.append(message)
        if late:
            _log.warning(
                "the broker refused verdicts: %s",
                error,
                extra={"count": len(late), "error": str(error)},
            )
            self._owner.came_late(late)

    def _leave(self) -> None:
        if self._client is None:
            return
        try:
            self._serve(0.0)
            for message in self.messages():
                self._acknowledge(message, AcknowledgeType.RELEASE, is_watched=False)
            self._commit()
            self._client.close()
        except BaseException as error:  # noqa: BLE001 - the locks end by themselves
            _log.warning("a member left in disorder", extra={"error": str(error)})


def _place_of(message: ShareMessage) -> PartitionOffset:
    place = message.message_id
    return place.partition, place.offset


def _as_ours(error: BaseException) -> BaseException:
    if isinstance(error, KafkaException):
        doing = "reading as a member of a share group"
        if meaning(kafka_error(error)) is Meaning.NO_GROUP:
            doing += " (if a consumer group has its name, give the queue another one by group=...)"
        found = broker_error(kafka_error(error), doing)
        found.__cause__ = error
        return found
    return error


def first_members(concurrency: int) -> int:
    """Return how many to begin with, for so many handlers at once; 0: unknown."""
    if not concurrency:
        return _UNKNOWN[0]
    return max(1, min(4, concurrency // _HANDLERS_OF_ONE))


def max_members(concurrency: int) -> int:
    """Return how many there may be, for so many handlers at once; 0: unknown."""
    if not concurrency:
        return _UNKNOWN[1]
    return max(1, min(MAX_MEMBERS, concurrency // _HANDLERS_AT_LEAST))


def members_to_add(
    held_since_ms: Sequence[int | None], *, first: int, maximum: int, now_ms: int
) -> int:
    """Return how many it takes until as many as at first may fetch.

    A partition is assigned to few members of a group. While all of these are held back no other
    member reads it.
    """
    fetching = sum(since is None or now_ms - since < HELD_BACK_MS for since in held_since_ms)
    return max(0, min(first - fetching, maximum - len(held_since_ms)))


class ShareConsumer(TopicConsumer[ShareMessage]):
    """Many consumers per partition, no order; locks are short and cannot be renewed."""

    def __init__(
        self,
        config: ServiceConfig,
        queue: QueueConfig,
        dead_letters: RequeueWriter,
        plan: ConsumerPlan,
    ) -> None:
        super().__init__(queue, dead_letters, plan.on_lease_lost)
        group_id, concurrency = group_of_workers(config, queue), plan.concurrency
        self.limits, self._lock_ms = self._set_up(config, group_id)
        self._max_deliveries = self.limits.handed_out(queue.max_deliveries)
        self._margin_ms = max(MARGIN_MS, plan.handler_timeout_ms)
        # Given back without a handler, how often; kept after an ack, which may come too late.
        self._unseen: dict[tuple[int, int, int], int] = {}
        self._moves = Moves(
            dead_letters,
            self._changed,
            limit=self.limits.after_set_up(queue.max_deliveries),
            lock_ms=self._lock_ms,
        )
        poll = min(MAX_POLL, queue.max_in_flight)
        if concurrency:
            poll = max(1, min(poll, 2 * concurrency // first_members(concurrency)))
        self._settings = share_settings(config, group_id=group_id, max_poll_records=poll)
        self._max_members = min(max_members(concurrency), self.limits.max_members)
        self._first_members = min(first_members(concurrency), self._max_members)
        self._members: list[Member] = []
        self._working: list[Member] = []
        with self._changed:
            self._add_members(self._first_members)

    def _add_members(self, count: int) -> None:
        for _ in range(count):
            number = len(self._members)
            member = Member(self._settings, self._queue.topic, self, number=number)
            self._members.append(member)
            self._working.append(member)
            member.start()

    def _set_up(self, config: ServiceConfig, group_id: str) -> tuple[ShareLimits, int]:
        with Admin(config) as admin:
            limits = read_limits(admin, group_id)
            lock_ms = share_lock_ms(self._queue, limits)
            handed_out = limits.handed_out(self._queue.max_deliveries)
            configure_group(admin, group_id, lock_ms=lock_ms, max_deliveries=handed_out)
            session_ms = shorten_session(admin, group_id, limits)
        _log.info(
            "a share group's limits",
            extra={
                "queue": self.queue_id,
                "group": group_id,
                "lock_ms": lock_ms,
                "deliveries": handed_out,
                "members": limits.max_members,
                "session_ms": session_ms,
            },
        )
        if handed_out < self._queue.max_deliveries:
            _log.warning(
                "queue %r: max_deliveries is %d and the broker's limit %d, the last of which is"
                " kept for the dead letter: messages are handed out %d times",
                self.queue_id,
                self._queue.max_deliveries,
                limits.max_deliveries,
                handed_out,
            )
        if lock_ms > self._queue.redelivery_timeout_ms:
            _log.warning(
                "queue %r: redelivery_timeout is %g s, and the shortest lock of the broker %g s:"
                " that is used",
                self.queue_id,
                self._queue.redelivery_timeout_ms / 1000,
                lock_ms / 1000,
            )
        return limits, lock_ms

    @property
    def max_deliveries(self) -> int:
        return self._max_deliveries

    # What members tell, each in its own thread.

    def arrived(self, member: Member, records: Sequence[Record], fetched_ms: int) -> None:
        """Hand out, or give up what was delivered too often: it may have killed its workers."""
        deadline_ms = fetched_ms + self._lock_ms
        with self._changed:
            for record in records:
                message = ShareMessage(self, record, deadline_ms=deadline_ms, place=member)
                message.broker_count = record.delivery_count() or 1
                message.is_seen = False
                member.add(message)
                self._sort(message)
            self._changed.notify_all()

    def _sort(self, message: ShareMessage) -> None:
        before = earlier_deliveries(message)
        unseen = self._unseen.get(message.key_of_place, 0)
        message._count = max(1, before + message.broker_count - unseen)
        verdict = carried_verdict(message)
        is_dead = message._count > self._max_deliveries
        if not (verdict or is_dead or self._moves.is_last(message)):
            if not self._moves.take_over(message):
                self._ready.append(message)
                return
        elif self._moves.take_over(message):
            pass
        elif verdict:
            message._count = before
            self._moves.bury(message, verdict)
        elif is_dead:
            message._count -= 1
            error_text = f"{message._count} deliveries ended without a verdict, or were given back"
            self._moves.bury(message, (DeadLetterReason.MAX_DELIVERIES, error_text))
        else:
            # Handlers have not seen it often enough, and another delivery may come to nothing.
            self._moves.send_back(message, message._count)
        message.state = MessageState.ACKNOWLEDGED

    def look_after(self, member: Member) -> None:
        """What cannot start any more goes back; what is held beyond its lock is lost."""
        now_ms = monotonic_ms()
        messages = member.messages()
        if self._moves.open_count:
            with self._changed:
                self._moves.look_after(member, now_ms)
        if not messages or now_ms < messages[0]._deadline_ms - self._margin_ms:
            return
        with self._changed:
            waiting = {id(message) for message in self._ready}
            for message in messages:
                if message.state is not MessageState.HELD:
                    continue
                if id(message) in waiting:
                    self._give_back(message)
                elif now_ms > message._deadline_ms:
                    self._lose(message)
                    member.acknowledge(message, AcknowledgeType.RELEASE, is_late=True)
            self._ready = type(self._ready)(
                message for message in self._ready if message.state is MessageState.HELD
            )

    def came_late(self, messages: Sequence[ShareMessage]) -> None:
        """The broker did not take these verdicts."""
        self._lost_late(messages)

    def has_room(self) -> bool:
        return self.in_flight < self._queue.max_in_flight

    def failed(self, member: Member, error: BaseException) -> None:
        """A member has ended; where a group takes no more members, those that it has go on."""
        with self._changed:
            self._working.remove(member)
            if self._working and meaning(error) is Meaning.GROUP_FULL:
                self._max_members = len(self._working)
                _log.warning(
                    "the share group has all the members that it takes (group.share.max.size)",
                    extra={"queue": self.queue_id, "members": len(self._working)},
                )
                return
            self._fail(error)

    def _give_back(self, message: ShareMessage) -> None:
        """No handler has seen it: the broker counts this delivery, the message's count does not."""
        message.state = MessageState.ACKNOWLEDGED
        key = message.key_of_place
        self._unseen[key] = self._unseen.get(key, 0) + 1
        if len(self._unseen) > _MAX_UNSEEN:
            del self._unseen[next(iter(self._unseen))]
        if self._must_move(message):
            self._moves.send_back(message, message._count)
        else:
            message.member.acknowledge(message, AcknowledgeType.RELEASE)

    def _must_move(self, message: ShareMessage) -> bool:
        """Return whether another process, which knows nothing of ``_unseen``, would give it up."""
        return self._moves.is_near_last(message) or message._count >= self._max_deliveries

    def put_back(self, messages: Sequence[Message]) -> None:
        for message in cast("Sequence[ShareMessage]", messages):
            message.is_seen = False
        super().put_back(messages)

    # What the consumer asks.

    def _fill(self, n: int) -> None:
        """What members have fetched is in ``_ready`` already; if they cannot fetch, more may."""
        del n
        if self._ready or self._closing.is_set() or not self.has_room():
            return
        held_since_ms = [member.held_since_ms for member in self._working]
        count = members_to_add(
            held_since_ms,
            first=self._first_members,
            maximum=self._max_members,
            now_ms=monotonic_ms(),
        )
        if count:
            self._add_members(count)
            _log.info(
                "a share group gets more members: slow messages hold back those that there are",
                extra={"queue": self.queue_id, "members": len(self._working)},
            )

    def _may_hand_out(self, message: ShareMessage) -> bool:
        if monotonic_ms() <= message._deadline_ms - self._margin_ms:
            message.is_seen = True
            return True
        self._give_back(message)
        return False

    def _done(self, message: ShareMessage) -> None:
        message.member.acknowledge(message, AcknowledgeType.ACCEPT)

    def _write_dead_letter(
        self, message: ShareMessage, reason: DeadLetterReason, error: str
    ) -> None:
        with self._changed:
            self._moves.bury(message, (reason, error))

    def _unwritten(self) -> int:
        return self._moves.open_count

    def _again(self, message: ShareMessage, delay_ms: int) -> None:
        del delay_ms
        if self._moves.is_near_last(message):
            with self._changed:
                self._moves.send_back(message, message._count + 1)
        else:
            message.member.acknowledge(message, AcknowledgeType.RELEASE)

    def _confirm(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while any(member.unconfirmed_count for member in self._members):
            if time.monotonic() > deadline_s or self._failure is not None:
                raise DeadlineExceededError(
                    f"verdicts of queue {self.queue_id!r} are not confirmed after {timeout_s:g} s"
                )
            time.sleep(_CONFIRM_SLICE_S)

    def _end(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._ready.clear()
        for member in self._members:
            member.stop()
        quiet_s = min(deadline_s, time.monotonic() + QUIET_S)
        for member in self._members:
            member.await_quiet(max(0.0, quiet_s - time.monotonic()))
        # A member fetches in the background, also when it is not polled: those that hold nothing
        # leave first, or they would be given, and give back, what the others give back or copy.
        # In an outage they leave slowly, and the others wait only so long until they release.
        idle = [member for member in self._members if not member.messages()]
        for member in idle:
            member.leave()
        idle_s = time.monotonic() + min(QUIET_S, (deadline_s - time.monotonic()) / 2)
        for member in idle:
            member.join(max(0.0, idle_s - time.monotonic()))
        self._move_the_rest(min(deadline_s, time.monotonic() + MOVE_S))
        for member in self._members:
            member.leave()
        left = [member.join(max(0.1, deadline_s - time.monotonic())) for member in self._members]
        if not all(left):
            raise DeadlineExceededError("leaving the share group takes long, and goes on")

    def _move_the_rest(self, deadline_s: float) -> None:
        """Move what would come to its last delivery unseen, before members leave and release it."""
        with self._changed:
            for member in self._members:
                for message in member.messages():
                    is_unseen = message.state is MessageState.HELD and not message.is_seen
                    if is_unseen and self._must_move(message):
                        self._give_back(message)
            self._moves.hurry()
            while self._moves.open_count and time.monotonic() < deadline_s:
                self._changed.wait(_CONFIRM_SLICE_S)


@dataclass(slots=True, eq=False)
class _Move:
    # None: its lock has ended.
    message: ShareMessage | None
    verdict: Verdict | None
    count: int
    letter: Future[None] | None = None
    copy: Future[None] | None = None
    began_ms: int = field(default_factory=monotonic_ms)
    ended_ms: int = 0
    kind: AcknowledgeType = AcknowledgeType.RELEASE


class Moves:
    """What is under way, and what was lately; guarded by the consumer's lock.

    Args:
        letters: Who writes.
        changed: The consumer's lock; notified when something has ended.
        limit: The broker's deliveries.
        lock_ms: How long a record is held.
    """

    def __init__(
        self, dead_letters: RequeueWriter, changed: threading.Condition, *, limit: int, lock_ms: int
    ) -> None:
        self._dead_letters = dead_letters
        self._changed = changed
        self._limit = limit
        self._lock_ms = lock_ms
        self._patience_ms = min(_PATIENCE_MS, lock_ms // 3)
        self._open: dict[_Key, _Move] = {}
        self._ended: dict[_Key, _Move] = {}

    @property
    def open_count(self) -> int:
        return len(self._open)

    def is_last(self, message: ShareMessage) -> bool:
        return message.broker_count >= self._limit

    def is_near_last(self, message: ShareMessage) -> bool:
        return message.broker_count + 1 >= self._limit

    def bury(self, message: ShareMessage, verdict: Verdict) -> None:
        """Write a dead letter (M1); with the lock held."""
        move = _Move(message, verdict, message.delivery_count + 1)
        self._open[message.key_of_place] = move
        move.letter = self._dead_letters.write(message, *verdict)
        self._watch(message.key_of_place, move, move.letter, AcknowledgeType.REJECT)

    def send_back(self, message: ShareMessage, count: int) -> None:
        """Copy a message to the tail (M3); its next delivery has that count. With the lock held."""
        move = _Move(message, None, count)
        self._open[message.key_of_place] = move
        self._copy(message, move)

    def take_over(self, message: ShareMessage) -> bool:
        """Tell whether a record that has come is one of these (M4); with the lock held."""
        self._forget(monotonic_ms() - 4 * self._lock_ms)
        key = message.key_of_place
        move = self._open.get(key) or self._ended.get(key)
        if move is None:
            return False
        if move.ended_ms:
            message.member.acknowledge(message, move.kind)
        else:
            move.message = message
        return True

    def look_after(self, member: Member, now_ms: int) -> None:
        """Copy what is refused for too long (M2); with the lock held, by the member's thread."""
        for key, move in list(self._open.items()):
            message = move.message
            if message is None or message.place is not member:
                continue
            copy_ms = message._deadline_ms - self._patience_ms
            if self.is_last(message):
                copy_ms = min(copy_ms, move.began_ms + self._patience_ms)
            if move.copy is None and now_ms > copy_ms:
                _log.error(
                    "a dead letter is not written, and the lock of its message ends: it is copied"
                    " to the queue's tail",
                    extra={"queue": message.queue_id, "place": repr(message)},
                )
                self._copy(message, move, key)
            if now_ms > message._deadline_ms:
                move.message = None
                member.acknowledge(message, AcknowledgeType.RELEASE, is_late=True)

    def hurry(self) -> None:
        """Copy what is in its last delivery, as the consumer ends; with the lock held."""
        for key, move in list(self._open.items()):
            if move.message is not None and move.copy is None and self.is_last(move.message):
                self._copy(move.message, move, key)

    def _copy(self, message: ShareMessage, move: _Move, key: _Key | None = None) -> None:
        move.copy = self._dead_letters.copy(message, move.count, move.verdict)
        self._watch(key or message.key_of_place, move, move.copy, AcknowledgeType.ACCEPT)

    def _watch(self, key: _Key, move: _Move, future: Future[None], kind: AcknowledgeType) -> None:
        def ended(outcome: Future[None]) -> None:
            if not outcome.cancelled():
                self._end(key, move, outcome.exception(), kind)

        future.add_done_callback(ended)

    def _end(
        self, key: _Key, move: _Move, failure: BaseException | None, kind: AcknowledgeType
    ) -> None:
        with self._changed:
            if move.ended_ms:
                return
            futures = [each for each in (move.letter, move.copy) if each is not None]
            if failure is not None:
                self._failed(key, move, failure, all(each.done() for each in futures))
                return
            move.ended_ms, move.kind = monotonic_ms(), kind
            for other in futures:
                other.cancel()
            self._open.pop(key, None)
            self._ended[key] = move
            message, move.message = move.message, None
            self._changed.notify_all()
        if move.verdict is not None and kind is AcknowledgeType.REJECT:
            _log.info("a message is given up; it is a dead letter", extra={"place": key})
        if message is not None:
            message.member.acknowledge(message, kind)

    def _failed(self, key: _Key, move: _Move, failure: BaseException, is_over: bool) -> None:
        """Run at the end of the consumer only; with the lock held."""
        if not is_over:
            return
        self._open.pop(key, None)
        message = move.message
        is_last = message is None or self.is_last(message)
        _log.error(
            "a message could be written neither to the dead letters nor to its queue; %s",
            "the broker may give it up" if is_last else "it comes again",
            extra={"place": key, "error": str(failure)},
        )
        self._changed.notify_all()

    def _forget(self, before_ms: int) -> None:
        while self._ended:
            key, move = next(iter(self._ended.items()))
            if move.ended_ms > before_ms:
                return
            del self._ended[key]


backend = TopicBackend(ShareConsumer)
