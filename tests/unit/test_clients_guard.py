"""Calls that must end: what they raise comes through, and one that hangs is given up."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress

import pytest
from tests.waiting import wait_until

from kafkamq.transport.transactions import BoundedCall, CallAbandonedError


def test_calls_run_one_after_the_other_in_the_same_other_thread() -> None:
    guard = BoundedCall()
    threads: list[int] = []
    for _ in range(3):
        guard.run(lambda: threads.append(threading.get_ident()), timeout_s=5, client=None)
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()
    guard.close()
    guard.close()


def test_what_a_call_raises_is_raised() -> None:
    guard = BoundedCall()

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guard.run(fail, timeout_s=5, client=None)
    guard.run(lambda: None, timeout_s=5, client=None)  # and the guard is still good
    guard.close()


def test_a_client_whose_call_failed_ends_without_a_garbage_collector() -> None:
    """It would dial its brokers until that comes."""

    class Client:
        def call(self) -> None:
            raise ZeroDivisionError

    guard, client = BoundedCall(), Client()
    is_there = weakref.ref(client)
    gc.disable()
    try:
        with suppress(ZeroDivisionError):
            guard.run(client.call, timeout_s=5, client=client)
        del client
        guard.close()
        wait_until(lambda: is_there() is None, "the end of the client", timeout_s=5)
    finally:
        gc.enable()


def test_a_call_that_hangs_is_given_up_and_the_guard_goes_on() -> None:
    guard, before = BoundedCall(), set(threading.enumerate())
    hanging = threading.Event()
    with pytest.raises(CallAbandonedError):
        guard.run(hanging.wait, timeout_s=0.05, client=object())
    done: list[int] = []
    guard.run(lambda: done.append(1), timeout_s=5, client=None)
    assert done == [1]
    hanging.set()
    guard.close()
    wait_until(lambda: set(threading.enumerate()) <= before, "the end of both threads")
