"""Questions and commits that take a while, off the engine's thread and many at a time.

Per group there is one thread that looks offsets up and one that commits; each takes everything that
came since its last turn, so 64 partitions cost as many requests as one. An overdue commit does not
hold its heartbeat back: the engine goes on without it, unless the offset must be committed.

Both ask one Kafka consumer that is never assigned anything; what the application polls is another
one (``partition_reader``), so no commit waits for a poll, nor a poll for one. Each question has
a queue of its own in the client; what comes unasked (errors, log lines) waits for a poll, which
the thread that commits does now and then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from kafkamq.claims.rules.steps import Write
from kafkamq.claims.session import ClaimSession, Fence
from kafkamq.config import ServiceConfig
from kafkamq.errors import KafkaMQError
from kafkamq.transport.admin import Admin
from kafkamq.transport.commits import GroupOffsets
from kafkamq.transport.errors import is_retriable

_log = logging.getLogger(__name__)
_TIMEOUT_S = 10.0
_FENCE_THREADS = 8
_IDLE_S = 1.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OffsetAnswers:
    """What becomes of what the offset service was given; called from its threads."""

    found: Callable[
        [ClaimSession, int, int, int], None
    ]  # earliest, latest, committed (negative: none)
    not_found: Callable[[ClaimSession], None]
    committed: Callable[[ClaimSession, Write, bool], None]
    refused: Callable[[KafkaMQError], None]  # told of every error; some, no waiting mends


class _Batcher(Generic[T]):
    """A thread that hands everything that came since its last turn to one call."""

    def __init__(
        self,
        name: str,
        handle: Callable[[list[T]], None],
        idle: Callable[[], object] = lambda: None,
    ) -> None:
        """``idle`` is called at least every few seconds, unless ``handle`` takes longer."""
        self._idle = idle
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._handle = handle
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        self._queue.put(item)

    def close(self, timeout_s: float) -> bool:
        """False: a call is still under way."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=_IDLE_S)
            except Empty:
                self._idle()
                continue
            items: list[T] = []
            while item is not None:
                items.append(item)
                if self._queue.empty():
                    break
                item = self._queue.get()
            if items:
                try:
                    self._handle(items)
                except Exception:  # noqa: BLE001 - a dead service would end every claim
                    _log.exception("a request for claims failed")
                self._idle()
            if item is None:
                return


class OffsetService:
    """The threads and the client of one group; its makers call it under the engine's lock.

    ``lookups`` finds the offsets of sessions' partitions; ``commits`` commits the offset of a
    session's write. A write without an offset commits nothing, and waits for those before it.
    """

    def __init__(
        self, config: ServiceConfig, admin: Admin, group: str, answers: OffsetAnswers
    ) -> None:
        self._config = config
        self._admin = admin
        self._group = group
        self._answers = answers
        self._client = GroupOffsets(config, group)
        self._fences = ThreadPoolExecutor(_FENCE_THREADS, f"kafkamq-fence-{group}")
        self._membership = self._client.membership()
        self.lookups = _Batcher(f"kafkamq-lookup-{group}", self._look_up)
        self.commits = _Batcher(f"kafkamq-commit-{group}", self._commit, self._serve)

    def close(self, timeout_s: float) -> None:
        idle = [batcher.close(timeout_s) for batcher in (self.lookups, self.commits)]
        self._fences.shutdown(wait=False)
        if all(idle):
            self._client.close()

    def count(self, topics: Sequence[str], answer: Callable[[dict[str, int]], None]) -> None:
        """Tell how many partitions topics have; those that cannot be told are absent."""
        with suppress(RuntimeError):  # it is closed
            self._fences.submit(self._count, topics, answer)

    def _count(self, topics: Sequence[str], answer: Callable[[dict[str, int]], None]) -> None:
        counts = {}
        for topic in topics:
            try:
                counts[topic] = self._client.partition_count(topic)
            except KafkaMQError as error:  # noqa: PERF203 - a handful of topics
                if is_retriable(error):  # no broker answers
                    return
        answer(counts)

    def fence(self, topic: str, partition: int) -> Fence:
        """A fence for a partition that is about to be claimed."""
        return Fence(self._config, self._group, topic, partition, self._membership)

    def end(self, fence: Fence) -> None:
        """End its client, off this thread."""
        with suppress(RuntimeError):  # it is closed, and the client ends with its last reference
            self._fences.submit(fence.close)

    # ---- looking up

    def _look_up(self, sessions: Sequence[ClaimSession]) -> None:
        open_ = list(dict.fromkeys(sessions))
        try:
            found = self._offsets(self._fenced(open_))
        except Exception as error:  # noqa: BLE001 - whatever it was, the claimants must hear of it
            _log.warning(
                "offsets of claimed partitions could not be looked up",
                extra={"group": self._group, "error": str(error)},
            )
            found = {}
            if isinstance(error, KafkaMQError):
                self._answers.refused(error)
        for session in open_:
            offsets = found.get(session)
            if offsets is None:
                self._answers.not_found(session)
            else:
                self._answers.found(session, *offsets)

    def _fenced(self, sessions: Sequence[ClaimSession]) -> list[ClaimSession]:
        """Those whose former owners can commit nothing any more."""

        def init(session: ClaimSession) -> bool:
            try:
                if session.fence is not None:
                    session.fence.init(_TIMEOUT_S)
                return True
            except KafkaMQError as error:
                _log.warning(
                    "a former owner could not be fenced",
                    extra={"place": session.place, "error": str(error)},
                )
                self._answers.refused(error)
                return False

        if not any(session.fence for session in sessions):
            return list(sessions)
        done = list(self._fences.map(init, sessions))
        return [session for session, is_done in zip(sessions, done, strict=True) if is_done]

    def _offsets(
        self, sessions: Sequence[ClaimSession]
    ) -> dict[ClaimSession, tuple[int, int, int]]:
        if not sessions:
            return {}
        places = [session.place for session in sessions]
        bounds = {}
        for topic in dict.fromkeys(topic for topic, _ in places):
            wanted = [partition for name, partition in places if name == topic]
            found = self._admin.log_bounds(topic, wanted)
            bounds.update({(topic, number): ends for number, ends in found.items()})
        committed = self._client.committed(places)
        return {
            session: (*bounds[session.place], committed[session.place])
            for session in sessions
            if session.place in bounds and session.place in committed
        }

    # ---- committing

    def _serve(self) -> None:
        """Take what the client has to say: it would be kept forever."""
        try:
            self._client.poll(1, 0.0)
        except KafkaMQError as error:
            self._answers.refused(error)

    def _commit(self, jobs: Sequence[tuple[ClaimSession, Write]]) -> None:
        plain = []
        for session, write in jobs:
            if session.fence is not None:
                self._fences.submit(self._commit_fenced, session, session.fence, write)
            else:
                plain.append((session, write))
        if plain:
            self._commit_plain(plain)

    def _commit_fenced(self, session: ClaimSession, fence: Fence, write: Write) -> None:
        is_done = False
        try:
            if write.commit_offset >= 0:
                fence.commit(write.commit_offset, write.ticket)
            is_done = True
        except KafkaMQError as error:
            self._say(session, str(error))
            self._answers.refused(error)
        finally:
            self._answers.committed(session, write, is_done)

    def _commit_plain(self, jobs: Sequence[tuple[ClaimSession, Write]]) -> None:
        wanted = {
            session.place: write.commit_offset
            for session, write in jobs
            if write.commit_offset >= 0
        }
        done: set[tuple[str, int]] = set()
        try:
            if wanted:
                done = wanted.keys() - self._client.commit_each(wanted).keys()
        except Exception as error:  # noqa: BLE001 - as above
            self._say(jobs[0][0], str(error))
        for session, write in jobs:
            self._answers.committed(session, write, session.place in done)

    def _say(self, session: ClaimSession, error_text: str) -> None:
        _log.warning(
            "a position could not be committed to Kafka",
            extra={"group": self._group, "place": session.place, "error": error_text},
        )
