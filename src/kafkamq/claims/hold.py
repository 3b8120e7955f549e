"""Claims without messages, for engines that read what they are told to: Spark above all."""

from __future__ import annotations

from collections.abc import Callable

from kafkamq.claims.broker_clock import lease_clock_ms
from kafkamq.claims.engine import Engine
from kafkamq.claims.held_partitions import HeldPartitions
from kafkamq.claims.partition_claims import PartitionClaims, PartitionClaimsListener
from kafkamq.claims.rules.steps import End, Fetch
from kafkamq.claims.session import ClaimSession
from kafkamq.errors import LeaseLostError


class Hold(HeldPartitions, PartitionClaimsListener):
    """Holds partitions and their positions; ``Member.hold`` makes it. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        begin: Callable[[PartitionClaimsListener], PartitionClaims],
        *,
        on_claim: Callable[[str, int, int], None] | None,
        on_lost: Callable[[str, int, str], None] | None,
    ) -> None:
        """``begin`` makes the claims, which tell this one what is its own."""
        self._engine = engine
        self._claims = begin(self)
        self._on_claim = on_claim
        self._on_lost = on_lost
        self.is_closed = False
        self._done: dict[ClaimSession, int] = {}  # positions that the next heartbeat will say
        self._claims.start()

    def commit_position(self, topic: str, partition: int, offset: int) -> None:
        """Everything before ``offset`` is done; the next heartbeat, or ``flush``, says so.

        Raises:
            LeaseLostError: The partition is not held any more.
        """
        with self._engine.lock:
            session = self._claims.sessions.get((topic, partition))
            if session is None or not session.claimant.is_live(lease_clock_ms()):
                raise LeaseLostError(f"{topic}[{partition}] is not held any more")
            if offset > max(self._done.get(session, 0), session.claimant.position):
                self._done[session] = offset
                session.claimant.hand_out((offset - 1,), lease_clock_ms())
                session.claimant.commit(offset - 1)

    # ---- what the claims tell, under the engine's lock

    def on_gained(self, session: ClaimSession, step: Fetch) -> None:
        if self._on_claim is not None:
            self._on_claim(*session.place, session.claimant.token)

    def on_lost(self, session: ClaimSession, reason: End, *, is_lost: bool) -> None:
        self._done.pop(session, None)
        if self._on_lost is not None:
            self._on_lost(*session.place, reason.value)
