"""Range claims: members share one partition by offset ranges, the next one claimed ahead.

The protocol's idea, on a topic of its own (``claims/wire/ranges.py``): who takes no whole partition
negotiates "offsets X to Y are mine", and has the next range in hand before it is needed.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

from kafkamq.claims.broker_clock import BrokerClock, lease_clock_ms
from kafkamq.claims.log_start import find_starts, group_starts
from kafkamq.claims.member import check_id
from kafkamq.claims.message import ClaimedMessage
from kafkamq.claims.range_positions import RangePositions
from kafkamq.claims.rules.ranges import HeldRange, RangeLog, RangeMember, RangeWrite
from kafkamq.claims.topic import require_topic, require_work
from kafkamq.claims.wire.marshal import coordination_partition
from kafkamq.claims.wire.ranges import RANGE_TOPIC, decode_range, encode_range
from kafkamq.config import ServiceConfig, milliseconds
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
from kafkamq.transport.admin import Admin
from kafkamq.transport.errors import (
    KafkaError,
    Meaning,
    broker_error,
    is_retriable,
    meaning,
)
from kafkamq.transport.follower import Follower
from kafkamq.transport.producer import IdempotentProducer
from kafkamq.transport.record import Record
from kafkamq.transport.settings import producer_settings
from kafkamq.types import RangeType

_log = logging.getLogger(__name__)
_BUSY_S, _IDLE_S = 0.002, 0.05
_ENDS_S = 0.5  # how often the log's ends are asked for
_SLICE_S = 0.1
_RECORDS = 5000  # of one poll
_BATCH = 200  # messages of one poll
_WINDOW_INTERVALS = 20  # what is abandoned is told by members, of which there may be none a while


class ClaimedRange:
    """Offsets ``first`` to ``next`` (not included) of one partition; iterate for its messages."""

    def __init__(self, claims: RangeClaims, partition: int, held: HeldRange) -> None:
        self.topic = claims.topic
        self.partition = partition
        self.first = held.first
        self.next = held.next
        self.token = held.token  # fencing token: rises with every claim of the same offsets
        self.position = held.first  # behind the last message that was handed out
        self._claims = claims

    def __repr__(self) -> str:
        return f"ClaimedRange({self.topic}[{self.partition}] {self.first}-{self.next})"

    def __iter__(self) -> Iterator[ClaimedMessage]:
        """Its messages; waits for those that are not written yet, until ``stop``.

        It ends early when it would wait and another range that is held has messages; this one is
        given again when its next message is there.

        Raises:
            LeaseLostError: The range is not held any more.
            BrokerError: It cannot be read.
        """
        return self._claims.read(self)

    def done(self, next: int | None = None) -> None:
        """Its messages up to ``next`` are done and never come again; None: those handed out.

        Raises:
            LeaseLostError: The range is not held any more.
            DeadlineExceededError: That could not be written, or nobody knows; call it again.
        """
        if next is not None or self.position > self.first:
            self._claims.done(self, self.position if next is None else next)
            if self.first == self.next:
                self._claims.forget(self)


class RangeClaims:
    """A member that works on ranges of one topic; context manager. One thread works on them.

    At least once: a range whose member dies is worked on again as a whole, or from where ``done``
    said last. Messages of a partition are in order within a range only.
    """

    _state: RangeLog
    _clock: BrokerClock
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
        range_topic: str = RANGE_TOPIC,
        heartbeat_interval: float | timedelta = 3.0,
        on_data_loss: str = "raise",
        kafka: Mapping[str, str] | None = None,
    ) -> None:
        """Begin to claim.

        Args:
            bootstrap_servers: The cluster.
            topic: What to work on.
            client_id: A name; need not be the same after a restart.
            group_id: Who shares the work; positions are committed to Kafka under this name.
            size: Offsets of a range; another member repeats at most so many after a crash.
            ahead: Ranges claimed beyond the one that is worked on.
            range_topic: Made by ``init_topic``; never Marshal's.
            heartbeat_interval: Seconds; all members must agree.
            on_data_loss: ``raise``, or ``skip`` with a warning, when messages that nobody has done
                were deleted, or the group's position lies behind the log's end.
            kafka: Kafka's own properties.

        Raises:
            ConfigError: A setting, or the range topic as it is, cannot work.
            DataLossError: The group's position lies outside the log.
            BrokerError, DeadlineExceededError: The cluster refused, or does not answer.
        """
        for name, value in (("client_id", client_id), ("group_id", group_id), ("topic", topic)):
            check_id(name, value)
        if size < 1 or ahead < 0:
            raise ConfigError(f"size is {size} and ahead {ahead}: they must be >= 1 and >= 0")
        if on_data_loss not in ("raise", "skip"):
            raise ConfigError(f"on_data_loss is {on_data_loss!r}: it must be 'raise' or 'skip'")
        self.topic = topic
        self.group_id = group_id
        self._skips = on_data_loss == "skip"
        self._interval_ms = milliseconds(heartbeat_interval, name="heartbeat_interval", minimum=500)
        self._config = ServiceConfig(bootstrap_servers=bootstrap_servers, kafka=dict(kafka or {}))
        self._changed = threading.Condition(threading.RLock())
        self._error: KafkaMQError | None = None
        self._is_stopped = self._is_closed = False
        self._given: set[int] = set()  # tokens of ranges that the application has
        self._waiting: dict[int, int] = {}  # by token: positions of those that it had so far
        self._ending: dict[int, int] = {}  # by token: said to be done up to there, without answer
        self._under_way = 0
        with Admin(self._config) as admin:
            self._open(admin, range_topic)
        self._member = RangeMember(
            self._state,
            client=client_id,
            instance=uuid.uuid4().hex[:8],
            size=size,
            ahead=ahead,
            interval_ms=self._interval_ms,
        )
        self._thread = threading.Thread(target=self._run, name="kafkamq-ranges", daemon=True)
        self._thread.start()

    def __enter__(self) -> RangeClaims:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[ClaimedRange]:
        """Ranges, until ``stop``."""
        while not self._is_stopped:
            found = self.next_range(1.0)
            if found is not None:
                yield found

    def next_range(self, timeout: float = 1.0) -> ClaimedRange | None:
        """A range that is held, those with messages first; None: there was none in time.

        Raises:
            BrokerError: What no waiting can mend.
        """
        deadline_s = time.monotonic() + timeout
        with self._changed:
            while not self._is_stopped:
                self._check()
                if held := self._to_give():
                    partition, each = min(held, key=lambda found: found[1].token)
                    self._given.add(each.token)
                    claimed = ClaimedRange(self, partition, each)
                    claimed.position = max(each.first, self._waiting.pop(each.token, 0))
                    return claimed
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(min(left_s, _SLICE_S))
        return None

    def _to_give(self) -> list[tuple[int, HeldRange]]:
        """What the application does not have, and has messages for it."""
        with self._changed:
            return [
                (partition, each)
                for partition, each in self._member.held(range(self._count))
                if each.token not in self._given
                and max(each.first, self._waiting.get(each.token, 0)) < self._ends.get(partition, 0)
                and self._member.is_live(partition, each, lease_clock_ms())
            ]

    def held(self) -> list[tuple[int, int, int]]:
        """Partition, first and next offset of everything that is held, claimed ahead or not."""
        with self._changed:
            return [
                (partition, each.first, each.next)
                for partition, each in self._member.held(range(self._count))
            ]

    def forget(self, claimed: ClaimedRange) -> None:
        """It is done as a whole."""
        with self._changed:
            self._given.discard(claimed.token)

    @property
    def is_stopped(self) -> bool:
        """Whether ``stop`` or ``close`` was called."""
        return self._is_stopped

    def stop(self) -> None:
        """End iterations; for other threads and signal handlers."""
        self._is_stopped = True

    def close(self, timeout: float = 10.0) -> None:
        """Give back what is not done, and end the clients. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = self._is_stopped = True
        with self._changed:
            self._member.leave()
            now_ms, now_s, partitions = lease_clock_ms(), self._clock.now_s(), range(self._count)
            writes = list(self._member.tell(partitions, now_ms, now_s))
            for partition, each in self._member.held(partitions):
                place = (partition, each.first, each.next)
                writes.append(self._member.end(RangeType.FREE, place, now_ms))
            for write in writes:
                self._send(write)
        with suppress(BrokerError):  # the client failed: what was under way was not written
            self._producer.wait_for(lambda: not self._under_way, timeout)
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self._commit(is_last=True)
            self._reader.close()
            self._positions.close()
        self._data.close()
        self._producer.close()

    # ---- of one range

    def read(self, claimed: ClaimedRange) -> Iterator[ClaimedMessage]:
        """See ``ClaimedRange.__iter__``."""
        try:
            yield from self._read(claimed)
        except KafkaMQError:  # ``next_range`` gives it again, for as long as it is ours
            self._given.discard(claimed.token)
            raise

    def _read(self, claimed: ClaimedRange) -> Iterator[ClaimedMessage]:
        place = (self.topic, claimed.partition)
        self._reading = None
        while claimed.position < claimed.next and not self._is_stopped:
            self._require(claimed)
            if self._reading is not claimed:  # what is read of another one is not of this one
                self._reading = claimed
                self._data.drop(self._data.places - {place})
                if self._skips:
                    self._skip_deleted(claimed)
                else:
                    self._data.place({place: claimed.position})
            records = self._data.poll(_BATCH, _SLICE_S)
            is_at_end = claimed.position >= self._ends.get(claimed.partition, 0)
            if not records and is_at_end and self._to_give():  # those have not to wait
                with self._changed:
                    self._given.discard(claimed.token)
                    self._waiting[claimed.token] = claimed.position
                return
            for record in records:
                message = ClaimedMessage(record, None)
                if message.offset >= claimed.next:  # the rest was deleted, or aborted
                    claimed.position = claimed.next
                    return
                message.token = claimed.token
                self._require(claimed)
                claimed.position = message.offset + 1
                yield message
                if self.is_stopped:
                    return
            if self._data.outside and self._skips:
                self._skip_deleted(claimed)
            self._data.require_inside()
            end = min(self._data.ends.get(place, 0), claimed.next)  # behind what was aborted
            claimed.position = max(claimed.position, end)

    def _skip_deleted(self, claimed: ClaimedRange) -> None:
        place = (self.topic, claimed.partition)
        first, end = self._data.bounds(place)
        if claimed.position > end:
            raise DataLossError(f"{claimed!r} lies behind the log's end")
        if claimed.position < first:  # else it is said once more, of what was read before
            _log.warning("%r: deleted before it was done; going on at %d", claimed, first)
            claimed.position = min(first, claimed.next)
        if claimed.position < claimed.next:
            self._data.place({place: claimed.position})
        else:
            self._data.drop([place])

    def done(self, claimed: ClaimedRange, next_offset: int) -> None:
        """See ``ClaimedRange.done``."""
        if not claimed.first < next_offset <= claimed.next:
            raise StateError(f"{claimed!r} cannot be done up to {next_offset}")
        with self._changed:
            place = (claimed.partition, claimed.first, next_offset)
            if self._ending.pop(claimed.token, 0) == next_offset and not self._is_open(*place):
                claimed.first = next_offset  # what had no answer stands in the log
                return
            self._require(claimed)
            write = self._member.end(RangeType.DONE, place, lease_clock_ms())
            if next_offset < claimed.next:
                before = (claimed.first, claimed.next)
                self._member.shorten(claimed.partition, before, next_offset)
            self._send(write)
            deadline_s = time.monotonic() + self._interval_ms / 1000
            while not 0 <= write.offset < self._next_offset:
                self._check()
                if time.monotonic() > deadline_s:
                    self._ending[claimed.token] = next_offset
                    raise DeadlineExceededError(f"{claimed!r} could not be written as done")
                self._changed.wait(_SLICE_S)
            if self._is_open(*place):
                self._lost(claimed)  # it was another one's before that stood in the log
            claimed.first = next_offset

    def _is_open(self, partition: int, first: int, end: int) -> bool:
        """Also where another member has done a part of it since."""
        return self._state.is_open(partition, first, end)

    def _require(self, claimed: ClaimedRange) -> None:
        with self._changed:
            self._check()
            for partition, each in self._member.held([claimed.partition]):
                is_it = each.token == claimed.token and each.first == claimed.first
                if is_it and self._member.is_live(partition, each, lease_clock_ms()):
                    return
        self._lost(claimed)

    def _lost(self, claimed: ClaimedRange) -> NoReturn:
        self._given.discard(claimed.token)  # it may be ours again, when a beat comes through
        raise LeaseLostError(f"{claimed!r} is not held any more: another member may work on it")

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # ---- the thread

    def _run(self) -> None:
        look_s = time.monotonic() + _ENDS_S
        try:
            with Admin(self._config) as admin:
                while not self._is_closed:
                    self._turn(_BUSY_S if self._under_way else _IDLE_S)
                    if time.monotonic() >= look_s:
                        look_s = time.monotonic() + _ENDS_S
                        self._look(admin)
                        self._commit()
        except KafkaMQError as error:
            _log.error("range claims end: %s", error)
            self._error = error
        except Exception as error:  # noqa: BLE001 - ranges must not be believed without a reader
            _log.exception("range claims end")
            self._error = BrokerError(f"the reader of range claims failed: {error!r}")

    def _turn(self, wait_s: float) -> None:
        records = self._reader.poll(_RECORDS, wait_s)
        self._reader.require_inside()
        self._producer.serve(0)
        with self._changed:
            for record in records:
                self._fold(record)
            self._member.observe(range(self._count))
            if self._next_offset >= self._end_at_start:
                now_s = self._clock.now_s()
                shuffled = random.sample(sorted(self._ends.items()), len(self._ends))
                for write in self._member.plan(
                    lease_clock_ms(), now_s, ends=dict(shuffled), bases=self._bases
                ):
                    self._send(write)
            self._changed.notify_all()

    def _fold(self, message: Record) -> None:
        offset = message.offset()
        assert offset is not None, "records have a place"
        try:
            record = decode_range(message.value())
        except WireError:
            record = None
        time_ms = message.timestamp()[1]
        self._state.apply(record, offset=offset, broker_time_s=time_ms / 1000)
        self._next_offset = offset + 1
        if self._next_offset >= self._end_at_start:
            self._clock.saw(time_ms)

    def _send(self, write: RangeWrite) -> None:
        try:
            value, report = encode_range(write.record), partial(self._delivered, write)
            self._producer.produce(self._range_topic, value, None, self._number, None, report)
            self._under_way += 1
        except BrokerError as error:
            _log.warning("a range record could not be sent", extra={"error": str(error)})
            self._member.on_written(write, -1)

    def _delivered(self, write: RangeWrite, error: KafkaError | None, message: Record) -> None:
        with self._changed:
            self._under_way -= 1
            offset = message.offset()
            self._member.on_written(write, -1 if error is not None or offset is None else offset)
            if error is not None and meaning(error) is Meaning.FORBIDDEN:
                self._error = broker_error(error, f"writing {self._range_topic}")

    def _open(self, admin: Admin, range_topic: str) -> None:
        """Check the topics, find out where to begin, and connect."""
        ranges = require_topic(admin, range_topic, rules="safe", interval_ms=self._interval_ms)
        self._count = require_work(admin, self.topic)
        self._bases = group_starts(admin, self.topic, self._count, self.group_id, skips=self._skips)
        self._number = coordination_partition(self.topic, ranges.partitions)
        self._range_topic = range_topic
        self._reader = self._follow(range_topic, isolation_level="read_uncommitted")
        window_ms = _WINDOW_INTERVALS * self._interval_ms
        begin = find_starts(admin, self._reader, ranges, window_ms=window_ms)
        start, since_s = begin.starts[self._number]
        self._end_at_start = begin.ends[self._number]
        self._next_offset = start
        self._clock = BrokerClock(begin.latest_ms)
        self._state = RangeLog(self.group_id, self.topic, self._interval_ms / 1000, since_s=since_s)
        self._look(admin)
        self._reader.place({(range_topic, self._number): start})
        # A fetch that waits at the log's end must not hold the next range back for long.
        self._data = self._follow(self.topic, group_id=self.group_id, fetch_wait_max_ms=20)
        self._positions = RangePositions(self._config, self.topic, self.group_id)
        timeout_ms = max(1000, self._interval_ms // 2)
        settings = producer_settings(self._config, message_timeout_ms=timeout_ms, linger_ms=0)
        self._producer = IdempotentProducer(self._config, settings, owner="RangeClaims")

    def _look(self, admin: Admin) -> None:
        bounds = admin.log_bounds(self.topic, range(self._count))
        self._ends = {number: end for number, (_, end) in bounds.items()}

    def _commit(self, *, is_last: bool = False) -> None:
        with self._changed:
            positions = {number: self._state.position(number) for number in range(self._count)}
        self._positions.commit(positions, is_last=is_last)

    def _follow(self, topic: str, **settings: Any) -> Follower:
        return Follower(
            self._config,
            f"reading {topic}",
            ignores=partial(is_retriable, or_missing=True),
            enable_partition_eof=True,
            **settings,
        )
