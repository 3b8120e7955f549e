"""The two ways of a batch into Kafka: STARTs, then offsets (R5); or both in one transaction."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.reader import MessageReader
from kafkamq.markers.rules.fetch_buffer import FetchBuffer
from kafkamq.markers.starts import Batch, Starter
from kafkamq.markers.transactional_starts import ExactCommitter
from kafkamq.transport.offset_commits import Commit

_SLICE_S = 0.25  # one blocking wait; between two, the group may have to be polled for
_log = logging.getLogger(__name__)


class Handover(Protocol):
    """Brings one batch at a time to the point where it may be handed out; one owner thread."""

    gather_s: float
    """How long a batch waits for more messages before it begins."""

    def begin(self, batch: Batch, wanted: int) -> None:
        """Set out; on an error, ``give_up``. Of the next messages ``wanted`` can be used."""

    def advance(
        self, batch: Batch, timeout_s: float, meanwhile: Callable[[], None] | None = None
    ) -> Commit:
        """Wait for it; on ``FAILED`` or an error, ``give_up``.

        Args:
            batch: The one that was begun first.
            timeout_s: Of the wait.
            meanwhile: Called when all its STARTs are in the log and its offsets on their way: the
                next one may begin.
        """

    def give_up(self, batch: Batch) -> None:
        """Forget the batch, and read again what it held."""

    def next_late(self, *, is_settled: bool) -> Batch | None:
        """One that was set aside as others went on; ``advance`` it. None: there is none.

        Args:
            is_settled: Only one of whose STARTs it is known what became of them.
        """

    @property
    def late_count(self) -> int:
        """Messages of such batches."""

    def give_up_late(self) -> None:
        """Give up all of these."""

    def lost(self, batch: Batch | None, partitions: Sequence[int]) -> None:
        """Partitions went to another member."""

    def close(self) -> None:
        """End what it owns."""


class PlainHandover:
    """R5: a crash between the two writes costs a second START, never a message.

    A marker partition that does not answer for a second does not hold up the others: what waits
    for it is set aside, with all behind it in its partitions of the messages topic, which are read
    no further until it is known what became of it.
    """

    gather_s = 0.0

    def __init__(self, starter: Starter, reader: MessageReader) -> None:
        self._starter = starter
        self._reader = reader
        self._late: list[Batch] = []

    def begin(self, batch: Batch, wanted: int) -> None:
        """Write the STARTs, and read on while the brokers take them."""
        self._starter.write(batch)
        self._reader.poll_ahead(wanted)

    def advance(
        self, batch: Batch, timeout_s: float, meanwhile: Callable[[], None] | None = None
    ) -> Commit:
        """See the STARTs in the log, then commit the offsets."""
        began_s = time.monotonic()
        if not batch.is_started and not self._has_started(batch, timeout_s):
            return Commit.PENDING
        if meanwhile is not None and not self._late:  # whose partitions stand still
            outcome = self._reader.commit(0.0)
            if outcome is not Commit.PENDING:
                return outcome
            meanwhile()
        return self._reader.commit(max(0.0, timeout_s - (time.monotonic() - began_s)))

    def _has_started(self, batch: Batch, timeout_s: float) -> bool:
        known = {number for late in self._late for number in late.late_routes()}
        if not self._starter.wait(batch, min(timeout_s, _SLICE_S), known):
            if not batch.is_overdue(known):
                return False
            self._set_aside(batch)
            self._starter.wait(batch, 0.0)  # of what is left all is reported
        if batch.is_late:
            self._reader.go_on(batch.partitions())
            self._late = [late for late in self._late if late is not batch]
        return True

    def _set_aside(self, batch: Batch) -> None:
        """Go on with what is reported. An interrupt leaves all in one of both batches, or both."""
        late = batch.late_part()
        self._late = [*self._late, late]
        batch.keep_but(late)
        self._reader.hold(late.first_offsets())
        _log.warning(
            "STARTs are not confirmed, others go on",
            extra={"marker_partitions": sorted(late.routes), "messages": late.count},
        )

    def next_late(self, *, is_settled: bool) -> Batch | None:
        """The oldest one."""
        for batch in self._late:
            if not is_settled or self._starter.is_settled(batch):
                return batch
        return None

    @property
    def late_count(self) -> int:
        """Messages that wait for marker partitions that do not answer."""
        return sum(batch.count for batch in self._late)

    def give_up(self, batch: Batch) -> None:
        """Seek back to the committed offset; with it goes what is behind it, or has failed, too."""
        self._reader.give_up_commit()
        partitions = batch.partitions()
        also = [
            late
            for late in self._late
            if late is not batch
            and (late.error() is not None or not partitions.isdisjoint(late.partitions()))
        ]
        self._forget([batch, *also])

    def give_up_late(self) -> None:
        """Seek back to the committed offsets."""
        self._forget(self._late)

    def _forget(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self._starter.abandon(batch)
        self._late = [batch for batch in self._late if batch not in batches]
        for batch in batches:
            self._reader.seek_back(batch.partitions())

    def lost(self, batch: Batch | None, partitions: Sequence[int]) -> None:
        """What was of those partitions is another member's."""
        for each in [*self._late, *([] if batch is None or batch in self._late else [batch])]:
            self._starter.drop(each, partitions)
        self._forget([late for late in self._late if not late.pieces and late is not batch])

    def close(self) -> None:
        """Nothing is owned."""


class ExactHandover:
    """One transaction per batch: no message is STARTed twice while a worker holds it."""

    gather_s = 0.05

    def __init__(
        self,
        starter: Starter,
        reader: MessageReader,
        buffer: FetchBuffer[MarkersMessage],
        committer: ExactCommitter,
    ) -> None:
        self._starter = starter
        self._reader = reader
        self._buffer = buffer
        self._committer = committer
        self._offsets: dict[int, int] = {}
        self._count = 0  # polled records that they stand for
        reader.is_in_transaction = lambda: committer.is_under_way

    def begin(self, batch: Batch, wanted: int) -> None:
        """Set the transaction going."""
        self._buffer.started()  # the same transaction has the offsets behind these STARTs
        self._offsets = self._buffer.committable()
        self._count = self._buffer.uncommitted_count
        self._committer.begin(batch.starts, self._offsets, self._reader.membership())

    def advance(
        self, batch: Batch, timeout_s: float, meanwhile: Callable[[], None] | None = None
    ) -> Commit:
        """Wait for its outcome, and stay in the group meanwhile; one transaction at a time."""
        outcome = self._committer.wait(min(timeout_s, _SLICE_S))
        if outcome is Commit.DONE:
            self._reader.committed(self._offsets, self._count)
            self._starter.started(batch)
        elif outcome is Commit.PENDING and timeout_s > 0:
            self._reader.tend()
        return outcome

    def next_late(self, *, is_settled: bool) -> Batch | None:
        """None: a transaction is all or nothing."""
        return None

    @property
    def late_count(self) -> int:
        """None."""
        return 0

    def give_up_late(self) -> None:
        """There are none."""

    def give_up(self, batch: Batch) -> None:
        """Ask the group where to read from: it knows what became of the transaction."""
        self._committer.give_up()
        self._starter.undo(batch)
        self._reader.ask_again(batch.partitions())

    def lost(self, batch: Batch | None, partitions: Sequence[int]) -> None:
        """The transaction decides: it names the membership from before."""
        for number in partitions:  # they may come back with another's position
            self._offsets.pop(number, None)

    def close(self) -> None:
        """End the producer."""
        self._committer.close()
