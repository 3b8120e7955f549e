"""What the handlers of this process are at: their messages, and where their code is.

Frames are looked at as they are. Nobody waits for it, and of the code only names and lines are
told, never a value.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile, islice
from types import CoroutineType, FrameType, GeneratorType
from typing import Any

from kafkamq.metrics.health import HandlerCall, health

MAX_POOLS = 200
MAX_CALLS, MAX_CALLS_OF_POOL = 100, 20
"""The oldest calls of each pool are told, so many of all pools."""
MAX_FRAMES = 24
"""The innermost frames of a stack are told."""
MAX_BYTES = 250_000
_MAX_DEPTH = 1000
_MAX_CHARACTERS = 120
_OURS = ("kafkamq.runtime.", "kafkamq.parallel.", "kafkamq.queue.", "threading", "asyncio.")


def handlers() -> bytes:
    """Return as JSON each pool of handlers: its queue, its slots, and what its oldest calls are at.

    ``for_ms`` is for how long a call goes on. The stack of a thread or a coroutine has its
    innermost frame last; that of a handler in another process is not known here. Where the answer
    would be too long, all stacks have fewer frames.
    """
    now_s, threads = time.monotonic(), sys._current_frames()
    try:
        pools = _pools(now_s, threads)
    finally:
        # The frame of this function is in it, which would hold all frames until they are collected.
        threads.clear()
    frames = MAX_FRAMES
    while len(answer := _encoded(pools)) > MAX_BYTES and frames:
        frames //= 2
        for pool in pools:
            for call in pool["calls"]:
                del call["stack"][: -frames or None]
    return answer


def _encoded(pools: Sequence[dict[str, Any]]) -> bytes:
    return json.dumps({"pools": pools}, ensure_ascii=False).encode("utf-8", "replace")


def _pools(now_s: float, threads: Mapping[int, FrameType]) -> list[dict[str, Any]]:
    pools, left = [], MAX_CALLS
    for each in health.handlers()[:MAX_POOLS]:
        slots = each.slots()
        calls = sorted(slots.calls, key=lambda call: call.began_s)
        shown = calls[: min(left, MAX_CALLS_OF_POOL)]
        left -= len(shown)
        pools.append(
            {
                "queue": each.queue,
                "handler": each.handler,
                "consumer": each.consumer(),
                "slots": slots.count,
                "busy": len(calls),
                "calls": [_shown(call, now_s, threads) for call in shown],
            }
        )
    return pools


def _shown(call: HandlerCall, now_s: float, threads: Mapping[int, FrameType]) -> dict[str, Any]:
    topic, partition, offset = call.place
    caller = call.caller
    frames: Iterable[FrameType] = ()
    if isinstance(caller, asyncio.Task):
        runs_in, frames = "a coroutine", _frames_of(caller.get_coro(), threads)
    elif isinstance(caller, int):
        runs_in = "a thread"
        # Of a call that began later the frames may be another one's.
        if call.began_s <= now_s:
            frames = _frames(threads.get(caller))
    else:
        runs_in = str(caller or "")[:_MAX_CHARACTERS]
    return {
        "topic": topic,
        "partition": partition,
        "offset": offset,
        "for_ms": max(0, round((now_s - call.began_s) * 1000)),
        "runs_in": runs_in,
        "stack": [_line(frame) for frame in list(dropwhile(_is_ours, frames))[-MAX_FRAMES:]],
    }


def _frames(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None and len(found) < _MAX_DEPTH:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _frames_of(coroutine: Any, threads: Mapping[int, FrameType]) -> Iterable[FrameType]:
    """Return the same of a coroutine, which waits, or runs in one of these threads."""
    if type(coroutine) is CoroutineType and coroutine.cr_running:
        for found in map(_frames, threads.values()):
            if coroutine.cr_frame in found:
                return found
    return islice(_awaited(coroutine), _MAX_DEPTH)


def _awaited(awaited: Any) -> Iterator[FrameType]:
    """Return the frames of what is Python's own: an awaitable of others may answer anything."""
    while True:
        if type(awaited) is CoroutineType:
            frame, awaited = awaited.cr_frame, awaited.cr_await
        elif type(awaited) is GeneratorType:
            frame, awaited = awaited.gi_frame, awaited.gi_yieldfrom
        else:
            return
        if frame is not None:
            yield frame


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(_OURS)


def _line(frame: FrameType) -> str:
    """Return file, line and function; of the file's path its end."""
    code = frame.f_code
    name = "/".join(code.co_filename.replace("\\", "/").split("/")[-2:])
    # Python 3.10 has no qualified names.
    function = getattr(code, "co_qualname", code.co_name)
    return f"{name}:{frame.f_lineno} {function}"[-_MAX_CHARACTERS:]
