"""Claimants in a world of late, lost and doubled writes, pauses, crashes and clock steps.

Two drivers of one world: a Hypothesis state machine, which finds short counterexamples, and long
seeded runs, which find rare ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.examples import examples
from tests.model.claim_world import BATCH, Member, World

from kafkamq.claims.rules.steps import Delivery

CLIENTS = ("a", "b", "c")
MAX_SKEW_S = 30  # steps of the broker's clock, and errors of estimates of it
members = st.integers(0, 2)
times_s = st.sampled_from([0, 0.1, 1, 5, 14, 16, 29, 31, 44, 59, 61, 89, 91, 119, 121])


class ClaimantMachine(RuleBasedStateMachine):
    delivery = Delivery.AT_LEAST_ONCE

    @initialize(skews=st.lists(st.integers(-(10**6), 10**6), min_size=3, max_size=3))
    def begin(self, skews: list[int]) -> None:
        self.world = World(self.delivery)
        for client, skew in zip(CLIENTS, skews, strict=True):
            self.world.start(client, reads_all=True, monotonic_skew_ms=skew, error_s=0)

    def member(self, number: int) -> Member | None:
        alive = [m for m in self.world.members if not m.is_dead]
        return alive[number % len(alive)] if alive else None

    @rule(seconds=times_s)
    def pass_time(self, seconds: float) -> None:
        self.world.now_s += seconds

    @rule(skew_s=st.integers(-MAX_SKEW_S, MAX_SKEW_S))
    def step_clock(self, skew_s: int) -> None:
        self.world.skew_s = skew_s

    @rule(number=members)
    def claim(self, number: int) -> None:
        if member := self.member(number):
            self.world.claim(member)

    @rule(number=members, count=st.integers(1, 5))
    def read(self, number: int, count: int) -> None:
        if member := self.member(number):
            self.world.read(member, count)
            self.world.plan(member)

    @rule(number=members, is_acknowledged=st.booleans())
    def land(self, number: int, is_acknowledged: bool) -> None:
        if member := self.member(number):
            self.world.land(member, is_acknowledged=is_acknowledged)

    @rule(number=members)
    def round_trip(self, number: int) -> None:
        """All goes well for once."""
        if member := self.member(number):
            for _ in range(4):
                while member.in_flight:
                    self.world.land(member)
                self.world.read(member)
                self.world.claim(member)

    @rule(number=members)
    def lose(self, number: int) -> None:
        if member := self.member(number):
            self.world.lose(member)

    @rule(number=members)
    def give_up_waiting(self, number: int) -> None:
        if member := self.member(number):
            self.world.give_up_waiting(member)

    @rule(number=members, count=st.integers(1, BATCH))
    def work(self, number: int, count: int) -> None:
        if member := self.member(number):
            self.world.work(member, count)

    @rule(number=members, count=st.integers(1, 4), in_order=st.booleans())
    def finish(self, number: int, count: int, in_order: bool) -> None:
        if member := self.member(number):
            self.world.finish_messages(member, count, in_order=in_order)

    @rule(number=members, drain_s=st.sampled_from([0, 5]), keeps_claim=st.booleans())
    def release(self, number: int, drain_s: int, keeps_claim: bool) -> None:
        if member := self.member(number):
            self.world.release(member, drain_s=drain_s, keeps_claim=keeps_claim)

    @rule(seconds=st.sampled_from([-10, 30, 100]))
    def pause_group(self, seconds: int) -> None:
        self.world.pause_group(seconds)

    @rule(number=members)
    def crash(self, number: int) -> None:
        if member := self.member(number):
            self.world.crash(member)

    @precondition(lambda self: self.world.ghosts)
    @rule(number=members)
    def land_ghost(self, number: int) -> None:
        self.world.land_ghost(number)

    @rule(
        number=members,
        reads_all=st.booleans(),
        error_s=st.integers(-MAX_SKEW_S, MAX_SKEW_S),
        skew=st.integers(-(10**6), 10**6),
    )
    def restart(self, number: int, reads_all: bool, error_s: int, skew: int) -> None:
        client = CLIENTS[number]
        if all(m.is_dead for m in self.world.members if m.client == client):
            self.world.start(client, reads_all=reads_all, monotonic_skew_ms=skew, error_s=error_s)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


class AtMostOnceMachine(ClaimantMachine):
    delivery = Delivery.AT_MOST_ONCE


bounded = settings(
    deadline=None,
    max_examples=examples(60),
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAtLeastOnce = ClaimantMachine.TestCase
TestAtLeastOnce.settings = bounded
TestAtMostOnce = AtMostOnceMachine.TestCase
TestAtMostOnce.settings = bounded


def run(delivery: Delivery, seed: int, steps: int = 800) -> World:
    """One long run; each draws its own rates of faults."""
    draw = random.Random(seed)
    machine = ClaimantMachine()
    world = machine.world = World(delivery)
    for client in CLIENTS:
        world.start(
            client,
            reads_all=draw.random() < 0.5,
            monotonic_skew_ms=draw.randrange(10**6),
            error_s=draw.uniform(-MAX_SKEW_S, MAX_SKEW_S),
        )
    faults = draw.choice([0.0, 0.3, 1.0, 3.0])
    pace_s = draw.choice([0.5, 5, 20, 60])

    def pass_time(number: int) -> None:
        world.now_s += draw.expovariate(1 / pace_s)

    def step_clock(number: int) -> None:
        world.skew_s = draw.uniform(-MAX_SKEW_S, MAX_SKEW_S)

    def restart(number: int) -> None:
        skew = draw.randrange(10**6)
        machine.restart(number, draw.random() < 0.5, draw.randint(-30, 30), skew)

    rules: dict[Callable[[int], None], float] = {
        pass_time: 6,
        machine.claim: 5,
        lambda number: machine.read(number, draw.randint(1, 5)): 8,
        lambda number: machine.land(number, True): 8,
        machine.round_trip: 10,
        lambda number: machine.work(number, draw.randint(1, BATCH)): 8,
        lambda number: machine.finish(number, draw.randint(1, 4), draw.random() < 0.5): 6,
        lambda number: machine.release(number, draw.choice([0, 5]), draw.random() < 0.3): 0.3,
        restart: 2,
        lambda number: machine.land(number, False): faults,
        machine.lose: faults,
        machine.give_up_waiting: faults,
        machine.crash: faults / 2,
        lambda number: machine.land_ghost(number) if world.ghosts else None: faults,
        step_clock: faults / 2,
        lambda number: machine.pause_group(draw.choice([-10, 30, 100])): faults / 10,
    }
    for act in draw.choices(list(rules), list(rules.values()), k=steps):
        act(draw.randrange(3))
        world.check()
    world.settle()
    return world


@pytest.mark.parametrize("delivery", Delivery, ids=lambda delivery: delivery.value)
@pytest.mark.parametrize("part", range(examples(4)))
def test_long_runs(delivery: Delivery, part: int) -> None:
    handed = takeovers = 0
    for seed in range(part * 60, part * 60 + 60):
        try:
            world = run(delivery, seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        handed += len(world.handed) + len(world.done)
        takeovers += world.takeovers
    assert handed > 1000 and takeovers > 50, "the runs get somewhere"
