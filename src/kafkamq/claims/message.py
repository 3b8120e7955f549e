"""What an application is given of a claimed partition: messages, batches, and its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kafkamq.errors import StateError
from kafkamq.transport.record import Record, headers_of
from kafkamq.transport.transactions import TransactionalProducer


@dataclass(frozen=True, slots=True)
class CommitToken:
    """Names a message that was handed out; small, and can be sent to another process and back."""

    topic: str
    partition: int
    offset: int
    token: int


class ClaimedMessage:
    """A record of a partition that this process holds.

    Attributes:
        payload: Its value; None: null.
        timestamp_ms: Its timestamp; -1: it has none.
        token: The fencing token of the claim under which it was handed out. Tokens of a partition
            rise with every new owner: a store that refuses writes with a smaller one than it has
            seen is safe from former owners.
    """

    __slots__ = (
        "_commit",
        "_record",
        "key",
        "offset",
        "partition",
        "payload",
        "timestamp_ms",
        "token",
        "topic",
    )

    def __init__(self, record: Record, commit: Callable[[CommitToken], None] | None) -> None:
        """``commit`` is None where nothing is committed: at most once."""
        self.topic: str = record.topic() or ""
        self.partition: int = record.partition() or 0
        offset = record.offset()
        self.offset: int = -1 if offset is None else offset
        self.key: bytes | None = record.key()
        self.payload: bytes | None = record.value()
        self._record = record
        self.timestamp_ms: int = record.timestamp()[1]
        self.token = -1
        self._commit = commit

    def __repr__(self) -> str:
        return f"ClaimedMessage({self.topic}[{self.partition}]@{self.offset}, token {self.token})"

    @property
    def headers(self) -> dict[str, bytes | None]:
        """Headers by name, the last of each; none at all where a name is no text."""
        return dict(headers_of(self._record))

    @property
    def commit_token(self) -> CommitToken:
        """What ``Consumer.commit`` takes in place of this message."""
        return CommitToken(self.topic, self.partition, self.offset, self.token)

    def commit(self) -> None:
        """It is done: after a crash it is not handed out again, once a heartbeat has told so.

        Raises:
            LeaseLostError: The claim has ended; the message may be with another consumer.
            StateError: It was not handed out, everything up to it is done, or delivery is at most
                once.
        """
        if self._commit is None:
            raise StateError("delivery is at most once: there is nothing to commit")
        self._commit(self.commit_token)


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages of one partition, in order; at most once they never come again."""

    topic: str
    partition: int
    token: int
    messages: tuple[ClaimedMessage, ...]

    @property
    def first_offset(self) -> int:
        """The offset of the first message."""
        return self.messages[0].offset

    @property
    def next_offset(self) -> int:
        """The offset behind the last message."""
        return self.messages[-1].offset + 1

    def __len__(self) -> int:
        return len(self.messages)


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
