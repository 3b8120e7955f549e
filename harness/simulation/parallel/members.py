"""Members of a group as users write them: a process each, with a ``ParallelConsumer``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from harness.simulation.parallel.draw import TAKE_MS, Manner, ParallelLimits, Use
from harness.simulation.parallel.ledger import (
    DEAD,
    GROUP,
    RESULTS,
    TOPIC,
    Ledger,
    number_of,
)
from harness.simulation.scheduler import Process, Scheduler
from harness.simulation.stage import World
from kafkamq.config import Backoff
from kafkamq.errors import DeadlineExceededError
from kafkamq.parallel.config import ParallelOptions
from kafkamq.parallel.consumer import ParallelConsumer
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.results import OutgoingRecord
from kafkamq.types import Nack, Reject

if TYPE_CHECKING:
    from kafkamq.runtime.verdicts import Verdict

MAX_RESULT_BYTES = 2000  # that the topic of results takes
_MAX_KILLS = 3  # by handlers
_PROTOCOLS = {
    "eager": {"partition.assignment.strategy": "range,roundrobin"},
    "cooperative": {},
    "consumer": {"group.protocol": "consumer"},
}
_log = logging.getLogger(__name__)


class ParallelWorld(World):
    """One topic of records, one group, and what its handlers did."""

    def __init__(
        self, scheduler: Scheduler, limits: ParallelLimits, servers: str, ledger: Ledger
    ) -> None:
        super().__init__(scheduler, servers)
        self.limits = limits
        self.ledger = ledger
        self.has_killed: set[int] = set()


class _HandlerError(Exception):
    """A handler's own."""


class Member:
    """One process."""

    def __init__(self, world: ParallelWorld) -> None:
        self.is_closing = False
        self.is_pausing = False
        self._world = world
        self._limits = world.limits
        self._process: Process | None = None

    def main(self, process: Process) -> None:
        """Run until it is told to close, or its consumer has failed."""
        self._process = process
        world, rng = self._world, self._world.rng
        consumer = ParallelConsumer(
            TOPIC,
            group_id=GROUP,
            bootstrap_servers=world.servers,
            kafka={
                "topic.metadata.refresh.interval.ms": "5000",
                **_PROTOCOLS[self._limits.protocol],
            },
            ordering=self._limits.ordering,
            concurrency=self._limits.concurrency,
            **self._options(process.name),
        )
        if self._limits.use is Use.STREAM:
            self._stream(consumer)
        elif self._limits.use is Use.PRODUCE:
            consumer.poll_and_produce(self._handle)
        else:
            handler: Any = self._handle_list if self._limits.batch_size else self._handle
            consumer.poll(handler)
        while not self.is_closing and not consumer.wait(0.5):
            if self.is_pausing:
                self.is_pausing = False
                consumer.pause()
                world.sleep(rng.uniform(0, 8))
                consumer.resume()
            elif rng.random() < 0.05:
                consumer.commit_soon()
        try:
            consumer.close(5.0, drain=rng.choice((0.0, 5.0)))
        except DeadlineExceededError as error:
            _log.info("a member could not leave in time", extra={"error": str(error)})

    def _options(self, name: str) -> ParallelOptions:
        limits, ledger = self._limits, self._world.ledger
        options: ParallelOptions = {
            "null_keys": limits.null_keys,
            "commit_mode": limits.mode,
            "commit_interval": limits.commit_interval_ms / 1000,
            "revoke_timeout": limits.revoke_timeout_ms / 1000,
            "backoff": Backoff(first=0.1, max=1.0),
            "max_open": limits.max_open,
            "on_data_loss": "skip",
            "on_assigned": lambda places: ledger.assigned(name, places),
            "on_revoked": lambda places, _: ledger.revoked(name, places),
        }
        if limits.batch_size:
            options |= {"batch_size": limits.batch_size, "batch_linger": 0.05}
        if limits.gives_up:
            options["max_attempts"] = limits.max_attempts
            options["on_exhausted"] = limits.on_exhausted
            if limits.on_exhausted == "dead-letter":
                options["dead_letter_topic"] = DEAD
                if limits.parks_stalled:
                    options |= {"on_stall": "dead-letter", "stall_after": 5.0}
        return options

    def _stream(self, consumer: ParallelConsumer) -> None:
        """Iterate in a thread of its own: the iteration ends with the consumer."""
        results = consumer.stream(self._handle)
        ledger, world = self._world.ledger, self._world

        def iterate() -> None:
            previous: ParallelRecord | None = None
            try:
                while True:
                    if previous is not None:
                        ledger.finished(previous)
                    previous, _ = next(results)
                    world.sleep(world.rng.uniform(0, TAKE_MS / 1000))
            except StopIteration:
                return
            except Exception as error:  # noqa: BLE001 - what ``wait`` raises in the first thread
                _log.info("a stream ended", extra={"error": str(error)})

        self._world.threading.Thread(target=iterate, name="iterating").start()

    # ---- handlers

    def _handle(self, record: ParallelRecord) -> OutgoingRecord | Verdict | str | None:
        assert self._process is not None, "it has begun"
        ledger = self._world.ledger
        call = ledger.begin(self._process.name, [record])
        manner = self._work(record)
        if manner in (Manner.FAILS, Manner.HOPELESS):
            ledger.end(call, failed=True)
            raise _HandlerError(manner.value)
        if manner is Manner.NACKS:
            ledger.end(call, failed=True)
            return Nack(delay=0.3, reason="later")
        if manner is Manner.REJECTS:
            ledger.end(call, failed=True, gives_up=True)
            return Reject("no good")
        ledger.end(call)
        if self._limits.use is not Use.PRODUCE:
            return None if self._limits.use is Use.POLL else "result"
        size = 2 * MAX_RESULT_BYTES if manner is Manner.LARGE else 0
        value = b"result %d %s" % (number_of(record.value), b"." * size)
        return OutgoingRecord(topic=RESULTS, key=record.key, value=value)

    def _handle_list(self, records: list[ParallelRecord]) -> Any:
        assert self._process is not None, "it has begun"
        ledger = self._world.ledger
        call = ledger.begin(self._process.name, records)
        manners = [self._work(record) for record in records]
        is_bad = any(each is not Manner.QUICK and each is not Manner.SLOW for each in manners)
        ledger.end(call, failed=is_bad)
        if is_bad:
            raise _HandlerError("one of the list")
        return None

    def _work(self, record: ParallelRecord) -> Manner:
        """Take a while; how it ends: of those who fail a few times, as QUICK at last."""
        world, limits = self._world, self._limits
        manner = Manner((record.value or b"").split(b" ")[0].decode())
        slow_s = limits.slow_ms / 1000
        work_s = world.rng.uniform(0, limits.work_ms / 1000)
        world.sleep(slow_s if manner is Manner.SLOW else work_s)
        number = number_of(record.value)
        if manner is Manner.POISON:
            if number not in world.has_killed and len(world.has_killed) < _MAX_KILLS:
                world.has_killed.add(number)
                assert self._process is not None, "it has begun"
                self._process.kill()
            return Manner.QUICK
        if manner in (Manner.FAILS, Manner.NACKS) and record.attempt > 2:
            return Manner.QUICK
        return manner
