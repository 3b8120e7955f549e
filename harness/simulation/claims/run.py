"""Members that claim partitions or ranges, in a simulation.

Each seed draws how they claim, how they work and what goes wrong. Then the faults stop, and the
group must come to the end of every log::

    simulate_claims(seed=7).require_ok()
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from harness.simulation.claims.draw import ClaimLimits, ClaimUse, draw_claims
from harness.simulation.claims.ledger import GROUP, OUTPUTS, TOPIC, ClaimLedger, of_claim_line
from harness.simulation.claims.members import ClaimMember, ClaimWorld, pause_group
from harness.simulation.limits import Faults
from harness.simulation.scheduler import Process
from harness.simulation.stage import Report, Stage
from kafkamq.claims.log_engine import init_topic
from kafkamq.claims.rules.ranges import RANGE_TOPIC
from kafkamq.claims.wire.marshal import COORDINATION_TOPIC
from kafkamq.testing.checker import CheckFailedError


@dataclass(kw_only=True)
class ClaimSimulation(Report):
    """A run of a group."""

    limits: ClaimLimits
    problems: list[str] = field(default_factory=list)
    handed_out: int = 0  # messages, however often

    kind = "claims"

    def require_ok(self) -> None:
        if self.problems:
            raise CheckFailedError(self.label + "\n".join(self.problems))


class _Run(Stage[ClaimMember]):
    def __init__(self, seed: int, limits: ClaimLimits) -> None:
        self.simulation = simulation = ClaimSimulation(seed=seed, limits=limits)
        name = f"claims-{seed}"
        super().__init__(simulation, limits, name, name)
        self.limits = limits
        self.ledger = ClaimLedger(self.kafka, limits)
        self._world = ClaimWorld(self.scheduler, limits, self.kafka.servers, self.ledger)
        self._rng = random.Random(f"messages of {name}")
        self.grace_s = 3 * limits.interval_ms / 1000

    @property
    def world(self) -> ClaimWorld:
        """Return what its processes share."""
        return self._world

    def states_of(self, message: str, extra: Mapping[str, object]) -> Iterable[str]:
        return of_claim_line(message)

    def prepare(self) -> None:
        """Topics, members and what becomes of them."""
        limits, rng, world = self.limits, self.world.rng, self.world
        is_ranges = limits.use is ClaimUse.RANGES
        init_topic(
            self.kafka.servers,
            RANGE_TOPIC if is_ranges else COORDINATION_TOPIC,
            partitions=limits.coordination_partitions,
            heartbeat_interval=world.interval_s,
        )
        self.kafka.cluster.create_topic(TOPIC, limits.partitions)
        self.kafka.cluster.create_topic(OUTPUTS, 1)
        self.set_alarm()
        world.start("sender", lambda _: self._send_all(), lambda: None)
        for number in range(limits.members + limits.joins):
            is_late = number >= limits.members
            after_s = rng.uniform(0, self.chaos_s if is_late else 2)
            self.at(after_s, lambda client=f"c{number}": self._start(client))  # type: ignore[misc]
        for _ in range(limits.closes):
            self.at(rng.uniform(0, self.chaos_s), self._close_one)
        for _ in range(limits.deletions):
            self.at(rng.uniform(0, self.chaos_s), self._delete_records)
        for _ in range(0 if is_ranges else limits.group_pauses):
            self.at(rng.uniform(0, self.chaos_s), self._pause_group)

    def is_settled(self) -> bool:
        """All was handed out, and the group's positions are at the ends of the logs."""
        if self.ledger.missing():
            return False
        groups, topic = self.kafka.cluster.groups, self.kafka.cluster.topics[TOPIC]
        for log in topic.partitions:
            known = groups.committed(GROUP, (TOPIC, log.number))
            if log.records and (known is None or known[0] < log.end):
                return False
        return True

    def keep(self) -> None:
        """The verdict."""
        simulation, ledger, limits = self.simulation, self.ledger, self.limits
        is_calm = (
            limits.faults == Faults()
            and not (limits.slow_share or limits.group_pauses)
            and not limits.releases_if_behind  # with a message in hand, which comes again
            and not limits.closes  # S7: who reads the log's end may know less
        )
        restarts = simulation.started.total() - limits.members - limits.joins
        ledger.judge(is_calm=is_calm, restarts=restarts)
        simulation.problems = [text for _, text in simulation.troubles()] + ledger.problems
        simulation.reached += +ledger.reached
        simulation.handed_out = sum(ledger.handed_out.values())

    def _send_all(self) -> None:
        from kafkamq.transport.memory.state import LogRecord

        limits, rng, cluster = self.limits, self._rng, self.kafka.cluster
        pause_s = self.chaos_s / limits.messages
        for number in range(limits.messages):
            self.scheduler.sleep(rng.uniform(0, 2 * pause_s))
            with cluster.changed:
                log = rng.choice(cluster.topics[TOPIC].partitions)
                value = b"message %d" % number
                log.append(LogRecord(cluster.now_ms(), None, value, None, None))
                cluster.changed.notify_all()
        self.world.is_sent = True

    # ---- what becomes of members

    def _start(self, client: str) -> None:
        name = f"{client}.{self.simulation.started[client]}"
        self.simulation.started[client] += 1
        member = ClaimMember(self.world, client)
        process = self.world.start(name, member.main, lambda: self._ended(process, client))
        self.actors[process] = member

    def _ended(self, process: Process, client: str) -> None:
        self.actors.pop(process, None)
        self.kafka.changed(process)
        self.later(lambda: self._start(client))

    def _close_one(self) -> None:
        if self.actors:
            self.world.rng.choice(list(self.actors.values())).is_closing = True

    def _pause_group(self) -> None:
        self.world.start("operator", lambda _: pause_group(self.world), lambda: None)

    def _delete_records(self) -> None:
        """Retention: also of what nobody has read."""
        log = self.world.rng.choice(self.kafka.cluster.topics[TOPIC].partitions)
        if log.start < log.end:
            before = self.world.rng.randint(log.start + 1, log.end)
            self.kafka.cluster.delete_records(TOPIC, log.number, before)


def simulate_claims(seed: int, limits: ClaimLimits | None = None) -> ClaimSimulation:
    """Run one seed, with its own limits or with yours."""
    run = _Run(seed, draw_claims(seed) if limits is None else limits)
    run.play()
    return run.simulation
