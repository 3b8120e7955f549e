"""How many handlers may be at work at once, where nobody has said so; pure.

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
depend on how many calls happen to end within the window. All times are ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, log
from typing import Protocol

from kafkamq.errors import ConfigError

_WINDOW_MS = 240.0  # the shortest measurement
_CALLS = 24  # that end in it, at least, and
_CYCLES = 3  # so many of each slot; but
_PATIENCE_MS = 2_000.0  # after so long one of each will do
_SETTLE_CYCLES = 1.5  # calls that began under another limit end within that
_SETTLE_MS = 20.0
_FULL = 0.9  # of its slots are at work: they are what limits it
_MOSTLY = 0.8  # of the time
_PRICE = 0.05  # a limit that is x times as high must bring x ** _PRICE times the rate
_FACTORS = (2.0, 1.5, 1.25)  # of steps
_REST_MS = 1_000.0
_MAX_REST_MS = 16_000.0
_CHANGE = log(1.4)  # of the rate: what was found does not hold any more


@dataclass(frozen=True, slots=True)
class Interval:
    """What happened since the last one."""

    elapsed_ms: float
    completed: int  # calls that ended
    spent_ms: float  # how long these took together, with what follows a call in its slot
    busy: float  # slots at work
    has_backlog: bool  # there was something to do for another slot


@dataclass(frozen=True, slots=True)
class Totals:
    """What was done from the beginning, and how it stands; of several processes, in one of them."""

    completed: int  # calls
    spent_ms: float  # see ``Interval``, as all of it
    busy: float
    has_backlog: bool


class Adjustable(Protocol):
    """Slots with a limit that can be moved: of a queue, or of each of several processes."""

    def set_limit(self, limit: int) -> None:
        """So many slots may be at work at once; what more are at goes on."""

    def totals(self) -> Totals:
        """At this moment."""


@dataclass(slots=True)
class _Window:
    """Intervals under one limit."""

    settle_ms: float  # until it begins
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
        """Whether more slots could have done more."""
        return self.full_ms >= _MOSTLY * self.elapsed_ms

    def is_over(self, limit: int) -> bool:
        if self.elapsed_ms < _WINDOW_MS:
            return False
        wanted = max(_CALLS, _CYCLES * limit) if self.elapsed_ms < _PATIENCE_MS else limit
        return self.completed >= wanted or not self.is_full

    @property
    def cycle_ms(self) -> float:
        """The time of a call; 0: none has ended."""
        return self.spent_ms / self.completed if self.completed else 0.0

    @property
    def rate(self) -> float:
        """Calls per ms."""
        cycle_ms = self.cycle_ms
        return self.busy_ms / self.elapsed_ms / cycle_ms if cycle_ms else 0.0


class FanOut:
    """The limit of one pool.

    Args:
        start: The limit to begin with.
        minimum, maximum: Its bounds.

    Raises:
        ConfigError: The bounds leave nothing between them.
    """

    def __init__(self, *, start: int, maximum: int, minimum: int = 1) -> None:
        if not 1 <= minimum <= maximum:
            raise ConfigError(f"the limit is to be from {minimum} to {maximum}: at least 1")
        self._minimum = minimum
        self.maximum = maximum
        self.limit = min(max(start, minimum), maximum)
        self._base = self.limit  # the best known
        self._base_rate: float | None = None  # as it was just now; None: not known
        self._reference: float | None = None  # when the rest began; None: it does not rest
        self._rest_ms = _REST_MS
        self._rested_ms = 0.0
        self._step = 0  # of the factors
        self._direction = 1
        self._tried: set[int] = set()  # directions
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
        """Whether calls that began before now say little of what follows."""
        return self.limit != self._base or not window.is_full or self._reference is None

    def _judge(self, rate: float) -> None:
        """Of a trial: keep it, or go back."""
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
            self._base_rate = None  # measured again, as other things may have changed
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
        """Begin the next trial; where all were fruitless, a rest."""
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
        return max(self._minimum, min(self._base - 1, ceil(self._base / factor)))
