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
from kafkamq.claims.partition_reader import Intake
from kafkamq.claims.rules.steps import HandOut
from kafkamq.claims.session import Tenure

__all__ = ["BatchDesk"]


@dataclass(slots=True)
class _Lane:
    """One partition: what is offered of what was read."""

    tenure: Tenure
    offered: tuple[ClaimedMessage, ...] = ()
    is_wanted: bool = False
    is_handed_out: bool = False


class BatchDesk:
    """The lanes of one consumer; ``next_batch`` belongs to the application's thread."""

    def __init__(self, engine: Engine, intake: Intake, batch: int) -> None:
        self._engine = engine
        self._intake = intake
        self._batch = batch
        self._lanes: dict[Tenure, _Lane] = {}

    # ---- under the engine's lock

    def add(self, tenure: Tenure) -> None:
        self._lanes[tenure] = _Lane(tenure)

    def remove(self, tenure: Tenure) -> None:
        self._lanes.pop(tenure, None)

    def hand_out(self, tenure: Tenure, step: HandOut) -> None:
        """The log says that the offered batch may be used."""
        lane = self._lanes.get(tenure)
        if lane is not None and lane.offered and lane.offered[0].offset == step.first_offset:
            lane.is_handed_out = True

    def untaken(self) -> dict[Tenure, int]:
        """First offsets of batches that were committed, and that nobody has asked for since."""
        return {
            lane.tenure: lane.offered[0].offset
            for lane in self._lanes.values()
            if lane.is_handed_out
        }

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
                if is_wanting and not any(lane.is_handed_out for lane in self._lanes.values()):
                    self._engine.changed.wait(left_s)

    def _take(self) -> Batch | None:
        for lane in list(self._lanes.values()):
            if not lane.is_handed_out:
                continue
            messages, claimant = lane.offered, lane.tenure.claimant
            lane.offered, lane.is_handed_out, lane.is_wanted = (), False, False
            self._lanes[lane.tenure] = self._lanes.pop(lane.tenure)  # to the back of the line
            self._offer(is_idle=False)
            if not claimant.is_live(
                lease_clock_ms()
            ):  # the last thing: what came before takes time
                continue  # it is dropped: the lease ended before it reached the application
            self._engine.stats.handed_out += len(messages)
            return Batch(*lane.tenure.place, claimant.token, messages)
        return None

    def _want(self) -> bool:
        """Commit one offered batch; False: none is offered."""
        if any(lane.is_wanted for lane in self._lanes.values()):
            return True
        for lane in self._lanes.values():
            if lane.offered:
                lane.is_wanted = lane.tenure.claimant.want_batch()
                if lane.is_wanted:
                    self._engine.drive(lane.tenure)
                    return True
                lane.offered = ()  # dropped by its claimant
        return False

    def _offer(self, *, is_idle: bool) -> None:
        """Announce what was read: full batches, and smaller ones when nothing else is to do."""
        for lane in list(self._lanes.values()):
            claimant = lane.tenure.claimant
            read = self._intake.lanes.get(lane.tenure)
            if lane.offered or not read or not claimant.wants_batch:
                continue
            if len(read) < self._batch and not is_idle:
                continue
            size = min(self._batch, len(read))
            lane.offered = tuple(read.popleft() for _ in range(size))
            claimant.offer(
                lane.offered[0].offset,
                lane.offered[-1].offset + 1,
                lease_clock_ms(),
                is_wanted=False,
            )
            self._engine.drive(lane.tenure)

    def _fill(self, timeout_s: float) -> None:
        if self._intake.is_idle and timeout_s > 0:
            with self._engine.changed:
                self._engine.changed.wait(timeout_s)
            timeout_s = 0.0
        self._intake.fill(timeout_s)
