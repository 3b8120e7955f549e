"""The limit that finds itself, on simulated pools: it must come close to the best fixed one."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import cache

import pytest

from kafkamq.runtime.rules.pace import FanOut, Interval

TICK_MS = 20.0
FOUND_MS = 5_000.0
MAXIMUM = 256
GOAL = 0.9

Service = Callable[[int, random.Random], float]
"""How long a call takes, in ms, that begins as one of so many."""


class Pool:
    """Slots that are at calls; ``work`` says how many there could be at work at that time."""

    def __init__(self, service: Service, *, seed: int = 1, work: Callable[[float], int]) -> None:
        self.service = service
        self.work = work
        self.now_ms = 0.0
        self.limit = 0
        self.ended = 0
        self.spent_ms = 0.0
        self._chance = random.Random(seed)
        self._calls: list[tuple[float, float]] = []  # their ends, and how long they took

    @property
    def busy(self) -> int:
        return len(self._calls)

    def _fill(self, now_ms: float) -> None:
        while self.busy < min(self.limit, self.work(now_ms)):
            takes_ms = self.service(self.busy + 1, self._chance)
            heapq.heappush(self._calls, (now_ms + takes_ms, takes_ms))

    def pass_by(self, elapsed_ms: float) -> Interval:
        ended, spent_ms = self.ended, self.spent_ms
        end_ms = self.now_ms + elapsed_ms
        self._fill(self.now_ms)
        while self._calls and self._calls[0][0] <= end_ms:
            at_ms, took_ms = heapq.heappop(self._calls)
            self.ended += 1
            self.spent_ms += took_ms
            self._fill(at_ms)
        self.now_ms = end_ms
        return Interval(
            elapsed_ms,
            self.ended - ended,
            self.spent_ms - spent_ms,
            self.busy,
            self.work(end_ms) > self.busy,
        )


def endless(_: float) -> int:
    return 1_000_000


def waiting(_: int, chance: random.Random) -> float:
    return chance.uniform(0.0, 40.0)


def waiting_alike(_: int, __: random.Random) -> float:
    return 60.0


def slow(_: int, chance: random.Random) -> float:
    return chance.uniform(150.0, 250.0)


def one_interpreter(at_once: int, _: random.Random) -> float:
    """2 ms of CPU; who has the lock is changed, which costs the more the more want it."""
    return 2.0 * at_once * (1.0 + 0.002 * at_once)


def mostly_waiting(at_once: int, chance: random.Random) -> float:
    """10 ms of waiting, and 0.2 ms under the lock."""
    return chance.uniform(5.0, 15.0) + 0.2 * max(0, at_once - 50)


def overrun_beyond_20(at_once: int, chance: random.Random) -> float:
    """A backend that does 20 calls at once, and less when more are open."""
    return chance.uniform(8.0, 12.0) * max(1.0, (at_once / 20) ** 1.7)


def overrun_beyond_6(at_once: int, chance: random.Random) -> float:
    return chance.uniform(30.0, 50.0) * max(1.0, (at_once / 6) ** 1.5)


SERVICES: list[Service] = [
    waiting,
    waiting_alike,
    slow,
    one_interpreter,
    mostly_waiting,
    overrun_beyond_20,
    overrun_beyond_6,
]


@cache
def rate_at(service: Service, limit: int, work: Callable[[float], int] = endless) -> float:
    """Calls per ms of a fixed limit."""
    pool = Pool(service, work=work)
    pool.limit = limit
    pool.pass_by(1000.0)
    ended = pool.ended
    pool.pass_by(3000.0)
    return (pool.ended - ended) / 3000.0


def best_rate(service: Service, work: Callable[[float], int] = endless) -> float:
    limits = sorted({min(MAXIMUM, round(1.25**power)) for power in range(26)})
    return max(rate_at(service, limit, work) for limit in limits)


def found_rate(
    service: Service,
    *,
    start: int = 16,
    seed: int = 1,
    work: Callable[[float], int] = endless,
    for_ms: float = 6_000.0,
) -> tuple[float, FanOut]:
    """Calls per ms when the search has had its time."""
    pool = Pool(service, seed=seed, work=work)
    fan_out = FanOut(start=start, maximum=MAXIMUM)
    run(pool, fan_out, FOUND_MS)
    ended = pool.ended
    run(pool, fan_out, for_ms)
    return (pool.ended - ended) / for_ms, fan_out


def run(pool: Pool, fan_out: FanOut, for_ms: float) -> None:
    until_ms = pool.now_ms + for_ms
    while pool.now_ms < until_ms:
        pool.limit = fan_out.limit
        fan_out.observe(pool.pass_by(TICK_MS))
        assert 1 <= fan_out.limit <= MAXIMUM


@pytest.mark.parametrize("service", SERVICES)
def test_within_5_s_it_is_close_to_the_best_fixed_limit(service: Service) -> None:
    rates = [found_rate(service, seed=seed)[0] for seed in (1, 2, 3)]
    assert min(rates) >= GOAL * best_rate(service)


@pytest.mark.parametrize("start", [1, 256])
@pytest.mark.parametrize("service", [waiting, one_interpreter, overrun_beyond_20])
def test_from_far_away_it_comes_there_as_well(service: Service, start: int) -> None:
    rate, _ = found_rate(service, start=start)
    assert rate >= GOAL * best_rate(service)


def test_calls_that_bring_nothing_more_are_not_made() -> None:
    """An interpreter's lock, and a backend that is full: the limit is no higher than needed."""
    assert found_rate(one_interpreter)[1].limit <= 3
    assert found_rate(overrun_beyond_20)[1].limit <= 30


def test_orders_that_keep_slots_idle_are_no_reason_for_more() -> None:
    """20 keys: 20 calls at once, whatever the limit is."""
    rate, fan_out = found_rate(waiting, work=lambda _: 20)
    assert rate >= GOAL * best_rate(waiting, lambda _: 20)
    assert 20 <= fan_out.limit <= 40


def in_bursts(now_ms: float) -> int:
    """2 s of work, 2 s of none."""
    return 1_000_000 if now_ms % 4000.0 < 2000.0 else 0


def test_between_bursts_it_neither_forgets_nor_learns() -> None:
    rate, fan_out = found_rate(waiting, work=in_bursts, for_ms=20_000.0)
    assert rate >= GOAL * best_rate(waiting) / 2
    assert fan_out.limit >= 100


def test_idle_it_stays_where_it_is() -> None:
    assert found_rate(waiting, work=lambda _: 0)[1].limit == 16
    assert found_rate(waiting, work=lambda _: 1)[1].limit == 16


def test_a_backend_that_changes_is_followed() -> None:
    """It slows down beyond 20 calls at once, then beyond 80, then beyond 20 again."""
    capacity = 20

    def service(at_once: int, chance: random.Random) -> float:
        return chance.uniform(8.0, 12.0) * max(1.0, (at_once / capacity) ** 1.7)

    pool, fan_out = Pool(service, work=endless), FanOut(start=16, maximum=MAXIMUM)
    for capacity in (20, 80, 20):
        run(pool, fan_out, 25_000.0)  # a backend with more room shows at the next trial alone
        ended = pool.ended
        run(pool, fan_out, 10_000.0)
        assert (pool.ended - ended) / 10_000.0 >= GOAL * capacity / 10.0
        assert fan_out.limit <= 1.5 * capacity


def test_a_backend_that_breaks_down_is_not_overrun_until_the_rest_is_over() -> None:
    takes_ms = 10.0

    def service(at_once: int, chance: random.Random) -> float:
        slower = 1.0 if takes_ms == 10.0 else max(1.0, (at_once / 10) ** 1.7)
        return takes_ms * slower * chance.uniform(0.8, 1.2)

    pool, fan_out = Pool(service, work=endless), FanOut(start=16, maximum=64)
    run(pool, fan_out, 40_000.0)
    assert fan_out.limit == 64
    takes_ms = 20.0
    run(pool, fan_out, 6_000.0)
    assert fan_out.limit <= 20


def test_where_all_calls_hang_nothing_is_decided() -> None:
    pool = Pool(lambda _, __: 1e9, work=endless)
    fan_out = FanOut(start=16, maximum=MAXIMUM)
    run(pool, fan_out, 60_000.0)
    assert fan_out.limit == 16


def test_bounds() -> None:
    assert FanOut(start=16, maximum=8).limit == 8
    pool = Pool(one_interpreter, work=endless)
    fan_out = FanOut(start=1, maximum=1)
    run(pool, fan_out, FOUND_MS)
    assert fan_out.limit == 1
