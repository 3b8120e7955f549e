"""Handlers that run in processes of their own: importable there."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.waiting import within

from kafkamq import Reject


def die_or_hang(body: str) -> None:
    """What the body says."""
    if body == "die":
        os._exit(7)
    if body == "hang":
        time.sleep(60)


_barrier = threading.Barrier(3)
_met: list[asyncio.Event] = []


def meet(body: bytes) -> None:
    """Ends when three are in it."""
    _barrier.wait(within(30))


async def meet_async(body: bytes) -> None:
    """The same, of coroutines."""
    mine = asyncio.Event()
    _met.append(mine)
    if len(_met) % 3 == 0:
        for each in _met[-3:]:
            each.set()
    await asyncio.wait_for(mine.wait(), within(30))


def reject_odd(bodies: list[str]) -> list[Reject | None]:
    """A verdict for each."""
    return [Reject("odd") if int(body) % 2 else None for body in bodies]


def raise_odd(body: str) -> None:
    """Every second one fails."""
    if int(body) % 2:
        raise ValueError("odd")


def where(body: bytes) -> Reject:
    """Says its process."""
    return Reject(f"in {os.getpid()}")


def around(message: object) -> Iterator[None]:
    """Says where it is called, of a handler that rejects."""
    outcome = yield
    return Reject(f"{outcome.reason}, around {os.getpid()}")  # type: ignore[attr-defined]


def begin_and_hang(body: str) -> None:
    """Leaves a file; nobody waits for its end."""
    Path(body).touch()
    time.sleep(600)


def take_upper(body: bytes) -> Reject:
    """Rejects it with its own text."""
    return Reject(body.decode())
