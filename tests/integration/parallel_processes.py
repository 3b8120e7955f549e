"""A handler that is called in other processes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from kafkamq import OutgoingRecord
from kafkamq.parallel.record import PlainRecord


def double_check(record: PlainRecord) -> None:
    """Notes the offset in the file that is the key; dies once, at record 50."""
    path = Path((record.key or b"").decode())
    path.with_name(f"pid-{os.getpid()}").touch()
    died = path.with_name("died")
    if record.offset == 50 and not died.exists():
        died.touch()
        os._exit(1)
    with path.open("a") as file:
        file.write(f"{record.offset}\n")


def square(record: PlainRecord) -> object:
    """Results; some that cannot leave the process, some that end it."""
    folder, number = Path(record.headers[0][1].decode()), int(record.value or b"0")
    topic = f"{record.topic}-out"
    if number == 7:
        return lambda: None  # cannot be pickled
    if number == 8:
        os._exit(3)  # each time
    if number == 9 and record.attempt == 1:
        raise OSError("not yet")
    folder.joinpath(f"tried-{number}-{record.attempt}").touch()
    return OutgoingRecord(topic=topic, key=record.key, value=b"%d" % number**2)


def rest(record: PlainRecord) -> None:
    """20 ms."""
    del record
    time.sleep(0.02)


def hang(record: PlainRecord) -> None:
    """Never ends by itself."""
    Path((record.key or b"").decode()).touch()
    time.sleep(600)


class Unloadable:
    """A handler that only its own process can make."""

    def __reduce__(self) -> tuple[object, ...]:
        return _load, (os.getpid(),)

    def __call__(self, record: PlainRecord) -> None:
        raise AssertionError("never called")


def _load(pid: int) -> Unloadable:
    if pid != os.getpid():
        sys.exit("not here")
    return Unloadable()
