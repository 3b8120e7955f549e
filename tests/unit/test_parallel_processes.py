"""Handlers in processes: what is done, tried and not tried when a process ends or gets a signal."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit import parallel_handlers as handlers
from tests.unit.test_parallel_desk import PLACE, Room
from tests.waiting import wait_until

from kafkamq import Ack, ConfigError, OutgoingRecord
from kafkamq.config import Backoff
from kafkamq.parallel import processes
from kafkamq.parallel.handling import UNTRIED, Handling
from kafkamq.parallel.processes import (
    WorkerDiedError,
    _local,
    _Process,
    _Remote,
    _shards,
    process_pool,
)
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.settling import Settler

ROOT = Path(__file__).parents[2]


class Message:
    """What a record is made of."""

    def value(self) -> bytes:
        return b""

    def topic(self) -> str:
        return PLACE[0]

    def partition(self) -> int:
        return PLACE[1]

    def headers(self) -> None:
        return None

    def timestamp(self) -> tuple[int, int]:
        return 1, 0


def records(*keys: str, start: int = 0) -> list[ParallelRecord]:
    return [
        ParallelRecord(Message(), start + number, key.encode())  # type: ignore[arg-type]
        for number, key in enumerate(keys)
    ]


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Counter[int]]:
    """How often each offset was noted."""
    path = tmp_path / "seen"
    path.touch()
    monkeypatch.setenv(handlers.SEEN, str(path))
    monkeypatch.setenv(handlers.PARENT, str(os.getpid()))
    return lambda: Counter(int(line.split()[2]) for line in path.read_text().splitlines())


@pytest.fixture
def remote() -> Iterator[Callable[..., _Remote]]:
    made: list[_Remote] = []

    def make(handler: Callable[..., object], *, wants_results: bool = False) -> _Remote:
        shard = _shards(Room().desk.config)
        made.append(_Remote(handler, shard, pytest.fail, wants_results=wants_results))
        return made[-1]

    _local.process = None
    yield make
    for each in made:
        each.end()
    _local.process = None


def child() -> _Process:
    process: _Process = _local.process
    return process


def test_who_dies_idle_takes_nothing_along(
    remote: Callable[..., _Remote], seen: Callable[[], Counter[int]]
) -> None:
    call = remote(handlers.note)
    assert call(records(*"abcde")) == [None] * 5
    child()._process.kill()
    child()._process.join()
    # The batch before is done to the last record; that says nothing of this one.
    assert call(records(*"abcde", start=5)) == [UNTRIED] * 5
    assert call(records(*"abcde", start=5)) == [None] * 5
    assert seen() == Counter(range(10))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_group_are_the_parents(
    remote: Callable[..., _Remote], seen: Callable[[], Counter[int]], number: int
) -> None:
    call = remote(handlers.work)

    def send() -> None:
        wait_until(Path(os.environ[handlers.SEEN] + ".begun").exists)
        os.kill(call._processes[0]._process.pid, number)
        Path(os.environ[handlers.SEEN] + ".sent").touch()

    thread = threading.Thread(target=send)
    thread.start()
    assert call(records("a")) == [None]  # busy
    thread.join()
    os.kill(child()._process.pid, number)  # idle
    assert call(records("b", start=1)) == [None]
    assert seen() == Counter(range(2))


@pytest.mark.parametrize("handler", [handlers.accept, handlers.refuse_some])
def test_who_ends_its_process_is_to_blame_alone(
    remote: Callable[..., _Remote], seen: Callable[[], Counter[int]], handler: Callable[..., object]
) -> None:
    call = remote(handler)
    *fine, died, untried = call(records("a", "b", "c", "poison", "d"))
    assert isinstance(died, WorkerDiedError)
    assert untried is UNTRIED
    assert not any(isinstance(outcome, WorkerDiedError) for outcome in fine)
    assert UNTRIED not in fine
    assert seen() == Counter(range(3))


def test_innocents_are_processed_once_and_are_no_dead_letters(
    seen: Callable[[], Counter[int]],
) -> None:
    options = {"max_attempts": 2, "dead_letter_topic": "dead"}
    room = Room(processes=1, backoff=Backoff(first=0.001, max=0.002, jitter=0.0), **options)
    letters: list[int] = []

    def park(record: ParallelRecord, *_: object) -> object:
        letters.append(record.offset)
        return Done()

    letters_to: Any = park
    settler = Settler(room.desk.config, room.stats, letters_to, pytest.fail, pytest.fail)
    handling = Handling(desk=room.desk, settler=settler, handler=handlers.accept)
    pool = process_pool(handling, room.desk.config, is_async=False)
    room.speed_up()
    room.desk.add(room.lane, records("a", "b", "c", "d", "poison"))
    pool.start()
    try:

        def is_done() -> bool:
            room.desk.tend()
            return room.committable == 5

        wait_until(is_done)
        assert letters == [4]
        assert seen() == Counter(range(4))
    finally:
        room.desk.stop()
        pool.cancel()
        assert pool.join(10)


class Done:
    """A dead letter that is in Kafka."""

    def result(self, timeout_s: float) -> None:
        del timeout_s


def test_an_outcome_that_cannot_be_read_is_one_records_failure(
    remote: Callable[..., _Remote], seen: Callable[[], Counter[int]]
) -> None:
    """The others have their own results, now and in the batches that follow."""
    call = remote(handlers.result, wants_results=True)
    keys = ("a", "error", "b", "result", "c", "result", "speechless", "later", "d")
    found = call(records(*keys))
    values = [each.value for each in found if isinstance(each, OutgoingRecord)]
    assert values == [b"result of 0", b"result of 2", b"result of 4", b"result of 8"]
    assert str(found[1]) == "HomeboundError: boom"
    assert isinstance(found[3], ConfigError)
    assert "cannot be read outside" in str(found[3])
    assert found[5] is UNTRIED  # of the same key
    assert isinstance(found[6], handlers.SpeechlessError)
    assert "async def" in str(found[7])
    (again,) = call(records("a", start=9))
    assert again.value == b"result of 9"
    assert seen() == Counter()


def test_an_ack_among_results_is_an_ack(remote: Callable[..., _Remote], seen: object) -> None:
    assert remote(handlers.accept, wants_results=True)(records("a", "b")) == [Ack(), Ack()]


def test_who_is_killed_before_it_began_is_replaced(
    remote: Callable[..., _Remote], seen: Callable[[], Counter[int]]
) -> None:
    call = remote(handlers.note)
    _local.process = call._make()
    child()._process.kill()
    assert call(records("a")) == [UNTRIED]
    assert call(records("a")) == [None]


def test_the_interpreter_ends_with_idle_processes(seen: object) -> None:
    """Nothing closed them, and signals to end do not reach them; none takes their place."""
    program = (
        "import atexit\n"
        "def begin_another():\n"
        "    try:\n"
        "        remote._make()\n"
        "    except OSError as error:\n"
        "        print(error)\n"
        "atexit.register(begin_another)\n"
        "from tests.unit import parallel_handlers as handlers\n"
        "from kafkamq.parallel.processes import _Remote\n"
        "if __name__ == '__main__':\n"
        "    remote = _Remote(handlers.note, id, print, wants_results=False)\n"
        "    process = remote._make()\n"
        "    assert process.is_ready()\n"
        "    print(process._process.pid)\n"
    )
    path = Path(os.environ[handlers.SEEN]).with_name("program.py")
    path.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(
        [sys.executable, str(path)],
        env=environment,
        timeout=60,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    pid, refusal = said.splitlines()
    assert not Path(f"/proc/{int(pid)}").exists()
    assert "the interpreter exits" in refusal


def test_no_room_for_a_process_costs_no_attempt(
    remote: Callable[..., _Remote],
    seen: Callable[[], Counter[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = remote(handlers.note)
    monkeypatch.setattr(processes, "_PAUSE_S", 0.0)

    def refuse(*_: object, **__: object) -> object:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as full:
        full.setattr(processes, "start_child", refuse)
        assert call(records("a", "b")) == [UNTRIED] * 2
    assert call(records("a", "b")) == [None] * 2
    assert seen() == Counter(range(2))
