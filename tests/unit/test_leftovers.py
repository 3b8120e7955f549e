"""What a test leaves behind is found: threads of ours, and loops that are watched."""

from __future__ import annotations

import threading
from collections import Counter

from tests.leftovers import Stock
from tests.waiting import within

from kafkamq.metrics.health import health


def test_a_thread_of_ours_is_found_until_it_has_ended() -> None:
    stock = Stock()
    stock.keep(stock.left())
    gate = threading.Event()
    threads = [
        threading.Thread(target=gate.wait, args=(within(60),), name=name, daemon=True)
        for name in ("kafkamq-test", "another's")
    ]
    for thread in threads:
        thread.start()
    try:
        assert stock.left() == Counter(threads[:1])
        other = Stock()
        other.keep(other.left())
        assert not other.left(), "it may stay"
    finally:
        gate.set()
        for thread in threads:
            thread.join()
    assert not stock.left()


def test_a_loop_is_found_although_one_of_its_name_was_there() -> None:
    loops = [health.add("a loop of this test", max_age_s=60) for _ in range(2)]
    try:
        health.remove(loops.pop())
        stock = Stock()
        stock.keep(stock.left())
        assert not stock.left()
        loops.append(health.add("a loop of this test", max_age_s=60))
        assert stock.left() == Counter(["a loop of this test"])
    finally:
        for loop in loops:
            health.remove(loop)
    assert not stock.left()
