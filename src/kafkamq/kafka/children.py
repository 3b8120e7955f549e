"""Processes that call handlers: how they begin, and what signals to the whole group mean there.

A terminal's Ctrl-C and a supervisor's SIGTERM reach every process of a group. A child pays no heed
to them: its parent decides, lets it end what it is at, and ends it.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

__all__ = ["leave_signals_to_parent", "start_child"]

_ENDING = (signal.SIGINT, signal.SIGTERM)


def start_child(
    target: Callable[..., None], *args: object, name: str
) -> tuple[BaseProcess, Connection]:
    """A process that calls ``target`` with its end of a pipe and ``args``; and our end.

    The target calls ``leave_signals_to_parent`` first. Whoever starts one ends it by ``kill``, at
    the latest when the interpreter exits: ``multiprocessing`` would ask it to end, and wait.
    """
    context = multiprocessing.get_context("spawn")  # librdkafka does not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), name=name, daemon=True)
    resource_tracker.ensure_running()  # its start would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return process, ours


def leave_signals_to_parent() -> None:
    """In the process: SIGINT and SIGTERM do nothing."""
    for number in _ENDING:  # not SIG_IGN, which programs that the handler starts would inherit
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
