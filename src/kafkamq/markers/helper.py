"""Asks brokers for a consumer's intake, which must not wait for an answer; a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from kafkamq.errors import KafkaMQError
from kafkamq.transport.commits import GroupOffsets
from kafkamq.transport.job_thread import JobThread

Answer = TypeVar("Answer")
Question = Callable[["Helper"], Answer]
Heard = Callable[["Answer | None", "KafkaMQError | None"], None]
_log = logging.getLogger(__name__)


class Helper:
    """One question after the other; the thread and the second client are made when needed.

    Questions run in the thread. What is to be done with an answer runs in ``see_answers``, which
    the owner calls.
    """

    def __init__(
        self, name: str, open_client: Callable[[], GroupOffsets], wake: Callable[[], None]
    ) -> None:
        """``wake`` is called when an answer is there."""
        self._open_client = open_client
        self._wake = wake
        self._client: GroupOffsets | None = None
        self._answers: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = JobThread(name)

    def ask(self, question: Question[Answer], heard: Heard[Answer]) -> None:
        """Ask, behind what was asked before; ``heard`` gets the answer, or why there is none."""

        def run() -> None:
            answer: Answer | None = None
            failure: KafkaMQError | None = None
            try:
                answer = question(self)
            except KafkaMQError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - who asked waits for an answer
                _log.exception("a question to the brokers failed")
                failure = KafkaMQError(f"a question to the brokers failed: {error!r}")
            self._answers.put(lambda: heard(answer, failure))
            self._wake()

        self._thread.add(run)

    @property
    def client(self) -> GroupOffsets:
        """What knows the group's offsets without being a member; for questions alone."""
        if self._client is None:
            self._client = self._open_client()
        return self._client

    def see_answers(self) -> None:
        """Do what is to be done with the answers that are there."""
        while not self._answers.empty():
            self._answers.get()()

    def end(self) -> None:
        """End the thread behind the present question, and its client; does not wait."""
        self._thread.end(self._close_client)

    def _close_client(self) -> None:
        if self._client is not None:
            self._client.close()
