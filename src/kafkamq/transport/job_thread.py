"""A thread that runs jobs one after the other, for an owner that must not wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], object]


class JobThread:
    """A daemon thread, which the first job starts; one owner thread.

    A job must raise nothing: the owner hears of its outcome by what the job itself does.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def add(self, job: Job) -> None:
        """Run ``job`` behind those that were added before."""
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put(job)

    def end(self, last: Job | None = None, *, timeout_s: float = 0.0) -> bool:
        """End behind what was added, and behind ``last``; without any job, there is nothing to end.

        Returns:
            Whether it has ended within the time; else it does so by itself.
        """
        if self._thread.ident is None:
            return True
        if last is not None:
            self._jobs.put(last)
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        for job in iter(self._jobs.get, None):
            job()
