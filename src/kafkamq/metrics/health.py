"""Liveness and readiness follow from the ages of this process's loops.

A loop that matters (a consumer's keeper, a tracker's turn) beats; one that has not beaten for
longer than it may is taken for hung. Handlers do not beat: their pool is asked how long it hangs.
Standard library only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LoopState:
    """One loop as it is now: the age of its last turn, and in ``detail`` more, for people."""

    name: str
    age_s: float
    max_age_s: float
    is_ready: bool
    detail: str = ""

    @property
    def is_live(self) -> bool:
        return self.age_s <= self.max_age_s


class HandlerCall(Protocol):
    """A handler at work on a message, or on the list that begins with it."""

    @property
    def began_s(self) -> float: ...

    @property
    def place(self) -> tuple[str, int, int]:
        """Return its topic, partition and offset."""

    @property
    def caller(self) -> object:
        """Return in what it runs: a thread's number, a task, or a text that says it."""


class HandlerPool(Protocol):
    """A pool of handlers at one moment; times are monotonic s."""

    @property
    def count(self) -> int: ...

    @property
    def calls(self) -> Sequence[HandlerCall]: ...

    def hung_s(self, now_s: float) -> float:
        """Return for how long nothing has ended although every slot is at it; 0: it works."""

    def is_ready(self, now_s: float) -> bool:
        """Return whether it does not hang, or not for long."""

    def describe(self, now_s: float) -> str:
        """Return what is wrong, for people to read; empty while there is nothing to say."""


class Loop:
    """One loop; ``beat`` belongs to it, everything else to its observers."""

    def __init__(self, name: str, max_age_s: float, is_ready: Callable[[], bool]) -> None:
        self.name = name
        self._max_age_s = max_age_s
        self._is_ready = is_ready
        self._last_s = time.monotonic()

    def beat(self) -> None:
        """It has made a turn."""
        self._last_s = time.monotonic()

    def state(self) -> LoopState:
        age_s = time.monotonic() - self._last_s
        return LoopState(self.name, age_s, self._max_age_s, self._is_ready())


class Handlers:
    """The handlers of one pool; their age is the time for which all of them hang."""

    def __init__(
        self,
        name: str,
        max_age_s: float,
        slots: Callable[[], HandlerPool],
        *,
        queue: str = "",
        handler: str = "",
        consumer: Callable[[], str] = lambda: "",
    ) -> None:
        self.name = name
        self.slots = slots
        self.queue = queue
        self.handler = handler
        self.consumer = consumer
        self._max_age_s = max_age_s

    def state(self) -> LoopState:
        slots = self.slots()
        now_s = time.monotonic()
        return LoopState(
            self.name,
            slots.hung_s(now_s),
            self._max_age_s,
            slots.is_ready(now_s),
            slots.describe(now_s),
        )


class Health:
    """The loops of a process; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loops: list[Loop | Handlers] = []

    def add(
        self, name: str, *, max_age_s: float, is_ready: Callable[[], bool] = lambda: True
    ) -> Loop:
        """Watch a loop that begins, and return what beats for it.

        Args:
            max_age_s: A healthy one turns at least so often.
            is_ready: Whether it can do its work; must not wait.
        """
        loop = Loop(name, max_age_s, is_ready)
        self.watch(loop)
        return loop

    def watch(self, watched: Loop | Handlers) -> None:
        """Ask from now on for the state of this, too."""
        with self._lock:
            self._loops.append(watched)

    def remove(self, loop: Loop | Handlers) -> None:
        """Forget a loop that has ended as it should; idempotent."""
        with self._lock:
            self._loops = [other for other in self._loops if other is not loop]

    def states(self) -> list[LoopState]:
        with self._lock:
            loops = list(self._loops)
        return [loop.state() for loop in loops]

    def handlers(self) -> list[Handlers]:
        """Return the pools of handlers among them."""
        with self._lock:
            return [loop for loop in self._loops if isinstance(loop, Handlers)]

    def is_live(self) -> bool:
        return all(state.is_live for state in self.states())

    def is_ready(self) -> bool:
        """Return whether there is a loop, and all of them turn and can work."""
        states = self.states()
        return bool(states) and all(state.is_live and state.is_ready for state in states)


health = Health()
"""The loops of this process."""
