"""Who owns a marker partition, and how far its owner is: one committed offset per partition (R22).

The ledger of a partition is the offset committed under its transactional id (as the group id): its
offset is the position to read from after a restart, its metadata says which engine of which epoch
wrote it, in which batch, and how many rows of that batch are done. It is committed in the same
transaction as what it speaks of, so it can neither lag nor lead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kafkamq.clients.transactions import TransactionalProducer
from kafkamq.config import ServiceConfig
from kafkamq.wire.ledger import Position

__all__ = ["Claim", "Ledger", "LedgerKey", "claim", "close_ledgers", "ledger", "read_positions"]


@dataclass(frozen=True, slots=True)
class LedgerKey:
    """Names one ledger: its transactional id (also its group) and where its offset is committed."""

    transactional_id: str
    topic: str
    partition: int

    @classmethod
    def of_markers(cls, config: ServiceConfig, partition: int) -> LedgerKey:
        """The ledger of a marker partition, the same for every engine: R22."""
        raise NotImplementedError


class Ledger:
    """One ledger and the transactional producer that writes it; one owner thread.

    Attributes:
        key: What it names.
        engine: Who writes: constant over the restarts of one engine (for Spark: of a checkpoint).
        epoch: The epoch of this start of the engine.
        last: What the ledger held when it was last read or written; None: nothing yet.
        producer: For what goes into the same transaction as the position.
    """

    def __init__(self, config: ServiceConfig, key: LedgerKey, *, engine: str, epoch: int) -> None:
        self.key = key
        self.engine = engine
        self.epoch = epoch
        self.last: Position | None = None
        self.producer: TransactionalProducer

    @property
    def is_open(self) -> bool:
        """Whether transactions can start: opened, and not fenced or broken since."""
        raise NotImplementedError

    def open(self, *, timeout_s: float = 30.0) -> Position | None:
        """Fence whoever wrote before (``init_transactions``), read the ledger, check the epoch.

        What an earlier owner had under way is committed or aborted for good when this returns, so
        that ``last`` and ``rows_done`` are the truth, also after a commit of unknown outcome.

        Raises:
            FencedError: The ledger holds a larger epoch, or another engine's equal one: stop.
            BrokerError, DeadlineExceededError: Not reached in time; may be repeated.
        """
        raise NotImplementedError

    def rows_done(self, batch: int) -> int:
        """Rows of ``batch`` that this start of this engine has committed; 0: none."""
        raise NotImplementedError

    def begin(self) -> None:
        """Begin a transaction; produce through ``producer`` afterwards."""
        raise NotImplementedError

    def commit(
        self,
        position: int,
        *,
        batch: int,
        rows_done: int,
        source_hash: str = "",
        members: Sequence[bytes] = (),
        timeout_s: float = 30.0,
    ) -> Position:
        """Put the position into the open transaction and commit it.

        Args:
            position: Offset to read from after a restart.
            batch: Number of the batch, of this engine.
            rows_done: Rows of the batch that are done with this transaction.
            source_hash: Of the batch's source, for engines that check it.
            members: Group metadata of consumers (``Consumer.consumer_group_metadata()``); the
                position is committed for their groups as well, which fences former members.
            timeout_s: Bound of the whole call.

        Raises:
            TransactionAbortedError: Known to be aborted; the ledger is usable.
            FencedError: Somebody opened this ledger after us; known to be aborted or committed
                only after ``open``.
            OutcomeUnknownError: Call ``open``; then ``rows_done`` tells.
        """
        raise NotImplementedError

    def abort(self, *, timeout_s: float = 10.0) -> None:
        """Abort the open transaction, if any."""
        raise NotImplementedError

    def close(self) -> None:
        """Abort what is open and end the producer; idempotent."""
        raise NotImplementedError


def ledger(config: ServiceConfig, key: LedgerKey, *, engine: str, epoch: int) -> Ledger:
    """This process's ledger of that key, engine and epoch, made once (not opened); R22.

    One thread at a time may use it. A fork starts with none.
    """
    raise NotImplementedError


def close_ledgers() -> None:
    """Close all that ``ledger`` made in this process."""
    raise NotImplementedError


def read_positions(
    config: ServiceConfig, keys: Sequence[LedgerKey], *, timeout_s: float = 30.0
) -> dict[LedgerKey, Position]:
    """What the ledgers hold, without fencing anybody; a key without a commit is absent."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Claim:
    """A start of an engine: its epoch, and what each partition's ledger held before."""

    epoch: int
    positions: dict[int, Position] = field(default_factory=dict)  # absent: nothing committed yet


def claim(
    config: ServiceConfig,
    *,
    engine: str,
    partitions: int,
    takeover: bool = True,
    timeout_s: float = 60.0,
) -> Claim:
    """Make this start of ``engine`` the latest on every marker partition, id 0 first (R22).

    For an engine that owns all partitions at once (Spark's driver). All that predecessors wrote is
    committed or aborted when it returns: append the TICKs after it (R17). Positions are kept as
    they were found; batch and rows done only where the same engine wrote them.

    Raises:
        ConfigError: ``takeover`` is False and another engine's epoch is the latest.
        FencedError: A later start of some engine was found on the way.
    """
    raise NotImplementedError
