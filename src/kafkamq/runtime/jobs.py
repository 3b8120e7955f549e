"""A few threads for what waits for the broker; results come back into the owner's thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from kafkamq.errors import KafkaMQError

T = TypeVar("T")


class Workers:
    """Runs jobs; a KafkaMQError goes to the job's ``on_error``, anything else to ``deliver``."""

    def __init__(self, threads: int, *, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._finished: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.running = 0

    def submit(
        self,
        job: Callable[[], T],
        on_done: Callable[[T], None],
        on_error: Callable[[KafkaMQError], None],
    ) -> None:
        """Run ``job`` in a worker; then one of the others in the owner's thread."""
        self.running += 1

        def run() -> None:
            try:
                result = job()
            except BaseException as error:  # noqa: BLE001 - raised in the owner's thread
                self._finished.put(partial(_failed, on_error, error))
            else:
                self._finished.put(partial(on_done, result))

        self._pool.submit(run)

    def deliver(self, timeout_s: float = 0.0) -> None:
        """Run what has finished; waits up to ``timeout_s`` for the first."""
        wait = timeout_s > 0 and self.running > 0
        while True:
            try:
                continuation = self._finished.get(wait, timeout_s if wait else None)
            except Empty:
                return
            wait = False
            self.running -= 1
            continuation()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _failed(on_error: Callable[[KafkaMQError], None], error: BaseException) -> None:
    if not isinstance(error, KafkaMQError):
        raise error
    on_error(error)
