"""Handlers that tests call in processes of their own."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from tests.waiting import deadline_after, wait_until

from kafkamq import Ack, Nack, OutgoingRecord
from kafkamq.parallel.consumer import ParallelConsumer
from kafkamq.parallel.record import PlainRecord

if TYPE_CHECKING:
    import pytest

PARENT = "KAFKAMQ_TEST_PARENT"  # the process of the test, for what only a child can do
SEEN = "KAFKAMQ_TEST_SEEN"  # a file
FAIL = "raise ImportError('no libfoo')"
WAIT = "(pathlib.Path(__file__).parent / 'begun').touch(); time.sleep(600)"  # as for a lock


def handler_elsewhere(
    monkeypatch: pytest.MonkeyPatch, folder: Path, statement: str
) -> Callable[..., object]:
    """A handler whose module runs the statement where another process imports it."""
    name = f"elsewhere_{uuid.uuid4().hex}"
    (folder / f"{name}.py").write_text(
        "import os, pathlib, time\n"
        f"if os.getpid() != {os.getpid()}:\n"
        f"    {statement}\n"
        "def handle(message) -> None: ...\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    handler: Callable[..., object] = importlib.import_module(name).handle
    return handler


def note(record: PlainRecord) -> None:
    """One line a call, written at once."""
    with Path(os.environ[SEEN]).open("ab", buffering=0) as file:
        place = (os.getpid(), record.partition, record.offset)
        file.write(b"%d %d %d %b\n" % (*place, record.key or b""))


def accept(record: PlainRecord) -> Ack:
    """Notes it; the key "poison" ends the process."""
    if record.key == b"poison":
        os._exit(137)
    note(record)
    return Ack()


def refuse_some(record: PlainRecord) -> object:
    """Every second one comes again, before the key "poison" ends the process."""
    if record.key == b"poison":
        os._exit(137)
    note(record)
    return Nack() if record.offset % 2 else None


def work(record: PlainRecord) -> None:
    """Ends when a signal was sent to it."""
    Path(f"{os.environ[SEEN]}.begun").touch()
    wait_until(Path(f"{os.environ[SEEN]}.sent").exists, "a signal")
    note(record)


def eight_are_in(record: PlainRecord) -> bool:
    """Of all processes: each leaves a file where it begins."""
    seen = Path(os.environ[SEEN])
    Path(f"{seen}.{record.offset}.in").touch()
    return len(list(seen.parent.glob(f"{seen.name}.*.in"))) == 8


def meet(record: PlainRecord) -> None:
    """Ends when eight are at work."""
    wait_until(lambda: eight_are_in(record), "the others")


async def meet_async(record: PlainRecord) -> None:
    """The same, of coroutines."""
    deadline_s = deadline_after(60)
    while not eight_are_in(record):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.005)


def hang_on_poison(record: PlainRecord) -> None:
    """Notes it; the key "poison" never ends."""
    if record.key == b"poison":
        time.sleep(60)
    note(record)


def hang_first(record: PlainRecord) -> None:
    """Notes it; hangs the first time, and the key "poison" each time."""
    begun = Path(f"{os.environ[SEEN]}.{record.offset}")
    is_first = not begun.exists()
    begun.touch()
    if is_first or record.key == b"poison":
        time.sleep(60)
    note(record)


async def hang_on_poison_async(record: PlainRecord) -> None:
    """The same, and may be cancelled."""
    if record.key == b"poison":
        await asyncio.sleep(60)
    note(record)


def note_ends(record: PlainRecord) -> None:
    """Two lines: the begin and the end."""
    with Path(os.environ[SEEN]).open("ab", buffering=0) as file:
        place = (os.getpid(), record.offset, record.key or b"")
        file.write(b"begin %d %d %b\n" % place)
        time.sleep(0.0002)
        file.write(b"end %d %d %b\n" % place)


def step(record: PlainRecord) -> None:
    """Ends when the file of its offset is there."""
    wait_until(Path(f"{os.environ[SEEN]}.{record.offset}").exists, "leave to go on")


def step_out(record: PlainRecord) -> None:
    """Says that it began, and notes the record when the file of its offset is there."""
    Path(f"{os.environ[SEEN]}.begun-{record.offset}").touch()
    step(record)
    note(record)


class HomeboundError(Exception):
    """Cannot be made in the process of the test."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        if os.getpid() == int(os.environ[PARENT]):
            raise SystemExit("not here")


class HomeboundResult:
    """A result that cannot be made there, either."""

    def __init__(self, text: str) -> None:
        if os.getpid() == int(os.environ[PARENT]):
            raise RuntimeError("not here")

    def __reduce__(self) -> tuple[object, ...]:
        return HomeboundResult, ("again",)


class SpeechlessError(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def result(record: PlainRecord) -> object:
    """What it does stands in the key."""
    match record.key:
        case b"error":
            raise HomeboundError("boom")
        case b"result":
            return HomeboundResult("first")
        case b"speechless":
            raise SpeechlessError
        case b"later":
            return _later()
    return OutgoingRecord(topic="out", value=b"result of %d" % record.offset)


async def _later() -> None:
    raise AssertionError("nobody awaits it")


class ClumsyError(Exception):
    """Passes on other arguments than it takes, as many do."""

    def __init__(self, place: str, text: str) -> None:
        super().__init__(f"{place}: {text}")
        self.place = place


class LadenError(Exception):
    """Holds what cannot leave its process."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def fork_and_die(record: PlainRecord) -> None:
    """Leaves a process behind that has all that this one had open."""
    if os.fork() == 0:
        while not Path(os.environ[SEEN] + ".end").exists():
            time.sleep(0.05)
        os._exit(0)
    os._exit(3)


def listen(pipe: Connection) -> None:
    """A process that ends with its parent."""
    pipe.send("begun")
    with suppress(EOFError):
        pipe.recv()


def fail(record: PlainRecord) -> None:
    """In the way that stands in the key."""
    if record.key == b"clumsy":
        raise ClumsyError("here", "boom")
    raise LadenError("boom")


async def forget(record: PlainRecord) -> object:
    """To await."""
    return _later()


async def cancel_all(record: PlainRecord) -> None:
    """Whatever runs on the loop, the first time."""
    begun = Path(f"{os.environ[SEEN]}.begun")
    if not begun.exists():
        begun.touch()
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(60)
    note(record)


@dataclass
class Order:
    id: int


def order_of(order: Order) -> str:
    """Takes the value."""
    return f"order {order.id}"


def shout(record: PlainRecord) -> Iterator[None]:
    """Middleware."""
    outcome = yield
    return outcome.upper()


def main() -> None:
    """A program that runs until it is told to stop: servers, topic, group, processes."""
    servers, topic, group, processes = sys.argv[1:]
    consumer = ParallelConsumer(
        topic,
        group_id=group,
        bootstrap_servers=servers,
        processes=int(processes),
        commit_interval=0.1,
    )
    consumer.run(note)


if __name__ == "__main__":
    main()
