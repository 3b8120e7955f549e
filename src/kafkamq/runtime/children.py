"""Processes that call handlers: how they begin, and what signals to the whole group mean there.

A terminal's Ctrl-C and a supervisor's SIGTERM reach every process of a group. A child pays no heed
to them: its parent decides, lets it end what it is at, and ends it by ``kill``; what is left when
the interpreter exits is ended here, as ``multiprocessing`` would ask it to end, and wait.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from weakref import WeakSet

from kafkamq.runtime.signals import STOPS

_lock = threading.Lock()  # guards what follows, and a start
_started: WeakSet[BaseProcess] = WeakSet()
_pipes: WeakSet[Connection] = WeakSet()
_ended = threading.Event()


def start_child(
    target: Callable[..., None], *args: object, name: str
) -> tuple[BaseProcess, Connection]:
    """A process that calls ``target`` with its end of a pipe and ``args``; and our end.

    The target calls ``leave_signals_to_parent`` first.
    """
    context = multiprocessing.get_context("spawn")  # librdkafka does not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), name=name, daemon=True)
    resource_tracker.ensure_running()  # its start would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        with _lock:
            if _ended.is_set():
                raise OSError("the interpreter exits: no process begins any more")
            process.start()
            _started.add(process)
            keep_from_forks(ours)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return process, ours


def _end_all() -> None:
    with _lock:
        _ended.set()
        for process in _started:
            process.kill()


def keep_from_forks(pipe: Connection) -> None:
    """A fork of this process closes its copy, or the other end would not see this process die."""
    _pipes.add(pipe)


def _forget_all() -> None:
    """In the child of a fork: they are its parent's."""
    global _lock, _started
    _lock, _started = threading.Lock(), WeakSet()
    for pipe in list(_pipes):
        pipe.close()


atexit.register(_end_all)  # later than multiprocessing's own, which hence runs after it
os.register_at_fork(after_in_child=_forget_all)


def leave_signals_to_parent() -> None:
    """In the process: signals that end a program do nothing."""
    for number in STOPS:  # not SIG_IGN, which programs that the handler starts would inherit
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
