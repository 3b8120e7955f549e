"""The claims of one member: what it holds, what it tries, and when it gives all back."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kafkamq.claims.broker_clock import lease_clock_ms
from kafkamq.claims.engine import Engine
from kafkamq.claims.rules.claimant import Claimant, may_reclaim
from kafkamq.claims.rules.log import ClaimState
from kafkamq.claims.rules.policy import ClaimMode, ClaimPolicy, Prospect
from kafkamq.claims.rules.steps import (
    ClaimantConfig,
    Delivery,
    End,
    Fetch,
    Finish,
    HandOut,
    Phase,
    Stop,
)
from kafkamq.claims.session import NEVER_MS, ClaimSession, Listener
from kafkamq.types import MarshalRecord, MarshalType

_log = logging.getLogger(__name__)
_ROUND_MS = 100
_MAX_PAUSE_MS = 3000
_PARTITIONS_MS = 10_000  # added partitions are noticed within this


@dataclass(frozen=True, kw_only=True)
class PartitionClaimsConfig:
    """What is claimed, and how."""

    topics: tuple[str, ...]
    delivery: Delivery = Delivery.AT_LEAST_ONCE
    mode: ClaimMode = ClaimMode.BALANCED
    max_claims: int = 0  # 0: no limit
    reclaim: bool = True
    release_if_behind: bool = True
    shares: bool = True  # gives partitions to members that hold less, and asks for some (G7)
    is_fenced: bool = False  # a transactional producer per partition; at most once always has one


class PartitionClaimsListener:
    """Who works on what is held; called under the engine's lock, so it must be quick."""

    def on_gained(self, session: ClaimSession, step: Fetch) -> None:
        """The partition may be read."""

    def on_batch(self, session: ClaimSession, step: HandOut) -> None:
        """The offered batch may be used."""

    def on_lost(self, session: ClaimSession, reason: End, *, is_lost: bool) -> None:
        """Nothing more may be handed out; unless ``is_lost``, verdicts still count."""


class PartitionClaims(Listener):
    """Claims by policy; driven by the engine's ticks, everything under its lock."""

    def __init__(
        self,
        engine: Engine,
        listener: PartitionClaimsListener,
        *,
        client: str,
        instance: str,
        group: str,
        config: PartitionClaimsConfig,
        counts: Mapping[str, int],
    ) -> None:
        """Nothing is claimed before ``start``; ``counts`` are the partitions of each topic."""
        self.config = config
        self.group = group
        # What is held or tried, by topic and partition.
        self.sessions: dict[tuple[str, int], ClaimSession] = {}
        self._engine = engine
        self._ids = (client, instance)
        self._counts = dict(counts)
        self._listener = listener
        self._policy = ClaimPolicy(
            config.mode,
            max_claims=config.max_claims,
            pause_ms=min(_MAX_PAUSE_MS, engine.interval_ms // 20),
            rest_ms=engine.interval_ms,
        )
        self._next_round_ms = 0
        self._count_ms = lease_clock_ms() + _PARTITIONS_MS
        self._template = self._claimant_config(config.topics[0], 0)
        self._is_stopped = False
        # By topic that is incomplete: what is held of it, and where to read from.
        self._waiting: dict[str, dict[ClaimSession, Fetch]] = {}
        self.complete: set[str] = set()  # with whole topics: those of which everything is held

    def start(self) -> None:
        with self._engine.lock:
            self._engine.add_ticker(self._tick)

    @property
    def topics(self) -> Sequence[str]:
        return self.config.topics

    @property
    def is_over(self) -> bool:
        """It was stopped, and nothing is held any more."""
        return self._is_stopped and not self.sessions

    def held(self) -> dict[tuple[str, int], ClaimSession]:
        """What may be worked on now."""
        return {
            place: session
            for place, session in self.sessions.items()
            if session.claimant.phase is Phase.OWNING
        }

    def stop(self, *, drain_ms: int, keeps_claims: bool) -> None:
        self._is_stopped = True
        self._engine.remove_ticker(self._tick)
        for session in list(self.sessions.values()):
            self.release(session, drain_ms=drain_ms, keeps_claim=keeps_claims)

    def release(
        self,
        session: ClaimSession,
        *,
        drain_ms: int = 0,
        reason: End = End.RELEASED,
        keeps_claim: bool = False,
        offset: int | None = None,
    ) -> None:
        session.claimant.release(
            lease_clock_ms(),
            drain_ms=drain_ms,
            reason=reason,
            keeps_claim=keeps_claim,
            offset=offset,
        )
        self._engine.drive(session)

    def claim_again(self, session: ClaimSession) -> None:
        """Give it back, to begin anew; in topic mode with all other partitions of the topic (G4).

        Else another member would take this one, and nobody could have the topic as a whole again.
        """
        if self.config.mode is ClaimMode.TOPIC:
            self._break(session.place[0])
        else:
            self.release(session)

    # ---- rounds

    def _counted(self, counts: Mapping[str, int]) -> None:
        """From the offset service's thread: how many partitions the topics have now."""
        with self._engine.lock:
            for topic, count in counts.items():
                self._counts[topic] = max(count, self._counts[topic])

    def _tick(self, now_ms: int, now_s: float) -> None:
        if now_ms < self._next_round_ms or self._is_stopped:
            return
        self._next_round_ms = now_ms + _ROUND_MS
        if now_ms >= self._count_ms:
            self._count_ms = now_ms + _PARTITIONS_MS
            self._engine.offset_service.of(self.group).count(self.topics, self._counted)
        prospects = self._prospects(now_s)
        for prospect in self._policy.choose(prospects, now_ms, random_unit=random.random()):
            self._try(prospect)
        given = self._policy.gives(prospects)
        able = [session for (topic, _), session in self.held().items() if topic in given]
        if able:  # what has least under way
            session = min(able, key=lambda each: each.claimant.outstanding)
            self.release(session, drain_ms=NEVER_MS, reason=End.SHARED)  # handlers may be slow
        asked = self._policy.ask(prospects, now_ms) if self.config.shares else None
        if asked is not None:
            self._ask(asked, now_s)

    def _ask(self, prospect: Prospect, now_s: float) -> None:
        client, instance = self._ids
        record = MarshalRecord(
            MarshalType.CLAIMING_MESSAGES,
            time_s=int(now_s),
            instance=instance,
            client=client,
            group=self.group,
            topic=prospect.topic,
            partition=prospect.partition,
        )
        self._engine.send(self._engine.partition_of(prospect.topic), record, lambda _: None)

    def _prospects(self, now_s: float) -> list[Prospect]:
        found = []
        for topic, count in self._counts.items():
            coordination_partition = self._engine.partition_of(topic)
            log = self._engine.log.logs[coordination_partition]
            if log.is_paused(self.group, now_s=now_s):
                continue
            is_ready = log.is_ready(now_s=now_s)
            for partition in range(count):
                session = self.sessions.get((topic, partition))
                claim = log.claim(self.group, topic, partition, now_s=now_s)
                if session is not None:
                    is_asked = self.config.shares and claim.asked_at > session.heard_at
                    session.heard_at = claim.asked_at
                    found.append(
                        Prospect(
                            topic,
                            partition,
                            is_ours=True,
                            is_held=session.claimant.phase is Phase.OWNING,
                            asker=claim.asker if is_asked else ("", ""),
                        )
                    )
                    continue
                is_back = is_ready and may_reclaim(self._template, claim)
                is_orphan = (claim.client, claim.instance) == self._ids
                found.append(
                    Prospect(
                        topic,
                        partition,
                        is_claimable=claim.is_claimable or is_orphan,
                        is_reclaimable=is_back,
                        is_stale=claim.state is ClaimState.STALE,
                        owner=(claim.client, claim.instance),
                    )
                )
        random.shuffle(found)  # members that start together begin in different places
        return found

    def _try(self, prospect: Prospect) -> None:
        engine, topic, partition = self._engine, prospect.topic, prospect.partition
        number = engine.partition_of(topic)
        peers = engine.log.peers[number] if engine.log.peers else None
        claimant = Claimant(
            engine.log.logs[number], self._claimant_config(topic, partition), peers=peers
        )
        is_fenced = self.config.is_fenced or self.config.delivery is Delivery.AT_MOST_ONCE
        fence = engine.offset_service.fence(self.group, topic, partition) if is_fenced else None
        session = self.sessions[topic, partition] = ClaimSession(claimant, number, self, fence)
        session.is_takeover = prospect.is_stale
        engine.add(session)

    def _claimant_config(self, topic: str, partition: int) -> ClaimantConfig:
        client, instance = self._ids
        return ClaimantConfig(
            client=client,
            instance=instance,
            group=self.group,
            topic=topic,
            partition=partition,
            delivery=self.config.delivery,
            interval_ms=self._engine.interval_ms,
            retry_ms=min(500, max(10, self._engine.interval_ms // 20)),
            reclaim=self.config.reclaim,
            release_if_behind=self.config.release_if_behind,
            is_whole_topic=self.config.mode is ClaimMode.TOPIC,
            yields_to_rivals=bool(self._engine.log.peers),
        )

    # ---- what sessions tell

    def on_fetch(self, session: ClaimSession, step: Fetch) -> None:
        """Held; with whole topics it is read when all of the topic is held."""
        if self.config.mode is not ClaimMode.TOPIC:
            self._listener.on_gained(session, step)
            return
        topic = session.place[0]
        waiting = self._waiting.setdefault(topic, {})
        waiting[session] = step
        if len(waiting) == self._counts[topic] or topic in self.complete:
            self.complete.add(topic)
            for each, fetch in self._waiting.pop(topic).items():
                each.claimant.read(lease_clock_ms())
                self._listener.on_gained(each, fetch)

    def on_hand_out(self, session: ClaimSession, step: HandOut) -> None:
        self._listener.on_batch(session, step)

    def on_stop(self, session: ClaimSession, step: Stop) -> None:
        self._waiting.get(session.place[0], {}).pop(session, None)  # it must not be read any more
        self._listener.on_lost(session, step.reason, is_lost=step.is_lost)

    def on_finish(self, session: ClaimSession, step: Finish) -> None:
        topic, partition = session.place
        if self.sessions.get(session.place) is session:
            del self.sessions[session.place]
        was_held = session.start is not None
        level = logging.INFO if was_held else logging.DEBUG
        _log.log(
            level,
            "a claim ended",
            extra={"topic": topic, "partition": partition, "reason": step.reason.value},
        )
        self._policy.on_end(topic, partition, step.reason, lease_clock_ms(), was_held=was_held)
        for broken in self._policy.take_broken_topics():
            self._break(broken)

    def _break(self, topic: str) -> None:
        """Whole topics: one partition is gone, so the others are given back."""
        self.complete.discard(topic)
        self._waiting.pop(topic, None)
        for place, session in list(self.sessions.items()):
            if place[0] == topic:
                self.release(session, reason=End.RELEASED)
