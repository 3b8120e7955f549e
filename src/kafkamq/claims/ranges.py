"""In range claims members share one partition by offset ranges, the next one claimed ahead.

The protocol has the idea; here they have a topic of their own (``claims/rules/ranges.py``). Members
tell each other "offsets X to Y are mine", and have the next range in hand before it is needed.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import NoReturn

from kafkamq.claims.consumer import Batch, ClaimedMessage
from kafkamq.claims.log_engine import (
    CoordinationTopic,
    LogEngine,
    check_id,
    follow,
    require_topic,
    require_work,
)
from kafkamq.claims.rules.ranges import (
    RANGE_TOPIC,
    HeldRange,
    RangeLog,
    RangeMember,
    RangeWrite,
    decode_range,
    encode_range,
)
from kafkamq.claims.rules.steps import Delivery
from kafkamq.claims.wire.marshal import coordination_partition
from kafkamq.config import Options, ServiceConfig, one_of, wait_seconds
from kafkamq.errors import (
    BrokerError,
    ConfigError,
    DataLossError,
    DeadlineExceededError,
    KafkaMQError,
    LeaseLostError,
    StateError,
    WireError,
)
from kafkamq.metrics import Counter, Gauge, health, register
from kafkamq.transport.admin import Admin
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.commits import GroupOffsets, PendingCommit
from kafkamq.transport.record import Record
from kafkamq.types import RangeType

_log = logging.getLogger(__name__)
_ENDS_S = 0.5
_SLICE_S = 0.1
_JOIN_S = 1.0
_BATCH = 200
_MAX_SILENCE_S = 30.0
_LABELS = ("group", "topic")
HELD = Gauge("kafkamq_claims_ranges_held", "Ranges held, worked on or claimed ahead.", _LABELS)
DONE = Counter("kafkamq_claims_ranges_done", "Ranges, or beginnings of them, done.", _LABELS)
LOST = Counter(
    "kafkamq_claims_ranges_lost", "Ranges that were lost while they were worked on.", _LABELS
)
HANDED_OUT = Counter(
    "kafkamq_claims_ranges_messages_handed_out", "Messages of ranges handed out.", _LABELS
)
register(globals())


class _RangeEngine(LogEngine):
    # A member that tells of what is abandoned may be away for a while.
    window_intervals = 20
    state: RangeLog
    member: RangeMember

    def __init__(
        self,
        config: ServiceConfig,
        ranges: CoordinationTopic,
        topic: str,
        group_id: str,
        *,
        interval_ms: int,
        skips: bool,
        join: Callable[[RangeLog], RangeMember],
    ) -> None:
        """``join`` makes the member when the log is known."""
        super().__init__(config, ranges, interval_ms=interval_ms, owner="RangeClaims")
        self.ends: dict[int, int] = {}
        self._work = topic
        self._group_id = group_id
        self._join = join
        self._number = coordination_partition(topic, ranges.partitions)
        self._look_s = 0.0
        self._offsets = GroupOffsets(config, group_id)
        self._committed: dict[int, int] = {}
        self._begun: list[PendingCommit] = []
        try:
            self.partitions = range(require_work(self.admin, topic))
            self._bases = _group_starts(self.admin, topic, self.partitions, group_id, skips=skips)
            self.open_writer()
            self._look()
            self.start([self._number])
        except BaseException:
            self.close(5.0)
            raise

    def open_log(self, partition: int, since_s: float | None) -> None:
        interval_s = self.interval_ms / 1000
        self.state = RangeLog(self._group_id, self._work, interval_s, since_s=since_s)
        self.member = self._join(self.state)

    def fold(self, message: Record, partition: int, offset: int, broker_ms: int) -> None:
        try:
            record = decode_range(message.value())
        except WireError:
            record = None
        has_ended = self.state.apply(record, offset=offset, broker_time_s=broker_ms / 1000)
        if record is not None and has_ended:
            self.member.on_ended(record)

    def turn(self, now_ms: int) -> None:
        self.member.observe(self.partitions)
        if self.is_ready:
            shuffled = dict(random.sample(sorted(self.ends.items()), len(self.ends)))
            now_s = self.clock.now_s()
            for write in self.member.plan(now_ms, now_s, ends=shuffled, bases=self._bases):
                self.send(write)
        self.changed.notify_all()

    def look_around(self) -> None:
        if time.monotonic() >= self._look_s:
            self._look()
            self._commit()

    def _look(self) -> None:
        self._look_s = time.monotonic() + _ENDS_S
        bounds = self.admin.log_bounds(self._work, self.partitions)
        self.ends = {number: end for number, (_, end) in bounds.items()}

    def send(self, write: RangeWrite) -> None:
        report = partial(self.member.on_written, write)
        self.append(self._number, encode_range(write.record), report)

    def held(self) -> list[tuple[int, HeldRange]]:
        """Partition and range of everything that is held, claimed ahead or not; under the lock."""
        return self.member.held(self.partitions)

    def end(self, type: RangeType, partition: int, first: int, next: int) -> RangeWrite:
        write = self.member.end(type, (partition, first, next), monotonic_ms())
        self.send(write)
        return write

    def leave(self, timeout_s: float) -> None:
        """Give back what is held, and wait until that is written."""
        self.stop()
        with self.lock:
            self.member.leave()
            now_s = self.clock.now_s()
            for write in list(self.member.tell(self.partitions, monotonic_ms(), now_s)):
                self.send(write)
            for partition, each in self.held():
                self.end(RangeType.FREE, partition, each.first, each.next)
        with suppress(BrokerError):
            # The client failed: what was under way was not written.
            self.open_writer().wait_for(lambda: not self.under_way, timeout_s)

    def on_stopped(self) -> None:
        if self.is_ready:
            self._commit(is_last=True)
        self._offsets.close()

    def _commit(self, *, is_last: bool = False) -> None:
        """Commit positions for a restart of the whole group (RC5); wait for the last ones."""
        with self.lock:
            positions = {number: self.state.position(number) for number in self.partitions}
        try:
            # Its events must go somewhere.
            self._offsets.serve()
            for pending in self._begun:
                if pending.error is not None:
                    for each in pending.offsets:
                        self._committed.pop(each.partition, None)
            self._begun = [each for each in self._begun if not each.is_answered]
            known = {} if is_last else self._committed
            news = {at: n for at, n in positions.items() if n > known.get(at, 0)}
            self._committed.update(news)
            places = {(self._work, number): at for number, at in news.items()}
            if places and is_last:
                self._offsets.commit(places)
            elif places:
                self._begun.append(self._offsets.begin(places))
        except (KafkaMQError, RuntimeError):
            _log.debug("positions of ranges could not be committed")


def _group_starts(
    admin: Admin, topic: str, partitions: Sequence[int], group_id: str, *, skips: bool
) -> dict[int, int]:
    """Return by partition the group's position, or the log's start, where nobody has claimed
    anything.

    Raises:
        DataLossError: A position lies outside the log, and that is not to be skipped.
    """
    bounds = admin.log_bounds(topic, partitions)
    wanted = [(group_id, (topic, number)) for number in partitions]
    found = {}
    for place in admin.committed(wanted, stable=False):
        first, end = bounds[place.partition]
        known = place.offset if place.offset >= 0 else first
        found[place.partition] = min(max(known, first), end)
        if found[place.partition] != known:
            text = (
                f"the position of {topic}[{place.partition}] of group {group_id!r}"
                f" is {known}, and the log has {first} to {end}"
            )
            if not skips:
                raise DataLossError(f"{text}; set on_data_loss='skip' to go on")
            _log.warning("%s; going on at %d", text, found[place.partition])
    return found


class ClaimedRange:
    """Offsets ``first`` to ``next`` (not included) of one partition; iterate for its messages."""

    def __init__(self, claims: RangeClaims, partition: int, held: HeldRange) -> None:
        self.topic = claims.topic
        self.partition = partition
        self.first = held.first
        self.next = held.next
        # A fencing token: it rises with every claim of the same offsets.
        self.token = held.token
        # It lies behind the last message that was handed out.
        self.position = held.first
        self._claims = claims

    def __repr__(self) -> str:
        return f"ClaimedRange({self.topic}[{self.partition}] {self.first}-{self.next})"

    def __iter__(self) -> Iterator[ClaimedMessage]:
        """Return its messages; waits for those not written yet, until ``stop`` or ``close``.

        It ends early when it would wait and another range that is held has messages; this one is
        given again when its next message is there.

        Raises:
            LeaseLostError: The range is not held any more.
            BrokerError: It cannot be read.
            StateError: Delivery is at most once: use ``batches``.
        """
        if self._claims.is_once:
            raise StateError("delivery is at most once: use batches()")
        return self._claims.read(self)

    def batches(self) -> Iterator[Batch]:
        """Yield its messages, up to 200 at a time; waits and ends as an iteration does.

        At most once, the log says that a batch is done before it is yielded, so nobody is handed
        any of it again. When the loop is left, ``next_range`` gives the rest of the range.

        Raises:
            LeaseLostError, BrokerError: As for an iteration.
            DeadlineExceededError: At most once, nobody knows whether that was written: the batch is
                not handed out, and comes again unless it was.
        """
        return self._claims.batches(self)

    def done(self, next: int | None = None) -> None:
        """Its messages up to ``next`` are done and never come again; None: those handed out.

        Raises:
            LeaseLostError: The range is not held any more.
            DeadlineExceededError: That could not be written, or nobody knows; call it again.
            StateError: Delivery is at most once: what is handed out is done.
        """
        if self._claims.is_once:
            raise StateError("delivery is at most once: what is handed out is done")
        if next is not None or self.position > self.first:
            self._claims.done(self, self.position if next is None else next)


class RangeClaims:
    """A member that works on ranges of one topic; context manager. One thread works on them.

    At least once: a range whose member dies is worked on again as a whole, or from where ``done``
    told last. At most once: no message is handed out twice, and one batch at most is lost when a
    member dies. Messages of a partition are in order within a range only.
    """

    _reading: ClaimedRange | None = None

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str,
        *,
        client_id: str,
        group_id: str,
        size: int = 1000,
        ahead: int = 1,
        delivery: str = Options.delivery.default,
        range_topic: str = RANGE_TOPIC,
        heartbeat_interval: float | timedelta = 3.0,
        on_data_loss: str = Options.on_data_loss.default,
        kafka: Mapping[str, str] | None = None,
    ) -> None:
        """Join the members that share the group's partitions, and begin to claim ranges.

        Args:
            client_id: A name; need not be the same after a restart.
            group_id: The group that shares the work, and commits its positions to Kafka.
            size: Offsets of a range; another member repeats at most so many after a crash.
            ahead: Ranges claimed beyond the one that is worked on.
            delivery: ``at-least-once``, or ``at-most-once``: messages come by ``batches`` only, are
                never handed out twice while the range topic keeps its records, and need no
                ``done``. All members of a group have the same.
            range_topic: Made by ``init_topic``; never Marshal's.
            heartbeat_interval: Seconds; all members must agree.
            on_data_loss: ``raise``, or ``skip`` with a warning, when messages that nobody has done
                were deleted, or the group's position lies behind the log's end.

        Raises:
            ConfigError: A setting, or the range topic as it is, cannot work.
            DataLossError: The group's position lies outside the log.
            BrokerError, DeadlineExceededError: The cluster refused, or does not answer.
        """
        for name, value in (("client_id", client_id), ("group_id", group_id), ("topic", topic)):
            check_id(name, value)
        if size < 1 or ahead < 0:
            raise ConfigError(f"size is {size} and ahead {ahead}: they must be >= 1 and >= 0")
        Options.on_data_loss.check(on_data_loss)
        self.topic = topic
        self.group_id = group_id
        self._labels = (group_id, topic)
        self.is_once = one_of(Delivery, "delivery", delivery) is Delivery.AT_MOST_ONCE
        self._skips = on_data_loss == "skip"
        self._is_stopped = self._is_closed = False
        # By their tokens: what the application has, and its positions in ranges that wait; up to
        # where ranges were written as done, without an answer. Then what ``done`` waits for.
        self._given: set[int] = set()
        self._waiting: dict[int, int] = {}
        self._ending: dict[int, int] = {}
        self._under_way: list[RangeWrite] = []
        self._polling = threading.Lock()
        interval_ms = Options.heartbeat_interval.convert(heartbeat_interval)
        config = ServiceConfig(bootstrap_servers=bootstrap_servers, kafka=dict(kafka or {}))
        with Admin(config) as admin:
            ranges = require_topic(admin, range_topic, rules="safe", interval_ms=interval_ms)
        join = partial(RangeMember, client=client_id, instance=uuid.uuid4().hex[:8])
        # A fetch that waits at the log's end must not hold the next range back for long.
        self._data = follow(config, topic, group_id=group_id, fetch_wait_max_ms=20)
        self.engine = _RangeEngine(
            config,
            ranges,
            topic,
            group_id,
            interval_ms=interval_ms,
            skips=self._skips,
            join=partial(join, size=size, ahead=ahead, interval_ms=interval_ms),
        )
        self._watch()

    def _watch(self) -> None:
        engine = self.engine
        self._loop = health.add(
            f"ranges of {self.topic}",
            max_age_s=_MAX_SILENCE_S,
            is_ready=lambda: engine.is_ready and engine.error is None,
        )
        engine.on_turn = self._loop.beat
        self._forget_metrics = HELD.watch(lambda: {self._labels: float(len(self.held()))})

    def __enter__(self) -> RangeClaims:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[ClaimedRange]:
        while not self._is_stopped:
            found = self.next_range(1.0)
            if found is not None:
                yield found

    def next_range(self, timeout: float | timedelta = 1.0) -> ClaimedRange | None:
        """Return a range that is held, those with messages first; None: there was none in time.

        Raises:
            BrokerError: What no waiting can mend.
        """
        deadline_s = time.monotonic() + wait_seconds(timeout, may_be_endless=True)
        with self.engine.lock:
            while not self._is_stopped:
                self.engine.check()
                if held := self._to_give():
                    partition, each = min(held, key=lambda found: found[1].token)
                    self._given.add(each.token)
                    claimed = ClaimedRange(self, partition, each)
                    claimed.position = max(each.first, self._waiting.pop(each.token, 0))
                    return claimed
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self.engine.changed.wait(min(left_s, _SLICE_S))
        return None

    def _to_give(self) -> list[tuple[int, HeldRange]]:
        engine = self.engine
        with engine.lock:
            return [
                (partition, each)
                for partition, each in engine.held()
                if each.token not in self._given
                and max(each.first, self._waiting.get(each.token, 0))
                < engine.ends.get(partition, 0)
                and engine.member.is_live(partition, each, monotonic_ms())
            ]

    def held(self) -> list[tuple[int, int, int]]:
        """Partition, first and next offset of everything that is held, claimed ahead or not."""
        with self.engine.lock:
            return [(number, each.first, each.next) for number, each in self.engine.held()]

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def stop(self) -> None:
        """End iterations; for other threads and signal handlers."""
        self._is_stopped = True

    def close(self, timeout: float | timedelta = 10.0) -> None:
        """Give back what is not done, and end the clients. Idempotent."""
        timeout_s = wait_seconds(timeout, may_be_endless=True)
        with self.engine.lock:
            # From here on no other thread says that anything is done.
            if self._is_closed:
                return
            self._is_closed = self._is_stopped = True
        health.remove(self._loop)
        self._forget_metrics()
        # What another thread, or this one below a signal's handler, has said to be done is so:
        # nothing is read back behind this.
        with suppress(KafkaMQError):
            bound_s = min(timeout_s, self.engine.interval_ms / 1000)
            self.engine.wait_until(
                lambda: all(map(self._is_known, self._under_way)), bound_s, "ending ranges"
            )
        self.engine.leave(timeout_s)
        self.engine.close(timeout_s)
        # A poll of another thread ends now; one of this thread, if a signal's handler closes, only
        # when this returns.
        is_free = self._polling.acquire(timeout=_JOIN_S)
        self._data.close()
        if is_free:
            self._polling.release()

    # ---- of one range

    def read(self, claimed: ClaimedRange) -> Iterator[ClaimedMessage]:
        with self._until_closed(claimed):
            for found in self._read(claimed):
                for message in found:
                    # Nothing that waits, also for a lock, stands behind the check (RC7). So it is
                    # counted first, also where the claim is lost.
                    HANDED_OUT.add(1, *self._labels)
                    self._require(claimed)
                    claimed.position = message.offset + 1
                    yield message
                    if self.is_stopped:
                        return

    def batches(self, claimed: ClaimedRange) -> Iterator[Batch]:
        place = (claimed.topic, claimed.partition, claimed.token)
        with self._until_closed(claimed):
            for found in self._read(claimed):
                HANDED_OUT.add(len(found), *self._labels)
                self._require(claimed)
                claimed.position = found[-1].offset + 1
                if self.is_once:
                    self._end_first(claimed)
                try:
                    yield Batch(*place, tuple(found))
                except GeneratorExit:
                    # The loop was left, and ``done`` cannot end the range.
                    if self.is_once:
                        self._given.discard(claimed.token)
                    raise
                if self.is_stopped:
                    return
            if self.is_once and claimed.first < claimed.position:
                # Behind its last message there was none.
                self._end_first(claimed)

    @contextmanager
    def _until_closed(self, claimed: ClaimedRange) -> Iterator[None]:
        """What fails is given again by ``next_range`` while it is ours; a close is no failure."""
        try:
            yield
        except (KafkaMQError, RuntimeError):
            self._given.discard(claimed.token)
            if not self._is_closed:
                # Else another thread, or a signal's handler, has closed.
                raise

    def _end_first(self, claimed: ClaimedRange) -> None:
        """What was read of a range is done before it is handed out (RC8)."""
        try:
            self.done(claimed, claimed.position)
        except BaseException:
            claimed.position = claimed.first
            self._given.discard(claimed.token)
            raise

    def _read(self, claimed: ClaimedRange) -> Iterator[list[ClaimedMessage]]:
        """Yield what is read of it; the caller moves its position behind what it hands out."""
        place = (self.topic, claimed.partition)
        self._reading = None
        while claimed.position < claimed.next and not self._is_stopped:
            self._require(claimed)
            if self._reading is not claimed:
                self._reading = claimed
                self._given.add(claimed.token)
                self._data.drop(self._data.places - {place})
                if self._skips:
                    self._skip_deleted(claimed)
                else:
                    self._data.place({place: claimed.position})
            with self._polling:
                records = self._data.poll(_BATCH, _SLICE_S)
            is_at_end = claimed.position >= self.engine.ends.get(claimed.partition, 0)
            if not records and is_at_end and self._to_give():
                # Ranges that have messages do not wait for this one.
                with self.engine.lock:
                    self._given.discard(claimed.token)
                    self._waiting[claimed.token] = claimed.position
                return
            messages = [ClaimedMessage(record, None) for record in records]
            found = [message for message in messages if message.offset < claimed.next]
            for message in found:
                message.token = claimed.token
            if found:
                yield found
            if len(found) < len(messages):
                # The rest was deleted, or aborted.
                claimed.position = claimed.next
                return
            if self._data.outside and self._skips:
                self._skip_deleted(claimed)
            self._data.require_inside()
            # It lies behind what was aborted.
            end = min(self._data.ends.get(place, 0), claimed.next)
            claimed.position = max(claimed.position, end)

    def _skip_deleted(self, claimed: ClaimedRange) -> None:
        place = (self.topic, claimed.partition)
        first, end = self._data.bounds(place)
        if claimed.position > end:
            raise DataLossError(f"{claimed!r} lies behind the log's end")
        if claimed.position < first:
            # Else it is logged a second time, of what was read before.
            _log.warning("%r: deleted before it was done; going on at %d", claimed, first)
            claimed.position = min(first, claimed.next)
        if claimed.position < claimed.next:
            self._data.place({place: claimed.position})
        else:
            self._data.drop([place])

    def done(self, claimed: ClaimedRange, next_offset: int) -> None:
        if not claimed.first < next_offset <= claimed.next:
            raise StateError(f"{claimed!r} cannot be done up to {next_offset}")
        with self.engine.lock:
            place = (claimed.partition, claimed.first, next_offset)
            was_asked = self._ending.pop(claimed.token, 0) == next_offset
            if was_asked and not self.is_once and not self.engine.state.is_open(*place):
                # What had no answer stands in the log, or other members have done the rest.
                self._end_at(claimed, next_offset)
                return
            self._require(claimed)
            if self._is_closed:
                # Nothing is read back behind this.
                raise StateError("this RangeClaims is closed")
            write = self.engine.end(RangeType.DONE, *place)
            if next_offset < claimed.next:
                before = (claimed.first, claimed.next)
                self.engine.member.shorten(claimed.partition, before, next_offset)
            self._under_way.append(write)
            try:
                interval_s = self.engine.interval_ms / 1000
                is_known = partial(self._is_known, write)
                self.engine.wait_until(is_known, interval_s, f"ending {claimed!r}")
            except (DeadlineExceededError, StateError) as error:
                self._ending[claimed.token] = next_offset
                error_text = f"{claimed!r} could not be written as done"
                raise DeadlineExceededError(error_text) from error
            finally:
                self._under_way.remove(write)
            if self.engine.state.is_open(*place) or (self.is_once and not write.has_ended):
                # It was another one's before that stood in the log.
                self._lost(claimed)
            self._end_at(claimed, next_offset)
            DONE.add(1, *self._labels)

    def _end_at(self, claimed: ClaimedRange, next_offset: int) -> None:
        claimed.first = next_offset
        if claimed.first == claimed.next:
            self._given.discard(claimed.token)

    def _is_known(self, write: RangeWrite) -> bool:
        return write.has_ended or 0 <= write.offset < self.engine.state.next_offset

    def _require(self, claimed: ClaimedRange) -> None:
        with self.engine.lock:
            self.engine.check()
            for partition, each in self.engine.member.held([claimed.partition]):
                is_it = each.token == claimed.token and each.first == claimed.first
                if is_it and self.engine.member.is_live(partition, each, monotonic_ms()):
                    return
        self._lost(claimed)

    def _lost(self, claimed: ClaimedRange) -> NoReturn:
        # It may be ours again, when a beat comes through.
        self._given.discard(claimed.token)
        LOST.add(1, *self._labels)
        raise LeaseLostError(f"{claimed!r} is not held any more: another member may work on it")
