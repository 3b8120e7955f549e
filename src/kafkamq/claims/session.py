"""A claimant in the shell: where it stands, who is told what becomes of it, and its fence."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kafkamq.claims.rules.claimant import Claimant
from kafkamq.claims.rules.steps import Fetch, Finish, HandOut, Stop
from kafkamq.config import ServiceConfig
from kafkamq.errors import LeaseLostError
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.record import TopicPartition
from kafkamq.transport.transactions import TransactionalProducer

NEVER_MS = 2**62


class Fence:
    """A transactional producer that belongs to one claimed partition: the next owner's ends it.

    Its id names group, topic and partition. ``init`` is called once, before the partition's
    position is looked up: from then on no former owner can commit an offset or an output. It is
    never called again in the same session, because then a zombie would fence its successor.
    """

    def __init__(
        self, config: ServiceConfig, group: str, topic: str, partition: int, group_metadata: bytes
    ) -> None:
        self.producer = TransactionalProducer(config, f"kafkamq.claims.{group}.{topic}.{partition}")
        self._place = (topic, partition)
        self._group_metadata = group_metadata
        self._is_initialised = False
        self._last_ticket = -1
        self._lock = threading.Lock()  # the application's transactions, and positions
        self._is_over = False

    @property
    def is_usable(self) -> bool:
        """Whether it still fences; else another took over, or it failed: give the claim up."""
        return not self._is_initialised or self.producer.is_ready

    def init(self, timeout_s: float) -> None:
        """Fence former owners, once."""
        if not self._is_initialised:
            self.producer.init(timeout_s=timeout_s)
            self._is_initialised = True

    def commit(self, offset: int, ticket: int) -> None:
        """Commit the partition's position for the group, unless a later ticket was."""
        topic, partition = self._place
        with self._in_turn():
            if ticket < self._last_ticket:  # its write did not wait for it, and it is old
                return
            self._last_ticket = ticket
            with self.producer.transaction(timeout_s=10.0):
                self.producer.send_offsets(
                    [TopicPartition(topic, partition, offset)], self._group_metadata
                )

    @contextmanager
    def transaction(self) -> Iterator[TransactionalProducer]:
        """A transaction: committed when the block ends normally, else aborted.

        Raises:
            LeaseLostError: The claim has ended, or ended before the commit.
        """
        with self._in_turn():
            self._require()
            with self.producer.transaction(timeout_s=10.0):
                yield self.producer
                self._require()

    def close(self) -> None:
        """End the client; while a thread uses it, that thread ends it when it is done."""
        self._is_over = True
        self._close()

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            if self._is_over:
                self._close()

    def _close(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self.producer.close()
            finally:
                self._lock.release()

    def _require(self) -> None:
        if self._is_over:
            raise LeaseLostError(f"the claim of {self.producer.transactional_id} has ended")


class Listener:
    """Who is told of a session's steps; called under the engine's lock, so it must be quick."""

    def on_offsets(self, session: ClaimSession, earliest: int, latest: int, committed: int) -> None:
        """The answer to ``LookUp`` has come."""
        session.claimant.on_offsets(earliest, latest, committed, monotonic_ms=monotonic_ms())

    def on_fetch(self, session: ClaimSession, step: Fetch) -> None:
        """The partition is held: read it."""

    def on_hand_out(self, session: ClaimSession, step: HandOut) -> None:
        """At most once: the offered batch may be used."""

    def on_stop(self, session: ClaimSession, step: Stop) -> None:
        """The claim ends: hand nothing more out."""

    def on_finish(self, session: ClaimSession, step: Finish) -> None:
        """The session is over, and is driven no more."""


@dataclass(slots=True, eq=False, repr=False)
class ClaimSession:
    """One claimant and its surroundings; everything under the engine's lock."""

    claimant: Claimant
    coordination_partition: int
    listener: Listener
    fence: Fence | None = None
    start: Fetch | None = None  # once it is held
    is_takeover: bool = False  # its former owner fell silent
    wake_ms: int = -NEVER_MS
    heard_at: int = -1  # the last record that asked for it, and was judged
    open_commits: int = 0  # writes whose offsets are being committed

    @property
    def place(self) -> tuple[str, int]:
        return self.claimant.config.topic, self.claimant.config.partition
