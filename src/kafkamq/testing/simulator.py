"""A seeded simulation of a whole namespace: senders, workers, tracker engines, and what goes wrong.

Each seed draws its own limits and fault rates: how many workers, partitions and messages, how often
a process dies or stands still, how long Kafka cannot be reached, how its clock steps, which engines
start when. Then the faults stop, and everything must settle. The verdict comes from the logs alone
(``kafkamq.testing.checker``)::

    simulation = simulate(seed=7)
    simulation.verdict().require_ok(simulation.label)
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from kafkamq.errors import KafkaMQError
from kafkamq.markers.rules.entry import NEVER
from kafkamq.markers.wire.markers import decode_marker, encode_end, encode_schedule
from kafkamq.queue.wire.headers import message_headers
from kafkamq.queue.wire.keys import join_key
from kafkamq.queue.wire.partitions import marker_key
from kafkamq.testing.checker import Place, Verdict, check_logs
from kafkamq.testing.engines import BatchEngine, Checkpoint, EngineSettings, LocalEngine
from kafkamq.testing.workers import (
    Behaviour,
    Group,
    ToldAck,
    Topics,
    Worker,
    WorkerSettings,
    payload_of,
)
from kafkamq.testing.world import Faults, Network, Process, Thread, Ticket, World, wait
from kafkamq.transport.memory import LogRecord, MemoryKafka
from kafkamq.types import Headers, MarkerType, MessageId, Outcome

__all__ = ["Limits", "Simulation", "draw_limits", "simulate"]

_ENDING = (Outcome.ACK, Outcome.REDELIVERED, Outcome.DEAD_LETTERED)
_SETTLE_MS = 1_800_000  # of simulated time; a poison message needs its deliveries


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a seed draws; give your own to ``simulate`` to look at one situation."""

    faults: Faults = field(default_factory=Faults)
    chaos_ms: int = 60_000  # while faults happen
    partitions: int = 2
    marker_partitions: int = 2
    workers: int = 2
    messages: int = 40
    delayed_share: float = 0.1
    cancelled_share: float = 0.3  # of the delayed ones
    ttl_share: float = 0.0
    behaviours: tuple[tuple[Behaviour, float], ...] = ((Behaviour.QUICK, 1.0),)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    engine_starts: int = 1  # in all; the later ones take over
    batch_share: float = 0.5  # of engines that work in batches, as on Spark
    outages: int = 0
    max_outage_ms: int = 20_000
    clock_steps: int = 0
    restart_ms: int = 3000  # until a dead process is started again
    close_share: float = 0.0  # of workers that are closed and replaced in between


def draw_limits(seed: int) -> Limits:
    """What a seed is like."""
    rng = random.Random(f"limits {seed}")
    calm = rng.random() < 0.15
    timeout_ms = rng.choice((1000, 3000, 3000, 10_000))
    carry_after_ms = rng.choice((NEVER, 5000, 20_000))
    behaviours = tuple((behaviour, rng.choice((0.0, 0.0, 0.03, 0.1))) for behaviour in _UNUSUAL)
    return Limits(
        faults=Faults(
            crash_rate=0.0 if calm else rng.choice((0.0, 0.0002, 0.002)),
            pause_rate=0.0 if calm else rng.choice((0.0, 0.0005, 0.003)),
            max_pause_ms=rng.choice((timeout_ms, 5 * timeout_ms, 90_000)),
            lost_reply_rate=0.0 if calm else rng.choice((0.0, 0.001, 0.02)),
            zombie_rate=rng.choice((0.0, 0.5, 1.0)),
            latency_ms=rng.choice((2, 20, 200)),
        ),
        chaos_ms=rng.choice((20_000, 60_000, 120_000)),
        partitions=rng.randint(1, 4),
        marker_partitions=rng.randint(1, 3),
        workers=rng.randint(1, 4),
        messages=rng.choice((5, 30, 80)),
        delayed_share=rng.choice((0.0, 0.1, 0.5)),
        ttl_share=rng.choice((0.0, 0.1)),
        behaviours=((Behaviour.QUICK, 1.0), *behaviours),
        worker=WorkerSettings(
            redelivery_timeout_ms=timeout_ms,
            max_deliveries=rng.choice((1, 2, 3, 5)),
            max_lease_ms=rng.choice((2 * timeout_ms, 60_000)),
            batch=rng.choice((1, 5, 20)),
            handlers=rng.randint(1, 6),
            max_in_flight=rng.choice((1, 10, 50)),
            poll_ms=rng.choice((20, 300)),
            max_inline_payload_bytes=rng.choice((0, 1 << 16)),
        ),
        engine=EngineSettings(
            carry_after_ms=carry_after_ms,
            max_actions=rng.choice((1, 3, 50_000)),
            poll_ms=rng.choice((20, 300)),
            task_failure_rate=0.0 if calm else rng.choice((0.0, 0.05)),
        ),
        engine_starts=1 if calm else rng.randint(1, 5),
        batch_share=rng.choice((0.0, 0.5, 1.0)),
        outages=0 if calm else rng.choice((0, 1, 4)),
        max_outage_ms=rng.choice((2000, 20_000, 45_000)),
        clock_steps=0 if calm else rng.choice((0, 0, 1, 4)),
        close_share=rng.choice((0.0, 0.3)),
    )


_UNUSUAL = (
    Behaviour.SLOW,
    Behaviour.NACKS,
    Behaviour.REJECTS,
    Behaviour.POISON,
    Behaviour.HANGS,
)


@dataclass
class Simulation:
    """A run: the logs, and what happened."""

    seed: int
    limits: Limits
    topics: Topics
    kafka: MemoryKafka
    confirmed: list[Place] = field(default_factory=list)
    deaths: int = 0
    engines: int = 0
    workers: int = 0
    acks: list[ToldAck] = field(default_factory=list)
    settled_ms: int = -1  # simulated time; -1: it did not settle

    @property
    def label(self) -> str:
        """For error texts."""
        return f"seed {self.seed}: "

    def records(self, topic: str) -> list[LogRecord]:
        """All committed records of a topic."""
        return list(self.kafka.records(topic))

    def verdict(self) -> Verdict:
        """What the logs say."""
        engine = self.limits.engine
        return check_logs(
            messages=self.kafka.records(self.topics.messages),
            markers=self.kafka.records(self.topics.markers),
            dead_letters=self.kafka.records(self.topics.dead_letters),
            confirmed=self.confirmed,
            max_deliveries=engine.max_deliveries,
            max_lease_ms=engine.max_lease_ms,
        )


class _Run:
    """The stage: starts processes, breaks things, waits for the end."""

    def __init__(self, seed: int, limits: Limits) -> None:
        self.limits = limits
        self.world = World(seed)
        self.world.faults = limits.faults
        kafka = MemoryKafka()
        self.network = Network(self.world, kafka)
        topics = Topics()
        kafka.create_topic(topics.messages, limits.partitions)
        kafka.create_topic(topics.markers, limits.marker_partitions)
        kafka.create_topic(topics.dead_letters)
        self.simulation = Simulation(seed, limits, topics, kafka)
        self.group = Group(self.world, kafka, topics.messages, "workers")
        self.checkpoint = Checkpoint()
        self.is_chaos = True
        self.live_workers: list[Worker] = []
        self.live_engines: list[LocalEngine | BatchEngine] = []
        self.send_process = Process(self.world, "sender", is_safe=True)
        self.is_sent = False
        self._log = _Progress(kafka, topics)

    def run(self) -> Simulation:
        limits, world, rng = self.limits, self.world, self.world.rng
        chaos_ms = limits.chaos_ms
        self.send_process.spawn(self._send())
        for _ in range(limits.workers):
            world.at(rng.randint(0, 2000), self._start_worker)
        world.at(0, self._start_engine)
        for _ in range(limits.engine_starts - 1):
            world.at(rng.randint(0, chaos_ms), self._start_engine)
        for _ in range(limits.outages):
            begin_ms = rng.randint(0, chaos_ms)
            places = [(self.simulation.topics.markers, p) for p in range(limits.marker_partitions)]
            place = rng.choice((None, *places))
            length_ms = rng.randint(1, limits.max_outage_ms)
            self.network.add_outage(begin_ms, begin_ms + length_ms, place)
        for _ in range(limits.clock_steps):
            step_ms = rng.choice((-3_600_000, -5000, -1, 700, 5000, 3_600_000))
            world.at(rng.randint(0, chaos_ms), partial(self._step_clock, step_ms))
        for _ in range(round(limits.workers * limits.close_share)):
            world.at(rng.randint(0, chaos_ms), self._close_worker)
        world.run(chaos_ms)
        self._end_chaos()
        while world.now_ms < chaos_ms + _SETTLE_MS:
            world.run(world.now_ms + 2000)
            self.network.sync_clock()
            if self.is_sent and self._log.is_settled():
                self.simulation.settled_ms = world.now_ms
                # What comes back from the dead now would be seen, too.
                world.run(world.now_ms + 4 * limits.worker.redelivery_timeout_ms)
                if self._log.is_settled() and not self.simulation.verdict().lost:
                    break  # an END may be there and too late: so the verdict is asked as well
        for worker in self.live_workers:
            self.simulation.acks += worker.acks
        return self.simulation

    # ---- processes

    def _start_worker(self) -> None:
        simulation = self.simulation
        simulation.workers += 1
        name = f"w{simulation.workers}"
        worker = Worker(self.network, simulation.topics, self.group, self.limits.worker, name)
        worker.process.on_death = partial(self._worker_died, worker)
        self.live_workers.append(worker)

    def _worker_died(self, worker: Worker) -> None:
        simulation = self.simulation
        self.live_workers.remove(worker)
        simulation.acks += worker.acks
        simulation.deaths += not worker.is_closed
        self.world.at(
            self.world.now_ms + self.world.rng.randint(0, self.limits.restart_ms),
            self._start_worker,
        )

    def _close_worker(self) -> None:
        if self.live_workers:
            self.world.rng.choice(self.live_workers).is_closing = True

    def _start_engine(self) -> None:
        simulation, settings = self.simulation, self.limits.engine
        simulation.engines += 1
        name = f"e{simulation.engines}"
        if self.world.chance(self.limits.batch_share):
            older = [one for one in self.live_engines if isinstance(one, BatchEngine)]
            for one in older:  # one query on one checkpoint
                one.process.on_death = None
                one.process.die()
                self.live_engines.remove(one)
            engine: LocalEngine | BatchEngine = BatchEngine(
                self.network, simulation.topics, settings, name, "batches", self.checkpoint
            )
        else:
            engine = LocalEngine(self.network, simulation.topics, settings, name, name)
        engine.process.on_death = partial(self._engine_died, engine)
        self.live_engines.append(engine)

    def _engine_died(self, engine: LocalEngine | BatchEngine) -> None:
        self.live_engines.remove(engine)
        self.simulation.deaths += 1
        self.world.at(
            self.world.now_ms + self.world.rng.randint(0, self.limits.restart_ms),
            self._start_engine,
        )

    def _step_clock(self, step_ms: int) -> None:
        self.network.skew_ms += step_ms

    def _end_chaos(self) -> None:
        """No new faults; what they left behind still happens."""
        faults = self.limits.faults
        self.world.faults = Faults(latency_ms=faults.latency_ms)
        self.limits = replace(self.limits, restart_ms=500)
        if all(engine.is_over for engine in self.live_engines):
            self._start_engine()

    # ---- messages

    def _send(self) -> Thread:
        limits, rng = self.limits, self.world.rng
        pause_ms = max(1, limits.chaos_ms // (2 * max(1, limits.messages)))
        for number in range(limits.messages):
            yield rng.randint(0, 2 * pause_ms)
            payload = payload_of(self._behaviour(), number)
            ttl_ms = 20_000 if rng.random() < limits.ttl_share else None
            headers = message_headers((("n", b"%d" % number),), id=f"m{number}", ttl_ms=ttl_ms)
            key = join_key(limits.worker.queue_id)
            try:
                if rng.random() < limits.delayed_share:
                    yield from self._schedule(key, payload, headers)
                else:
                    place = (self.simulation.topics.messages, rng.randrange(limits.partitions))
                    call = partial(self.network.kafka.append, *place, key, payload, headers)
                    record = yield from wait(self.network.request("sender", place, call))
                    self.simulation.confirmed.append((*place, record.offset))
            except KafkaMQError:
                continue  # the sender does not know; what is in the log counts
        self.is_sent = True

    def _behaviour(self) -> Behaviour:
        behaviours = [behaviour for behaviour, _ in self.limits.behaviours]
        weights = [weight for _, weight in self.limits.behaviours]
        return self.world.rng.choices(behaviours, weights)[0]

    def _schedule(
        self, key: bytes, payload: bytes, headers: Headers
    ) -> Generator[int | Ticket[object], None, None]:
        rng, kafka = self.world.rng, self.network.kafka
        delay_ms = rng.randint(0, self.limits.chaos_ms)
        number = rng.randrange(self.limits.marker_partitions)
        place = (self.simulation.topics.markers, number)
        value = encode_schedule(key, payload, redeliver_after_ms=delay_ms, headers=headers)
        call = partial(kafka.append, *place, None, value)
        record = yield from wait(self.network.request("sender", place, call))
        self.simulation.confirmed.append((*place, record.offset))
        if rng.random() < self.limits.cancelled_share:
            yield rng.randint(0, 5000)
            first = MessageId(number, record.offset)
            end = encode_end(first, Outcome.ACK, of_schedule=True)
            call = partial(kafka.append, *place, marker_key(number, record.offset), end)
            yield from wait(self.network.request("sender", place, call))


class _Progress:
    """Reads along what was ended, to know when nothing is left to do."""

    def __init__(self, kafka: MemoryKafka, topics: Topics) -> None:
        self._kafka = kafka
        self._topics = topics
        self._open: set[tuple[bool, int, int]] = set()
        self._ended: set[tuple[bool, int, int]] = set()
        self._positions: dict[tuple[str, int], int] = {}

    def is_settled(self) -> bool:
        """Whether every message and every SCHEDULE has ended."""
        for record in self._news(self._topics.messages):
            self._open.add((False, record.partition, record.offset))
        for record in self._news(self._topics.markers):
            marker = decode_marker(record.value)
            if marker.type is MarkerType.SCHEDULE and not marker.carried_forward:
                self._open.add((True, record.partition, record.offset))
            message_id = marker.message_id
            is_end = marker.type is MarkerType.END and marker.outcome in _ENDING
            if is_end and message_id is not None:
                place = (marker.of_schedule, message_id.partition, message_id.offset)
                self._ended.add(place)
        self._open -= self._ended
        return not self._open

    def _news(self, topic: str) -> Iterator[LogRecord]:
        for number in range(self._kafka.partition_count(topic)):
            position = self._positions.get((topic, number), 0)
            records, self._positions[topic, number] = self._kafka.read(topic, number, position)
            yield from records


def simulate(seed: int, limits: Limits | None = None) -> Simulation:
    """Run one seed, with its own limits or with yours."""
    return _Run(seed, draw_limits(seed) if limits is None else limits).run()
