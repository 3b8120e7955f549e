"""Processes that claim partitions or ranges, as users write them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from harness.simulation.claims.draw import ClaimLimits, ClaimUse
from harness.simulation.claims.ledger import GROUP, OUTPUTS, TOPIC, ClaimLedger, number_of
from harness.simulation.scheduler import Process, Scheduler
from harness.simulation.stage import World
from kafkamq.claims.admin import Admin
from kafkamq.claims.cluster import Cluster
from kafkamq.claims.consumer import ClaimedMessage, Consumer
from kafkamq.claims.ranges import ClaimedRange, RangeClaims
from kafkamq.errors import DeadlineExceededError, KafkaMQError, LeaseLostError

_log = logging.getLogger(__name__)


class ClaimWorld(World):
    """One topic, one group, and what was handed out."""

    def __init__(
        self, scheduler: Scheduler, limits: ClaimLimits, servers: str, ledger: ClaimLedger
    ) -> None:
        super().__init__(scheduler, servers)
        self.limits = limits
        self.ledger = ledger

    @property
    def interval_s(self) -> float:
        return self.limits.interval_ms / 1000


class ClaimMember:
    """One process of a client, which keeps its name when it starts again."""

    def __init__(self, world: ClaimWorld, client: str) -> None:
        self.client = client
        self.is_closing = False
        self._world = world
        self._limits = world.limits
        self._name = client

    def main(self, process: Process) -> None:
        """Run until it is told to close, or claims nothing any more."""
        self._name = process.name
        if self._limits.use is ClaimUse.RANGES:
            self._work_on_ranges()
            return
        world, limits = self._world, self._limits
        is_once = limits.use is ClaimUse.AT_MOST_ONCE
        with Cluster(world.servers, heartbeat_interval=world.interval_s) as cluster:
            consumer = cluster.member(self.client, GROUP).consumer(
                TOPIC,
                delivery="at-most-once" if is_once else "at-least-once",
                claims=limits.mode,
                max_claims=limits.max_claims,
                reclaim=limits.reclaims,
                release_if_behind=limits.releases_if_behind,
                batch=limits.batch,
                fenced=limits.use is ClaimUse.FENCED,
                on_data_loss="skip",
                on_lost=lambda _, __, reason: world.ledger.lost(reason),
            )
            while not self.is_closing:
                if is_once:
                    self._work_on_batch(consumer)
                else:
                    self._work_on_message(consumer)
            keeps = world.rng.random() < limits.keeps_share
            consumer.close(release=not keeps, drain=world.rng.choice((0.0, 0.5)), timeout=10.0)

    def _work_on_batch(self, consumer: Consumer) -> None:
        batch = consumer.next_batch(0.5)
        if batch is not None:
            self._world.ledger.hands_out(self._name, batch.messages)
            self._work(batch.messages)

    def _work_on_message(self, consumer: Consumer) -> None:
        message = consumer.receive(0.5)
        if message is None:
            return
        world, ledger = self._world, self._world.ledger
        ledger.hands_out(self._name, [message])
        self._work([message])
        while not self._finish(consumer, message):
            world.sleep(0.1)

    def _finish(self, consumer: Consumer, message: ClaimedMessage) -> bool:
        """Commit it, with its output; False: its transaction failed, and is made again."""
        world, ledger = self._world, self._world.ledger
        is_committed = False
        try:
            if self._limits.use is ClaimUse.FENCED:
                place = message.partition, message.token
                with consumer.transaction(message) as outputs:
                    value = b"output %d %d %d" % (number_of(message.payload), *place)
                    outputs.send(OUTPUTS, value)
            message.commit()
            is_committed = True
            ledger.finished([message])
            if world.rng.random() < self._limits.flushes:
                consumer.flush(5.0)
        except LeaseLostError as error:
            _log.info("a message comes again", extra={"error": str(error)})
        except KafkaMQError as error:
            if is_committed:
                return True  # only the flush was late
            if self._limits.use is not ClaimUse.FENCED:
                raise
            _log.info("an output may be missing", extra={"error": str(error)})
            return False
        return True

    def _work(self, messages: Sequence[ClaimedMessage]) -> None:
        world, limits = self._world, self._limits
        for _ in messages:
            if world.rng.random() < limits.slow_share:
                world.sleep(world.rng.uniform(1, 3) * world.interval_s)
            else:
                world.sleep(world.rng.uniform(0, limits.work_ms / 1000))

    # ---- ranges

    def _work_on_ranges(self) -> None:
        world, limits = self._world, self._limits
        claims = RangeClaims(
            world.servers,
            TOPIC,
            client_id=self.client,
            group_id=GROUP,
            size=limits.batch,
            heartbeat_interval=world.interval_s,
            on_data_loss="skip",
        )
        with claims:
            while not self.is_closing:
                claimed = claims.next_range(0.5)
                if claimed is not None:
                    try:
                        self._work_on_range(claims, claimed)
                    except (LeaseLostError, DeadlineExceededError):  # given again, if it is ours
                        world.ledger.lost("a range")

    def _work_on_range(self, claims: RangeClaims, claimed: ClaimedRange) -> None:
        ledger, rng = self._world.ledger, self._world.rng
        waiting: list[ClaimedMessage] = []

        def done() -> None:
            first, end = claimed.first, claimed.position
            ledger.says(waiting)
            while True:
                try:
                    claimed.done()
                    break
                except DeadlineExceededError as error:  # what is not said is said again
                    _log.info("a range is not known to be done", extra={"error": str(error)})
            ledger.finished(waiting)
            ledger.settles(claimed.partition, first, end)
            waiting.clear()

        for message in claimed:
            ledger.hands_out(self._name, [message])
            self._work([message])
            waiting.append(message)
            is_last = ledger.is_at_end(message)  # the iteration waits for more
            if claimed.position < claimed.next and (is_last or rng.random() < 0.1):
                done()
            if self.is_closing:
                claims.stop()
        done()


def pause_group(world: ClaimWorld) -> None:
    """An operator stops all members for a while."""
    with Cluster(world.servers, heartbeat_interval=world.interval_s) as cluster:
        cluster.ready()
        admin = Admin(cluster, GROUP)
        admin.pause(4 * world.interval_s)
        world.sleep(world.rng.uniform(0, 4) * world.interval_s)
        if world.rng.random() < 0.5:
            admin.resume()
