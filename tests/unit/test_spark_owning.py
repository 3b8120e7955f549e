"""One process of a machine performs what belongs to a slot; when it ends, another one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator

import pytest
from tests.waiting import within

from kafkamq.errors import StateError
from kafkamq.spark.tracker import owners as owning
from kafkamq.spark.tracker.owners import Owners

_OTHER = """
import os, sys
from kafkamq.spark.tracker.owners import Owners

owners = Owners(sys.argv[1], lambda slot, request: os.getpid())
print(owners.run(0, None), flush=True)
sys.stdin.read()
"""


class Slots:
    """Stands for one process: performs, and remembers what."""

    def __init__(self, name: str) -> None:
        self.done: list[tuple[int, object]] = []
        self.owners = Owners(name, self.perform)

    def perform(self, slot: int, request: object) -> object:
        self.done.append((slot, request))
        if request == "wrong":
            raise StateError("a wrong request")
        if request == "bug":
            raise ZeroDivisionError("a bug")
        return str(request).upper()


@pytest.fixture
def both() -> Iterator[tuple[Slots, Slots]]:
    name = uuid.uuid4().hex
    first, second = Slots(name), Slots(name)
    yield first, second
    for each in (first, second):
        each.owners.close()


def test_rows_go_to_the_process_that_was_first(both: tuple[Slots, Slots]) -> None:
    first, second = both
    assert first.owners.run(0, "a") == "A"
    assert second.owners.run(1, "b") == "B"
    assert second.owners.run(0, "c") == "C"
    assert first.owners.run(1, "d") == "D"
    assert first.done == [(0, "a"), (0, "c")]
    assert second.done == [(1, "b"), (1, "d")]


def test_errors_come_back_by_name(both: tuple[Slots, Slots]) -> None:
    first, second = both
    first.owners.run(0, "a")
    with pytest.raises(StateError, match="a wrong request"):
        second.owners.run(0, "wrong")
    with pytest.raises(Exception, match="ZeroDivisionError: a bug"):
        second.owners.run(0, "bug")
    assert second.owners.run(0, "b") == "B"
    assert not second.done


def test_who_comes_next_takes_over_from_an_owner_that_ended(both: tuple[Slots, Slots]) -> None:
    first, second = both
    first.owners.run(0, "a")
    second.owners.run(0, "b")
    first.owners.close()
    assert second.owners.run(0, "c") == "C"
    assert first.owners.run(0, "d") == "D"
    assert second.done == [(0, "c"), (0, "d")]


def test_a_killed_process_owns_nothing() -> None:
    name = uuid.uuid4().hex
    command = [sys.executable, "-c", _OTHER, name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    here = Slots(name)
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None
            assert int(other.stdout.readline()) == other.pid
            assert here.owners.run(0, "a") == other.pid
        finally:
            other.send_signal(signal.SIGKILL)
    assert here.owners.run(0, "b") == "B"
    here.owners.close()


def test_an_owner_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owning, "REPLY_S", 0.2)
    name = uuid.uuid4().hex
    goes_on = threading.Event()

    def hang(slot: int, request: object) -> object:
        return goes_on.wait(within(60.0)) if request == "hang" else None

    stuck, other = Owners(name, hang), Slots(name)
    stuck.run(0, "first")
    assert other.owners.run(0, "hang") == "HANG"
    goes_on.set()
    stuck.close()
    other.owners.close()


def test_a_slot_does_one_thing_at_a_time() -> None:
    name = uuid.uuid4().hex
    running, most = [0], [0]
    both = threading.Barrier(2, timeout=within(30.0))

    def perform(slot: int, request: object) -> object:
        running[0] += 1
        most[0] = max(most[0], running[0])
        assert running[0] == 1
        running[0] -= 1
        return None

    owner, other = Owners(name, perform), Owners(name, perform)
    owner.run(0, None)

    def many() -> None:
        both.wait()
        for _ in range(200):
            other.run(0, None)

    thread = threading.Thread(target=many)
    thread.start()
    both.wait()
    for _ in range(200):
        owner.run(0, None)
    thread.join(within(30.0))
    assert most == [1]
    owner.close()
    other.close()


def test_without_such_sockets_everyone_does_its_own(
    monkeypatch: pytest.MonkeyPatch, both: tuple[Slots, Slots]
) -> None:
    monkeypatch.setattr(owning, "_CAN_SHARE", False)
    first, second = both
    assert first.owners.run(0, "a") == "A"
    assert second.owners.run(0, "b") == "B"
    assert len(first.done) == len(second.done) == 1


def test_what_is_to_be_done_soon_is_done_in_one_thread() -> None:
    before = threading.active_count()
    running, may_go_on = threading.Event(), threading.Event()
    done = threading.Semaphore(0)

    def perform(slot: int, request: object) -> object:
        running.set()
        assert may_go_on.wait(within(30.0))
        done.release()
        if request == 0:
            raise ZeroDivisionError("a bug")
        return None

    owners = Owners(uuid.uuid4().hex, perform)
    for number in range(1000):
        owners.soon(number % 4, number)
    assert running.wait(within(30.0))
    most = threading.active_count()
    may_go_on.set()
    assert all(done.acquire(timeout=within(30.0)) for _ in range(1000))
    assert most <= before + 1
    owners.close()
