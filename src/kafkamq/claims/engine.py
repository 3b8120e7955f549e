"""A process folds the coordination log here, and performs its claimants' steps.

Questions and commits that take a while are an ``OffsetService``'s, off the engine's thread and many
at a time. Per group there is one thread that looks offsets up and one that commits; each takes
everything that came since its last turn, so 64 partitions cost as many requests as one. An overdue
commit does not hold its heartbeat back: the engine goes on without it, unless the offset must be
committed.

Both ask one Kafka consumer that is never assigned anything; what the application polls is another
one (``PartitionReader``), so no commit waits for a poll, nor a poll for one. Each question has
a queue of its own in the client; what comes unasked (errors, log lines) waits for a poll, which
the thread that commits does now and then.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from kafkamq.claims.log_engine import CoordinationTopic, LogEngine, interval_of
from kafkamq.claims.rules.claimant import Claimant
from kafkamq.claims.rules.log import ClaimLog
from kafkamq.claims.rules.steps import (
    ClaimantConfig,
    End,
    Fetch,
    Finish,
    HandOut,
    LookUp,
    Step,
    Stop,
    Write,
)
from kafkamq.claims.wire.marshal import coordination_partition, decode_value, encode_value
from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, KafkaMQError, LeaseLostError, WireError
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.commits import GroupOffsets
from kafkamq.transport.errors import is_retriable
from kafkamq.transport.record import Record, TopicPartition
from kafkamq.transport.transactions import TransactionalProducer
from kafkamq.types import MarshalRecord, MarshalType

NEVER_MS = 2**62
_MAX_CLIENTS = 10_000
_TIMEOUT_S = 10.0
_FENCE_THREADS = 8
_IDLE_S = 1.0
Ticker = Callable[[int, float], None]
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Fence:
    """A transactional producer that belongs to one claimed partition: the next owner's ends it.

    Its id names group, topic and partition. ``init`` is called once, before the partition's
    position is looked up: from then on no former owner can commit an offset or an output. It is
    never called again in the same session, because then a zombie would fence its successor.
    """

    def __init__(
        self, config: ServiceConfig, group: str, topic: str, partition: int, group_metadata: bytes
    ) -> None:
        self.producer = TransactionalProducer(config, f"kafkamq.claims.{group}.{topic}.{partition}")
        self._place = (topic, partition)
        self._group_metadata = group_metadata
        self._is_initialised = False
        self._last_ticket = -1
        self._lock = threading.Lock()
        self._is_over = False

    @property
    def is_usable(self) -> bool:
        """Say whether it still fences; else another took over, or it failed: give the claim up."""
        return not self._is_initialised or self.producer.is_ready

    def init(self, timeout_s: float) -> None:
        with self._in_turn():
            if not self._is_initialised:
                self._require()
                self.producer.init(timeout_s=timeout_s)
                self._is_initialised = True

    def commit(self, offset: int, ticket: int) -> None:
        """Commit the partition's position for the group, unless a later ticket was."""
        topic, partition = self._place
        with self._in_turn():
            if ticket < self._last_ticket:
                return
            self._last_ticket = ticket
            with self.producer.transaction(timeout_s=10.0):
                self.producer.send_offsets(
                    [TopicPartition(topic, partition, offset)], self._group_metadata
                )

    @contextmanager
    def transaction(self) -> Iterator[TransactionalProducer]:
        """Yield a transaction: committed when the block ends normally, else aborted.

        Raises:
            LeaseLostError: The claim has ended, or ended before the commit.
        """
        with self._in_turn():
            self._require()
            with self.producer.transaction(timeout_s=10.0):
                yield self.producer
                self._require()

    def close(self) -> None:
        """End the client; while a thread uses it, that thread ends it when it is done."""
        self._is_over = True
        self._close()

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            if self._is_over:
                self._close()

    def _close(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self.producer.close()
            finally:
                self._lock.release()

    def _require(self) -> None:
        if self._is_over:
            raise LeaseLostError(f"the claim of {self.producer.transactional_id} has ended")


class Listener:
    """Who is told of a session's steps; called under the engine's lock, so it must be quick."""

    def on_offsets(self, session: ClaimSession, earliest: int, latest: int, committed: int) -> None:
        session.claimant.on_offsets(earliest, latest, committed, monotonic_ms=monotonic_ms())

    def on_fetch(self, session: ClaimSession, step: Fetch) -> None:
        """The partition is held: read it."""

    def on_hand_out(self, session: ClaimSession, step: HandOut) -> None:
        """At most once: the offered batch may be used."""

    def on_stop(self, session: ClaimSession, step: Stop) -> None:
        """The claim ends: hand nothing more out."""

    def on_finish(self, session: ClaimSession, step: Finish) -> None:
        """The session is over, and is driven no more."""


@dataclass(slots=True, eq=False, repr=False)
class ClaimSession:
    """One claimant and its surroundings; everything under the engine's lock."""

    claimant: Claimant
    coordination_partition: int
    listener: Listener
    fence: Fence | None = None
    start: Fetch | None = None
    is_takeover: bool = False
    wake_ms: int = -NEVER_MS
    heard_at: int = -1
    open_commits: int = 0

    @property
    def place(self) -> tuple[str, int]:
        return self.claimant.config.topic, self.claimant.config.partition


class _Batcher(Generic[T]):
    """A thread that hands everything that came since its last turn to one call."""

    def __init__(
        self,
        name: str,
        handle: Callable[[list[T]], None],
        idle: Callable[[], object] = lambda: None,
    ) -> None:
        """``idle`` is called at least every few seconds, unless ``handle`` takes longer."""
        self._idle = idle
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._handle = handle
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        self._queue.put(item)

    def close(self, timeout_s: float) -> bool:
        """False: a call is still under way."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=_IDLE_S)
            except Empty:
                self._idle()
                continue
            items: list[T] = []
            while item is not None:
                items.append(item)
                if self._queue.empty():
                    break
                item = self._queue.get()
            if items:
                try:
                    self._handle(items)
                except Exception:  # noqa: BLE001 - a dead service would end every claim
                    _log.exception("a request for claims failed")
                self._idle()
            if item is None:
                return


class OffsetService:
    """The threads and the client of one group; its makers call it under the engine's lock.

    ``lookups`` finds the offsets of sessions' partitions; ``commits`` commits the offset of a
    session's write. A write without an offset commits nothing, and waits for those before it.
    The engine is told of the answers, and of every error: some, no waiting mends.
    """

    def __init__(self, engine: Engine, group: str) -> None:
        self._config = config = engine.config
        self._admin = engine.admin
        self._group = group
        self._engine = engine
        self._client = GroupOffsets(config, group)
        self._fences = ThreadPoolExecutor(_FENCE_THREADS, f"kafkamq-fence-{group}")
        self._membership = self._client.membership()
        self.lookups = _Batcher(f"kafkamq-lookup-{group}", self._look_up)
        self.commits = _Batcher(f"kafkamq-commit-{group}", self._commit, self._serve)

    def close(self, timeout_s: float) -> None:
        idle = [batcher.close(timeout_s) for batcher in (self.lookups, self.commits)]
        self._fences.shutdown(wait=False)
        if all(idle):
            self._client.close()

    def count(self, topics: Sequence[str], answer: Callable[[dict[str, int]], None]) -> None:
        """Tell how many partitions topics have; those that cannot be told are absent."""
        with suppress(RuntimeError):
            self._fences.submit(self._count, topics, answer)

    def _count(self, topics: Sequence[str], answer: Callable[[dict[str, int]], None]) -> None:
        counts = {}
        for topic in topics:
            try:
                counts[topic] = self._client.partition_count(topic)
            except KafkaMQError as error:  # noqa: PERF203 - a handful of topics
                if is_retriable(error):
                    return
        answer(counts)

    def fence(self, topic: str, partition: int) -> Fence:
        return Fence(self._config, self._group, topic, partition, self._membership)

    def end(self, fence: Fence) -> None:
        try:
            self._fences.submit(fence.close)
        except RuntimeError:
            # The pool has ended before the claim did. A fence that nobody closes keeps its thread;
            # no thread starts when the interpreter ends.
            with suppress(RuntimeError):
                threading.Thread(target=fence.close, name="kafkamq-fence", daemon=True).start()

    # ---- looking up

    def _look_up(self, sessions: Sequence[ClaimSession]) -> None:
        open_ = list(dict.fromkeys(sessions))
        try:
            found = self._offsets(self._fenced(open_))
        except Exception as error:  # noqa: BLE001 - whatever it was, the claimants must hear of it
            _log.warning(
                "offsets of claimed partitions could not be looked up",
                extra={"group": self._group, "error": str(error)},
            )
            found = {}
            if isinstance(error, KafkaMQError):
                self._engine.refuse(error)
        for session in open_:
            offsets = found.get(session)
            if offsets is None:
                self._engine.not_found(session)
            else:
                self._engine.found(session, *offsets)

    def _fenced(self, sessions: Sequence[ClaimSession]) -> list[ClaimSession]:
        """Return those whose former owners can commit nothing any more."""

        def init(session: ClaimSession) -> bool:
            try:
                if session.fence is not None:
                    session.fence.init(_TIMEOUT_S)
                return True
            except KafkaMQError as error:
                _log.warning(
                    "a former owner could not be fenced",
                    extra={"place": session.place, "error": str(error)},
                )
                self._engine.refuse(error)
                return False

        if not any(session.fence for session in sessions):
            return list(sessions)
        done = list(self._fences.map(init, sessions))
        return [session for session, is_done in zip(sessions, done, strict=True) if is_done]

    def _offsets(
        self, sessions: Sequence[ClaimSession]
    ) -> dict[ClaimSession, tuple[int, int, int]]:
        if not sessions:
            return {}
        places = [session.place for session in sessions]
        bounds = {}
        for topic in dict.fromkeys(topic for topic, _ in places):
            wanted = [partition for name, partition in places if name == topic]
            found = self._admin.log_bounds(topic, wanted)
            bounds.update({(topic, number): ends for number, ends in found.items()})
        committed = self._client.committed(places)
        return {
            session: (*bounds[session.place], committed[session.place])
            for session in sessions
            if session.place in bounds and session.place in committed
        }

    # ---- committing

    def _serve(self) -> None:
        """Take what the client has to say: it would be kept forever."""
        try:
            self._client.poll(1, 0.0)
        except KafkaMQError as error:
            self._engine.refuse(error)

    def _commit(self, jobs: Sequence[tuple[ClaimSession, Write]]) -> None:
        plain = []
        for session, write in jobs:
            if session.fence is not None:
                self._fences.submit(self._commit_fenced, session, session.fence, write)
            else:
                plain.append((session, write))
        if plain:
            self._commit_plain(plain)

    def _commit_fenced(self, session: ClaimSession, fence: Fence, write: Write) -> None:
        is_done = False
        try:
            if write.commit_offset >= 0:
                fence.commit(write.commit_offset, write.ticket)
            is_done = True
        except KafkaMQError as error:
            self._say(session, str(error))
            self._engine.refuse(error)
        finally:
            self._engine.committed(session, write, is_done)

    def _commit_plain(self, jobs: Sequence[tuple[ClaimSession, Write]]) -> None:
        wanted = {
            session.place: write.commit_offset
            for session, write in jobs
            if write.commit_offset >= 0
        }
        done: set[tuple[str, int]] = set()
        try:
            if wanted:
                done = wanted.keys() - self._client.commit_each(wanted).keys()
        except Exception as error:  # noqa: BLE001 - as above
            self._say(jobs[0][0], str(error))
        for session, write in jobs:
            self._engine.committed(session, write, session.place in done)

    def _say(self, session: ClaimSession, error_text: str) -> None:
        _log.warning(
            "a position could not be committed to Kafka",
            extra={"group": self._group, "place": session.place, "error": error_text},
        )


@dataclass(slots=True)
class Stats:
    won: int = 0
    takeovers: int = 0
    lost: int = 0
    ended: dict[End, int] = field(default_factory=dict)
    lateness_ms: int = 0
    max_lateness_ms: int = 0
    handed_out: int = 0
    # Handed out though a former session of this process had them already.
    redelivered: int = 0


@dataclass(slots=True)
class ClientClock:
    """How far a client's clock is off, and what it takes for the interval."""

    # The time it wrote minus the broker's.
    skew_s: float = 0.0
    # 0: it did not say.
    interval_ms: int = 0
    instance: str = ""
    records: int = 0


class CoordinationLog:
    """The world state of all coordination partitions.

    Attributes:
        logs: The state of each coordination partition under the rules in use.
        peers: The same under the Go clients' rules; empty unless they take part.
        clients: By group and client: what its records tell of its clock.
        reasons: How often records were malformed, by reason.
        other_intervals: By group and client: intervals that are not ours.
    """

    def __init__(self, *, rules: str, has_broker_time: bool, interval_ms: int) -> None:
        """``rules`` is ``safe`` or ``peer``; there is no log before ``open``."""
        self.logs: list[ClaimLog] = []
        self.peers: list[ClaimLog] = []
        self.clients: dict[tuple[str, str], ClientClock] = {}
        self.reasons: Counter[str] = Counter()
        self.other_intervals: dict[tuple[str, str], int] = {}
        self._rules = rules
        self._has_broker_time = has_broker_time
        self._interval_ms = interval_ms

    @property
    def bad_records(self) -> int:
        return sum(log.malformed + log.impossible for log in self.logs)

    def open(self, since_s: float | None) -> None:
        interval_s = self._interval_ms / 1000
        if self._has_broker_time:
            self.logs.append(ClaimLog("safe", interval_s, since_s=since_s))
        else:
            self.logs.append(ClaimLog("peer", interval_s))
        if self._rules == "peer":
            self.peers.append(ClaimLog("peer", interval_s))

    def apply(self, message: Record, number: int, at: int, time_ms: int) -> MarshalRecord | None:
        """Fold one record; None: it could not be decoded."""
        record = None
        try:
            record = decode_value(message.value())
        except WireError as error:
            self.reasons[error.reason] += 1
        observed_s, time_s = time.time(), time_ms / 1000
        self.logs[number].apply(record, offset=at, observed_at_s=observed_s, broker_time_s=time_s)
        if self.peers:
            peer = self.peers[number]
            peer.apply(record, offset=at, observed_at_s=observed_s, broker_time_s=time_s)
        if record is not None:
            self._meet(record, time_ms, message)
        return record

    def check_intervals(self, group: str) -> None:
        """Refuse a group whose members do not agree on the interval."""
        for (of_group, client), other_ms in self.other_intervals.items():
            if of_group == group:
                raise ConfigError(
                    f"heartbeat_interval is {self._interval_ms / 1000:g} s here and"
                    f" {other_ms / 1000:g} s for client {client} of group {group}: all clients of"
                    " a coordination topic must agree, or claims end too early; use another"
                    " coordination topic for another interval"
                )

    def _meet(self, record: MarshalRecord, broker_ms: int, message: Record) -> None:
        key = (record.group, record.client)
        client = self.clients.get(key)
        if client is None:
            if len(self.clients) >= _MAX_CLIENTS:
                self.clients.pop(next(iter(self.clients)))
            client = self.clients[key] = ClientClock()
        client.skew_s = record.time_s - broker_ms / 1000
        client.records += 1
        if record.instance == client.instance:
            return
        client.instance = record.instance
        client.interval_ms = interval_ms = interval_of(message)
        is_member = record.type is not MarshalType.RELEASE_GROUP
        if interval_ms and interval_ms != self._interval_ms and is_member:
            self.other_intervals[key] = interval_ms


class Engine(LogEngine):
    """Runs the claimants of one cluster object."""

    def __init__(
        self, config: ServiceConfig, topic: CoordinationTopic, *, rules: str, interval_ms: int
    ) -> None:
        super().__init__(config, topic, interval_ms=interval_ms, owner="Cluster")
        self.log = CoordinationLog(
            rules=rules, has_broker_time=topic.has_broker_time, interval_ms=interval_ms
        )
        self.stats = Stats()
        self._offsets: dict[str, OffsetService] = {}
        self._sessions: dict[ClaimSession, None] = {}
        self._dirty: dict[ClaimSession, None] = {}
        self._by_place: dict[tuple[str, str, int], ClaimSession] = {}
        self._tickers: list[Ticker] = []
        self._overdue: dict[tuple[ClaimSession, int], tuple[int, Write]] = {}

    def services(self) -> list[Callable[[float], object]]:
        return [service.close for service in self._offsets.values()]

    # ---- what members use, under the lock

    def partition_of(self, topic: str) -> int:
        return coordination_partition(topic, self.topic.partitions)

    def offsets_of(self, group: str) -> OffsetService:
        """Get the group's offsets; the first call makes a client and threads, and takes a while."""
        if group not in self._offsets:
            self._offsets[group] = OffsetService(self, group)
        return self._offsets[group]

    def attempt(
        self, config: ClaimantConfig, listener: Listener, *, is_fenced: bool
    ) -> ClaimSession:
        """Return a claimant that has written nothing yet."""
        number = self.partition_of(config.topic)
        peers = self.log.peers[number] if self.log.peers else None
        claimant = Claimant(self.log.logs[number], config, peers=peers)
        fence = None
        if is_fenced:
            fence = self.offsets_of(config.group).fence(config.topic, config.partition)
        return ClaimSession(claimant, number, listener, fence)

    def add(self, session: ClaimSession) -> None:
        config = session.claimant.config
        self._sessions[session] = None
        self._by_place[config.group, config.topic, config.partition] = session
        self.drive(session)

    def held_ages(self) -> dict[tuple[str, ...], float]:
        """Get seconds since the last heartbeat of what is held, by group, topic and partition."""
        with self.lock:
            now_s = self.clock.now_s()
            found: dict[tuple[str, ...], float] = {}
            for (group, topic, partition), session in self._by_place.items():
                if session.start is not None:
                    log = self.log.logs[session.coordination_partition]
                    claim = log.claim(group, topic, partition, now_s=now_s)
                    found[group, topic, str(partition)] = max(0.0, claim.age_s)
            return found

    def add_ticker(self, ticker: Ticker) -> None:
        """Call it at every turn, with the lease clock and the broker's time."""
        self._tickers.append(ticker)

    def remove_ticker(self, ticker: Ticker) -> None:
        if ticker in self._tickers:
            self._tickers.remove(ticker)

    def drive(self, session: ClaimSession) -> None:
        self._dirty.pop(session, None)
        claimant = session.claimant
        steps = claimant.plan(
            monotonic_ms(), self.clock.now_s(), random_unit=random.random(), wall_s=time.time()
        )
        for step in steps:
            self.perform(session, step)
        if self.stats.lateness_ms != claimant.lateness_ms:
            self.stats.lateness_ms = claimant.lateness_ms
            self.stats.max_lateness_ms = max(self.stats.max_lateness_ms, claimant.lateness_ms)
        wake_ms = claimant.wake_ms()
        session.wake_ms = NEVER_MS if wake_ms is None else wake_ms

    def perform(self, session: ClaimSession, step: Step) -> None:
        if isinstance(step, Write):
            self._write(session, step)
        elif isinstance(step, LookUp):
            self._service_of(session).lookups.put(session)
        elif isinstance(step, Fetch):
            session.start = step
            self.stats.won += 1
            self.stats.takeovers += session.is_takeover
            session.listener.on_fetch(session, step)
        elif isinstance(step, HandOut):
            session.listener.on_hand_out(session, step)
        elif isinstance(step, Stop):
            self.stats.lost += step.is_lost
            session.listener.on_stop(session, step)
        else:
            self._finish(session, step)
        self.changed.notify_all()

    def send(self, partition: int, record: MarshalRecord, report: Callable[[int], None]) -> None:
        """Append a record; ``report`` is called with its offset, or -1 when that is not known."""
        self.append(partition, encode_value(record), report)

    def on_failure(self) -> None:
        for session in list(self._sessions):
            session.listener.on_stop(session, Stop(End.UNCERTAIN, is_lost=True))
            self._finish(session, Finish(End.UNCERTAIN, session.claimant.position))

    # ---- the thread

    def open_log(self, partition: int, since_s: float | None) -> None:
        self.log.open(since_s)

    def fold(self, message: Record, partition: int, offset: int, broker_ms: int) -> None:
        record = self.log.apply(message, partition, offset, broker_ms)
        if record is None:
            return
        if not record.topic:
            group = record.group
            self._dirty |= {t: None for t in self._sessions if t.claimant.config.group == group}
            return
        session = self._by_place.get((record.group, record.topic, record.partition))
        if session is not None:
            self._dirty[session] = None

    def turn(self, now_ms: int) -> None:
        # Heartbeats do not wait forever for offsets that are committed as well.
        late = [key for key, (due_ms, _) in self._overdue.items() if due_ms <= now_ms]
        for session, ticket in late:
            self._after_commit(session, self._overdue[session, ticket][1], is_committed=False)
        due = [t for t in self._sessions if t in self._dirty or t.wake_ms <= now_ms]
        for session in due:
            if session in self._sessions:
                self.drive(session)
        if self.is_ready:
            for ticker in list(self._tickers):
                ticker(now_ms, self.clock.now_s())

    def _service_of(self, session: ClaimSession) -> OffsetService:
        return self._offsets[session.claimant.config.group]

    # ---- writing

    def _write(self, session: ClaimSession, step: Write) -> None:
        if step.commit_offset < 0 and not session.open_commits:
            self._produce(session, step)
            return
        session.open_commits += 1
        if not step.must_commit:
            patience_ms = min(2000, session.claimant.config.lease_ms // 4)
            self._overdue[session, step.ticket] = (monotonic_ms() + patience_ms, step)
        self._service_of(session).commits.put((session, step))

    def _after_commit(self, session: ClaimSession, step: Write, *, is_committed: bool) -> None:
        key = (session, step.ticket)
        if not step.must_commit and self._overdue.pop(key, None) is None:
            return
        session.open_commits -= 1
        if is_committed or not step.must_commit:
            self._produce(session, step)
        else:
            session.claimant.on_failed(step.ticket, monotonic_ms())
        if session.fence is not None and not session.fence.is_usable:
            session.claimant.release(monotonic_ms(), reason=End.FENCED)
        self.plan_soon(session)

    def _produce(self, session: ClaimSession, step: Write) -> None:
        def report(offset: int) -> None:
            if offset < 0:
                session.claimant.on_failed(step.ticket, monotonic_ms())
            else:
                session.claimant.on_written(step.ticket, offset)
            self.plan_soon(session)

        self.send(session.coordination_partition, step.record, report)

    def plan_soon(self, session: ClaimSession) -> None:
        if session in self._sessions:
            # A change of positions drives its own sessions.
            self._dirty[session] = None

    # ---- answers of the offset service, from its threads

    def found(self, session: ClaimSession, earliest: int, latest: int, committed: int) -> None:
        with self.lock:
            session.listener.on_offsets(session, earliest, latest, committed)
            self._drive_if_ours(session)

    def not_found(self, session: ClaimSession) -> None:
        with self.lock:
            session.claimant.on_lookup_failed(monotonic_ms())
            self._drive_if_ours(session)

    def committed(self, session: ClaimSession, step: Write, is_committed: bool) -> None:
        with self.lock:
            self._after_commit(session, step, is_committed=is_committed)
            self._drive_if_ours(session)

    def _drive_if_ours(self, session: ClaimSession) -> None:
        if session in self._sessions:
            self.drive(session)
        else:
            self._dirty.pop(session, None)

    def _finish(self, session: ClaimSession, step: Finish) -> None:
        config = session.claimant.config
        self._sessions.pop(session, None)
        self._dirty.pop(session, None)
        self.stats.ended[step.reason] = self.stats.ended.get(step.reason, 0) + 1
        key = (config.group, config.topic, config.partition)
        if self._by_place.get(key) is session:
            del self._by_place[key]
        if session.fence is not None:
            self._service_of(session).end(session.fence)
        session.listener.on_finish(session, step)
