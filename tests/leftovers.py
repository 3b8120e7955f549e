"""A test that leaves a thread of kafkamq behind, or a loop that its health watches, fails.

Whoever comes next would meet it: as a process that is not live, or as work that nobody asked for.
What fixtures of a wider scope than a test have begun may stay.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Generator
from contextlib import suppress

import pytest
from tests.waiting import wait_until

from kafkamq.metrics.health import health

__all__ = ["Stock"]

# Calls that nobody answers end by themselves.
_PATIENCE_S = 20.0
# A service that serves many tests keeps the producer of each of their queues.
_SERVES_ALL = "world"
_PRODUCER = "kafkamq-sender"


class Stock:
    """The threads and loops that may be there; what else there is was left by a test."""

    def __init__(self) -> None:
        self._known: Counter[object] = Counter()

    def left(self) -> Counter[object]:
        """The threads that are too many, and the names of loops that are."""
        return self._there() - self._known

    def keep(self, more: Counter[object]) -> None:
        """Let these stay, too."""
        self._known = (self._known & self._there()) + more

    def _there(self) -> Counter[object]:
        threads = [each for each in threading.enumerate() if each.name.startswith("kafkamq")]
        return Counter([*threads, *(state.name for state in health.states())])


_stock = Stock()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    before = _stock.left()
    done = yield
    if fixturedef.scope != "function":
        _stock.keep(_stock.left() - before)
    return done


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    yield
    if _SERVES_ALL in getattr(item, "fixturenames", ()):
        found = _stock.left()
        senders = (each for each in found if getattr(each, "name", "") == _PRODUCER)
        _stock.keep(Counter({each: found[each] for each in senders}))
    with suppress(AssertionError):
        wait_until(lambda: not _stock.left(), timeout_s=_PATIENCE_S)
    if left := _stock.left():
        _stock.keep(left)
        pytest.fail(f"left behind: {', '.join(sorted(map(str, left.elements())))}", pytrace=False)
