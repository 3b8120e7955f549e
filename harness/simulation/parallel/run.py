"""A group of parallel consumers in a simulation.

Each seed draws a group, its handlers and what goes wrong. Then the faults stop, and every record
that the logs still have must be done, and committed::

    simulate_parallel(seed=7).require_ok()
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from harness.simulation.limits import Faults
from harness.simulation.parallel.draw import Manner, ParallelLimits, draw_parallel
from harness.simulation.parallel.ledger import DEAD, GROUP, RESULTS, TOPIC, Ledger, of_parallel_line
from harness.simulation.parallel.members import MAX_RESULT_BYTES, Member, ParallelWorld
from harness.simulation.scheduler import Process
from harness.simulation.stage import Report, Stage
from kafkamq.testing.checker import CheckFailedError

_NOTICE_S = 60.0  # after the faults: by then everybody knows that a log is another one
_LOOK_S = 0.2


@dataclass(kw_only=True)
class ParallelSimulation(Report):
    """A run of a group."""

    limits: ParallelLimits
    problems: list[str] = field(default_factory=list)
    handled: int = 0  # calls of handlers that ended well

    kind = "parallel"

    def require_ok(self) -> None:
        if self.problems:
            raise CheckFailedError(self.label + "\n".join(self.problems))


class _Run(Stage[Member]):
    def __init__(self, seed: int, limits: ParallelLimits) -> None:
        self.simulation = simulation = ParallelSimulation(seed=seed, limits=limits)
        name = f"parallel-{seed}"
        super().__init__(simulation, limits, name, name)
        self.limits = limits
        self.ledger = Ledger(self.kafka, limits)
        self._world = ParallelWorld(self.scheduler, limits, self.kafka.servers, self.ledger)
        self._rng = random.Random(f"records of {name}")
        self._unnoticed: set[int] = set()  # partitions whose logs went
        self._last_kept: dict[int, int] = {}  # positions, though Kafka may have dropped them since

    @property
    def world(self) -> ParallelWorld:
        """Return what its processes share."""
        return self._world

    def states_of(self, message: str, extra: Mapping[str, object]) -> Iterable[str]:
        return of_parallel_line(message)

    def prepare(self) -> None:
        """Topics, members and what becomes of them."""
        limits, rng, cluster = self.limits, self.world.rng, self.kafka.cluster
        cluster.create_topic(TOPIC, limits.partitions)
        cluster.create_topic(RESULTS, 1, {"max.message.bytes": str(MAX_RESULT_BYTES)})
        cluster.create_topic(DEAD, 1)
        cluster.settings["offset.metadata.max.bytes"] = str(limits.metadata_bytes)
        cluster.settings["group.consumer.session.timeout.ms"] = "10000"
        cluster.settings["group.consumer.heartbeat.interval.ms"] = str(limits.heartbeat_ms)
        cluster.groups.on_kept = self._kept
        self.set_alarm()
        self.world.start("sender", lambda _: self._send_all(), lambda: None)
        for _ in range(limits.members):
            self.at(rng.uniform(0, 2), self._start)
        for count, change in (
            (limits.joins, self._start),
            (limits.closes, self._close_one),
            (limits.pauses, self._pause_one),
            (limits.deletions, self._delete_records),
            (limits.truncations, self._truncate),
            (limits.new_partitions, self._add_partition),
        ):
            for _ in range(count):
                self.at(rng.uniform(0, self.chaos_s), change)

    def is_settled(self) -> bool:
        """All is done, and committed."""
        if self.ledger.open_numbers():
            return False
        groups = self.kafka.cluster.groups
        for partition in self.ledger.partitions:
            log = self.ledger.log(partition)
            known = groups.committed(GROUP, (TOPIC, partition))
            if known is None and self.limits.faults.lost_offsets:
                continue  # nobody misses what is committed, as long as it reads on
            if log.records and (known is None or known[0] < log.end):
                return False
        return True

    def keep(self) -> None:
        """The verdict."""
        simulation, ledger, faults = self.simulation, self.ledger, self.limits.faults
        manners = {manner for manner, weight in self.limits.manners if weight}
        # A result that Kafka refuses ends its transaction, whose records are all handled again.
        has_aborts = Manner.LARGE in manners and self.limits.mode == "transactional"
        ledger.judge(
            is_calm=faults == Faults()
            and not manners & {Manner.POISON, Manner.SLOW}
            and not has_aborts
            and self.limits.is_quicker_than_revocations
            and not (self.limits.deletions or self.limits.truncations)
            and self.limits.metadata_bytes > 1000,
            is_certain=not (faults.lost_reply_rate or faults.outages or faults.fatal_errors),
        )
        simulation.problems = [text for _, text in simulation.troubles()] + ledger.problems
        simulation.reached += +ledger.reached
        simulation.handled = sum(ledger.ends.values())

    def _kept(self, group: str, place: tuple[str, int], committed: tuple[int, str | None]) -> None:
        if group == GROUP and place[0] == TOPIC:
            offset, metadata = committed
            self._last_kept[place[1]] = self.ledger.committed(place[1], offset, metadata or "")

    # ---- records

    def _send_all(self) -> None:
        limits, rng = self.limits, self._rng
        weights = [weight for _, weight in limits.manners]
        pause_s = self.chaos_s / limits.records
        for number in range(limits.records):
            self.scheduler.sleep(rng.uniform(0, 2 * pause_s))
            manner = rng.choices([manner for manner, _ in limits.manners], weights)[0]
            key = b"k%d" % rng.randrange(limits.keys) if limits.keys else None
            count = len(self.ledger.partitions)
            partition = rng.randrange(count) if key is None else zlib.crc32(key) % count
            self._wait_for_notice(partition)
            self._append(partition, key, manner.value_of(number))
            if manner is Manner.LARGE:
                self.ledger.large.add(number)
        self.world.is_sent = True

    def _append(self, partition: int, key: bytes | None, value: bytes) -> None:
        from kafkamq.transport.memory.state import LogRecord

        cluster = self.kafka.cluster
        with cluster.changed:
            log = self.ledger.log(partition)
            log.append(LogRecord(cluster.now_ms(), key, value, None, None))
            cluster.changed.notify_all()

    # ---- what becomes of members

    def _start(self) -> None:
        name = f"m{self.simulation.started['member']}"
        self.simulation.started["member"] += 1
        member = Member(self.world)
        process = self.world.start(name, member.main, lambda: self._ended(process))
        self.actors[process] = member

    def _ended(self, process: Process) -> None:
        self.actors.pop(process, None)
        self.kafka.changed(process)
        self.later(self._start)

    def _close_one(self) -> None:
        if self.actors:
            self.world.rng.choice(list(self.actors.values())).is_closing = True

    def _pause_one(self) -> None:
        if self.actors:
            self.world.rng.choice(list(self.actors.values())).is_pausing = True

    # ---- what becomes of logs

    def _delete_records(self) -> None:
        """Retention: also of what nobody has read."""
        partition = self.world.rng.choice(self.ledger.partitions)
        log = self.ledger.log(partition)
        if log.start < log.end and partition not in self._unnoticed:
            before = self.world.rng.randint(log.start + 1, log.end)
            known = self.kafka.cluster.groups.committed(GROUP, (TOPIC, partition))
            if known is None or known[0] < before:
                self.ledger.reached["a log's start went before its records were read"] += 1
            self.kafka.cluster.delete_records(TOPIC, partition, before)

    def _truncate(self) -> None:
        """An unclean election: the log's end is gone, or all of it.

        Nothing is written there until all readers know, or had time enough to. Else the log might
        be as long as before when they look, and nobody could tell (librdkafka does not commit
        epochs).
        """
        rng, partition = self.world.rng, self.world.rng.choice(self.ledger.partitions)
        log = self.ledger.log(partition)
        if log.start < log.end and partition not in self._unnoticed:
            self._unnoticed.add(partition)
            end = log.start if rng.random() < 0.6 else rng.randint(log.start, log.end - 1)
            self.kafka.cluster.truncate(TOPIC, partition, end)
            self.ledger.truncated(partition)
            self.ledger.reached["a log was truncated under its readers"] += 1

    def _wait_for_notice(self, partition: int) -> None:
        while partition in self._unnoticed:
            is_late = self.world.now_s() > 1 + self.chaos_s + _NOTICE_S
            if is_late or self._is_noticed(partition):
                self.scheduler.sleep(1.0)  # what is on its way arrives
                self._unnoticed.discard(partition)
            self.scheduler.sleep(_LOOK_S)

    def _is_noticed(self, partition: int) -> bool:
        from kafkamq.transport.record import TopicPartition

        place, end = (TOPIC, partition), self.ledger.log(partition).end
        # A client tells no position where nothing was read since the assignment: that tells it.
        positions = [
            each.offset
            for client in self.kafka.consumers()
            for each in [*client.position([TopicPartition(*place)]), *client.assignment()]
            if (each.topic, each.partition) == place
        ]
        # Who was told of a position may stand still, and begin there when Kafka has dropped it;
        # and what a map says of lost records would be taken for others at their places.
        return all(at <= end for at in [*positions, self._last_kept.get(partition, 0)])

    def _add_partition(self) -> None:
        self.kafka.cluster.add_partitions(TOPIC, 1)


def simulate_parallel(seed: int, limits: ParallelLimits | None = None) -> ParallelSimulation:
    """Run one seed, with its own limits or with yours."""
    run = _Run(seed, draw_parallel(seed) if limits is None else limits)
    run.play()
    return run.simulation
