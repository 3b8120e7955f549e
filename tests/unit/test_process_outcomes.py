"""What a process of handlers tells: errors keep their kind, and a loop that has gone is told."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit import parallel_handlers as handlers
from tests.unit.test_parallel_processes import Work, records, runs, seen, working
from tests.unit.test_parallel_work_queue import Room
from tests.waiting import wait_until, within

from kafkamq import ConfigError, DeadlineExceededError
from kafkamq.parallel.config import processes_of
from kafkamq.parallel.failure_policy import FailurePolicy
from kafkamq.parallel.results import Handling
from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.runtime.process_executor import ProcessExecutor
from kafkamq.runtime.verdicts import understood
from kafkamq.runtime.work_queue import WorkerDiedError
from kafkamq.types import Nack

__all__ = ["seen", "working"]


def test_an_error_keeps_its_kind_as_retry_on_asks_for_it(
    working: Callable[..., Work], seen: object
) -> None:
    work = working(handlers.fail)
    work.shelf.add(*runs("clumsy", "laden"))
    work.shelf.wait(2)
    clumsy, laden = (work.outcomes()[offset] for offset in range(2))
    assert isinstance(clumsy, handlers.ClumsyError)
    assert (str(clumsy), clumsy.place) == ("here: boom", "here")
    assert isinstance(laden, handlers.LadenError)
    assert str(laden) == "boom"
    for error in (clumsy, laden):
        assert understood(error, (type(error),)) == (Nack(), error)


def test_a_coroutine_that_nobody_awaits_is_no_success(
    working: Callable[..., Work], seen: object
) -> None:
    work = working(handlers.forget)
    work.shelf.add(*runs("a"))
    work.shelf.wait(1)
    assert isinstance(work.outcomes().get(0), ConfigError)


def test_a_process_whose_loop_is_gone_is_replaced(
    working: Callable[..., Work], seen: Callable[[], Counter[int]]
) -> None:
    """Also if it is sent nothing more, which it would notice."""
    work = working(handlers.cancel_all)
    work.shelf.add(*runs("a"))
    work.shelf.wait(1)
    assert isinstance(work.outcomes()[0], WorkerDiedError)
    work.shelf.add(*runs("b", start=1))
    work.shelf.wait(2)
    assert seen() == Counter((1,))


def test_time_that_runs_out_at_the_queue_is_no_death(
    working: Callable[..., Work], seen: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an answer that is not published in time, the process knows nothing."""
    work = working(handlers.note, starts=False)
    late = DeadlineExceededError("no answer from the brokers")

    def publish(*_: object) -> None:
        raise late

    monkeypatch.setattr(work.shelf, "publish", publish)
    work.shelf.add(*runs("a"))
    work.start()
    wait_until(lambda: work.shelf.failure is late, timeout_s=20)


@pytest.mark.parametrize("is_lost", [False, True])
def test_of_a_partition_that_goes_no_process_begins_what_waits_behind_another(
    seen: Callable[[], Counter[int]], is_lost: bool
) -> None:
    """Also of few records, of which each could have a handler if they were of many keys."""
    room = Room(processes=1, threads=8)
    policy = FailurePolicy(room.queue.config, room.stats, pytest.fail, pytest.fail, pytest.fail)
    processes = processes_of(room.queue.config, handlers.step_out, is_async=False)
    pool = ProcessExecutor(Handling(room.queue, policy), processes)
    other = room.queue.assign(("topic", 1), OffsetTracker(0))
    path = os.environ[handlers.SEEN]
    room.queue.add(room.partition, records(*"aaa"))
    pool.start()
    try:
        wait_until(Path(f"{path}.begun-0").exists)
        if is_lost:
            room.queue.close(room.partition)
        else:
            room.queue.recall([room.partition])
        room.queue.add(other, records("b", start=10))  # the process is told one after the other
        wait_until(Path(f"{path}.begun-10").exists)
        for offset in (0, 1, 2, 10):
            Path(f"{path}.{offset}").touch()
        wait_until(lambda: seen()[0] and not pool.slots().calls)
    finally:
        room.queue.stop()
        assert pool.join(within(10))
        pool.cancel()
    assert seen() == Counter((0, 10))
