"""Which offsets a worker commits, and when: behind its STARTs (R5), and behind other queues'."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from kafkamq.config import QueueConfig
from kafkamq.errors import KafkaMQError
from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.rules.fetch_buffer import FetchBuffer
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.offset_commits import Answer, Commit, Committer
from kafkamq.transport.port import Consumer as KafkaConsumer

COMMIT_INTERVAL_MS = 1000  # other queues' messages are committed this often
REQUEST_TIMEOUT_S = 10.0
_WAIT_S = 0.25  # one blocking wait
_log = logging.getLogger(__name__)


class OffsetCommits:
    """The commits of one reader, one at a time; the caller serialises."""

    def __init__(
        self,
        topic: str,
        queue: QueueConfig,
        buffer: FetchBuffer[MarkersMessage],
        note: Callable[[Mapping[int, int]], None],
    ) -> None:
        """``note`` is told what is committed, by partition."""
        self._queue = queue
        self._buffer = buffer
        self._note = note
        self._committer = Committer(topic, queue.queue_id)
        self._committed_ms = monotonic_ms()
        self._committing: dict[int, int] = {}
        self._count = 0  # polled records that they stand for
        self.is_skipping = False
        """Whether what is being committed is behind other queues' messages alone."""

    @property
    def is_pending(self) -> bool:
        """Whether a commit is under way and not given up."""
        return self._committer.is_pending

    def commit(self, consumer: KafkaConsumer, timeout_s: float) -> Commit:
        """Commit all that may be; call again while pending.

        Raises:
            BrokerError: It failed, and would fail again.
        """
        # One after the other, or the older one might come last.
        if self.is_skipping and self._end_skipping(min(timeout_s, _WAIT_S)) is Commit.PENDING:
            return Commit.PENDING
        if not self._committer.is_pending:
            offsets = self._buffer.committable()
            if not offsets:
                return Commit.DONE
            self._begin(consumer, offsets)
        outcome = self._committer.wait(min(timeout_s, _WAIT_S))
        if outcome is Commit.DONE:
            self.committed(self._committing, self._count)
        return outcome

    def commit_now(self, consumer: KafkaConsumer, offsets: dict[int, int]) -> bool:
        """Commit and wait, bounded; False: ask again later."""
        if self._committer.is_pending:  # a batch's, which comes first
            return False
        self._committer.begin(consumer, offsets)
        done = self._committer.wait(REQUEST_TIMEOUT_S) is Commit.DONE
        self._committer.give_up()
        if done:
            self._note(offsets)
        return done

    def _begin(self, consumer: KafkaConsumer, offsets: dict[int, int]) -> None:
        self._committing, self._count = offsets, self._buffer.uncommitted_count
        self._committer.begin(consumer, offsets)

    def committed(self, offsets: dict[int, int], count: int) -> None:
        """These offsets are committed, which are those of ``count`` polled records."""
        self._buffer.committed(offsets, count)
        self._committed_ms = monotonic_ms()
        self._note(offsets)

    def skip(self, consumer: KafkaConsumer) -> None:
        """Foreign messages: by count, and by time when nothing else commits."""
        skipped = self._buffer.uncommitted_count
        if not skipped or self._committer.is_pending:
            return
        is_due = monotonic_ms() - self._committed_ms >= COMMIT_INTERVAL_MS
        are_many = skipped >= self._queue.max_messages_per_commit and not len(self._buffer)
        if not are_many and not is_due:
            return
        offsets = self._buffer.committable()
        if offsets:
            self._begin(consumer, offsets)
            self.is_skipping = True
        else:
            self._buffer.committed({})

    def see_skipped(self) -> None:
        """See whether such a commit has ended."""
        if self.is_skipping:
            self._end_skipping(0.0)

    def _end_skipping(self, timeout_s: float) -> Commit:
        """What became of such a commit; the next one says again what was refused."""
        try:
            outcome = self._committer.wait(timeout_s)
        except KafkaMQError as error:
            _log.info("skipped messages could not be committed", extra={"error": str(error)})
            outcome = Commit.FAILED
        if outcome is Commit.DONE:
            self.committed(self._committing, self._count)
        elif outcome is Commit.FAILED:
            self._committed_ms = monotonic_ms()  # not at once again
        self.is_skipping = outcome is Commit.PENDING
        return outcome

    def forget(self, partition: int) -> None:
        """It is another member's, and may come back with that one's position."""
        self._committing.pop(partition, None)
        self._committer.forget(partition)

    def give_up(self) -> None:
        """Wait no more for the commit that is pending."""
        self._committer.give_up()
        self.is_skipping = False

    def ask(self, question: Callable[[], Answer]) -> Future[Answer]:
        """Ask it behind the commits that were begun."""
        return self._committer.ask(question)

    def finish(self, close: Callable[[], None], timeout_s: float) -> bool:
        """As ``Committer.finish``; nothing else works afterwards."""
        return self._committer.finish(close, timeout_s)
