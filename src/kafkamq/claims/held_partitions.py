"""What consumers and bare holds have in common: the partitions of one member."""

from __future__ import annotations

import logging
from typing import TypeVar

from kafkamq.claims.broker_clock import lease_clock_ms
from kafkamq.claims.engine import Engine
from kafkamq.claims.partition_claims import Holding
from kafkamq.claims.rules.steps import Phase
from kafkamq.claims.session import Tenure
from kafkamq.errors import DeadlineExceededError, LeaseLostError

__all__ = ["HeldPartitions"]

_Self = TypeVar("_Self", bound="HeldPartitions")
_log = logging.getLogger(__name__)


class HeldPartitions:
    """Views and the end; who derives from it sets ``_engine`` and ``_holding``. Thread-safe."""

    _engine: Engine
    _holding: Holding
    is_closed: bool

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def claims(self) -> dict[tuple[str, int], int]:
        """Fencing token by topic and partition of everything that is held now."""
        with self._engine.lock:
            return {place: tenure.claimant.token for place, tenure in self._holding.held().items()}

    @property
    def complete_topics(self) -> frozenset[str]:
        """With ``claims="topic"``: topics that are held as a whole."""
        return frozenset(self._holding.complete)

    def positions(self) -> dict[tuple[str, int], int]:
        """The next offset to consume, by topic and partition, of everything that is held now."""
        with self._engine.lock:
            return {
                place: tenure.claimant.position for place, tenure in self._holding.held().items()
            }

    def confirmed_position(self, topic: str, partition: int) -> int:
        """Up to where the log says that all is done; -1: it is not held."""
        with self._engine.lock:
            tenure = self._holding.tenures.get((topic, partition))
            return -1 if tenure is None else tenure.claimant.confirmed_position

    def wait_for_claims(self, count: int, timeout: float = 30.0) -> None:
        """Wait until at least ``count`` partitions are held."""
        self._engine.wait_until(
            lambda: len(self._holding.held()) >= count, timeout, f"claiming {count} partitions"
        )

    def flush(self, timeout: float = 30.0) -> None:
        """Write the positions of everything that is held, and wait until they stand in the log."""
        with self._engine.lock:
            wanted = {}
            for tenure in self._holding.held().values():
                tenure.claimant.beat_soon(lease_clock_ms())
                self._engine.drive(tenure)
                wanted[tenure] = tenure.claimant.position
        lost: list[Tenure] = []

        def is_done() -> bool:
            for tenure in list(wanted):
                if tenure.claimant.confirmed_position >= wanted[tenure]:
                    del wanted[tenure]
                elif tenure.claimant.phase not in (Phase.OWNING, Phase.DRAINING):
                    del wanted[tenure]
                    lost.append(tenure)
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
            self._holding.stop(drain_ms=round(drain * 1000), keeps_claims=not release)
        try:
            self._engine.wait_until(
                lambda: self._holding.is_over or self._engine.error is not None,
                timeout,
                "releasing claims",
            )
        except DeadlineExceededError as error:
            _log.warning("%s: others get the partitions when they are stale", error)
