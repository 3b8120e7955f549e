"""Handlers in processes: what is done, tried and not tried when a process ends or gets a signal."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit import parallel_handlers as handlers
from tests.unit.shelf import Batch, Shelf
from tests.unit.test_parallel_work_queue import PLACE, Room
from tests.waiting import stop_process, wait_until, within

from kafkamq import Ack, ConfigError, Nack, OutgoingRecord
from kafkamq.config import Backoff
from kafkamq.parallel.config import is_async_handler, processes_of
from kafkamq.parallel.failure_policy import FailurePolicy
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.results import Handling
from kafkamq.queue.sure_writer import Written
from kafkamq.runtime import process_executor
from kafkamq.runtime.child import start_child
from kafkamq.runtime.process_executor import ProcessExecutor
from kafkamq.runtime.rules.pace import RunAhead
from kafkamq.runtime.work_queue import HandlerTimeoutError, WorkerDiedError

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


def runs(*keys: str, start: int = 0) -> list[Batch]:
    """Each record for itself."""
    return [Batch([record]) for record in records(*keys, start=start)]


class Work:
    """Processes, and the shelf that they work on."""

    def __init__(self, handler: Callable[..., object], **options: Any) -> None:
        self.shelf = Shelf()
        wants_results = options.pop("wants_results", False)
        kill_after_ms = options.pop("kill_after_ms", 0)
        config = Room(processes=options.pop("count", 1), **options).queue.config
        is_async = is_async_handler(handler)
        processes = processes_of(config, handler, is_async=is_async, wants_results=wants_results)
        if kill_after_ms:  # by the parent alone
            processes = replace(processes, timeout_ms=kill_after_ms)
        self.executor = ProcessExecutor(self.shelf, processes)

    def start(self) -> None:
        self.executor.start()
        wait_until(lambda: self.executor.pids, "a process")

    def outcomes(self) -> dict[int, object]:
        return {record.offset: outcome for record, outcome in self.shelf.outcomes}


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Counter[int]]:
    """How often each offset was noted."""
    path = tmp_path / "seen"
    path.touch()
    monkeypatch.setenv(handlers.SEEN, str(path))
    monkeypatch.setenv(handlers.PARENT, str(os.getpid()))
    return lambda: Counter(int(line.split()[2]) for line in path.read_text().splitlines())


@pytest.fixture
def working() -> Iterator[Callable[..., Work]]:
    made: list[Work] = []

    def make(handler: Callable[..., object], *, starts: bool = True, **options: Any) -> Work:
        made.append(Work(handler, **options))
        if starts:
            made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.shelf.end(each.executor)


def test_who_dies_idle_takes_nothing_along(
    working: Callable[..., Work], seen: Callable[[], Counter[int]]
) -> None:
    work = working(handlers.note)
    work.shelf.add(*runs(*"abcde"))
    work.shelf.wait(5)
    (pid,) = work.executor.pids
    os.kill(pid, signal.SIGKILL)
    work.shelf.add(*runs(*"abcde", start=5))
    work.shelf.wait(10)
    assert work.outcomes() == {}
    assert seen() == Counter(range(10))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_group_are_the_parents(
    working: Callable[..., Work], seen: Callable[[], Counter[int]], number: int
) -> None:
    work = working(handlers.work)
    work.shelf.add(*runs("a"))
    (pid,) = work.executor.pids
    wait_until(Path(os.environ[handlers.SEEN] + ".begun").exists)
    os.kill(pid, number)  # busy
    Path(os.environ[handlers.SEEN] + ".sent").touch()
    work.shelf.wait(1)
    os.kill(pid, number)  # idle
    work.shelf.add(*runs("b", start=1))
    work.shelf.wait(2)
    assert work.executor.pids == [pid]
    assert seen() == Counter(range(2))


@pytest.mark.parametrize("handler", [handlers.accept, handlers.refuse_some])
@pytest.mark.parametrize("is_one_run", [False, True])
def test_who_ends_its_process_is_to_blame_alone(
    working: Callable[..., Work],
    seen: Callable[[], Counter[int]],
    handler: Callable[..., object],
    is_one_run: bool,
) -> None:
    work = working(handler, starts=False)
    keys = ("a", "b", "c", "poison", "d")
    work.shelf.add(*([Batch(records(*keys), is_serial=False)] if is_one_run else runs(*keys)))
    work.start()
    work.shelf.wait(5)
    outcomes = work.outcomes()
    died = [offset for offset, outcome in outcomes.items() if isinstance(outcome, WorkerDiedError)]
    assert died == [3]
    if handler is handlers.refuse_some:
        assert isinstance(outcomes[1], Nack)
    assert seen() == Counter((0, 1, 2, 4))


def test_a_fork_of_a_process_does_not_hide_its_death(
    working: Callable[..., Work], seen: object
) -> None:
    work = working(handlers.fork_and_die)
    try:
        work.shelf.add(*runs("a"))
        work.shelf.wait(1)
    finally:
        Path(os.environ[handlers.SEEN] + ".end").touch()
    assert isinstance(work.outcomes()[0], WorkerDiedError)


def test_a_fork_of_the_parent_does_not_hide_its_end() -> None:
    """Our end of the pipe is closed, as with a parent that is killed."""
    process, pipe = start_child(handlers.listen, name="listener")
    assert pipe.recv() == "begun"
    left = os.fork()
    if left == 0:
        signal.pause()
    try:
        pipe.close()
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        os.kill(left, signal.SIGKILL)
        os.waitpid(left, 0)


def test_innocents_are_processed_once_and_are_no_dead_letters(
    seen: Callable[[], Counter[int]],
) -> None:
    options = {"max_attempts": 2, "dead_letter_topic": "dead"}
    room = Room(processes=1, backoff=Backoff(first=0.001, max=0.002, jitter=0.0), **options)
    letters: list[int] = []

    def write(record: ParallelRecord, *_: object) -> object:
        letters.append(record.offset)
        written = Written()
        written.end(None)
        return written

    letters_to: Any = write
    policy = FailurePolicy(room.queue.config, room.stats, letters_to, pytest.fail, pytest.fail)
    processes = processes_of(room.queue.config, handlers.accept, is_async=False)
    pool = ProcessExecutor(Handling(room.queue, policy), processes)
    room.speed_up()
    room.queue.add(room.partition, records("a", "b", "c", "d", "poison"))
    pool.start()
    try:

        def is_done() -> bool:
            room.queue.tend()
            return room.committable == 5

        wait_until(is_done)
        assert letters == [4]
        assert seen() == Counter(range(4))
    finally:
        room.queue.stop()
        pool.cancel()
        assert pool.join(10)


def test_an_outcome_that_cannot_be_read_is_one_records_failure(
    working: Callable[..., Work], seen: Callable[[], Counter[int]]
) -> None:
    """The others have their own results, now and later."""
    work = working(handlers.result, wants_results=True)
    keys = ("a", "error", "b", "result", "c", "result", "speechless", "later", "d")
    work.shelf.add(Batch(records(*keys), is_serial=False))
    work.shelf.wait(len(keys))
    found = work.outcomes()
    values = [each.value for each in found.values() if isinstance(each, OutgoingRecord)]
    assert values == [b"result of 0", b"result of 2", b"result of 4", b"result of 8"]
    assert isinstance(found[1], handlers.HomeboundError)
    assert str(found[1]) == "boom"
    assert isinstance(found[3], ConfigError)
    assert "cannot be read outside" in str(found[3])
    assert isinstance(found[6], handlers.SpeechlessError)
    assert "async def" in str(found[7])
    work.shelf.add(*runs("a", start=9))
    work.shelf.wait(len(keys) + 1)
    assert work.outcomes()[9].value == b"result of 9"  # type: ignore[attr-defined]
    assert seen() == Counter()


def test_behind_a_failure_in_its_order_nothing_is_begun(
    working: Callable[..., Work], seen: Callable[[], Counter[int]]
) -> None:
    work = working(handlers.refuse_some)
    work.shelf.add(Batch(records("a", "a", "a")))
    work.shelf.wait(3)
    assert [record.offset for record in work.shelf.back] == [2]
    assert list(work.outcomes()) == [1]


def test_an_ack_among_results_is_an_ack(working: Callable[..., Work], seen: object) -> None:
    work = working(handlers.accept, wants_results=True)
    work.shelf.add(*runs("a", "b"))
    work.shelf.wait(2)
    assert work.outcomes() == {0: Ack(), 1: Ack()}


def test_who_is_killed_before_it_began_is_replaced(
    working: Callable[..., Work],
    seen: Callable[[], Counter[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_executor, "PAUSE_S", 0.01)
    work = working(handlers.note, starts=False)
    begin, kills = process_executor._Process.begin, [1]

    def killed(process: Any, is_over: Callable[[], bool]) -> str | None:
        if kills:
            kills.pop()
            process._process.kill()
        return begin(process, is_over)

    monkeypatch.setattr(process_executor._Process, "begin", killed)
    work.shelf.add(*runs("a"))
    work.start()
    work.shelf.wait(1)
    assert seen() == Counter(range(1))


def test_the_interpreter_ends_with_idle_processes(seen: object) -> None:
    """Nothing closed them, and signals to end do not reach them; none takes their place."""
    program = (
        "import atexit\n"
        "def begin_another():\n"
        "    try:\n"
        "        _Process(work.executor.processes.call)\n"
        "    except OSError as error:\n"
        "        print(error)\n"
        "atexit.register(begin_another)\n"
        "from tests.unit import parallel_handlers as handlers\n"
        "from tests.unit.test_parallel_processes import Work\n"
        "from kafkamq.runtime.process_executor import _Process\n"
        "if __name__ == '__main__':\n"
        "    work = Work(handlers.note)\n"
        "    process = _Process(work.executor.processes.call)\n"
        "    assert process.begin(lambda: False) is None\n"
        "    print(process.pid)\n"
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
    working: Callable[..., Work],
    seen: Callable[[], Counter[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = working(handlers.note, starts=False)
    monkeypatch.setattr(process_executor, "PAUSE_S", 0.01)
    refused = threading.Event()

    def refuse(*_: object, **__: object) -> object:
        refused.set()
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as full:
        full.setattr(process_executor, "start_child", refuse)
        work.shelf.add(*runs("a", "b"))
        work.executor.start()
        assert refused.wait(10)
    work.shelf.wait(2)
    assert work.outcomes() == {}
    assert seen() == Counter(range(2))


def test_a_system_without_what_processes_share_is_told(
    working: Callable[..., Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container is so whose file systems can only be read."""
    work = working(handlers.note, starts=False)

    def refuse(*_: object, **__: object) -> object:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    with monkeypatch.context() as lacking:
        lacking.setattr(process_executor, "start_child", refuse)
        with pytest.raises(ConfigError, match=r"No usable temporary directory.*/dev/shm"):
            work.executor.check(lambda: False)
    work.executor.start()


@pytest.mark.parametrize("handler", [handlers.meet, handlers.meet_async])
def test_a_process_has_several_handlers_at_once(
    working: Callable[..., Work], seen: object, handler: Callable[..., object]
) -> None:
    """Eight of them wait for each other, four in each of two processes."""
    work = working(handler, count=2, threads=4)
    work.shelf.add(*runs(*"abcdefgh"))
    work.shelf.wait(8)
    assert work.outcomes() == {}


def test_who_takes_too_long_loses_its_process(
    working: Callable[..., Work], seen: Callable[[], Counter[int]]
) -> None:
    """What else was in the process is none of its business."""
    work = working(handlers.hang_on_poison, timeout_ms=1500)
    work.shelf.add(*runs("a", "poison", "b"))
    work.shelf.wait(3)
    ((offset, outcome),) = work.outcomes().items()
    assert (offset, str(outcome)) == (1, "the handler took longer than 1.5 s")
    assert isinstance(outcome, HandlerTimeoutError)
    assert seen() == Counter((0, 2))


def test_a_process_that_is_stopped_is_ended_although_it_reads_nothing(
    working: Callable[..., Work], seen: Callable[[], Counter[int]]
) -> None:
    """Its pipe is full, so its port waits in a run; it is at no call, so none has failed."""
    work = working(handlers.note, timeout_ms=1500)
    work.shelf.add(*runs("a", "b"))
    work.shelf.wait(2)
    (pid,) = work.executor.pids
    stop_process(pid)
    work.shelf.add(*runs("c" * 1_000_000, "d", start=2))
    work.shelf.wait(4)
    assert work.outcomes() == {}
    assert seen() == Counter(range(4))


def test_a_process_that_is_stopped_in_a_call_is_late(
    working: Callable[..., Work], seen: Callable[[], Counter[int]]
) -> None:
    work = working(handlers.work, timeout_ms=1500)
    work.shelf.add(*runs("a"))
    wait_until(Path(os.environ[handlers.SEEN] + ".begun").exists)
    stop_process(work.executor.pids[0])
    Path(os.environ[handlers.SEEN] + ".sent").touch()
    work.shelf.add(*runs("b", start=1))
    work.shelf.wait(2)
    ((offset, outcome),) = work.outcomes().items()
    assert offset == 0
    assert isinstance(outcome, HandlerTimeoutError)
    assert seen() == Counter((1,))


def test_a_process_that_does_not_come_up_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module waits when it is imported, as for a lock or a server."""
    work = Work(handlers.handler_elsewhere(monkeypatch, tmp_path, handlers.WAIT))
    work.executor.start()
    wait_until((tmp_path / "begun").exists)
    work.shelf.stop()
    assert work.executor.join(within(10))
    assert work.shelf.failure is None
    (tmp_path / "begun").unlink()
    checked = threading.Thread(
        target=work.executor.check, args=((tmp_path / "begun").exists,), daemon=True
    )
    checked.start()
    checked.join(within(60))
    assert not checked.is_alive()
    work.executor.cancel()


@pytest.mark.parametrize("handler", [handlers.hang_on_poison, handlers.hang_on_poison_async])
def test_of_several_handlers_the_one_that_takes_too_long_is_left_alone(
    working: Callable[..., Work],
    seen: Callable[[], Counter[int]],
    handler: Callable[..., object],
) -> None:
    work = working(handler, timeout_ms=1500, threads=2)
    (pid,) = work.executor.pids
    work.shelf.add(*runs("a", "poison", "poison", "poison", "b"))
    work.shelf.wait(5)
    assert {offset for offset, _ in work.outcomes().items()} == {1, 2, 3}
    assert all(isinstance(each, HandlerTimeoutError) for each in work.outcomes().values())
    assert work.executor.pids == [pid]
    assert seen() == Counter((0, 4))


def test_who_was_beside_a_handler_that_takes_too_long_is_not_to_blame(
    working: Callable[..., Work], seen: Callable[[], Counter[int]]
) -> None:
    """Where a process with several handlers had to be ended for one of them."""
    work = working(handlers.hang_first, threads=2, kill_after_ms=3000)
    work.shelf.add(*runs("poison"))
    wait_until(Path(f"{os.environ[handlers.SEEN]}.0").exists)
    time.sleep(1.0)
    work.shelf.add(*runs("b", start=1))
    work.shelf.wait(2)
    assert [(record.offset, str(said)) for record, said in work.shelf.outcomes] == [
        (0, "the handler took longer than 3 s")
    ]
    assert [record.offset for record in work.shelf.back] == [1]
    assert seen() == Counter((1,))


def test_what_no_handler_has_begun_comes_back_when_asked_for(
    working: Callable[..., Work], seen: Callable[[], Counter[int]]
) -> None:
    """Also what stands behind the record that a handler is at, in its order."""
    work = working(handlers.work, starts=False)
    work.shelf.add(Batch(records(*"aaa")), *runs("b", "c", start=3))
    (port,) = work.executor._ports
    port._ahead = RunAhead(concurrency=5, maximum=5)
    work.start()
    wait_until(Path(os.environ[handlers.SEEN] + ".begun").exists)
    wait_until(lambda: port._held == 5)
    work.shelf.stop()
    wait_until(lambda: port._held == 3)
    Path(os.environ[handlers.SEEN] + ".sent").touch()
    assert work.executor.join(10)
    assert work.shelf.done_count == 1
    assert seen() == Counter((0,))
    assert [record.offset for record in work.shelf.back] == [3, 4, 1, 2]


def test_the_records_of_a_key_are_in_one_process_in_order(
    seen: Callable[[], Counter[int]],
) -> None:
    room = Room(processes=2, threads=4)
    policy = FailurePolicy(room.queue.config, room.stats, pytest.fail, pytest.fail, pytest.fail)
    processes = processes_of(room.queue.config, handlers.note_ends, is_async=False)
    pool = ProcessExecutor(Handling(room.queue, policy), processes)
    pool.start()
    wait_until(lambda: len(pool.pids) == 2, "both processes")
    count, keys = 2000, 20
    for start in range(0, count, 500):
        room.queue.add(room.partition, records(*[f"k{n % keys}" for n in range(500)], start=start))
    try:

        def is_done() -> bool:
            room.queue.tend()
            return room.committable == count

        wait_until(is_done)
    finally:
        room.queue.stop()
        assert pool.join(10)
        pool.cancel()
    lines = Path(os.environ[handlers.SEEN]).read_text().splitlines()
    pids, of_key = set(), {}
    for line in lines:
        what, pid, offset, key = line.split()
        pids.add(pid)
        of_key.setdefault(key, []).append((int(offset), what))
    assert len(pids) == 2
    for found in of_key.values():  # each ends before the next one begins, wherever
        assert found == sorted(found, key=lambda each: (each[0], each[1] == "end"))
    assert sum(map(len, of_key.values())) == 2 * count
    room.queue.scheduler.check()


def test_a_handler_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(ConfigError, match="can be imported"):
        processes_of(Room(processes=1).queue.config, lambda record: None, is_async=False)
    assert pickle.loads(pickle.dumps(handlers.note)) is handlers.note


def test_the_limit_of_each_process_moves(
    working: Callable[..., Work], seen: Callable[[], Counter[int]]
) -> None:
    """Of 8 slots 2 are at work, then 5; a process that takes a dead one's place is told as well."""
    work = working(handlers.work, starts=False, threads=8)
    work.executor.set_limit(2)
    work.start()
    work.shelf.add(*runs(*"abcdefgh"))
    begun = lambda: len(work.executor.slots().calls)  # noqa: E731
    wait_until(lambda: begun() == 2)
    totals = work.executor.totals()
    assert (totals.completed, totals.busy, totals.has_backlog) == (0, 2, True)
    work.executor.set_limit(5)
    wait_until(lambda: begun() == 5)
    (pid,) = work.executor.pids
    os.kill(pid, signal.SIGKILL)
    work.shelf.wait(5)  # which it was at; and three follow
    wait_until(lambda: begun() == 3)
    Path(os.environ[handlers.SEEN] + ".sent").touch()
    work.shelf.wait(8)
    assert sum(seen().values()) == 3
    assert work.executor.totals().busy == 0
