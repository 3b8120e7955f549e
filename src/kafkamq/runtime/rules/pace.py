"""How many handlers are at work at once, and how many records each takes at a time; pure.

``FanOut`` looks for the limit with the best yield: calls ended per second, where a limit that is
twice as high must bring some per cent more, as each call at work costs its backend something. What
limits the rate shows in the search alone: a backend with room gives twice as much for twice as many
calls, one that is full, or an interpreter's lock, gives nothing, and one that is overrun gives
less.

The search is a pattern search. From where it is it tries a step up, then a step down, and goes on
in a direction for as long as that pays, with longer steps; where neither pays, with shorter ones;
where none pays, it rests, longer each time, and looks again when it has rested or the rate changes.
Each trial is compared with what was measured just before it. Of moments without a backlog, or in
which slots are idle, it learns nothing: more slots could not have done more.

The rate of a window is that of Little's law, slots at work through the time of a call: it does not
depend on how many calls happen to end within the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, log
from typing import Protocol

# Records up to here are light, also where a dozen workers share one interpreter.
_LIGHT_US = 50.0
_MEMORY_RECORDS = 1024.0
# The shortest measurement, the calls that must end in it, and how many of each slot.
_WINDOW_MS = 240.0
_CALLS = 24
_CYCLES = 3
# Behind this one call of each slot will do.
_PATIENCE_MS = 2_000.0
# Within these cycles calls end that began under another limit.
_SETTLE_CYCLES = 1.5
_SETTLE_MS = 20.0
# Slots limit the rate while this share of them is at work, for that share of the time.
_FULL = 0.9
_MOSTLY = 0.8
# A limit that is x times as high must bring x ** _PRICE times the rate.
_PRICE = 0.05
_FACTORS = (2.0, 1.5, 1.25)
_REST_MS = 1_000.0
_MAX_REST_MS = 16_000.0
# Behind such a change of the rate, what was found does not hold any more.
_CHANGE = log(1.4)
# This is about what a batch takes from the log to the handlers.
_AHEAD_MS = 30
_AHEAD_WINDOW_MS = 20


@dataclass(frozen=True, slots=True)
class Interval:
    elapsed_ms: float
    completed: int
    spent_ms: float
    busy: float
    has_backlog: bool


@dataclass(frozen=True, slots=True)
class Totals:
    """What was done from the beginning, and how it stands; of several processes, in one of them."""

    completed: int
    spent_ms: float
    busy: float
    has_backlog: bool


class Adjustable(Protocol):
    """Slots with a limit that can be moved: of a queue, or of each of several processes."""

    def set_limit(self, limit: int) -> None:
        """Change how many slots may be at work at once; what more are at goes on."""

    def totals(self) -> Totals:
        """Return the totals at this moment."""


@dataclass(slots=True)
class _Window:
    settle_ms: float
    elapsed_ms: float = 0.0
    completed: int = 0
    spent_ms: float = 0.0
    busy_ms: float = 0.0
    full_ms: float = 0.0

    def add(self, interval: Interval, limit: int) -> None:
        if self.settle_ms > 0:
            self.settle_ms -= interval.elapsed_ms
            return
        self.elapsed_ms += interval.elapsed_ms
        self.completed += interval.completed
        self.spent_ms += interval.spent_ms
        self.busy_ms += interval.busy * interval.elapsed_ms
        if interval.has_backlog and interval.busy >= _FULL * limit:
            self.full_ms += interval.elapsed_ms

    @property
    def is_full(self) -> bool:
        return self.full_ms >= _MOSTLY * self.elapsed_ms

    def is_over(self, limit: int) -> bool:
        if self.elapsed_ms < _WINDOW_MS:
            return False
        wanted = max(_CALLS, _CYCLES * limit) if self.elapsed_ms < _PATIENCE_MS else limit
        return self.completed >= wanted or not self.is_full

    @property
    def cycle_ms(self) -> float:
        """Return the time of a call; 0: none has ended."""
        return self.spent_ms / self.completed if self.completed else 0.0

    @property
    def rate(self) -> float:
        cycle_ms = self.cycle_ms
        return self.busy_ms / self.elapsed_ms / cycle_ms if cycle_ms else 0.0


class FanOut:
    """The limit of one pool, from 1 to ``maximum``; ``start`` is what it begins with."""

    def __init__(self, *, start: int, maximum: int) -> None:
        self.maximum = maximum
        self.limit = min(start, maximum)
        self._base = self.limit
        # Its rate as it was just now; None: not known.
        self._base_rate: float | None = None
        # When the rest began; None: it does not rest.
        self._reference: float | None = None
        self._rest_ms = _REST_MS
        self._rested_ms = 0.0
        self._step = 0
        self._direction = 1
        self._tried: set[int] = set()
        self._window = _Window(_SETTLE_MS)
        self._seen: tuple[float, Totals] | None = None

    def steer(self, now_ms: float, slots: Adjustable) -> None:
        """Look at slots, and move their limit; every few ms."""
        limit, totals = self.limit, slots.totals()
        seen, self._seen = self._seen, (now_ms, totals)
        if seen is None:
            slots.set_limit(limit)
            return
        before_ms, before = seen
        interval = Interval(
            now_ms - before_ms,
            totals.completed - before.completed,
            totals.spent_ms - before.spent_ms,
            totals.busy,
            totals.has_backlog,
        )
        if self.observe(interval) != limit:
            slots.set_limit(self.limit)

    def observe(self, interval: Interval) -> int:
        """Take in what happened; the limit from here on."""
        window = self._window
        window.add(interval, self.limit)
        if window.is_over(self.limit):
            if self.limit != self._base:
                self._judge(window.rate)
            elif window.is_full:
                self._look_around(window)
            else:
                self._base_rate = None
            settle_ms = max(_SETTLE_MS, _SETTLE_CYCLES * window.cycle_ms)
            self._window = _Window(settle_ms if self._is_new(window) else 0.0)
        return self.limit

    def _is_new(self, window: _Window) -> bool:
        """Return whether calls that began before now say little of what follows."""
        return self.limit != self._base or not window.is_full or self._reference is None

    def _judge(self, rate: float) -> None:
        before = self._base_rate
        gain = -inf
        if rate and before:
            gain = log(rate / before) - _PRICE * log(self.limit / self._base)
        if gain > 0:
            self._base, self._base_rate = self.limit, rate
            self._tried = {-self._direction}
            self._step = max(self._step - 1, 0)
            self._rest_ms = _REST_MS
            self._try_on()
        else:
            self._tried.add(self._direction)
            # It is measured again, as other things may have changed.
            self._base_rate = None
            self.limit = self._base

    def _look_around(self, window: _Window) -> None:
        """Under the best limit known: rest on, or try another one."""
        self._base_rate = window.rate
        if self._reference is not None:
            self._rested_ms += window.elapsed_ms
            is_changed = abs(log(window.rate / self._reference)) > _CHANGE
            if self._rested_ms < self._rest_ms and not is_changed:
                return
            self._reference = None
            if is_changed:
                self._rest_ms = _REST_MS
                self._step = 1
        self._try_on()

    def _try_on(self) -> None:
        while True:
            for direction in (self._direction, -self._direction):
                if direction not in self._tried:
                    limit = self._stepped(direction)
                    if limit != self._base:
                        self._direction, self.limit = direction, limit
                        return
            self._tried.clear()
            if self._step + 1 >= len(_FACTORS):
                break
            self._step += 1
        self._direction = 1
        self._reference, self._rested_ms = self._base_rate, 0.0
        self._rest_ms = min(2 * self._rest_ms, _MAX_REST_MS)

    def _stepped(self, direction: int) -> int:
        factor = _FACTORS[self._step]
        if direction > 0:
            return min(self.maximum, max(self._base + 1, int(self._base * factor)))
        return max(1, min(self._base - 1, ceil(self._base / factor)))


class RunSize:
    """How many records a worker takes at a time, by how long they took until now.

    One when each takes long, so that all workers have something to do; many when they take
    microseconds, so that taking them costs nothing.

    The average goes by time spent, so that a single slow record counts at once, and the moments in
    which a worker only waited for others to let go of the interpreter count as what they are.
    """

    def __init__(self, *, max_records: int = 512, target_us: int = 10_000) -> None:
        self._max_records = max_records
        self._target_us = target_us
        # Nothing is known yet: records are taken one by one.
        self._spent_us = float(target_us)
        self._records = 1.0

    @property
    def is_light(self) -> bool:
        """Records take so little that spreading them over workers costs more than it brings."""
        return self._spent_us < _LIGHT_US * self._records

    def observe(self, records: int, elapsed_us: float) -> None:
        """A worker was done with so many records in that time."""
        if records < 1:
            return
        self._spent_us += max(elapsed_us, 0.0)
        self._records += records
        if self._records > _MEMORY_RECORDS:
            self._spent_us *= _MEMORY_RECORDS / self._records
            self._records = _MEMORY_RECORDS

    def size(self, waiting_count: int, workers: int) -> int:
        """Say how many to take now; of records that are not light there is something for each."""
        by_time = int(self._target_us * self._records / max(self._spent_us, 1e-3))
        if by_time <= 1:
            # This is the usual case where ten thousand wait at once.
            return 1
        limit = min(self._max_records, by_time)
        if not self.is_light:
            # Half of a share: who is through early finds something, and all end together.
            limit = min(limit, waiting_count // max(2 * workers, 1))
        return max(1, limit)


class RateLimit:
    """Lets so many records pass a second; what a moment did not use, the next one may."""

    def __init__(self, per_second: float, *, burst_ms: int = 100) -> None:
        self._per_ms = per_second / 1000
        self._burst = max(1.0, self._per_ms * burst_ms)
        self._allowance = 1.0
        self._at_ms: float | None = None

    def available(self, monotonic_ms: float) -> int:
        if self._at_ms is not None:
            grown = (monotonic_ms - self._at_ms) * self._per_ms
            self._allowance = min(self._burst, self._allowance + grown)
        self._at_ms = monotonic_ms
        return int(self._allowance)

    def spend(self, records: int) -> None:
        self._allowance -= records


class RunAhead:
    """How many messages a worker takes before a handler is free for them.

    None, when handlers are slow: what waits behind a slow one could be handled elsewhere. When they
    are quick, as many as they finish within the time that fetching takes.
    """

    def __init__(self, *, concurrency: int, maximum: int, is_ahead: bool = True) -> None:
        self.concurrency = concurrency
        self._maximum = max(1, maximum)
        self._is_ahead = is_ahead
        self._ahead = 0
        self._since_ms = 0
        self._finished = 0

    def wanted(self, held: int, finished: int, now_ms: int) -> int:
        passed_ms = now_ms - self._since_ms
        if passed_ms >= _AHEAD_WINDOW_MS:
            self._ahead = (finished - self._finished) * _AHEAD_MS // passed_ms
            self._since_ms, self._finished = now_ms, finished
        ahead = self._ahead if self._is_ahead else 0
        return min(self.concurrency + ahead, self._maximum) - held
