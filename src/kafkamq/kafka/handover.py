"""The two ways of a batch into Kafka: STARTs, then offsets (R5); or both in one transaction."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from kafkamq.core.intake import Intake
from kafkamq.kafka.commits import Commit
from kafkamq.kafka.exact import ExactCommitter
from kafkamq.kafka.message import Message
from kafkamq.kafka.reader import MessageReader
from kafkamq.kafka.starts import Batch, Starter

__all__ = ["ExactHandover", "Handover", "PlainHandover"]

_SLICE_S = 0.25


class Handover(Protocol):
    """Brings one batch at a time to the point where it may be handed out; one owner thread."""

    gather_s: float
    """How long a batch waits for more messages before it begins."""

    def begin(self, batch: Batch) -> None:
        """Set out; on an error, ``give_up``."""

    def advance(self, batch: Batch, timeout_s: float) -> Commit:
        """Wait for it; on ``FAILED`` or an error, ``give_up``."""

    def give_up(self, batch: Batch) -> None:
        """Forget the batch, and read again what it held."""

    def lost(self, batch: Batch, partitions: Sequence[int]) -> None:
        """Partitions went to another member."""

    def close(self) -> None:
        """End what it owns."""


class PlainHandover:
    """R5: a crash between the two writes costs a second START, never a message."""

    gather_s = 0.0

    def __init__(self, starter: Starter, reader: MessageReader) -> None:
        self._starter = starter
        self._reader = reader

    def begin(self, batch: Batch) -> None:
        """Write the STARTs, and read on while the brokers take them."""
        self._starter.write(batch)
        self._reader.poll_ahead(len(batch.messages))
        self._starter.prepare(len(batch.messages))

    def advance(self, batch: Batch, timeout_s: float) -> Commit:
        """See the STARTs in the log, then commit the offsets."""
        began_s = time.monotonic()
        if not batch.is_started and not self._starter.wait(batch, timeout_s):
            return Commit.PENDING
        return self._reader.commit(max(0.0, timeout_s - (time.monotonic() - began_s)))

    def give_up(self, batch: Batch) -> None:
        """Seek back to the committed offset."""
        self._starter.abandon(batch)
        self._reader.seek_back(batch.partitions())

    def lost(self, batch: Batch, partitions: Sequence[int]) -> None:
        """What was of those partitions is another member's."""
        self._starter.drop(batch, partitions)

    def close(self) -> None:
        """Nothing is owned."""


class ExactHandover:
    """One transaction per batch: no message is STARTed twice while a worker holds it."""

    gather_s = 0.05

    def __init__(
        self,
        starter: Starter,
        reader: MessageReader,
        intake: Intake[Message],
        committer: ExactCommitter,
    ) -> None:
        self._starter = starter
        self._reader = reader
        self._intake = intake
        self._committer = committer
        self._offsets: dict[int, int] = {}
        self._count = 0  # polled records that they stand for
        reader.is_in_transaction = lambda: committer.is_under_way

    def begin(self, batch: Batch) -> None:
        """Set the transaction going."""
        self._intake.started()  # the same transaction has the offsets behind these STARTs
        self._offsets = self._intake.committable()
        self._count = self._intake.uncommitted_count
        self._committer.begin(batch.starts, self._offsets, self._reader.membership())

    def advance(self, batch: Batch, timeout_s: float) -> Commit:
        """Wait for its outcome, and stay in the group meanwhile."""
        outcome = self._committer.wait(min(timeout_s, _SLICE_S))
        if outcome is Commit.DONE:
            self._reader.committed(self._offsets, self._count)
            self._starter.started(batch)
        elif outcome is Commit.PENDING and timeout_s > 0:
            self._reader.tend()
        return outcome

    def give_up(self, batch: Batch) -> None:
        """Ask the group where to read from: it knows what became of the transaction."""
        self._committer.give_up()
        self._starter.undo(batch)
        self._reader.ask_again(batch.partitions())

    def lost(self, batch: Batch, partitions: Sequence[int]) -> None:
        """The transaction decides: it names the membership from before."""
        for number in partitions:  # they may come back with another's position
            self._offsets.pop(number, None)

    def close(self) -> None:
        """End the producer."""
        self._committer.close()
