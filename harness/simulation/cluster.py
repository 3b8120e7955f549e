"""The Kafka in memory of a simulation: whose clients there are, what becomes of their requests."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from harness.simulation.limits import Situation
from harness.simulation.scheduler import NS_PER_S, START_NS, Process, Scheduler
from kafkamq.testing.history import LogRecord
from kafkamq.transport import clients

if TYPE_CHECKING:
    from kafkamq.transport.memory.cluster import MemoryKafka
    from kafkamq.transport.memory.consumer import Consumer
    from kafkamq.transport.memory.state import Fault
    from kafkamq.types import PartitionId

_HIT = 0.05, 0.5  # of writes, while a producer is to fail: of others, and of markers
_HIT_S = 0.2  # so long such a write is under way
_STALE = 0.3  # of answers, while some brokers lag behind
MAX_POLL_GAP_S = 1.0
_log = logging.getLogger(__name__)
_STEPS_MS = (-3_600_000, -5000, -1, 700, 5000, 3_600_000)


class _Cut:
    """Clients that reach no broker: those of processes that are dead or stand still."""

    def __init__(self, owners: dict[object, Process]) -> None:
        self._owners = owners

    def __contains__(self, client: object) -> bool:
        owner = self._owners.get(client)
        return owner is not None and (not owner.is_alive or owner.is_frozen)

    def __bool__(self) -> bool:
        return False  # who comes and goes is told to the cluster (``changed``)


def _is_of_markers(place: PartitionId | None) -> bool:
    return place is not None and place[0].endswith(".markers")


class SimulatedKafka:
    """One run's cluster."""

    def __init__(self, scheduler: Scheduler, name: str, situation: Situation) -> None:
        self.servers = f"memory://{name}"
        self._scheduler = scheduler
        self._situation = situation
        self._rng = random.Random(scheduler.rng.random())
        self._skew_ms = 0
        self._is_chaos = True
        self._owners: dict[object, Process] = {}
        self._read: dict[tuple[str, int], int] = {}
        self._began_ns = scheduler.now_ns
        self._armed = 0  # producers that are to fail
        self._at: Callable[[float, Callable[[], None]], None] = lambda *_: None
        self._cluster: MemoryKafka | None = None
        self.is_watched: Callable[[Process], bool] = lambda _: False
        """Whether the members of groups in a process must be polled all the time."""

    # ---- what it is

    def open(self) -> None:
        """Make it, before anybody else."""
        from kafkamq.transport.memory.cluster import cluster_of, forget_cluster

        forget_cluster(self.servers.removeprefix("memory://"))
        self._cluster = cluster = cluster_of(self.servers)
        cluster.now_ms = lambda: (self._scheduler.now_ns + START_NS) // 1_000_000 + self._skew_ms

    @property
    def cluster(self) -> MemoryKafka:
        """Return the brokers."""
        assert self._cluster is not None, "it is open"
        return self._cluster

    def consumers(self, of: Process | None = None) -> list[Consumer]:
        """Return those that are open, of one process or of all that live."""
        from kafkamq.transport.memory.consumer import Consumer

        alive = [
            client
            for client, owner in self._owners.items()
            if owner.is_alive and of in (None, owner)
        ]
        return [each for each in alive if isinstance(each, Consumer) and not each.is_closed]

    def close(self) -> None:
        """Forget it."""
        from kafkamq.transport.memory.cluster import forget_cluster

        forget_cluster(self.servers.removeprefix("memory://"))

    # ---- logs

    def records(self, topic: str, number: int, begin: int = 0) -> tuple[list[LogRecord], int]:
        """Committed records of a partition from an offset on, and where they end."""
        found = self.cluster.topics.get(topic)
        if found is None:
            return [], begin
        log = found.partitions[number]
        read, end = log.read(max(begin, log.start), 1 << 60, is_committed=True)
        return [
            LogRecord(
                topic,
                number,
                offset,
                each.timestamp_ms,
                each.key,
                each.value,
                tuple(each.headers or ()),
            )
            for offset, each in read
        ], end

    def all_records(self, topic: str) -> list[LogRecord]:
        found = self.cluster.topics.get(topic)
        numbers = range(len(found.partitions)) if found is not None else ()
        return [record for number in numbers for record in self.records(topic, number)[0]]

    def news(self, topic: str) -> list[LogRecord]:
        """Return what was not asked for before."""
        news: list[LogRecord] = []
        found = self.cluster.topics.get(topic)
        for number in range(len(found.partitions)) if found is not None else ():
            place = topic, number
            records, self._read[place] = self.records(*place, self._read.get(place, 0))
            news += records
        return news

    # ---- what goes wrong

    def begin_faults(self, at: Callable[[float, Callable[[], None]], None]) -> None:
        """From here on the limits' faults happen; ``at`` does something after some seconds."""
        faults, rng = self._situation.faults, self._rng
        self._at = at
        self.cluster.faults.plan = self._plan
        self.cluster.faults.cut = _Cut(self._owners)  # type: ignore[assignment]  # as a set
        if faults.full_queue_rate:
            self.cluster.faults.is_full = self._is_full
        self.cluster.faults.told = self._told
        self.cluster.faults.has_ids = self._has_ids
        chaos_s = self._situation.chaos_ms / 1000
        topics = list(self.cluster.topics.values())
        places = [(each.name, number) for each in topics for number in range(len(each.partitions))]
        for _ in range(faults.outages):
            place = rng.choice((None, rng.choice(places)))
            length_s = rng.uniform(0, faults.max_outage_ms / 1000)
            at(rng.uniform(0, chaos_s), partial(self._break, place, length_s, at))
        for _ in range(faults.clock_steps):
            at(rng.uniform(0, chaos_s), self._step_clock)
        for _ in range(faults.fatal_errors):
            at(rng.uniform(0, chaos_s), self._arm)
        for _ in range(faults.lost_offsets):
            at(rng.uniform(0, chaos_s), self._lose_offsets)

    def end_faults(self) -> None:
        """No new ones; outages that have begun end in their time."""
        self._is_chaos = False

    def changed(self, process: Process) -> None:
        """It died, stands still, or goes on. What a dead one had queued never arrives."""
        if not process.is_alive:
            for client, owner in self._owners.items():
                if owner is process:
                    self.cluster.keep(client, has_backlog=False)  # type: ignore[arg-type]
                    if waiting := getattr(client, "waiting", None):
                        _log.debug("records died with a process", extra={"topics": waiting})
        self.cluster.due(0.0)

    def is_writing(self, process: Process) -> bool:
        """Return whether a client of it has records that are not sent yet."""
        own = [client for client, owner in self._owners.items() if owner is process]
        return any(getattr(client, "waiting", None) for client in own)

    def factories(self) -> list[tuple[object, object]]:
        """Return what opens clients, and what stands for it: who opens one is its owner."""

        def owned(make: Callable[..., object]) -> Callable[..., object]:
            def open_client(*args: object, **kwargs: object) -> object:
                client = make(*args, **kwargs)
                task = self._scheduler.current
                assert task is not None, "only simulated threads open clients"
                self._scheduler.require_own("open clients")
                self._owners[client] = task.process
                if self.is_watched(task.process) and hasattr(client, "subscribe"):
                    self._watch(client, task.process)
                return client

            return open_client

        factories = clients.open_admin, clients.open_consumer, clients.open_producer
        return [(each, owned(each)) for each in factories]

    def _watch(self, client: Any, process: Process) -> None:
        """A member of a group is polled once a second, whatever happens to its process."""
        scheduler, subscribe, consume = self._scheduler, client.subscribe, client.consume
        last_ns = 0  # of the member; 0: it is none

        def subscribed(*args: object, **callbacks: object) -> None:
            nonlocal last_ns
            last_ns = scheduler.now_ns
            subscribe(*args, **callbacks)

        def consumed(size: int, timeout_s: float) -> object:
            nonlocal last_ns
            gap_s = (scheduler.now_ns - max(last_ns, process.thawed_ns)) / NS_PER_S
            if last_ns and gap_s > MAX_POLL_GAP_S:
                scheduler.failures.append(f"{process!r} was not polled for {gap_s:.3f} s")
            try:
                return consume(size, timeout_s)
            finally:
                last_ns = scheduler.now_ns if last_ns else 0

        client.subscribe, client.consume = subscribed, consumed

    def _plan(self, kind: str, client: object, place: PartitionId | None) -> Fault | None:
        from kafkamq.transport.memory.state import REFUSALS, UNKNOWN, Fault

        rng, faults = self._rng, self._situation.faults
        latency_s = rng.random() * faults.latency_ms / 1000
        if kind == "fetch":
            return Fault(latency_s=latency_s + rng.random() * faults.fetch_ms / 1000)
        is_copy = kind == "produce" and place is not None and place[0].endswith(".messages")
        if faults.copy_ms and is_copy and getattr(client, "transactional_id", None):
            latency_s += faults.copy_ms / 1000
        if not self._is_chaos:
            return Fault(latency_s=latency_s) if latency_s else None
        if kind == "commit":
            latency_s += rng.random() * faults.commit_ms / 1000
        if kind == "produce" and self._armed and rng.random() < _HIT[_is_of_markers(place)]:
            self._armed -= 1
            latency_s = max(latency_s, _HIT_S)
            self._at(latency_s * rng.random(), partial(self._fail, client))
        if kind == "produce" and rng.random() < faults.write_error_rate:
            return Fault(latency_s=latency_s, error=UNKNOWN)
        if faults.lost_reply_rate and rng.random() < faults.lost_reply_rate:
            is_lost = rng.random() < 0.5
            return Fault(latency_s=latency_s, is_lost=is_lost, is_answer_lost=not is_lost)
        if faults.refusal_rate and kind != "produce" and rng.random() < faults.refusal_rate:
            return Fault(latency_s=latency_s, error=rng.choice(REFUSALS))
        return Fault(latency_s=latency_s) if latency_s else None

    def _is_within(self, duration_ms: int) -> bool:
        """Return whether so little of the run has passed."""
        return self._scheduler.now_ns < self._began_ns + duration_ms * 1_000_000

    def _told(self, topic: str, count: int) -> int:
        """Return the answer of a broker that has not heard of the last partition, or of the
        topic.
        """
        rate = _STALE if count > 1 else _STALE / 10
        if not self._is_within(self._situation.faults.stale_ms) or self._rng.random() > rate:
            return count
        _log.debug("an answer was stale", extra={"topic": topic})
        return count - 1

    def _has_ids(self) -> bool:
        """Brokers are upgraded: more and more of them tell ids."""
        return not self._is_within(int(self._rng.random() * self._situation.faults.no_ids_ms))

    def _is_full(self, _: object) -> bool:
        return self._is_chaos and self._rng.random() < self._situation.faults.full_queue_rate

    def _break(
        self,
        place: PartitionId | None,
        length_s: float,
        at: Callable[[float, Callable[[], None]], None],
    ) -> None:
        faults = self.cluster.faults

        def mend() -> None:
            if place is None:
                faults.is_down = False
            else:
                faults.offline.discard(place)
            with self.cluster.changed:
                self.cluster.changed.notify_all()

        if place is None:
            faults.is_down = True
        else:
            faults.offline.add(place)
        at(length_s, mend)

    def _step_clock(self) -> None:
        if self._is_chaos:
            self._skew_ms += self._rng.choice(_STEPS_MS)

    def _arm(self) -> None:
        """Some producer that writes soon fails for good, with records under way."""
        self._armed += self._is_chaos

    def _fail(self, client: object) -> None:
        from kafkamq.transport.memory.producer import Producer
        from kafkamq.transport.memory.state import FATAL

        owner = self._owners.get(client)
        if isinstance(client, Producer) and owner is not None and owner.is_alive:
            client.fail(self._rng.choice(FATAL))

    def _lose_offsets(self) -> None:
        """Kafka drops what an idle group has committed (``offsets.retention.minutes``).

        A ledger is not idle while a process has it open, which commits to it once an hour.
        """
        groups, alive = self.cluster.groups, set()
        for client, owner in self._owners.items():
            if owner.is_alive:
                alive.add(getattr(client, "transactional_id", None))
        idle = sorted(groups.offsets.keys() - alive)
        if self._is_chaos and idle:
            groups.expire_offsets(self._rng.choice(idle))
