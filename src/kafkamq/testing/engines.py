"""Simulated tracker engines: the real redelivery core, with transactions that can break anywhere.

`LocalEngine` folds continuously, as the in-process tracker does; `BatchEngine` works in numbered
batches with its state in a checkpoint, as the Spark job does: a batch whose task fails is repeated,
a query that died begins again behind its last committed batch. Both take partitions over as R22
says, and plan nothing before they have read their own TICK (R17).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kafkamq.errors import FencedError, KafkaMQError, WireError
from kafkamq.markers.rules.delivery import Carry, Settle
from kafkamq.markers.rules.entry import NEVER
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.rules.ticks import TickPolicy
from kafkamq.markers.wire.ledger import Position, decode_position, encode_position
from kafkamq.markers.wire.markers import decode_slim, encode_tick
from kafkamq.testing.agreement import StateStore
from kafkamq.testing.rewriting import Produced, Rewriter
from kafkamq.testing.workers import Topics
from kafkamq.testing.world import Network, Process, Thread, Ticket, wait
from kafkamq.transport.memory import Committed, LogRecord, TransactionalProducer
from kafkamq.types import Marker

__all__ = ["BatchEngine", "Checkpoint", "EngineSettings", "LocalEngine"]

_TRANSACTION_MS = 10_000
_STOP = "LATER_START"
_ATTEMPTS = 4
_MAX_LOOSE = 3  # entries that are kept as objects: few, so that others are packed
_Steps = Generator["int | Ticket[object]", None, None]
_Answer = Generator["int | Ticket[object]", None, "Position | None"]
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How engines run."""

    max_deliveries: int = 5
    max_lease_ms: int = 43_200_000
    carry_after_ms: int = NEVER
    max_actions: int = 50_000  # R16: of one transaction
    poll_ms: int = 100
    position_interval_ms: int = 10_000
    task_failure_rate: float = 0.0


class _UnknownOutcomeError(KafkaMQError):
    """Whether the transaction was committed is not known (R15)."""


class _Ledger:
    """One marker partition's transactional id, as an engine's process has it (R22)."""

    def __init__(self, engine: _Engine, partition: int) -> None:
        self.engine = engine
        self.partition = partition
        topic = engine.topics.markers
        self.name = f"kafkamq.{topic}.{partition}"
        self.place = (topic, partition)
        self.last: Position | None = None
        self.producer: TransactionalProducer = engine.network.kafka.producer(
            self.name, transaction_timeout_ms=_TRANSACTION_MS
        )

    def open(self) -> _Answer:
        """Fence predecessors, read what they left.

        Raises:
            FencedError: a later start owns it (code LATER_START).
        """
        yield from self._call(self.producer.init)
        kafka = self.engine.network.kafka
        committed = yield from wait(self._request(partial(kafka.committed, self.name, *self.place)))
        self.last = decode_position(committed.metadata) if committed is not None else None
        if self.last is not None and self.last.epoch > self.engine.epoch > 0:
            raise FencedError("a later engine took over", code=_STOP)
        return self.last

    def write(self, records: Sequence[Produced], position: Position) -> _Steps:
        """One transaction (R15).

        Raises:
            FencedError: somebody else opened the ledger; nothing of it happened.
            _UnknownOutcomeError: the commit was not answered.
            BrokerError: it did not happen.
        """
        yield from self._call(self.producer.begin)
        tickets = []
        for record in records:
            tickets.append(self._request(partial(self.producer.produce, *record)))
            yield 0
        for ticket in tickets:
            yield from wait(ticket)
        committed = Committed(position.position, encode_position(position))
        yield from self._call(
            partial(self.producer.send_offsets, self.name, {self.place: committed})
        )
        try:
            yield from self._call(self.producer.commit)
        except FencedError:
            raise
        except KafkaMQError as error:
            raise _UnknownOutcomeError(str(error)) from error
        self.last = position

    def _call(self, call: Callable[[], object]) -> _Steps:
        yield from wait(self._request(call))

    def _request(self, call: Callable[[], _Result]) -> Ticket[_Result]:
        return self.engine.network.request(
            f"{self.engine.process.name}.{self.partition}", self.place, call
        )


class _Engine:
    """What both engines have in common."""

    def __init__(
        self, network: Network, topics: Topics, settings: EngineSettings, name: str, engine_id: str
    ) -> None:
        self.network = network
        self.topics = topics
        self.settings = settings
        self.engine_id = engine_id
        self.process = Process(network.world, name)
        self.epoch = 0
        self.is_over = False  # another engine took over, for good
        self.ledgers: list[_Ledger] = []
        self._rewriter = Rewriter(network.kafka, topics, network.world.rng, settings.max_deliveries)
        self.process.spawn(self._run())

    def _run(self) -> Thread:
        while not self.is_over:
            try:
                yield from self._take_over()
                yield from self._work()
            except FencedError as error:
                self.is_over = error.code == _STOP
            except KafkaMQError:
                pass  # start again: what is known of the log is not enough any more (R15, R17)
            yield self.network.world.rng.randint(50, 500)

    def _work(self) -> _Steps:
        raise NotImplementedError

    # ---- starting (R22)

    def _take_over(self) -> _Steps:
        count = self.network.kafka.partition_count(self.topics.markers)
        self.ledgers = [_Ledger(self, number) for number in range(count)]
        for ledger in self.ledgers:
            while True:
                found = yield from ledger.open()
                if ledger.partition == 0:
                    self.epoch = (0 if found is None else found.epoch) + 1
                start = 0 if found is None else found.position
                own = Position(position=start, epoch=self.epoch, engine=self.engine_id)
                try:
                    yield from ledger.write((), own)
                    break
                except FencedError:  # another start at the same time: one of the two must wait
                    yield self.network.world.rng.randint(0, 2000)

    def _append_tick(self, partition: int, policy: TickPolicy | None) -> Thread:
        kafka, place = self.network.kafka, (self.topics.markers, partition)
        value = encode_tick(self.engine_id, self.epoch)
        call = partial(kafka.append, *place, None, value)
        try:
            record = yield from wait(self.network.request(self.process.name, place, call))
        except KafkaMQError:
            if policy is None:
                raise
            policy.on_failed()
            return
        if policy is not None:
            policy.on_delivered(record.offset)

    # ---- settling (R14, R15, R18, R19)

    def _perform(
        self, ledger: _Ledger, actions: Sequence[Settle | Carry], position: int, batch: int
    ) -> _Steps:
        """All rows that the ledger does not hold yet, some in each transaction (R16).

        Raises as ``_Ledger.write``; ``rows_done`` says how far it came.
        """
        done = self._rows_done(ledger, batch)
        while True:
            part = actions[done : done + self.settings.max_actions]
            records = [
                one for action in part for one in self._rewriter.rewrite(ledger.partition, action)
            ]
            done += len(part)
            written = Position(
                position=position,
                epoch=self.epoch,
                batch=batch,
                rows_done=done,
                engine=self.engine_id,
            )
            yield from ledger.write(records, written)
            if done >= len(actions):
                return

    def _rows_done(self, ledger: _Ledger, batch: int) -> int:
        last = ledger.last
        if last is None or (last.engine, last.epoch) != (self.engine_id, self.epoch):
            return 0
        return last.rows_done if last.batch == batch else 0

    def _fold(self, tracker: RedeliveryTracker, records: Sequence[LogRecord]) -> None:
        for record in records:
            marker: Marker | None
            try:
                marker = decode_slim(record.value)
            except WireError:
                marker = None
            tracker.apply(record.offset, record.timestamp_ms, marker)


class LocalEngine(_Engine):
    """Folds continuously; begins again at the committed position (R20)."""

    def _work(self) -> _Steps:
        kafka, settings, world = self.network.kafka, self.settings, self.network.world
        trackers = []
        policies = []
        reads = []
        written_ms = [world.now_ms] * len(self.ledgers)
        for ledger in self.ledgers:
            position = 0 if ledger.last is None else ledger.last.position
            trackers.append(
                RedeliveryTracker(
                    position,
                    partition=ledger.partition,
                    max_lease_ms=settings.max_lease_ms,
                    carry_after_ms=settings.carry_after_ms,
                    engine=(self.engine_id, self.epoch),
                    max_loose=_MAX_LOOSE,
                )
            )
            reads.append(position)
            policies.append(TickPolicy(world.now_ms))
            policies[-1].on_sent(world.now_ms)
            self.process.spawn(self._append_tick(ledger.partition, policies[-1]))
        batch = 0
        while True:
            yield world.rng.randint(1, settings.poll_ms)
            for ledger, tracker, policy in zip(self.ledgers, trackers, policies, strict=True):
                number = ledger.partition
                if not self.network.is_up(ledger.place):
                    continue
                records, reads[number] = kafka.read(*ledger.place, reads[number], 1000)
                self._fold(tracker, records)
                policy.on_read(world.now_ms, tracker.next_offset)
                if policy.wants_tick(world.now_ms, tracker.clock_ms, tracker.next_wake()):
                    policy.on_sent(world.now_ms)
                    self.process.spawn(self._append_tick(number, policy))
                is_position_due = (
                    tracker.is_live
                    and world.now_ms - written_ms[number] > settings.position_interval_ms
                )
                actions = tracker.plan()
                if actions or is_position_due:
                    batch += 1
                    yield from self._settle(ledger, tracker, actions, batch)
                    written_ms[number] = world.now_ms

    def _settle(
        self,
        ledger: _Ledger,
        tracker: RedeliveryTracker,
        actions: Sequence[Settle | Carry],
        batch: int,
    ) -> _Steps:
        position = tracker.committable_offset()
        try:
            yield from self._perform(ledger, actions, position, batch)
        except (FencedError, _UnknownOutcomeError):
            raise
        except KafkaMQError:
            yield from ledger.open()  # aborts what was begun: now it is known not to be done
            tracker.aborted(actions[self._rows_done(ledger, batch) :])


@dataclass
class Checkpoint:
    """What a batch engine keeps on its disk."""

    ranges: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    states: dict[int, dict[int, StateStore]] = field(default_factory=dict)  # batch, partition
    committed: int = -1
    first_offsets: dict[int, int] = field(default_factory=dict)


class _TaskFailedError(KafkaMQError):
    """A task died and is repeated, perhaps elsewhere."""


class BatchEngine(_Engine):
    """Works in batches; its state is that of a checkpoint (R18)."""

    def __init__(
        self,
        network: Network,
        topics: Topics,
        settings: EngineSettings,
        name: str,
        engine_id: str,
        checkpoint: Checkpoint,
    ) -> None:
        self.checkpoint = checkpoint
        self._positions_ms: dict[int, int] = {}
        self._statuses: dict[int, RedeliveryTracker] = {}
        super().__init__(network, topics, settings, name, engine_id)

    def _work(self) -> _Steps:
        world, checkpoint = self.network.world, self.checkpoint
        policies = {}
        for ledger in self.ledgers:
            number = ledger.partition
            position = 0 if ledger.last is None else ledger.last.position
            checkpoint.first_offsets.setdefault(number, position)
            policies[number] = TickPolicy(world.now_ms, lead_ms=self.settings.poll_ms)
            yield from self._append_tick(number, None)
        self._statuses.clear()
        while True:
            yield world.rng.randint(1, 10 * self.settings.poll_ms)
            batch = checkpoint.committed + 1
            if batch not in checkpoint.ranges:
                ranges = self._next_ranges(batch)
                if not any(begin < end for begin, end in ranges.values()):
                    self._tick(policies)
                    continue
                checkpoint.ranges[batch] = ranges
                yield 0
            for ledger in self.ledgers:
                yield from self._retry_task(ledger, batch)
            checkpoint.committed = batch
            checkpoint.states.pop(batch - 2, None)
            for number, tracker in self._statuses.items():
                policies[number].on_read(world.now_ms, tracker.next_offset)
            yield 0
            self._tick(policies)

    def _next_ranges(self, batch: int) -> dict[int, tuple[int, int]]:
        ranges = {}
        before = self.checkpoint.ranges.get(batch - 1, {})
        for ledger in self.ledgers:
            number = ledger.partition
            begin = before.get(number, (0, self.checkpoint.first_offsets[number]))[1]
            end = begin
            if self.network.is_up(ledger.place):
                end = max(begin, self.network.kafka.stable_offset(*ledger.place))
            ranges[number] = (begin, end)
        return ranges

    def _tick(self, policies: dict[int, TickPolicy]) -> None:
        world = self.network.world
        for number, policy in policies.items():
            tracker = self._statuses.get(number)
            if tracker is not None and policy.wants_tick(
                world.now_ms, tracker.clock_ms, tracker.next_wake()
            ):
                policy.on_sent(world.now_ms)
                self.process.spawn(self._append_tick(number, policy))

    def _retry_task(self, ledger: _Ledger, batch: int) -> _Steps:
        for attempt in range(_ATTEMPTS):
            is_done = yield from self._attempt(ledger, batch, is_first=attempt == 0)
            if is_done:
                return
            yield 100
        raise _TaskFailedError(f"batch {batch} of partition {ledger.partition}")

    def _attempt(
        self, ledger: _Ledger, batch: int, *, is_first: bool
    ) -> Generator[int | Ticket[object], None, bool]:
        try:
            if not is_first:
                yield from ledger.open()
            yield from self._task(ledger, batch)
        except FencedError as error:
            if error.code == _STOP:
                raise
            return False
        except KafkaMQError:
            return False
        return True

    def _task(self, ledger: _Ledger, batch: int) -> _Steps:
        """Fold the partition's records of a batch, keep the state, settle: in Spark's order."""
        number, settings = ledger.partition, self.settings
        begin, end = self.checkpoint.ranges[batch][number]
        records, _ = self.network.kafka.read(*ledger.place, begin)
        before = self.checkpoint.states.get(batch - 1, {}).get(number)
        store = StateStore() if before is None else copy.deepcopy(before)
        if before is None:
            store.save(RedeliveryTracker(begin, partition=number))
        tracker = store.restore(
            partition=number,
            max_lease_ms=settings.max_lease_ms,
            carry_after_ms=settings.carry_after_ms,
            engine=(self.engine_id, self.epoch),
        )
        self._fold(tracker, [record for record in records if record.offset < end])
        tracker.next_offset = end
        actions = tracker.plan(3 * settings.max_actions)
        position = tracker.committable_offset()
        store.save(tracker)
        yield 0
        self.checkpoint.states.setdefault(batch, {})[number] = store
        yield 0
        self._statuses[number] = tracker
        self._maybe_fail()
        now_ms = self.network.world.now_ms
        written_ms = self._positions_ms.setdefault(number, now_ms)
        last = ledger.last
        if last is not None and self._is_own(last) and last.batch > batch:
            return
        if actions or now_ms - written_ms > settings.position_interval_ms:
            yield from self._perform(ledger, actions, position, batch)
            self._positions_ms[number] = now_ms
            self._maybe_fail()

    def _is_own(self, last: Position) -> bool:
        return (last.engine, last.epoch) == (self.engine_id, self.epoch)

    def _maybe_fail(self) -> None:
        if self.network.world.chance(self.settings.task_failure_rate):
            raise _TaskFailedError("a task was lost")
