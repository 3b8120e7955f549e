"""At most once: batches are announced ahead, committed when they are asked for, then handed out.

Ahead of the application only ClaimingMessages is written, which moves no position; so a process
that dies loses the batch it works on, or the one it was about to be given, and no other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kafkamq.claims.broker_clock import lease_clock_ms
from kafkamq.claims.engine import Engine
from kafkamq.claims.message import Batch, ClaimedMessage
from kafkamq.claims.partition_reader import PartitionReader
from kafkamq.claims.rules.steps import HandOut
from kafkamq.claims.session import ClaimSession


@dataclass(slots=True)
class _Buffer:
    """One partition: what is offered of what was read."""

    session: ClaimSession
    offered: tuple[ClaimedMessage, ...] = ()
    is_wanted: bool = False
    is_handed_out: bool = False


class AtMostOnceBatches:
    """The buffers of one consumer; ``next_batch`` belongs to the application's thread."""

    def __init__(self, engine: Engine, reader: PartitionReader, batch: int) -> None:
        self._engine = engine
        self._reader = reader
        self._batch = batch
        self._buffers: dict[ClaimSession, _Buffer] = {}

    # ---- under the engine's lock

    def add(self, session: ClaimSession) -> None:
        self._buffers[session] = _Buffer(session)

    def remove(self, session: ClaimSession) -> None:
        self._buffers.pop(session, None)

    def hand_out(self, session: ClaimSession, step: HandOut) -> None:
        """The log says that the offered batch may be used."""
        buffer = self._buffers.get(session)
        if buffer is not None and buffer.offered and buffer.offered[0].offset == step.first_offset:
            buffer.is_handed_out = True

    # ---- the application's thread

    def next_batch(self, timeout_s: float) -> Batch | None:
        """A batch; None: there was none for ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._engine.lock:
                batch = self._take()
                if batch is not None:
                    return batch
                is_wanting = self._want()
            left_s = max(0.0, deadline_s - time.monotonic())
            self._fill(0.0 if is_wanting else left_s)
            with self._engine.changed:
                self._offer(is_idle=not is_wanting)
                is_wanting = self._want()
                if not left_s:
                    return self._take()
                if is_wanting and not any(
                    buffer.is_handed_out for buffer in self._buffers.values()
                ):
                    self._engine.changed.wait(left_s)

    def _take(self) -> Batch | None:
        for buffer in list(self._buffers.values()):
            if not buffer.is_handed_out:
                continue
            messages, claimant = buffer.offered, buffer.session.claimant
            buffer.offered, buffer.is_handed_out, buffer.is_wanted = (), False, False
            self._buffers[buffer.session] = self._buffers.pop(buffer.session)  # its turn is over
            self._offer(is_idle=False)
            return Batch(*buffer.session.place, claimant.token, messages)
        return None

    def _want(self) -> bool:
        """Commit one offered batch; False: none is offered."""
        if any(buffer.is_wanted for buffer in self._buffers.values()):
            return True
        for buffer in self._buffers.values():
            if buffer.offered:
                buffer.is_wanted = buffer.session.claimant.want_batch()
                if buffer.is_wanted:
                    self._engine.drive(buffer.session)
                    return True
                buffer.offered = ()  # dropped by its claimant
        return False

    def _offer(self, *, is_idle: bool) -> None:
        """Announce what was read: full batches, and smaller ones when nothing else is to do."""
        for buffer in list(self._buffers.values()):
            claimant = buffer.session.claimant
            read = self._reader.buffers.get(buffer.session)
            if buffer.offered or not read or not claimant.wants_batch:
                continue
            if len(read) < self._batch and not is_idle:
                continue
            size = min(self._batch, len(read))
            buffer.offered = tuple(read.popleft() for _ in range(size))
            claimant.offer(
                buffer.offered[0].offset,
                buffer.offered[-1].offset + 1,
                lease_clock_ms(),
                is_wanted=False,
            )
            self._engine.drive(buffer.session)

    def _fill(self, timeout_s: float) -> None:
        if self._reader.is_idle and timeout_s > 0:
            with self._engine.changed:
                self._engine.changed.wait(timeout_s)
            timeout_s = 0.0
        self._reader.fill(timeout_s)
