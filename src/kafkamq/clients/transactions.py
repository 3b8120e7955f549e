"""One transactional producer: begin, produce, offsets, commit; every wait bounded, outcomes named."""

from __future__ import annotations

from collections.abc import Sequence

from confluent_kafka import TopicPartition

from kafkamq.config import ServiceConfig
from kafkamq.types import Headers

__all__ = ["TransactionalProducer"]


class TransactionalProducer:
    """A producer of one transactional id; one owner thread.

    Every method raises ``FencedError`` when another producer of the same id was initialised later,
    ``TransactionAbortedError`` when the transaction is known not to have happened, and
    ``OutcomeUnknownError`` when only ``init`` can tell.
    """

    def __init__(self, config: ServiceConfig, transactional_id: str) -> None:
        raise NotImplementedError

    def init(self, *, timeout_s: float = 30.0) -> None:
        """Fence earlier producers of the id; makes a new client when this one is unusable."""
        raise NotImplementedError

    def begin(self) -> None:
        """Begin a transaction."""
        raise NotImplementedError

    def produce(
        self,
        topic: str,
        *,
        value: bytes | None,
        key: bytes | None = None,
        partition: int = -1,
        headers: Headers = (),
    ) -> None:
        """Queue one record of the open transaction; waits (bounded) while the queue is full."""
        raise NotImplementedError

    def send_offsets(
        self, positions: Sequence[TopicPartition], group_metadata: bytes, *, timeout_s: float = 10.0
    ) -> None:
        """Commit offsets for a group in the open transaction."""
        raise NotImplementedError

    def commit(self, *, timeout_s: float = 30.0) -> None:
        """Commit the open transaction; all its records are in the logs when this returns."""
        raise NotImplementedError

    def abort(self, *, timeout_s: float = 10.0) -> None:
        """Abort the open transaction, if any."""
        raise NotImplementedError

    def close(self) -> None:
        """End the client; an open transaction is aborted (bounded). Idempotent."""
        raise NotImplementedError
