"""Performs what a tracker planned: copies, dead letters, ENDs and the position, in transactions.

R14-R16, R18, R19. The STARTs are read again from the markers topic by their offsets, because
payloads never enter a tracker's state; then each part of the plan (at most 50,000 actions or
16 MiB) becomes one transaction with the position of the tracker and the count of rows done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kafkamq.clients.ledger import Ledger
from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.core.redelivery import Carry, Settle

__all__ = ["SettleReport", "SettlementError", "Settler"]


@dataclass(slots=True)
class SettleReport:
    """What one ``settle`` did; ``skipped`` rows were done by an earlier attempt."""

    copies: int = 0
    dead_letters: int = 0
    carried: int = 0
    payload_lost: int = 0
    skipped: int = 0
    transactions: int = 0


class SettlementError(Exception):
    """Some of the actions are known not to be done: ``tracker.aborted(error.actions)`` (R15).

    Attributes:
        actions: Those whose transaction is known to have aborted or never began.
        __cause__: The BrokerError.
    """

    actions: tuple[Settle | Carry, ...]


class Settler:
    """Settles actions of any marker partition of one namespace; one owner thread.

    Holds a read_committed reader of the markers and messages topics, kept between calls.
    """

    def __init__(self, config: ServiceConfig, tracker: TrackerConfig) -> None:
        raise NotImplementedError

    def settle(
        self,
        ledger: Ledger,
        actions: Sequence[Settle | Carry],
        *,
        position: int,
        batch: int,
        source_hash: str = "",
        members: Sequence[bytes] = (),
        reopen: bool = True,
        timeout_s: float = 60.0,
    ) -> SettleReport:
        """Perform all actions, in the order of their START offsets; each exactly once.

        Args:
            ledger: Of the marker partition that the actions are of.
            actions: Any order; the same ones for a retry of the same batch.
            position: The tracker's committable offset when it planned them.
            batch: Number of this batch; a retry goes on behind the rows that are done (R16). Call
                it without actions to write the position alone.
            source_hash: Goes into the ledger.
            members: See ``Ledger.commit``.
            reopen: True: when fenced or of unknown outcome, open the ledger again (which checks
                the epoch) and go on behind what is done. False: raise ``FencedError`` or
                ``OutcomeUnknownError``, for owners that must read the log again first (R17).
            timeout_s: Bound of the whole call.

        Raises:
            FencedError: A later start owns the partition: stop.
            SettlementError: Some actions are known not to be done; they may be asked for again.
            OutcomeUnknownError: Only with ``reopen=False``.
            DeadlineExceededError: The time is over; known to be undone behind ``rows_done``.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the reader; idempotent."""
        raise NotImplementedError
