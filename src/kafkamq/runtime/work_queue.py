"""What stands between who hands out work and who calls handlers: take and done.

- A ``WorkQueue`` hands out *runs*: records that are handled one after another. The shards of the
  parallel consumer are one, the messages that a ``Worker`` has received are another one, and so
  is the inbox of a process that handles for its parent.
- A *slot* is one who calls handlers: a thread, a coroutine, or a process with several of them.
  ``take`` settles what the slot has finished and gives it more, under one lock. A slot that gets
  nothing is parked until the queue wakes it.
- Order is the queue's: of what must stay in order it hands out one run at a time, and the next
  one when that is given back. So the records of a key are with one slot, hence in one process.
- What an outcome means is the queue's, too: ``acknowledge`` is called at once for each outcome
  that is no plain success. A queue of acknowledgements wants to know of every outcome.
- A run that was not handled to its end, or of which records failed, goes back by ``done``; all
  others are put into ``finished``. ``publish`` follows when the slot has handled all that it took.
- A handler that takes too long loses its *claim*: the thread that takes the claim out gives the
  outcome.
- Executors live in this package and nowhere else: ``ThreadExecutor``, ``LoopExecutor``,
  ``ProcessExecutor``, which runs one of the first two in each process.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from kafkamq.errors import DeadlineExceededError, KafkaMQError
from kafkamq.runtime.rules.hanging import Call, Slots

R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)
T = TypeVar("T")
_owner: ContextVar[object] = ContextVar("kafkamq_inside", default=None)


class HandlerFaultError(KafkaMQError):
    """A call of a handler that did not end by itself; it is always worth another attempt."""


class HandlerTimeoutError(HandlerFaultError, DeadlineExceededError):
    """The handler took longer than it may."""


class WorkerDiedError(HandlerFaultError):
    """The process of a handler ended in the middle of its work."""


@dataclass(slots=True, eq=False, repr=False)
class Slot(Generic[R]):
    """One who calls handlers; a field is its own thread's unless its comment names another."""

    # The runs that it has not begun; the queue may empty it.
    pending: Iterator[Any] = field(default_factory=lambda: iter(()))
    # The run that it is at, and what it has not begun of that; the same.
    current: tuple[Any, Iterator[R]] | None = None
    finished: list[Any] = field(default_factory=list)
    runs: Collection[Any] = ()
    taken: int = 0
    handed: int = 0
    # When it took them; of a process: when it was heard of last.
    began_s: float = 0.0
    width: int = 1
    # What handlers needed for ``finished``; None: as long as the slot had it.
    spent_us: float | None = None
    # Of a process: asks for what it has not begun; from any thread, at once.
    give_back: Callable[[], None] | None = None
    is_parked: bool = False
    # The record, or list, that its handler is at: the thread that takes it out gives the outcome.
    claim: list[Any] = field(default_factory=list)
    claimed_s: float = 0.0
    # Its thread's number, or its task.
    caller: object = None
    # What it waits at; only the executor knows its kind.
    gate: Any = None

    def forget(self) -> None:
        """Keep nothing of what is done, as it gets nothing now; with the queue's lock held."""
        self.runs, self.current, self.pending = (), None, iter(())


def take_list(slot: Slot[R]) -> tuple[list[Any], list[R]]:
    """Return all that the slot has taken, as one list; nobody relieves it of that any more."""
    runs = list(slot.pending)
    return runs, [record for run in runs for record in run.records]


class Waker(Protocol):
    """Wakes slots that are parked; called with the queue's lock held."""

    def wake(self, slots: Sequence[Any]) -> None:
        """Let them call ``take`` again."""


class ParkedSlots:
    """The slots of a queue that wait, and how many of all may be at work at once.

    The queue's lock is held around all of it.
    """

    def __init__(self) -> None:
        self._parked: list[Any] = []
        self._count = 0
        # None: all may work.
        self._limit: int | None = None
        self._kept = 0
        self._waker: Waker | None = None

    def join(self, count: int, waker: Waker) -> None:
        """Note how many slots there are; none waits."""
        self._count, self._waker = count, waker
        self.set_limit(self._limit)

    def set_limit(self, limit: int | None) -> None:
        self._limit = limit
        self._kept = 0 if limit is None else max(0, self._count - limit)

    @property
    def limit(self) -> int:
        return self._count - self._kept

    @property
    def busy(self) -> int:
        return self._count - len(self._parked)

    @property
    def is_over(self) -> bool:
        """More are at work than may be: who asks for more is to wait."""
        return len(self._parked) < self._kept

    @property
    def wakeable(self) -> int:
        return max(0, len(self._parked) - self._kept)

    def park(self, slot: Any) -> None:
        if not slot.is_parked:
            slot.is_parked = True
            self._parked.append(slot)

    def unpark(self, slot: Any) -> None:
        """It took although it was waiting."""
        if slot.is_parked:
            slot.is_parked = False
            self._parked.remove(slot)

    def wake(self, count: int) -> None:
        """Wake as many as may be; those that worked last: their stacks are warm."""
        self._wake(min(count, self.wakeable))

    def wake_all(self) -> None:
        """Wake all for the end, whatever the limit is."""
        self._wake(len(self._parked))

    def _wake(self, count: int) -> None:
        if count < 1:
            return
        woken = self._parked[-count:]
        del self._parked[-count:]
        for slot in woken:
            slot.is_parked = False
        if self._waker is not None:
            self._waker.wake(woken)


class WorkQueue(Protocol[R_contra]):
    """Hands out runs, and learns what became of them; thread-safe."""

    @property
    def is_stopped(self) -> bool:
        """Nothing is handed out any more: a slot that gets nothing ends."""

    @property
    def limit(self) -> int:
        """Return how many slots may be at work at once."""

    @property
    def has_backlog(self) -> bool:
        """There is something to do for another slot."""

    def make_slot(self) -> Any:
        """Return a slot of the kind that it needs."""

    def join(self, slots: Sequence[Any], waker: Waker) -> None:
        """These will work; once."""

    def take(self, slot: Any, limit: int = 0) -> Sequence[Any]:
        """Settle what the slot finished, and give it more; nothing: it is parked.

        Args:
            slot: Who asks.
            limit: The most records; 0: as many as one handler should have. What a slot with a
                limit takes is added to what it has.
        """

    def acknowledge(self, slot: Any, run: Any, record: R_contra, outcome: object) -> bool:
        """Return what a handler returned or raised; False: its run ends here. May wait."""

    async def acknowledge_async(
        self, slot: Any, run: Any, record: R_contra, outcome: object
    ) -> bool:
        """Acknowledge without blocking the event loop that calls."""

    def done(self, slot: Any, run: Any, processed: int | None = None) -> None:
        """A run, of which so many records were tried (None: all), and some perhaps have failed."""

    def publish(self, slot: Any) -> None:
        """All that the slot took is handled; may wait."""

    async def publish_async(self, slot: Any) -> None:
        """Publish without blocking the event loop that calls."""

    def abandon(self, slot: Any, records: Sequence[R_contra]) -> None:
        """The end does not wait any longer for the handler of these."""

    def calls(self, slots: Sequence[Any]) -> list[Call]:
        """Return what slots are at."""

    def fail(self, error: BaseException) -> None:
        """A slot cannot go on, by no fault of its handler."""


class Inbox(ABC, Generic[R, T]):
    """Lines up, parks and wakes; a subclass says what a slot takes, and what an outcome means."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ready: deque[R] = deque()
        self.slots: Sequence[Slot[T]] = ()
        self.is_stopped = False
        self.parked = ParkedSlots()

    def make_slot(self) -> Slot[T]:
        return Slot()

    def join(self, slots: Sequence[Slot[T]], waker: Waker) -> None:
        self.slots = slots
        self.parked.join(len(slots), waker)

    @property
    def limit(self) -> int:
        return self.parked.limit

    @property
    def has_backlog(self) -> bool:
        return bool(self.ready)

    def set_limit(self, limit: int) -> None:
        with self.lock:
            self.parked.set_limit(limit)
            self.parked.wake(len(self.ready))

    def stop(self) -> list[R]:
        """Hand out nothing any more; what was not handed out."""
        with self.lock:
            self.is_stopped = True
            found = list(self.ready)
            self.ready.clear()
            self.parked.wake_all()
        return found

    @abstractmethod
    def acknowledge(self, slot: Slot[T], run: Any, record: T, outcome: object) -> bool:
        """Return what a handler returned or raised; False: its run ends here. Never waits."""

    async def acknowledge_async(self, slot: Slot[T], run: Any, record: T, outcome: object) -> bool:
        return self.acknowledge(slot, run, record, outcome)

    def done(self, slot: Slot[T], run: Any, processed: int | None = None) -> None:
        """Note the end; each record has had its outcome."""

    def publish(self, slot: Slot[T]) -> None:
        """There is nothing to publish."""

    async def publish_async(self, slot: Slot[T]) -> None: ...

    def abandon(self, slot: Slot[T], records: Sequence[T]) -> None: ...

    def calls(self, slots: Sequence[Slot[T]]) -> list[Call]:
        del slots
        return []


@dataclass(frozen=True, kw_only=True)
class HandlerCall:
    function: Callable[..., Any]
    name: str = "kafkamq-worker"
    takes_lists: bool = False
    # The queue wants to know of every outcome, not only of those that are not None.
    wants_all: bool = False
    publishes: bool = False
    # A call that takes longer has failed; 0: never.
    timeout_ms: int = 0
    # Whether the end takes the records that handlers are busy with, in place of waiting for them.
    is_claimed: bool = False
    owner: object = None

    @property
    def keeps_claims(self) -> bool:
        return self.is_claimed or self.timeout_ms > 0

    def timeout_error(self) -> HandlerTimeoutError:
        return HandlerTimeoutError(f"the handler took longer than {self.timeout_ms / 1000:g} s")

    def abandoning_error(self, count: int) -> HandlerTimeoutError:
        """Return the error of a consumer behind which this many such calls go on already."""
        return HandlerTimeoutError(
            f"{count} calls of the handler go on although they took longer than "
            f"{self.timeout_ms / 1000:g} s, and cannot be ended: start this process again, and give"
            " the handler's own waits a time-out, or run it in processes="
        )


class Executor(Protocol):
    def start(self) -> None: ...

    def join(self, timeout_s: float) -> bool:
        """Wait until all have ended, after the queue was stopped; False: some are still at it."""

    def cancel(self) -> None:
        """Do not wait for handlers any more; end them, where that is possible."""

    def slots(self) -> Slots:
        """Return what its slots are at; from any thread."""


def enter(owner: object) -> None:
    """All that this thread or task calls from here on, and the tasks that it makes, is inside."""
    _owner.set(owner)


def is_inside(owner: object) -> bool:
    return _owner.get() is owner
