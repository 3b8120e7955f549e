"""Metrics of the claims of this process; their names are a contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kafkamq.claims.engine import Engine
from kafkamq.metrics import Counter, Gauge, health, register
from kafkamq.metrics.families import Labels

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

    def ages() -> Mapping[Labels, float]:
        return engine.held_ages()

    def held() -> Mapping[Labels, float]:
        found: dict[Labels, float] = {}
        for group, topic, _ in engine.held_ages():
            found[group, topic] = found.get((group, topic), 0.0) + 1
        return found

    def skews() -> Mapping[Labels, float]:
        return {key: client.skew_s for key, client in list(engine.log.clients.items())}

    forget = [
        HELD.watch(held),
        AGE.watch(ages),
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
