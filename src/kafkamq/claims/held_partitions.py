"""What consumers and bare holds have in common: the partitions of one member."""

from __future__ import annotations

import logging
from typing import TypeVar

from kafkamq.claims.broker_clock import lease_clock_ms
from kafkamq.claims.engine import Engine
from kafkamq.claims.partition_claims import PartitionClaims
from kafkamq.claims.rules.steps import Phase
from kafkamq.claims.session import ClaimSession
from kafkamq.errors import DeadlineExceededError, LeaseLostError

_Self = TypeVar("_Self", bound="HeldPartitions")
_log = logging.getLogger(__name__)


class HeldPartitions:
    """Views and the end; who derives from it sets ``_engine`` and ``_claims``. Thread-safe."""

    _engine: Engine
    _claims: PartitionClaims
    is_closed: bool

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def claims(self) -> dict[tuple[str, int], int]:
        """Fencing token by topic and partition of everything that is held now."""
        with self._engine.lock:
            return {place: session.claimant.token for place, session in self._claims.held().items()}

    @property
    def complete_topics(self) -> frozenset[str]:
        """With ``claims="topic"``: topics that are held as a whole."""
        return frozenset(self._claims.complete)

    def positions(self) -> dict[tuple[str, int], int]:
        """The next offset to consume, by topic and partition, of everything that is held now."""
        with self._engine.lock:
            return {
                place: session.claimant.position for place, session in self._claims.held().items()
            }

    def is_held(self, topic: str, partition: int, token: int) -> bool:
        """Whether that claim may be worked under at this moment."""
        with self._engine.lock:
            session = self._claims.sessions.get((topic, partition))
            return (
                session is not None
                and session.claimant.token == token
                and session.claimant.is_live(lease_clock_ms())
            )

    def confirmed_position(self, topic: str, partition: int) -> int:
        """Up to where the log says that all is done; -1: it is not held."""
        with self._engine.lock:
            session = self._claims.sessions.get((topic, partition))
            return -1 if session is None else session.claimant.confirmed_position

    def wait_for_claims(self, count: int, timeout: float = 30.0) -> None:
        """Wait until at least ``count`` partitions are held."""
        self._engine.wait_until(
            lambda: len(self._claims.held()) >= count, timeout, f"claiming {count} partitions"
        )

    def flush(self, timeout: float = 30.0) -> None:
        """Write the positions of all that is held, and wait until they stand in the log.

        What is just being given back is waited for as well: its release says the position.
        """
        with self._engine.lock:
            wanted = {}
            for session in list(self._claims.sessions.values()):
                if session.start is None:  # nothing was handed out under it
                    continue
                session.claimant.beat_soon(lease_clock_ms())
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

        self._engine.wait_until(is_done, timeout, "writing positions")
        if lost:
            places = ", ".join(f"{topic}[{number}]" for topic, number in (t.place for t in lost))
            raise LeaseLostError(
                f"the claims of {places} ended before their positions were written"
            )

    def close(self, *, release: bool = True, drain: float = 0.0, timeout: float = 30.0) -> None:
        """Give everything back. Idempotent.

        Args:
            release: False: leave the partitions claimed, for a quick restart of this client.
            drain: Seconds to wait for commits by other threads.
            timeout: Bound of it all, in seconds; what is not released by then goes stale.
        """
        if self.is_closed:
            return
        self.is_closed = True
        with self._engine.lock:
            self._claims.stop(drain_ms=round(drain * 1000), keeps_claims=not release)
        try:
            self._engine.wait_until(
                lambda: self._claims.is_over or self._engine.error is not None,
                timeout,
                "releasing claims",
            )
        except DeadlineExceededError as error:
            _log.warning("%s: others get the partitions when they are stale", error)
