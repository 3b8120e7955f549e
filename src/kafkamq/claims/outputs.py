"""What an application produces to Kafka under a claim."""

from __future__ import annotations

from collections.abc import Mapping

from kafkamq.transport.transactions import TransactionalProducer


class Outputs:
    """The open transaction of one claimed partition; ``Consumer.transaction`` makes it."""

    def __init__(self, producer: TransactionalProducer) -> None:
        self._producer = producer

    def send(
        self,
        topic: str,
        payload: bytes | None,
        *,
        key: bytes | None = None,
        headers: Mapping[str, bytes | None] | None = None,
        partition: int = -1,
    ) -> None:
        """Queue one record; it is there when the block has ended.

        Raises:
            FencedError: Another owner took the partition over.
            BrokerError: Kafka refused.
        """
        self._producer.produce((topic, partition, key, payload, tuple((headers or {}).items())))
