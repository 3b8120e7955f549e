"""``threading`` for simulated threads: the same names, on a `Scheduler`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from harness.simulation.scheduler import Scheduler, Task


class _Lock:
    """A lock, or a re-entrant one; as ``threading`` has them."""

    __slots__ = ("_depth", "_is_atomic", "_is_reentrant", "_owner", "_scheduler", "_waiters")

    def __init__(
        self, scheduler: Scheduler, *, is_reentrant: bool, is_atomic: bool = False
    ) -> None:
        self._scheduler = scheduler
        self._is_atomic = is_atomic
        self._is_reentrant = is_reentrant
        self._owner: Task | None = None
        self._depth = 0
        self._waiters: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        scheduler.touch()
        me = scheduler.current
        if self._depth and (self._owner is not me or not self._is_reentrant):
            if not blocking:
                return False
            deadline_s = None if timeout < 0 else scheduler.now_s() + timeout
            while self._depth:
                left_s = None if deadline_s is None else deadline_s - scheduler.now_s()
                if left_s is not None and left_s <= 0:
                    return False
                assert me is not None, "only simulated threads wait"
                self._waiters.append(me)
                try:
                    scheduler.park(left_s)
                except BaseException:  # an interrupt: the next one has its turn
                    if not self._depth and me not in self._waiters and self._waiters:
                        scheduler.wake(self._waiters.popleft())
                    raise
                finally:
                    if me in self._waiters:
                        self._waiters.remove(me)
        self._owner = me
        self._depth += 1
        scheduler.atomic_depth += self._is_atomic
        return True

    def release(self) -> None:
        if not self._depth or (self._is_reentrant and self._owner is not self._scheduler.current):
            if self._scheduler.is_over:
                return
            raise RuntimeError("release of a lock that is not held")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._waiters:
                self._scheduler.wake(self._waiters.popleft())
        if self._is_atomic:
            self._scheduler.atomic_depth -= 1
            self._scheduler.check_history()

    def locked(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # For conditions.

    def _release_save(self) -> int:
        depth = self._depth
        for _ in range(depth):
            self.release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        for _ in range(depth):
            self.acquire()

    def _is_owned(self) -> bool:
        return self._depth > 0 and self._owner is self._scheduler.current


class _Condition:
    def __init__(self, scheduler: Scheduler, lock: _Lock) -> None:
        self._scheduler = scheduler
        self._lock = lock
        self._waiters: deque[Task] = deque()
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        if not self._lock._is_owned():
            raise RuntimeError("wait on a condition whose lock is not held")
        me = self._scheduler.current
        assert me is not None
        self._waiters.append(me)
        depth = self._lock._release_save()
        try:
            is_woken = self._scheduler.park(timeout)
            if not is_woken and me in self._waiters:
                self._waiters.remove(me)
        finally:
            self._lock._acquire_restore(depth)
        return is_woken

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        deadline_s = None if timeout is None else self._scheduler.now_s() + timeout
        while not (result := predicate()):
            left_s = None if deadline_s is None else deadline_s - self._scheduler.now_s()
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify(self, n: int = 1) -> None:
        if not self._lock._is_owned() and not self._scheduler.is_over:
            raise RuntimeError("notify on a condition whose lock is not held")
        for _ in range(min(n, len(self._waiters))):
            self._scheduler.wake(self._waiters.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class _Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiters, self._waiters = self._waiters, []
        for task in waiters:
            self._scheduler.wake(task)
        self._scheduler.touch()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        if self._is_set:
            scheduler.touch()
            return True
        me = scheduler.current
        assert me is not None, "only simulated threads wait"
        self._waiters.append(me)
        is_woken = scheduler.park(timeout)
        if not is_woken and me in self._waiters:
            self._waiters.remove(me)
        return is_woken or self._is_set


class _Semaphore:
    """A semaphore, bounded or not."""

    def __init__(self, scheduler: Scheduler, value: int, *, is_bounded: bool) -> None:
        self._value = value
        self._bound = value if is_bounded else None
        self._changed = _Condition(scheduler, _Lock(scheduler, is_reentrant=True))

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        with self._changed:
            if not blocking and not self._value:
                return False
            if not self._changed.wait_for(lambda: self._value > 0, timeout):
                return False
            self._value -= 1
            return True

    def release(self, n: int = 1) -> None:
        with self._changed:
            if self._bound is not None and self._value + n > self._bound:
                raise ValueError("a bounded semaphore was released too often")
            self._value += n
            self._changed.notify(n)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Thread:
    """A thread of the process that starts it; subclasses may have their own ``run``."""

    scheduler: Scheduler  # of the subclass that a Threading makes

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name or "thread"
        self.daemon = bool(daemon)
        self.ident: int | None = None
        self._target, self._args, self._kwargs = target, tuple(args), dict(kwargs or {})
        self._task: Task | None = None
        self._ended = _Event(self.scheduler)

    @property
    def native_id(self) -> int | None:
        return self.ident

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def start(self) -> None:
        if self._task is not None:
            raise RuntimeError("threads can only be started once")
        scheduler = self.scheduler
        assert scheduler.current is not None
        self._task = scheduler.spawn(scheduler.current.process, self.name, self._run)
        self._task.thread = self
        self.ident = self._task.number
        scheduler.touch()

    def _run(self) -> None:
        try:
            self.run()
        except SystemExit:
            pass
        finally:
            self._ended.set()

    def join(self, timeout: float | None = None) -> None:
        if self._task is None:
            raise RuntimeError("cannot join a thread before it is started")
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._ended.is_set()


class _Local:
    _scheduler: Scheduler

    def __init__(self, scheduler: Scheduler) -> None:
        object.__setattr__(self, "_scheduler", scheduler)
        object.__setattr__(self, "_by_task", {})

    def _own(self) -> dict[str, object]:
        by_task: dict[Task | None, dict[str, object]] = object.__getattribute__(self, "_by_task")
        return by_task.setdefault(self._scheduler.current, {})

    def __getattr__(self, name: str) -> object:
        try:
            return self._own()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: object) -> None:
        self._own()[name] = value

    def __delattr__(self, name: str) -> None:
        del self._own()[name]


class Threading:
    """What stands in for the module ``threading``."""

    TIMEOUT_MAX = threading.TIMEOUT_MAX
    ThreadError = RuntimeError

    def __init__(self, scheduler: Scheduler, *, is_atomic: bool = False) -> None:
        """``is_atomic``: what is done under these locks is one step for all other threads."""
        self._scheduler = scheduler
        self._is_atomic = is_atomic
        self.Thread = type("Thread", (_Thread,), {"scheduler": scheduler})

    def Lock(self) -> _Lock:  # noqa: N802 - threading's name, as the following
        return _Lock(self._scheduler, is_reentrant=False, is_atomic=self._is_atomic)

    def RLock(self) -> _Lock:  # noqa: N802
        return _Lock(self._scheduler, is_reentrant=True, is_atomic=self._is_atomic)

    def Condition(self, lock: _Lock | None = None) -> _Condition:  # noqa: N802
        return _Condition(self._scheduler, self.RLock() if lock is None else lock)

    def Event(self) -> _Event:  # noqa: N802
        return _Event(self._scheduler)

    def Semaphore(self, value: int = 1) -> _Semaphore:  # noqa: N802
        return _Semaphore(self._scheduler, value, is_bounded=False)

    def BoundedSemaphore(self, value: int = 1) -> _Semaphore:  # noqa: N802
        return _Semaphore(self._scheduler, value, is_bounded=True)

    def local(self) -> _Local:
        return _Local(self._scheduler)

    def current_thread(self) -> _Thread:
        task = self._scheduler.current
        assert task is not None
        if task.thread is None:  # the first of its process
            task.thread = thread = self.Thread(name=task.name)
            thread._task, thread.ident = task, task.number
        assert isinstance(task.thread, _Thread)
        return task.thread

    def main_thread(self) -> _Thread:
        return self.current_thread()

    def get_ident(self) -> int:
        task = self._scheduler.current
        return 0 if task is None else task.number

    get_native_id = get_ident
