"""``def`` handlers run in threads here."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from kafkamq.runtime.rules.hanging import Slots, max_left
from kafkamq.runtime.verdicts import outcomes_of
from kafkamq.runtime.work_queue import HandlerCall, Slot, WorkQueue, enter, take_list

_WATCH_S = 0.05
_log = logging.getLogger(__name__)
R = TypeVar("R")


class _ReplacedError(BaseException):
    """Another thread has taken this one's place: what it brings does not count."""


class ThreadExecutor(Generic[R]):
    """``count`` threads. One whose handler takes too long is left alone; another one goes on."""

    def __init__(self, queue: WorkQueue[R], call: HandlerCall, count: int) -> None:
        self._queue = queue
        self._call = call
        self._slots: list[Slot[R]] = [queue.make_slot() for _ in range(count)]
        self._threads: dict[int, threading.Thread] = {}
        self._left: list[threading.Thread] = []
        self._is_over = threading.Event()

    def start(self) -> None:
        self._queue.join(self._slots, self)
        for number, slot in enumerate(self._slots):
            slot.gate = threading.Lock()
            slot.gate.acquire()
            self._begin(number, slot)
        if self._call.timeout_ms:
            threading.Thread(target=self._watch, name="kafkamq-timeouts", daemon=True).start()

    def _begin(self, number: int, slot: Slot[R], claim: list[Any] | None = None) -> None:
        name = f"{self._call.name}-{number}"
        thread = threading.Thread(
            target=self._run, args=(number, slot, claim), name=name, daemon=True
        )
        if claim is None:
            self._threads[number] = thread
        thread.start()

    def wake(self, slots: Sequence[Slot[R]]) -> None:
        for slot in slots:
            slot.gate.release()

    def join(self, timeout_s: float) -> bool:
        """Wait for all threads but the one that calls; return whether they have ended."""
        deadline_s = time.monotonic() + timeout_s
        for thread in list(self._threads.values()):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))
        has_ended = not any(thread.is_alive() for thread in self._threads.values())
        if has_ended:
            self._is_over.set()
        return has_ended

    def cancel(self) -> None:
        """A thread cannot be ended: what it is at goes on, and does not count."""
        self._is_over.set()
        if self._call.is_claimed:
            for slot in self._slots:
                records = _taken(slot.claim)
                if records is not None:
                    self._queue.abandon(slot, records if self._call.takes_lists else [records])

    def slots(self) -> Slots:
        return Slots(self._queue.limit, self._queue.calls(self._slots))

    # A thread.

    def _run(self, number: int, slot: Slot[R], late: list[Any] | None) -> None:
        enter(self._call.owner)
        try:
            call = self._claiming(slot) if self._call.keeps_claims else self._call.function
            if late is None:
                slot.caller = threading.get_ident()
            if late is None or self._takes_over(number, slot, call, late):
                self._work(slot, call)
        except _ReplacedError:
            return
        except BaseException as error:  # noqa: BLE001 - a slot less must not go unnoticed
            self._queue.fail(error)

    def _work(self, slot: Slot[R], call: Callable[[Any], object]) -> None:
        queue, takes_lists, publishes = self._queue, self._call.takes_lists, self._call.publishes
        take, process = queue.take, self._process_taken
        while True:
            if not take(slot):
                if queue.is_stopped:
                    return
                slot.gate.acquire()
                continue
            if takes_lists:
                self._process_list(slot, call)
            else:
                process(slot, call)
            if publishes:
                queue.publish(slot)

    def _process_taken(self, slot: Slot[R], call: Callable[[R], object]) -> None:
        for run in slot.pending:
            slot.current = run, iter(run.records)
            self._process(slot, call)

    def _process(self, slot: Slot[R], call: Callable[[R], object]) -> None:
        assert slot.current is not None
        run, records = slot.current
        queue, wants_all = self._queue, self._call.wants_all
        processed: int | None = 0 if run.is_stale else None
        if processed is None:
            for record in records:
                try:
                    outcome = call(record)
                except _ReplacedError:
                    raise
                except BaseException as error:  # noqa: BLE001 - the queue decides
                    outcome = error
                if (outcome is not None or wants_all) and not queue.acknowledge(
                    slot, run, record, outcome
                ):
                    processed = 1 + run.records.index(record)
                    break
        if processed is None and run.failed is None:
            slot.finished.append(run)
        else:
            queue.done(slot, run, processed)

    def _process_list(self, slot: Slot[R], call: Callable[[Any], object]) -> None:
        slot.runs, records = take_list(slot)
        if not records:
            return
        try:
            result: object = call(records)
        except _ReplacedError:
            raise
        except BaseException as error:  # noqa: BLE001 - the queue decides
            result = error
        self._end_list(slot, result)

    def _end_list(self, slot: Slot[R], result: object) -> None:
        queue, wants_all = self._queue, self._call.wants_all
        outcomes = iter(outcomes_of(result, sum([len(run.records) for run in slot.runs])))
        for run in slot.runs:
            for record, outcome in zip(run.records, outcomes, strict=False):
                if outcome is not None or wants_all:
                    queue.acknowledge(slot, run, record, outcome)
            queue.done(slot, run)

    # Handlers that take too long.

    def _claiming(self, slot: Slot[R]) -> Callable[[Any], object]:
        """The handler; what it brings counts if nobody took the claim meanwhile."""
        function = self._call.function

        def call(record: Any) -> object:
            slot.claimed_s = time.monotonic()
            claim = slot.claim = [record]
            try:
                outcome: object = function(record)
            except BaseException as error:  # noqa: BLE001 - the queue decides
                outcome = error
            try:
                claim.pop()
            except IndexError:
                raise _ReplacedError from None
            return outcome

        return call

    def _watch(self) -> None:
        """Lets others go on; it writes no log, whose lock a thread that hangs may hold."""
        timeout_s = self._call.timeout_ms / 1000
        replaced: dict[int, list[Any]] = {}
        while not self._is_over.wait(_WATCH_S):
            now_s = time.monotonic()
            for number, slot in enumerate(self._slots):
                # It is read before its time: the next one may begin in between.
                claim = slot.claim
                if not claim or now_s - slot.claimed_s <= timeout_s:
                    continue
                with suppress(RuntimeError):
                    # No thread can begin: it is tried again.
                    if replaced.get(number) is not claim:
                        if self._has_too_many_left():
                            return
                        self._begin(number, slot, claim)
                        replaced[number] = claim

    def _has_too_many_left(self) -> bool:
        """Return whether no more may be left alone; then another thread tells the queue."""
        self._left = [thread for thread in self._left if thread.is_alive()]
        if len(self._left) < max_left(len(self._slots)):
            return False
        error = self._call.abandoning_error(len(self._left))
        threading.Thread(target=self._queue.fail, args=(error,), daemon=True).start()
        return True

    def _takes_over(
        self, number: int, slot: Slot[R], call: Callable[[Any], object], late: list[Any]
    ) -> bool:
        """Go on in place of a thread whose handler takes too long; False: it ended just in time."""
        lost = _taken(late)
        if lost is None:
            return False
        self._left.append(self._threads[number])
        self._threads[number] = threading.current_thread()
        slot.caller = threading.get_ident()
        _log.warning("a handler takes too long; its thread is left alone: %s", self._call.name)
        error = self._call.timeout_error()
        if self._call.takes_lists:
            self._end_list(slot, error)
        else:
            assert slot.current is not None
            run, _ = slot.current
            if self._queue.acknowledge(slot, run, lost, error):
                self._process(slot, call)
            else:
                self._queue.done(slot, run, 1 + run.records.index(lost))
            self._process_taken(slot, call)
        if self._call.publishes:
            self._queue.publish(slot)
        return True


def _taken(claim: list[Any]) -> Any:
    """Return what a handler is at, taken from it; None: nothing."""
    try:
        return claim.pop()
    except IndexError:
        return None
