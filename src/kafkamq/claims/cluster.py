"""A process sees one coordination topic and its members here: what they ask of claims."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from kafkamq.claims.consumer import Consumer
from kafkamq.claims.engine import Engine, Stats
from kafkamq.claims.holding import ClaimOptions, Hold
from kafkamq.claims.log_engine import check_id, require_topic, require_work
from kafkamq.claims.rules.log import Claim
from kafkamq.claims.rules.policy import ClaimMode
from kafkamq.claims.rules.steps import Delivery
from kafkamq.claims.wire.marshal import COORDINATION_TOPIC
from kafkamq.config import Options, ServiceConfig, one_of, wait_seconds
from kafkamq.errors import ConfigError, StateError
from kafkamq.metrics import Counter, Gauge, health, register
from kafkamq.metrics.catalog import Labels
from kafkamq.transport.admin import Admin as KafkaAdmin

_log = logging.getLogger(__name__)
_START_S = 30.0
_READY_S = 60.0
_Holder = TypeVar("_Holder", Consumer, Hold)
MAX_SILENCE_S = 30.0
HELD = Gauge("kafkamq_claims_held", "Partitions held by this process.", ("group", "topic"))
AGE = Gauge(
    "kafkamq_claims_age_seconds",
    "Since the last heartbeat of a held partition, by the broker's time.",
    ("group", "topic", "partition"),
)
LATENESS = Gauge(
    "kafkamq_claims_heartbeat_lateness_seconds", "How late the last heartbeat was planned."
)
MAX_LATENESS = Gauge(
    "kafkamq_claims_heartbeat_lateness_max_seconds", "The latest heartbeat since the start."
)
WON = Counter("kafkamq_claims_won", "Claims that this process won.")
TAKEOVERS = Counter("kafkamq_claims_takeovers", "Of these: from an owner that fell silent.")
ENDED = Counter("kafkamq_claims_ended", "Attempts and claims that ended, by reason.", ("reason",))
LOST = Counter("kafkamq_claims_lost", "Held partitions that were taken, or may be: never released.")
HANDED_OUT = Counter("kafkamq_claims_messages_handed_out", "Messages handed out.")
REDELIVERED = Counter(
    "kafkamq_claims_messages_redelivered", "Of these: this process had handed them out before."
)
BAD_RECORDS = Counter(
    "kafkamq_claims_bad_records",
    "Records of the coordination topic that are malformed, or of impossible partitions.",
)
SKEW = Gauge(
    "kafkamq_claims_client_skew_seconds",
    "A client's clock minus the broker's, in its last record.",
    ("group", "client"),
)
register(globals())


def watch_engine(engine: Engine) -> Callable[[], None]:
    """Show an engine's figures, and watch over its loop, from now on; the result ends that."""
    stats = engine.stats

    def held() -> Mapping[Labels, float]:
        found: dict[Labels, float] = {}
        for group, topic, _ in engine.held_ages():
            found[group, topic] = found.get((group, topic), 0.0) + 1
        return found

    def skews() -> Mapping[Labels, float]:
        return {key: client.skew_s for key, client in list(engine.log.clients.items())}

    forget = [
        HELD.watch(held),
        AGE.watch(engine.held_ages),
        SKEW.watch(skews),
        ENDED.watch(lambda: {(end.value,): float(n) for end, n in list(stats.ended.items())}),
        LATENESS.watch(lambda: {(): stats.lateness_ms / 1000}),
        MAX_LATENESS.watch(lambda: {(): stats.max_lateness_ms / 1000}),
        WON.watch(lambda: {(): float(stats.won)}),
        TAKEOVERS.watch(lambda: {(): float(stats.takeovers)}),
        LOST.watch(lambda: {(): float(stats.lost)}),
        HANDED_OUT.watch(lambda: {(): float(stats.handed_out)}),
        REDELIVERED.watch(lambda: {(): float(stats.redelivered)}),
        BAD_RECORDS.watch(lambda: {(): float(engine.log.bad_records)}),
    ]

    loop = health.add(
        f"claims of {engine.topic.name}",
        max_age_s=MAX_SILENCE_S,
        is_ready=lambda: engine.is_ready and engine.error is None,
    )
    engine.on_turn = loop.beat

    def forget_all() -> None:
        health.remove(loop)
        for each in forget:
            each()

    return forget_all


class Cluster:
    """One coordination topic: its reader, its writer and everything this process claims.

    Thread-safe; context manager; make one per process. Leaving the block releases what is held.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        coordination_topic: str = COORDINATION_TOPIC,
        heartbeat_interval: float | timedelta = Options.heartbeat_interval.default,
        rules: str = Options.rules.default,
        kafka: Mapping[str, str] | None = None,
    ) -> None:
        """Check the topic and begin to read it; ``ready`` waits for its end.

        Args:
            bootstrap_servers: The cluster.
            coordination_topic: Its name; Go clients know ``__marshal`` only.
            heartbeat_interval: Seconds; a silent owner is replaced after two of them. All clients
                of the topic must agree. Go clients: 60.
            rules: ``safe``: everybody goes by the log and the broker's clock. ``peer``: Go clients
                take part; nothing is claimed that their rules, too, do not call free, and a claim
                is given up when one of them heartbeats on it.
            kafka: Kafka's own properties, for example for security.

        Raises:
            ConfigError: A setting, or the topic as it is, cannot work.
            BrokerError, DeadlineExceededError: The cluster refused, or does not answer.
        """
        Options.rules.check(rules)
        interval_ms = Options.heartbeat_interval.convert(heartbeat_interval)
        config = ServiceConfig(bootstrap_servers=bootstrap_servers, kafka=dict(kafka or {}))
        with KafkaAdmin(config) as admin:
            topic = require_topic(admin, coordination_topic, rules=rules, interval_ms=interval_ms)
        for warning in topic.warnings:
            _log.warning("coordination topic %s: %s", coordination_topic, warning)
        self._engine = Engine(config, topic, rules=rules, interval_ms=interval_ms)
        self._members: list[Member] = []
        self._is_closed = False
        try:
            self._engine.start(range(topic.partitions))
            self._forget_metrics = watch_engine(self._engine)
        except BaseException:
            self._engine.close(5.0)
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Cluster({self._engine.config.bootstrap_servers}, {self.coordination_topic})"

    @property
    def coordination_topic(self) -> str:
        return self._engine.topic.name

    @property
    def heartbeat_interval(self) -> float:
        """Return seconds between two heartbeats; a silent owner is replaced after two of them."""
        return self._engine.interval_ms / 1000

    @property
    def stats(self) -> Stats:
        """Counts of this process; a live object."""
        return self._engine.stats

    @property
    def engine(self) -> Engine:
        """The engine is for the other modules of this package."""
        return self._engine

    def ready(self, timeout: float | timedelta = _START_S) -> None:
        """Wait until everything that was in the topic at the start is read.

        Raises:
            DeadlineExceededError: It is not, after ``timeout`` seconds; the call may be repeated.
            BrokerError: It cannot be read.
        """
        timeout_s = wait_seconds(timeout, may_be_endless=True)
        self._engine.wait_until(lambda: self._engine.is_ready, timeout_s, "reading the claims")

    def member(self, client_id: str, group_id: str) -> Member:
        """Return a member of a group.

        Args:
            client_id: Unique in the group; the same after a restart, to take up what was held.
                1-249 characters without ``/``.
            group_id: The group; positions are also committed to Kafka under this name.

        Raises:
            ConfigError: An id cannot work.
        """
        if self._is_closed:
            raise StateError("this Cluster is closed")
        check_id("client_id", client_id)
        check_id("group_id", group_id)
        member = Member(self._engine, client_id, group_id)
        self._members.append(member)
        return member

    def claims(self, group_id: str | None = None) -> list[Claim]:
        """Return every partition that the read part of the topic names; of one group, or of all."""
        with self._engine.lock:
            now_s = self._engine.clock.now_s()
            return [
                claim
                for log in self._engine.log.logs
                for claim in log.claims(now_s=now_s)
                if group_id is None or claim.group == group_id
            ]

    def paused_until(self, group_id: str) -> float:
        """Return when the group's pause ends, epoch s by the broker; 0.0: it is not paused."""
        with self._engine.lock:
            now_s = self._engine.clock.now_s()
            until = max((log.paused_until(group_id) for log in self._engine.log.logs), default=0)
            return float(until) if until > now_s else 0.0

    def close(self, timeout: float | timedelta = 30.0) -> None:
        """Release everything and end the clients. Idempotent."""
        deadline_s = time.monotonic() + wait_seconds(timeout, may_be_endless=True)
        if self._is_closed:
            return
        self._is_closed = True
        for member in self._members:
            member.close(max(0.5, deadline_s - time.monotonic()))
        self._forget_metrics()
        self._engine.close(max(1.0, deadline_s - time.monotonic()))


class Member:
    """One client of one group; ``Cluster.member`` makes it. Thread-safe."""

    def __init__(self, engine: Engine, client_id: str, group_id: str) -> None:
        self.client_id = client_id
        self.group_id = group_id
        self.instance_id = uuid.uuid4().hex[:8]
        self._engine = engine
        self._holders: list[Consumer | Hold] = []

    def __repr__(self) -> str:
        return f"Member({self.client_id}, {self.group_id})"

    def claim_of(self, topic: str, partition: int) -> Claim:
        engine = self._engine
        with engine.lock:
            log = engine.log.logs[engine.partition_of(topic)]
            now_s = engine.clock.now_s()
            return log.claim(self.group_id, topic, partition, now_s=now_s)

    def claimed(self, topic: str, partition: int) -> bool:
        return self.claim_of(topic, partition).is_valid

    def consumer(
        self,
        topics: str | Sequence[str],
        *,
        delivery: str = Options.delivery.default,
        claims: str = "balanced",
        max_claims: int | None = None,
        reclaim: bool = True,
        release_if_behind: bool = True,
        batch: int = 500,
        queue: int = 1000,
        fenced: bool = False,
        on_data_loss: str = Options.on_data_loss.default,
        on_claim: Callable[[str, int, int], None] | None = None,
        on_lost: Callable[[str, int, str], None] | None = None,
    ) -> Consumer:
        """Return a consumer that claims partitions and reads what it holds.

        Args:
            topics: What to claim.
            delivery: ``at-least-once``: messages come one by one or in batches, are committed, and
                come again after a crash that no heartbeat with their position came before.
                ``at-most-once``: messages come by ``batches()`` only, are never handed out twice
                and cannot be committed.
            claims: ``balanced``: a few partitions a round, so that members share. ``greedy``:
                everything free, at once. ``topic``: whole topics as a unit.
            max_claims: The most partitions (``topic``: topics) to hold; None: no limit.
            reclaim: After a restart, take up at once what the same client held.
            release_if_behind: Give a partition up when this member is too slow for it.
            batch: The most messages of a batch.
            queue: How many messages are read ahead, about.
            fenced: A transactional producer for each partition, so that no former owner can commit
                or produce through ``transaction``. At most once always has it.
            on_data_loss: ``raise``, or ``skip`` with a warning, when the position lies outside
                the log.
            on_claim: Told topic, partition and fencing token of each claim; must not block.
            on_lost: Told topic, partition and reason of each claim that ends; must not block.

        Raises:
            ConfigError: A setting cannot work, or the group goes by another heartbeat interval.
            BrokerError: A topic does not exist.
            DeadlineExceededError: The coordination topic could not be read.
        """
        if batch < 1 or queue < 1:
            raise ConfigError(f"batch is {batch} and queue {queue}: they must be >= 1")
        Options.on_data_loss.check(on_data_loss)
        return self._claim(
            Consumer,
            topics,
            claims=claims,
            max_claims=max_claims,
            fenced=fenced,
            delivery=one_of(Delivery, "delivery", delivery),
            reclaim=reclaim,
            release_if_behind=release_if_behind,
            batch=batch,
            queue=queue,
            on_data_loss=on_data_loss,
            on_claim=on_claim,
            on_lost=on_lost,
        )

    def hold(
        self,
        topics: str | Sequence[str],
        *,
        claims: str = "balanced",
        max_claims: int | None = None,
        reclaim: bool = True,
        release_if_behind: bool = False,
        fenced: bool = False,
        on_claim: Callable[[str, int, int], None] | None = None,
        on_lost: Callable[[str, int, str], None] | None = None,
    ) -> Hold:
        """Hold claims without reading messages; the options are those of ``consumer``.

        Raises:
            As ``consumer``.
        """
        return self._claim(
            Hold,
            topics,
            claims=claims,
            max_claims=max_claims,
            fenced=fenced,
            reclaim=reclaim,
            release_if_behind=release_if_behind,
            shares=False,
            on_claim=on_claim,
            on_lost=on_lost,
        )

    def _claim(
        self,
        make: Callable[[Engine, ClaimOptions], _Holder],
        topics: str | Sequence[str],
        *,
        claims: str,
        max_claims: int | None,
        fenced: bool,
        **options: Any,
    ) -> _Holder:
        """Make what claims these topics, and begin when everybody's claims are read."""
        mode = one_of(ClaimMode, "claims", claims)
        if max_claims is not None and max_claims < 1:
            raise ConfigError(f"max_claims is {max_claims}: it must be >= 1, or None for no limit")
        names = (topics,) if isinstance(topics, str) else tuple(dict.fromkeys(topics))
        if not names:
            raise ConfigError("topics is empty: name at least one")
        for name in names:
            check_id("topic", name)
        if any(not holder.is_closed for holder in self._holders):
            raise StateError(
                "this member holds claims already: close its consumer, or make another member with"
                " another client_id"
            )
        engine = self._engine
        engine.open_writer()
        counts = {name: require_work(engine.admin, name) for name in names}
        engine.wait_until(lambda: engine.is_ready, _READY_S, "reading the claims")
        with engine.lock:
            engine.log.check_intervals(self.group_id)
        engine.offsets_of(self.group_id)
        # A client that comes back within one process is another instance, as after a restart.
        self.instance_id = uuid.uuid4().hex[:8]
        holder = make(
            engine,
            ClaimOptions(
                client=self.client_id,
                instance=self.instance_id,
                group=self.group_id,
                counts=counts,
                mode=mode,
                max_claims=max_claims or 0,
                is_fenced=fenced,
                **options,
            ),
        )
        self._holders.append(holder)
        holder.begin()
        return holder

    def close(self, timeout: float | timedelta = 30.0) -> None:
        """Close its consumers and holds. Idempotent."""
        deadline_s = time.monotonic() + wait_seconds(timeout, may_be_endless=True)
        for holder in self._holders:
            holder.close(timeout=max(0.5, deadline_s - time.monotonic()))
