"""A marker partition of a local tracker has the core's state and what its loop remembers of it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.markers.rules.delivery import Carry, Settle, size_of
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.rules.ticks import TickPolicy
from kafkamq.markers.tracker.ledger import Ledger
from kafkamq.markers.tracker.settlement import SettleReport
from kafkamq.markers.wire.records import Sign, SignKind, TrackerStatus
from kafkamq.transport.clock import monotonic_ms

_log = logging.getLogger(__name__)

ENGINE = "local"
"""The engine's name in ledgers: its replicas are one engine (R22)."""

_MAX_PAUSE_S = 5.0
_FIRST_PAUSE_S = 0.1
_TELL_S = 60.0
_MAX_LOOK_S = 12.0
LOOK_S = 3.0
# Kafka forgets offsets of a group that is silent for days.
_LEDGER_REFRESH_S = 3600.0
# Other replicas start by what partition 0's ledger says (R22).
_EPOCH_REFRESH_S = 60.0


class Phase(Enum):
    """How far the ownership of a partition has come."""

    WAITING = "waiting"
    STARTING = "starting"
    READING = "reading"


@dataclass(frozen=True, slots=True)
class Started:
    """A partition is ours: what the loop needs to read it."""

    ledger: Ledger
    position: int
    token: str


class Awaited:
    """Actions of a marker partition that cannot be settled yet (R18): they are planned again after
    a while, a longer one while there are always some.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._actions: deque[tuple[float, Sequence[Settle | Carry]]] = deque()
        self._look_s = LOOK_S
        self._told_s = -_TELL_S

    def __len__(self) -> int:
        return sum(size_of(row) for _, rows in self._actions for row in rows)

    def take(self) -> list[Settle | Carry]:
        now_s, found = time.monotonic(), list[Settle | Carry]()
        while self._actions and self._actions[0][0] < now_s:
            found += self._actions.popleft()[1]
        return found

    def add(self, actions: Sequence[Settle | Carry]) -> None:
        """Await what a settlement's report names; none: nothing was in its way."""
        if not actions:
            if not self._actions:
                self._look_s = LOOK_S
            return
        now_s = time.monotonic()
        self._actions.append((now_s + self._look_s, actions))
        self._look_s = min(2 * self._look_s, _MAX_LOOK_S)
        if now_s > self._told_s + _TELL_S:
            self._told_s = now_s
            first = actions[0]
            _log.warning(
                "due messages wait for a log that does not answer, or is not known",
                extra={
                    "partition": self._number,
                    "actions": len(actions),
                    "first_start": first.start_offset,
                    "message_partition": first.message_id.partition,
                },
            )


class TrackedPartition:
    """State of one assigned partition; only the tracker's loop touches it.

    A settlement of it may run in a worker thread meanwhile (``is_busy``), which only gets the
    ledger and its own list of actions.
    """

    def __init__(self, topic: str, number: int, config: TrackerConfig, carry_after_ms: int) -> None:
        self.topic = topic
        self.number = number
        self.phase = Phase.WAITING
        self.is_busy = False
        self.ledger: Ledger | None = None
        self.token = ""
        self.batch = 0
        self.core = RedeliveryTracker(partition=number)
        self.ticks = TickPolicy(monotonic_ms(), config.max_silence_ms)
        self.wants_start_tick = False
        self.redelivered = 0
        self.dead_lettered = 0
        self.waits_since_s = time.monotonic()
        self._config = config
        self._carry_after_ms = carry_after_ms
        self._written = -1
        self._written_s = 0.0
        # The log was read up to here, control records included.
        self.end = -1
        # No position goes behind this record, whose copy in the quarantine is not confirmed (R21);
        # -1: all are.
        self.kept_from = -1
        self.awaited = Awaited(number)
        # Nothing is tried before this monotonic time.
        self.retry_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self.last_status: TrackerStatus | None = None

    # ---- the life of an ownership

    def may_try(self) -> bool:
        """Return whether the pause after the last failure is over."""
        return time.monotonic() >= self.retry_s

    def failed(self) -> None:
        """Pause before the next attempt, longer each time."""
        self.retry_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)

    def succeeded(self) -> None:
        self._pause_s = _FIRST_PAUSE_S

    def wait(self) -> None:
        """Ask for another start: what is known of the log is not enough any more (R17)."""
        self.phase = Phase.WAITING
        self.waits_since_s = time.monotonic()
        if self.last_status is not None:
            # Metrics show it until the next start.
            self.last_status = replace(self.last_status, is_live=False)

    def start(self, started: Started, *, is_written_soon: bool = True) -> None:
        """Begin to fold at the ledger's position; nothing is planned before our TICK is read.

        ``is_written_soon``: the first position needs no pause. A producer's first transaction looks
        for coordinators, and is slow: what falls due finds that done, if the ledger stays open.
        """
        ledger = started.ledger
        assert ledger.last is not None, "a start writes the ledger"
        self.phase = Phase.READING
        self.ledger = ledger
        self.token = started.token
        self.batch = ledger.last.batch + 1
        self.core = RedeliveryTracker(
            started.position,
            partition=self.number,
            max_lease_ms=self._config.max_lease_ms,
            longest_ms=2 * self._carry_after_ms,
            carry_after_ms=self._carry_after_ms,
            engine=(started.token, ledger.epoch),
        )
        self.ticks = TickPolicy(monotonic_ms(), self._config.max_silence_ms)
        self.wants_start_tick = True
        self._written = started.position
        self._written_s = 0.0 if is_written_soon else time.monotonic()
        self.end = self.kept_from = -1
        self.awaited = Awaited(self.number)
        self.succeeded()

    # ---- ticks

    def wants_tick(self, now_ms: int) -> bool:
        """Append a TICK now? (R4; the first one: R17)."""
        if self.phase is not Phase.READING:
            return False
        if self.wants_start_tick:
            return True
        return self.ticks.wants_tick(now_ms, self.core.clock_ms, self.core.next_wake())

    def tick_sent(self, now_ms: int) -> None:
        self.wants_start_tick = False
        self.ticks.on_sent(now_ms)

    def tick_done(self, offset: int) -> None:
        """The TICK's fate: its offset, or -1."""
        if offset >= 0:
            self.ticks.on_delivered(offset)
            return
        self.ticks.on_failed()
        if not self.core.is_live:
            self.wants_start_tick = True

    # ---- settling

    def plan(self) -> Sequence[Settle | Carry]:
        """Return what to settle now; empty while a settlement is under way, or after a failure."""
        if self.is_busy or self.phase is not Phase.READING or not self.may_try():
            return ()
        self.core.aborted(self.awaited.take())
        return self.core.plan(self._config.max_offsets_per_commit)

    def position(self) -> int:
        committable = self.core.committable_offset()
        if self.kept_from >= 0:
            return min(committable, self.kept_from)
        # With nothing open, control records at the end need not be read again, and they may not
        # look like lost records when the log's start has passed them.
        if committable == self.core.next_offset:
            return max(committable, self.end)
        return committable

    def wants_position(self, turns: int = 1) -> bool:
        """Return whether the position should be written without actions (R22).

        ``turns``: So many partitions share an open ledger, and one after the other writes: each
        pauses so many times as long, or else ledgers would be opened for positions all the time.
        """
        if self.is_busy or self.phase is not Phase.READING or not self.core.is_live:
            return False
        since_s = time.monotonic() - self._written_s
        if since_s * 1000 < turns * self._config.position_interval_ms or not self.may_try():
            return False
        refresh_s = _LEDGER_REFRESH_S if self.number else _EPOCH_REFRESH_S
        return since_s > refresh_s or self.position() != self._written

    def is_behind(self) -> bool:
        return self.phase is Phase.READING and self.position() != self._written

    def settled(self, position: int, report: SettleReport) -> None:
        """A settlement is done; its ENDs come back through the log."""
        self.redelivered += report.copies
        self.dead_lettered += report.dead_letters
        if report.transactions:
            self._written = position
            self._written_s = time.monotonic()
        self.batch += 1
        self.succeeded()

    # ---- status

    def status(self) -> TrackerStatus | None:
        """Return the status record (R24); None while there is nothing new to say."""
        if self.phase is not Phase.READING or self.ledger is None:
            return None
        wake = self.core.next_wake()
        status = TrackerStatus(
            topic=self.topic,
            partition=self.number,
            engine=ENGINE,
            epoch=self.ledger.epoch,
            clock_ms=self.core.clock_ms,
            position=max(self.core.next_offset, self.end),
            committable_offset=self.core.committable_offset(),
            entries=self.core.open_count(),
            due=self.core.due_count(),
            awaited=len(self.awaited),
            deadline_ms=wake.deadline_ms,
            warn_ms=wake.warn_ms,
            late_verdicts=self.core.late_verdicts,
            malformed=self.core.malformed,
            redelivered=self.redelivered,
            dead_lettered=self.dead_lettered,
            batch=self.batch,
            is_live=self.core.is_live,
        )
        if status == self.last_status:
            return None
        self.last_status = status
        return status


def sign_of(config: ServiceConfig, partitions: Iterable[TrackedPartition]) -> Sign | None:
    """Return the sign of life of all of a replica's partitions, which are one engine (R36)."""
    ledgers = [part.ledger for part in partitions if part.phase is Phase.READING]
    epoch = max((ledger.epoch for ledger in ledgers if ledger is not None), default=0)
    if not epoch:
        return None
    topic = config.marker_topic
    return Sign(topic=topic, kind=SignKind.ACTIVE, engine=ENGINE, start=ENGINE, epoch=epoch)
