"""The partitions that a member holds: which it tries, what it is told of them, and their end.

``Holding`` is what consumers and bare holds have in common; it claims by policy, at the engine's
ticks and under its lock. ``Hold`` is for engines that read what they are told to: Spark above all.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

from kafkamq.claims.engine import NEVER_MS, ClaimSession, Engine, Listener
from kafkamq.claims.rules.claimant import may_reclaim
from kafkamq.claims.rules.log import ClaimState
from kafkamq.claims.rules.policy import ClaimMode, ClaimPolicy, Prospect
from kafkamq.claims.rules.steps import ClaimantConfig, Delivery, End, Fetch, Finish, Phase, Stop
from kafkamq.config import wait_seconds
from kafkamq.errors import DeadlineExceededError, LeaseLostError
from kafkamq.transport.clock import monotonic_ms
from kafkamq.types import MarshalType

_log = logging.getLogger(__name__)
_Self = TypeVar("_Self", bound="Holding")
_ROUND_MS = 100
_MAX_PAUSE_MS = 3000
_PARTITIONS_MS = 10_000


@dataclass(frozen=True, kw_only=True)
class ClaimOptions:
    """What a member claims, and how it hands out what it holds; as in ``Member.consumer``."""

    client: str
    instance: str
    group: str
    counts: Mapping[str, int]
    delivery: Delivery = Delivery.AT_LEAST_ONCE
    mode: ClaimMode = ClaimMode.BALANCED
    # 0: there is no limit.
    max_claims: int = 0
    reclaim: bool = True
    release_if_behind: bool = True
    # It gives partitions to members that hold less, and asks for some (G7).
    shares: bool = True
    # Each partition has a transactional producer; at most once it always has.
    is_fenced: bool = False
    batch: int = 500
    queue: int = 1000
    on_data_loss: str = "raise"
    on_claim: Callable[[str, int, int], None] | None = None
    on_lost: Callable[[str, int, str], None] | None = None


class Holding(Listener):
    """The claims of one member, from ``begin`` to ``close``; thread-safe, and a context manager."""

    def __init__(self, engine: Engine, options: ClaimOptions) -> None:
        self.is_closed = False
        self._engine = engine
        self._options = options
        self._ids = (options.client, options.instance)
        self._counts = dict(options.counts)
        # What is held or tried, by topic and partition.
        self._sessions: dict[tuple[str, int], ClaimSession] = {}
        self._policy = ClaimPolicy(
            options.mode,
            max_claims=options.max_claims,
            pause_ms=min(_MAX_PAUSE_MS, engine.interval_ms // 20),
            rest_ms=engine.interval_ms,
        )
        self._next_round_ms = 0
        self._count_ms = monotonic_ms() + _PARTITIONS_MS
        # Of any partition.
        self._config = ClaimantConfig(
            client=options.client,
            instance=options.instance,
            group=options.group,
            topic=next(iter(self._counts)),
            partition=0,
            delivery=options.delivery,
            interval_ms=engine.interval_ms,
            retry_ms=min(500, max(10, engine.interval_ms // 20)),
            reclaim=options.reclaim,
            release_if_behind=options.release_if_behind,
            is_whole_topic=options.mode is ClaimMode.TOPIC,
            yields_to_rivals=bool(engine.log.peers),
        )
        self._is_over = False
        # By topic that is incomplete: what is held of it, and where to read from.
        self._waiting: dict[str, dict[ClaimSession, Fetch]] = {}
        self._complete: set[str] = set()

    def begin(self) -> None:
        with self._engine.lock:
            self._engine.add_ticker(self._tick)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def claims(self) -> dict[tuple[str, int], int]:
        """Fencing token by topic and partition of everything that is held now."""
        with self._engine.lock:
            return {place: session.claimant.token for place, session in self._held().items()}

    @property
    def complete_topics(self) -> frozenset[str]:
        """Return the topics that are held as a whole, with ``claims="topic"``."""
        return frozenset(self._complete)

    def positions(self) -> dict[tuple[str, int], int]:
        """Return the next offset to consume of all that is held now, by topic and partition."""
        with self._engine.lock:
            return {place: session.claimant.position for place, session in self._held().items()}

    def is_held(self, topic: str, partition: int, token: int) -> bool:
        with self._engine.lock:
            session = self._sessions.get((topic, partition))
            return (
                session is not None
                and session.claimant.token == token
                and session.claimant.is_live(monotonic_ms())
            )

    def confirmed_position(self, topic: str, partition: int) -> int:
        """Return up to where the log says that all is done; -1: it is not held."""
        with self._engine.lock:
            session = self._sessions.get((topic, partition))
            return -1 if session is None else session.claimant.confirmed_position

    def wait_for_claims(self, count: int, timeout: float | timedelta = 30.0) -> None:
        """Wait until at least ``count`` partitions are held."""
        self._engine.wait_until(
            lambda: len(self._held()) >= count,
            wait_seconds(timeout, may_be_endless=True),
            f"claiming {count} partitions",
        )

    def flush(self, timeout: float | timedelta = 30.0) -> None:
        """Write the positions of all that is held, and wait until they stand in the log.

        What is just being given back is waited for as well: its release says the position.
        """
        timeout_s = wait_seconds(timeout, may_be_endless=True)
        with self._engine.lock:
            wanted = {}
            for session in list(self._sessions.values()):
                if session.start is None:
                    # Nothing was handed out under it.
                    continue
                session.claimant.beat_soon(monotonic_ms())
                self._engine.drive(session)
                wanted[session] = session.claimant.position
        lost: list[ClaimSession] = []

        def is_done() -> bool:
            for session in list(wanted):
                if session.claimant.confirmed_position >= wanted[session]:
                    del wanted[session]
                elif session.claimant.phase is Phase.OVER:
                    del wanted[session]
                    lost.append(session)
            return not wanted

        self._engine.wait_until(is_done, timeout_s, "writing positions")
        if lost:
            places = ", ".join(f"{topic}[{number}]" for topic, number in (t.place for t in lost))
            raise LeaseLostError(
                f"the claims of {places} ended before their positions were written"
            )

    def close(
        self,
        *,
        release: bool = True,
        drain: float | timedelta = 0.0,
        timeout: float | timedelta = 30.0,
    ) -> None:
        """Give everything back. Idempotent.

        Args:
            release: False: leave the partitions claimed, for a quick restart of this client.
            drain: Seconds to wait for commits by other threads.
            timeout: Bound of it all, in seconds; what is not released by then goes stale.
        """
        drain_ms = round(wait_seconds(drain, name="drain") * 1000)
        timeout_s = wait_seconds(timeout, may_be_endless=True)
        if self.is_closed:
            return
        self.is_closed = True
        engine = self._engine
        with engine.lock:
            self._is_over = True
            engine.remove_ticker(self._tick)
            for session in list(self._sessions.values()):
                self._release(session, drain_ms=drain_ms, keeps_claim=not release)
        try:
            engine.wait_until(
                lambda: not self._sessions or engine.error is not None,
                timeout_s,
                "releasing claims",
            )
        except DeadlineExceededError as error:
            _log.warning("%s: others get the partitions when they are stale", error)

    # ---- what becomes of a partition; under the engine's lock, so it must be quick

    def _gained(self, session: ClaimSession, _: Fetch) -> None:
        if self._options.on_claim is not None:
            self._options.on_claim(*session.place, session.claimant.token)

    def _ended(self, session: ClaimSession, reason: End) -> None:
        """Nothing more may be handed out; unless the claim is lost, verdicts still count."""
        if self._options.on_lost is not None:
            self._options.on_lost(*session.place, reason.value)

    def _held(self) -> dict[tuple[str, int], ClaimSession]:
        return {
            place: session
            for place, session in self._sessions.items()
            if session.claimant.phase is Phase.OWNING
        }

    def _release(
        self,
        session: ClaimSession,
        *,
        drain_ms: int = 0,
        reason: End = End.RELEASED,
        keeps_claim: bool = False,
        offset: int | None = None,
    ) -> None:
        session.claimant.release(
            monotonic_ms(), drain_ms=drain_ms, reason=reason, keeps_claim=keeps_claim, offset=offset
        )
        self._engine.drive(session)

    def _claim_again(self, session: ClaimSession) -> None:
        """Release a partition to claim it once more; whole topics with all their partitions (G4).

        Else another member would take this one, and nobody could have the topic as a whole again.
        """
        if self._options.mode is ClaimMode.TOPIC:
            self._break(session.place[0])
        else:
            self._release(session)

    # ---- rounds

    def _counted(self, counts: Mapping[str, int]) -> None:
        """Take from the offset service's thread how many partitions the topics have now."""
        with self._engine.lock:
            for topic, count in counts.items():
                self._counts[topic] = max(count, self._counts[topic])

    def _tick(self, now_ms: int, now_s: float) -> None:
        if now_ms < self._next_round_ms or self._is_over:
            return
        self._next_round_ms = now_ms + _ROUND_MS
        if now_ms >= self._count_ms:
            self._count_ms = now_ms + _PARTITIONS_MS
            offsets = self._engine.offsets_of(self._options.group)
            offsets.count(list(self._counts), self._counted)
        prospects = self._prospects(now_s)
        for prospect in self._policy.choose(prospects, now_ms, random_unit=random.random()):
            self._try(prospect)
        given = self._policy.gives(prospects)
        able = [session for (topic, _), session in self._held().items() if topic in given]
        if able:
            session = min(able, key=lambda each: each.claimant.outstanding)
            self._release(session, drain_ms=NEVER_MS, reason=End.SHARED)
        asked = self._policy.ask(prospects, now_ms) if self._options.shares else None
        if asked is not None:
            self._ask(asked, now_s)

    def _ask(self, prospect: Prospect, now_s: float) -> None:
        record = self._config_of(prospect).record(MarshalType.CLAIMING_MESSAGES, now_s)
        self._engine.send(self._engine.partition_of(prospect.topic), record, lambda _: None)

    def _prospects(self, now_s: float) -> list[Prospect]:
        found = []
        for topic, count in self._counts.items():
            coordination_partition = self._engine.partition_of(topic)
            log = self._engine.log.logs[coordination_partition]
            if log.is_paused(self._options.group, now_s=now_s):
                continue
            is_ready = log.is_ready(now_s=now_s)
            for partition in range(count):
                session = self._sessions.get((topic, partition))
                claim = log.claim(self._options.group, topic, partition, now_s=now_s)
                if session is not None:
                    is_asked = self._options.shares and claim.asked_at > session.heard_at
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
                is_back = is_ready and may_reclaim(self._config, claim)
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
        # Members that start together begin in different places.
        random.shuffle(found)
        return found

    def _try(self, prospect: Prospect) -> None:
        config = self._config_of(prospect)
        is_fenced = self._options.is_fenced or self._options.delivery is Delivery.AT_MOST_ONCE
        session = self._engine.attempt(config, self, is_fenced=is_fenced)
        session.is_takeover = prospect.is_stale
        self._sessions[session.place] = session
        self._engine.add(session)

    def _config_of(self, prospect: Prospect) -> ClaimantConfig:
        return replace(self._config, topic=prospect.topic, partition=prospect.partition)

    # ---- what sessions tell

    def on_fetch(self, session: ClaimSession, step: Fetch) -> None:
        """Held; with whole topics it is read when all of the topic is held."""
        if self._options.mode is not ClaimMode.TOPIC:
            self._gained(session, step)
            return
        topic = session.place[0]
        waiting = self._waiting.setdefault(topic, {})
        waiting[session] = step
        if len(waiting) == self._counts[topic] or topic in self._complete:
            self._complete.add(topic)
            for each, fetch in self._waiting.pop(topic).items():
                each.claimant.read(monotonic_ms())
                self._gained(each, fetch)

    def on_stop(self, session: ClaimSession, step: Stop) -> None:
        self._waiting.get(session.place[0], {}).pop(session, None)
        self._ended(session, step.reason)

    def on_finish(self, session: ClaimSession, step: Finish) -> None:
        topic, partition = session.place
        if self._sessions.get(session.place) is session:
            del self._sessions[session.place]
        was_held = session.start is not None
        _log.log(
            logging.INFO if was_held else logging.DEBUG,
            "a claim ended",
            extra={"topic": topic, "partition": partition, "reason": step.reason.value},
        )
        self._policy.on_end(topic, partition, step.reason, monotonic_ms(), was_held=was_held)
        for broken in self._policy.take_broken_topics():
            self._break(broken)

    def _break(self, topic: str) -> None:
        self._complete.discard(topic)
        self._waiting.pop(topic, None)
        for place, session in list(self._sessions.items()):
            if place[0] == topic:
                self._release(session)


class Hold(Holding):
    """Holds partitions and their positions; ``Member.hold`` makes it. Thread-safe."""

    def __init__(self, engine: Engine, options: ClaimOptions) -> None:
        super().__init__(engine, options)
        self._done: dict[ClaimSession, int] = {}

    def commit_position(self, topic: str, partition: int, offset: int) -> None:
        """Everything before ``offset`` is done; the next heartbeat, or ``flush``, says so.

        Raises:
            LeaseLostError: The partition is not held any more.
        """
        with self._engine.lock:
            session = self._sessions.get((topic, partition))
            if session is None or not session.claimant.is_live(monotonic_ms()):
                raise LeaseLostError(f"{topic}[{partition}] is not held any more")
            if offset > max(self._done.get(session, 0), session.claimant.position):
                self._done[session] = offset
                session.claimant.hand_out((offset - 1,), monotonic_ms())
                session.claimant.commit(offset - 1)

    def _ended(self, session: ClaimSession, reason: End) -> None:
        self._done.pop(session, None)
        super()._ended(session, reason)
