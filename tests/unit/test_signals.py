"""A signal may come while the main thread holds the lock of what the signal's handler sets."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from tests.waiting import within

from kafkamq.runtime.signals import holding_interrupts, keeping_interrupts, stop_on_signals

AT_THE_WORST_MOMENT = """
import os, signal, threading
from kafkamq.runtime.signals import stop_on_signals

event = threading.Event()
{setting}
with event._cond:  # as a wait does that begins or ends
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):
        pass  # the handler runs
assert event.wait(20), "nothing set it"
print("set")
"""


def _said(setting: str, timeout_s: float) -> str:
    program = AT_THE_WORST_MOMENT.format(setting=setting)
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=True
    ).stdout


def test_a_signal_stops_whatever_the_main_thread_is_doing() -> None:
    assert _said("stop_on_signals(event.set)", 60) == "set\n"


def test_a_handler_that_sets_the_event_itself_hangs() -> None:
    """The control: this is what ``stop_on_signals`` is for."""
    with pytest.raises(subprocess.TimeoutExpired):
        _said("signal.signal(signal.SIGTERM, lambda *_: event.set())", 2)


def test_what_was_before_comes_back() -> None:
    program = """
import signal
from kafkamq.runtime.signals import stop_on_signals

before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
undo = stop_on_signals(print)
assert signal.getsignal(signal.SIGTERM) not in before
undo()
assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_what_starts_meanwhile_does_not_take_ctrl_c() -> None:
    """A SparkContext would take it: its handler asks the JVM."""
    before = signal.getsignal(signal.SIGINT)
    try:
        undo = stop_on_signals(lambda: None)
        ours = signal.getsignal(signal.SIGINT)
        with keeping_interrupts():
            signal.signal(signal.SIGINT, lambda *_: None)
        assert signal.getsignal(signal.SIGINT) is ours
        undo()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with keeping_interrupts():
            signal.signal(signal.SIGINT, ours)
        assert signal.getsignal(signal.SIGINT) is ours  # nobody had set one
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_interrupts_behind_what_must_not_end_halfway() -> None:
    before = signal.getsignal(signal.SIGINT)
    done = []

    def at_work() -> None:
        with holding_interrupts():
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            at_work()
        assert done.pop() == "all of it"
        signal.signal(signal.SIGINT, lambda *_: done.append("told"))
        at_work()
        assert done == ["told", "all of it"]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_ctrl_c_means_at_once_and_the_next_one_interrupts() -> None:
    program = """
import os, signal, threading
from kafkamq.runtime.signals import stop_on_signals

said, hurried = [], threading.Event()
stop_on_signals(lambda: said.append("stop"), at_once=hurried.set)
os.kill(os.getpid(), signal.SIGHUP)
try:
    while True:
        said.append("again")  # those that come right behind the first one are the same
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(0.01)
except KeyboardInterrupt:
    assert hurried.is_set()
    assert said.count("again") > 2 and said.count("stop") > 1
    print("interrupted")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=within(60))
    assert done.stdout == "interrupted\n"


def test_an_ignored_hangup_stays_ignored() -> None:
    """``nohup`` ignores it."""
    program = """
import signal
from kafkamq.runtime.signals import stop_on_signals

signal.signal(signal.SIGHUP, signal.SIG_IGN)
stop_on_signals(print)
assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=within(60))


def test_a_second_ctrl_c_ends_the_drain_of_a_worker() -> None:
    program = """
import logging, os, signal, threading, time
from kafkamq import Worker
from kafkamq.testing import MemoryService

begun, hurried = threading.Event(), threading.Event()
service = MemoryService()
queue = service.queue("q")

@queue.handler()
def handle(message):
    begun.set()
    time.sleep(3600)

class Watch(logging.Handler):
    def emit(self, record):
        if "second Ctrl-C" in record.getMessage():
            hurried.set()

def press():
    begun.wait()
    while not hurried.wait(0.05):
        os.kill(os.getpid(), signal.SIGINT)

logging.getLogger("kafkamq").addHandler(Watch())
queue.producer().send(b"x")
threading.Thread(target=press, daemon=True).start()
Worker(service, drain=3600, telemetry=False).run()
with queue.consumer() as consumer:
    print(consumer.receive(10).delivery_count)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=within(60), check=True)
    assert done.stdout == "2\n"
