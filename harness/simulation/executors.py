"""``queue`` and ``concurrent.futures`` for simulated threads."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import NamedTuple

from harness.simulation.primitives import Threading

Callback = Callable[["_Future"], object]


class _Queue:
    threading: Threading

    def __init__(self, maxsize: int = 0) -> None:
        self.maxsize = maxsize
        self.queue: deque[object] = deque()
        self._changed = self.threading.Condition()
        self._unfinished = 0

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        with self._changed:
            if self.full():
                bound_s = timeout if block else 0.0
                if not self._changed.wait_for(lambda: not self.full(), bound_s):
                    raise queue.Full
            self.queue.append(item)
            self._unfinished += 1
            self._changed.notify_all()

    def get(self, block: bool = True, timeout: float | None = None) -> object:
        with self._changed:
            if not self.queue:
                bound_s = timeout if block else 0.0
                if not self._changed.wait_for(lambda: self.queue, bound_s):
                    raise queue.Empty
            item = self.queue.popleft()
            self._changed.notify_all()
            return item

    def put_nowait(self, item: object) -> None:
        self.put(item, block=False)

    def get_nowait(self) -> object:
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self.queue)

    def empty(self) -> bool:
        return not self.queue

    def full(self) -> bool:
        return 0 < self.maxsize <= len(self.queue)

    def task_done(self) -> None:
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()

    def join(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished)


class Queues:
    """What stands in for the module ``queue``."""

    Empty = queue.Empty
    Full = queue.Full

    def __init__(self, threading: Threading) -> None:
        self.Queue = type("Queue", (_Queue,), {"threading": threading})
        self.SimpleQueue = self.Queue


class _Future:
    threading: Threading

    def __init__(self) -> None:
        self._changed = self.threading.Condition()
        self._state = "pending"
        self._result: object = None
        self._error: BaseException | None = None
        self._callbacks: list[Callback] = []

    def cancel(self) -> bool:
        with self._changed:
            if self._state in ("running", "done"):
                return False
            self._state = "cancelled"
        self._finish()
        return True

    def cancelled(self) -> bool:
        return self._state == "cancelled"

    def running(self) -> bool:
        return self._state == "running"

    def done(self) -> bool:
        return self._state in ("done", "cancelled")

    def set_running_or_notify_cancel(self) -> bool:
        with self._changed:
            if self._state == "cancelled":
                return False
            self._state = "running"
            return True

    def set_result(self, result: object) -> None:
        self._set(result, None)

    def set_exception(self, exception: BaseException | None) -> None:
        self._set(None, exception)

    def _set(self, result: object, error: BaseException | None) -> None:
        with self._changed:
            if self.done():
                raise futures.InvalidStateError(f"{self._state}: {self!r}")
            self._result, self._error, self._state = result, error, "done"
        self._finish()

    def _finish(self) -> None:
        with self._changed:
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for call in callbacks:
            call(self)

    def add_done_callback(self, fn: Callback) -> None:
        with self._changed:
            if not self.done():
                self._callbacks.append(fn)
                return
        fn(self)

    def result(self, timeout: float | None = None) -> object:
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        with self._changed:
            if not self._changed.wait_for(self.done, timeout):
                raise futures.TimeoutError
            if self._state == "cancelled":
                raise futures.CancelledError
            return self._error


class _Executor:
    threading: Threading
    future: type[_Future]

    def __init__(
        self, max_workers: int | None = None, thread_name_prefix: str = "", **_: object
    ) -> None:
        self._most = max_workers or 8
        self._name = thread_name_prefix or "pool"
        self._calls: deque[tuple[_Future, Callable[[], object]]] = deque()
        self._changed = self.threading.Condition()
        self._threads = 0
        self._idle = 0
        self._is_shut = False

    def __enter__(self) -> _Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def submit(self, fn: Callable[..., object], /, *args: object, **kwargs: object) -> _Future:
        future = self.future()
        with self._changed:
            if self._is_shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._calls.append((future, lambda: fn(*args, **kwargs)))
            if self._idle < len(self._calls) and self._threads < self._most:
                self._threads += 1
                name = f"{self._name}_{self._threads}"
                self.threading.Thread(target=self._serve, name=name, daemon=True).start()
            self._changed.notify_all()
        return future

    def map(self, fn: Callable[..., object], *iterables: Iterable[object]) -> Iterator[object]:
        begun = [self.submit(fn, *args) for args in zip(*iterables, strict=False)]
        return (each.result() for each in begun)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._changed:
            self._is_shut = True
            dropped = list(self._calls) if cancel_futures else []
            if cancel_futures:
                self._calls.clear()
            self._changed.notify_all()
        for future, _ in dropped:
            future.cancel()
        if wait:
            with self._changed:
                self._changed.wait_for(lambda: not self._threads)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._calls or self._is_shut)
                self._idle -= 1
                if not self._calls:
                    self._threads -= 1
                    self._changed.notify_all()
                    return
                future, call = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:  # noqa: BLE001 - the future's, as in Python's own
                    future.set_exception(error)
                else:
                    future.set_result(result)


class _Waited(NamedTuple):
    done: set[_Future]
    not_done: set[_Future]


class Executors:
    """What stands in for the module ``concurrent.futures``."""

    ALL_COMPLETED = futures.ALL_COMPLETED
    FIRST_COMPLETED = futures.FIRST_COMPLETED
    FIRST_EXCEPTION = futures.FIRST_EXCEPTION
    CancelledError = futures.CancelledError
    InvalidStateError = futures.InvalidStateError
    TimeoutError = futures.TimeoutError

    def __init__(self, threading: Threading) -> None:
        self._threading = threading
        self.Future = type("Future", (_Future,), {"threading": threading})
        own = {"threading": threading, "future": self.Future}
        self.ThreadPoolExecutor = type("ThreadPoolExecutor", (_Executor,), own)

    def wait(
        self,
        fs: Iterable[_Future],
        timeout: float | None = None,
        return_when: str = futures.ALL_COMPLETED,
    ) -> _Waited:
        every = list(dict.fromkeys(fs))
        event = self._threading.Event()

        def is_over() -> bool:
            done = [each for each in every if each.done()]
            if return_when == futures.FIRST_COMPLETED:
                return bool(done) or not every
            failed = [each for each in done if not each.cancelled() and each._error is not None]
            is_enough = return_when == futures.FIRST_EXCEPTION and bool(failed)
            return is_enough or len(done) == len(every)

        def look(_: object) -> None:
            if is_over():
                event.set()

        for each in every:
            each.add_done_callback(look)
        if not is_over():
            event.wait(timeout)
        done = {each for each in every if each.done()}
        return _Waited(done, {each for each in every if each not in done})

    def as_completed(
        self, fs: Iterable[_Future], timeout: float | None = None
    ) -> Iterator[_Future]:
        finished = Queues(self._threading).SimpleQueue()
        every = list(dict.fromkeys(fs))
        for each in every:
            each.add_done_callback(finished.put)
        try:
            for _ in every:
                yield finished.get(timeout=timeout)
        except queue.Empty:
            raise futures.TimeoutError from None
