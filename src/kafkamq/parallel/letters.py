"""Dead letters that no worker waits for: of records that stall, and those that Kafka refuses.

A record whose dead letter is refused is given up all the same: its handler is not called again. It
stays open, and what is behind it in its order waits, until the letter is in Kafka.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import monotonic

from kafkamq.parallel.callbacks import tell
from kafkamq.parallel.config import ParallelConfig
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.rules.lanes import Lane, LaneState
from kafkamq.parallel.settling import Park
from kafkamq.parallel.stats import Stats
from kafkamq.parallel.work_queue import Desk
from kafkamq.types import DeadLetterReason

__all__ = ["AGAIN_S", "Letters"]

AGAIN_S = 5.0  # between tries to write one
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Refused:
    lane: Lane[ParallelRecord]
    record: ParallelRecord
    reason: DeadLetterReason
    said: str
    due_s: float


class Letters:
    """Those of one consumer; at most one for each open record."""

    def __init__(self, config: ParallelConfig, desk: Desk, park: Park, stats: Stats) -> None:
        self._hook = config.hooks.on_dead_letter
        self._desk = desk
        self._park = park
        self._stats = stats
        self._refused: deque[_Refused] = deque()  # in the order of their times

    def park(
        self,
        lane: Lane[ParallelRecord],
        record: ParallelRecord,
        reason: DeadLetterReason,
        said: str,
        refused: Callable[[], object],
    ) -> None:
        """Write one, and give its record up when Kafka has it; else call ``refused``."""
        self._watch(lane, record, reason, self._park(record, reason, said), refused)

    def hold(
        self,
        lane: Lane[ParallelRecord],
        record: ParallelRecord,
        reason: DeadLetterReason,
        said: str,
        parked: Future[None],
    ) -> None:
        """Nobody waits for ``parked`` any more: see that the letter is written; any thread."""

        def again() -> None:
            due_s = monotonic() + AGAIN_S
            self._refused.append(_Refused(lane, record, reason, said, due_s))

        self._watch(lane, record, reason, parked, again)

    def tend(self, now_s: float) -> None:
        """Try those again that are due; by the owner of the consumer."""
        refused = self._refused
        while refused and refused[0].due_s <= now_s:
            letter = refused.popleft()
            if letter.lane.state is LaneState.CLOSED:  # whoever has the partition decides anew
                continue
            told = letter.lane, letter.record, letter.reason, letter.said
            self.hold(*told, self._park(*told[1:]))

    def _watch(
        self,
        lane: Lane[ParallelRecord],
        record: ParallelRecord,
        reason: DeadLetterReason,
        parked: Future[None],
        refused: Callable[[], object],
    ) -> None:
        parked.add_done_callback(partial(self._ended, lane, record, reason, refused))

    def _ended(
        self,
        lane: Lane[ParallelRecord],
        record: ParallelRecord,
        reason: DeadLetterReason,
        refused: Callable[[], object],
        parked: Future[None],
    ) -> None:
        error = parked.exception()
        if error is not None:
            _log.error(
                "a dead letter could not be written; it is tried again",
                extra={"record": repr(record), "said": str(error)},
            )
            refused()
            return
        self._desk.give_up(lane, record.offset)
        self._stats.dead_lettered += 1
        _log.warning(
            "a record is given up; it is a dead letter",
            extra={"record": repr(record), "reason": reason.value},
        )
        tell("on_dead_letter", self._hook, record, reason.value)
