"""A simulated world: time, processes that crash and pause, and a network between them and Kafka.

Everything happens in one thread, driven by one seed. A process runs threads that are generators:
what they yield is a time to sleep in ms, or a `Ticket` to wait for. Between two yields nothing can
happen to a process, so each yield is a place where it may die or stand still; what it had sent by
then still arrives.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Generic, TypeVar

from kafkamq.errors import BrokerError, KafkaMQError
from kafkamq.transport.memory import MemoryKafka, TopicPartition

__all__ = ["Faults", "Network", "Process", "Thread", "Ticket", "World", "wait"]

Result = TypeVar("Result")
Thread = Generator["int | Ticket[object]", None, None]


class Ticket(Generic[Result]):
    """The answer to a request, once it is there."""

    __slots__ = ("_waiters", "error", "is_done", "result")

    def __init__(self) -> None:
        self.is_done = False
        self.result: Result | None = None
        self.error: KafkaMQError | None = None
        self._waiters: list[Callable[[], None]] = []

    def resolve(self, result: Result | None = None, error: KafkaMQError | None = None) -> None:
        """The answer came; a later one is ignored."""
        if self.is_done:
            return
        self.is_done, self.result, self.error = True, result, error
        for waiter in self._waiters:
            waiter()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call this when the answer is there, at once when it is."""
        if self.is_done:
            call()
        else:
            self._waiters.append(call)


def wait(ticket: Ticket[Result]) -> Generator[int | Ticket[object], None, Result]:
    """Give a thread the result of a ticket, once it is there (by ``yield from``).

    Raises:
        KafkaMQError: what the ticket failed with.
    """
    while not ticket.is_done:
        yield ticket  # type: ignore[misc]  # a waiter does not care for the result's type
    if ticket.error is not None:
        raise ticket.error
    return ticket.result  # type: ignore[return-value]  # done without an error: it is there


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often things go wrong; probabilities are per step of a process or per request."""

    crash_rate: float = 0.0
    pause_rate: float = 0.0
    max_pause_ms: int = 30_000
    lost_reply_rate: float = 0.0  # the call happened, its answer never comes
    zombie_rate: float = 0.0  # a request that was given up arrives nevertheless
    latency_ms: int = 10


class World:
    """Time and chance. ``now_ms`` is the true time; nobody but Kafka's clock sees it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ms = 0
        self.faults = Faults()
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_ms: int, call: Callable[[], None]) -> None:
        """Call this at that time."""
        self._count += 1
        heapq.heappush(self._events, (max(time_ms, self.now_ms), self._count, call))

    def run(self, until_ms: int) -> None:
        """Let everything happen up to that time."""
        while self._events and self._events[0][0] <= until_ms:
            self.now_ms, _, call = heapq.heappop(self._events)
            call()
        self.now_ms = until_ms

    def chance(self, rate: float) -> bool:
        """True once in 1 / rate."""
        return rate > 0.0 and self.rng.random() < rate


class Process:
    """An operating system's process: its threads live, stand still and die together."""

    def __init__(self, world: World, name: str, *, is_safe: bool = False) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.is_safe = is_safe  # never hit by faults
        self.frozen_until_ms = 0
        self.on_death: Callable[[], None] | None = None

    def spawn(self, thread: Thread) -> None:
        """Start a thread."""
        self.world.at(self.world.now_ms, lambda: self._step(thread))

    def die(self) -> None:
        """SIGKILL: nothing runs any more."""
        if self.is_alive:
            self.is_alive = False
            if self.on_death is not None:
                self.on_death()

    def freeze(self, ms: int) -> None:
        """SIGSTOP, a long collection, a paused machine."""
        self.frozen_until_ms = max(self.frozen_until_ms, self.world.now_ms + ms)

    def _step(self, thread: Thread) -> None:
        world, faults = self.world, self.world.faults
        if not self.is_alive:
            return
        if not self.is_safe and world.chance(faults.crash_rate):
            self.die()
            return
        if not self.is_safe and world.chance(faults.pause_rate):
            self.freeze(world.rng.randint(1, faults.max_pause_ms))
        if world.now_ms < self.frozen_until_ms:
            world.at(self.frozen_until_ms, lambda: self._step(thread))
            return
        try:
            wanted = next(thread)
        except StopIteration:
            return
        if isinstance(wanted, int):
            world.at(world.now_ms + wanted, lambda: self._step(thread))
        else:
            wanted.when_done(lambda: world.at(world.now_ms, lambda: self._step(thread)))


class Network:
    """Between processes and Kafka: latency, outages, lost answers, requests that arrive late.

    Requests of one sender to one place arrive in the order in which they were sent, as those of an
    idempotent producer do.
    """

    def __init__(self, world: World, kafka: MemoryKafka) -> None:
        self.world = world
        self.kafka = kafka
        self.skew_ms = 0  # the broker's clock minus the true time
        self._base_ms = kafka.clock_ms
        self._arrivals: dict[tuple[str, TopicPartition | None], int] = {}
        self._outages: list[tuple[int, int, TopicPartition | None]] = []

    def sync_clock(self) -> None:
        """Set the broker's clock to the world's time."""
        self.kafka.clock_ms = self._base_ms + self.world.now_ms + self.skew_ms
        self.kafka.expire_transactions()

    def add_outage(self, begin_ms: int, end_ms: int, place: TopicPartition | None) -> None:
        """Nothing can be written or read there; None: anywhere."""
        self._outages.append((begin_ms, end_ms, place))

    def is_up(self, place: TopicPartition | None) -> bool:
        """Whether a request would be answered now."""
        return self._up_again(self.world.now_ms, place) == self.world.now_ms

    def request(
        self,
        sender: str,
        place: TopicPartition | None,
        call: Callable[[], Result],
        *,
        timeout_ms: int = 30_000,
    ) -> Ticket[Result]:
        """Have the broker do this; the ticket fails when no answer comes in time.

        A failed ticket says nothing about whether it was done, like a delivery report that failed.
        """
        world, faults = self.world, self.world.faults
        ticket: Ticket[Result] = Ticket()
        lane = (sender, place)
        sent_ms = world.now_ms + world.rng.randint(0, faults.latency_ms)
        arrival_ms = max(self._up_again(sent_ms, place), self._arrivals.get(lane, 0))
        deadline_ms = world.now_ms + timeout_ms
        error = BrokerError(f"{sender}: no answer from {place}", code="_MSG_TIMED_OUT")
        if arrival_ms <= deadline_ms or world.chance(faults.zombie_rate):
            self._arrivals[lane] = arrival_ms
            world.at(arrival_ms, lambda: self._arrive(ticket, call))
        world.at(deadline_ms, lambda: ticket.resolve(error=error))
        return ticket

    def _arrive(self, ticket: Ticket[Result], call: Callable[[], Result]) -> None:
        world, faults = self.world, self.world.faults
        self.sync_clock()
        result: Result | None = None
        error: KafkaMQError | None = None
        try:
            result = call()
        except KafkaMQError as refused:
            error = refused
        if not world.chance(faults.lost_reply_rate):
            reply_ms = world.now_ms + world.rng.randint(0, faults.latency_ms)
            world.at(reply_ms, lambda: ticket.resolve(result, error))

    def _up_again(self, time_ms: int, place: TopicPartition | None) -> int:
        for begin_ms, end_ms, where in sorted(self._outages, key=lambda outage: outage[0]):
            if begin_ms <= time_ms < end_ms and (where is None or where == place):
                time_ms = end_ms
        return time_ms
