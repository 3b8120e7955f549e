"""The whole protocol, simulated: each seed breaks other things, and the logs must be in order.

A failure names its seed: ``simulate(SEED).verdict()`` shows it again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from tests.examples import examples

from kafkamq.queue.wire.headers import DELIVERY_COUNT, ORIGIN, REASON
from kafkamq.testing.engines import EngineSettings
from kafkamq.testing.history import Life, Timeline, read_timelines
from kafkamq.testing.simulator import Limits, Simulation, draw_limits, simulate
from kafkamq.testing.workers import Behaviour, WorkerSettings
from kafkamq.testing.world import Faults
from kafkamq.types import MarkerType

SEEDS = examples(200)
CHUNK = 20
MANY_SEEDS = 3000


def check(simulation: Simulation) -> Counter[str]:
    """The verdict, as numbers."""
    assert simulation.settled_ms >= 0, f"{simulation.label}it never settled"
    verdict = simulation.verdict()
    verdict.require_ok(simulation.label)
    check_told_in_time(simulation)
    names = ("sent", "acked", "redelivered", "dead_lettered", "cancelled", "extra_copies")
    counts = Counter({name: getattr(verdict, name) for name in names})
    counts.update(late=verdict.late_verdicts, twice=verdict.processed_twice)
    return counts


def check_told_in_time(simulation: Simulation) -> None:
    """R9: who was told that his ACK came in time was not wrong, if his START was the only one."""
    if simulation.limits.clock_steps:
        return
    told = {(ack.marker_partition, ack.marker_offset) for ack in simulation.acks if ack.is_in_time}
    for timeline in read_timelines(simulation.records(simulation.topics.markers)).values():
        for life in timeline.lives():
            for at in life.late_at:
                place = (timeline.partition, timeline.offsets[at])
                if place in told and life.why and not life.is_extra:
                    assert starts_before(timeline, life, at) > 1, f"{simulation.label}{place}"


def starts_before(timeline: Timeline, life: Life, at: int) -> int:
    own = timeline.of_message[life.of_schedule, life.message_id]
    return sum(timeline.marker(i).type is MarkerType.START for i in own if i < at)


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_seeds(first: int) -> None:
    for seed in range(first, first + CHUNK):
        check(simulate(seed))


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + MANY_SEEDS, MANY_SEEDS // 10))
def test_many_seeds(first: int) -> None:
    for seed in range(first, first + MANY_SEEDS // 10):
        check(simulate(seed))


def test_the_seeds_reach_what_can_happen() -> None:
    """Of some seeds with faults: nothing that the simulation offers stays unused."""
    seen: Counter[str] = Counter()
    deaths = 0
    for seed in (3, 5, 8, 11, 27, 49, 63, 90, 100, 119):
        simulation = simulate(seed)
        seen += check(simulation)
        deaths += simulation.deaths
    assert deaths > 100
    assert min(seen[name] for name in ("redelivered", "dead_lettered", "cancelled", "late")) > 5
    assert seen["extra_copies"] > 0


# ---- one thing at a time

QUIET = Limits(workers=3, messages=60, delayed_share=0.2, cancelled_share=0.3, ttl_share=0.0)


def only(behaviour: Behaviour, share: float = 0.2) -> Limits:
    behaviours = ((Behaviour.QUICK, 1.0 - share), (behaviour, share))
    return replace(QUIET, behaviours=behaviours, delayed_share=0.0)


def behaviours_sent(simulation: Simulation, behaviour: Behaviour) -> int:
    """First copies of messages that behave so."""
    prefix = behaviour.value.encode() + b" "
    numbers = {
        record.value
        for record in simulation.records(simulation.topics.messages)
        if (record.value or b"").startswith(prefix)
    }
    return len(numbers)


def reasons(simulation: Simulation) -> Counter[bytes]:
    letters = simulation.records(simulation.topics.dead_letters)
    return Counter(dict(letter.headers)[REASON] or b"" for letter in letters)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("batch_share", [0.0, 1.0])
def test_without_faults_every_message_is_delivered_once(seed: int, batch_share: float) -> None:
    counts = check(simulate(seed, replace(QUIET, batch_share=batch_share)))
    assert counts["acked"] + counts["cancelled"] == counts["sent"] == 60
    assert counts["redelivered"] == counts["twice"] == counts["dead_lettered"] == 0


@pytest.mark.parametrize("seed", range(5))
def test_r07_a_slow_handler_keeps_its_message(seed: int) -> None:
    simulation = simulate(seed, only(Behaviour.SLOW, 0.5))
    counts = check(simulation)
    assert behaviours_sent(simulation, Behaviour.SLOW) > 10
    assert counts["acked"] == 60
    assert counts["redelivered"] == 0


@pytest.mark.parametrize("seed", range(5))
def test_r06_poison_takes_nothing_with_it_into_the_dead_letters(seed: int) -> None:
    simulation = simulate(seed, only(Behaviour.POISON, 0.1))
    counts = check(simulation)
    poison = behaviours_sent(simulation, Behaviour.POISON)
    assert poison > 0
    assert counts["dead_lettered"] == poison
    assert counts["acked"] == 60 - poison
    assert reasons(simulation) == {b"max-deliveries": poison}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [(Behaviour.REJECTS, b"rejected"), (Behaviour.NACKS, b"max-deliveries")],
)
def test_r08_verdicts_do_what_they_say(seed: int, behaviour: Behaviour, reason: bytes) -> None:
    simulation = simulate(seed, only(behaviour))
    counts = check(simulation)
    count = behaviours_sent(simulation, behaviour)
    assert reasons(simulation) == {reason: count}
    assert counts["redelivered"] == (0 if behaviour is Behaviour.REJECTS else 2 * count)


@pytest.mark.parametrize("seed", range(5))
def test_r14_a_hanging_handler_loses_its_message_at_max_lease(seed: int) -> None:
    limits = replace(only(Behaviour.HANGS), worker=WorkerSettings(max_lease_ms=9000, handlers=12))
    simulation = simulate(seed, limits)
    counts = check(simulation)
    assert counts["redelivered"] >= behaviours_sent(simulation, Behaviour.HANGS) > 0
    assert counts["acked"] == 60


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("batch_share", [0.0, 0.5, 1.0])
def test_r17_r22_engines_take_over_and_nothing_is_copied_twice(
    seed: int, batch_share: float
) -> None:
    limits = replace(
        only(Behaviour.NACKS, 0.5),
        engine_starts=6,
        batch_share=batch_share,
        engine=EngineSettings(max_actions=2, task_failure_rate=0.05),
    )
    simulation = simulate(seed, limits)
    counts = check(simulation)
    assert counts["redelivered"] == 2 * behaviours_sent(simulation, Behaviour.NACKS)
    assert counts["extra_copies"] == counts["twice"] == 0


@pytest.mark.parametrize("seed", range(5))
def test_r15_engines_that_die_all_the_time(seed: int) -> None:
    limits = replace(
        only(Behaviour.NACKS, 0.5),
        faults=Faults(crash_rate=0.004, lost_reply_rate=0.02, zombie_rate=1.0, latency_ms=100),
        engine_starts=3,
    )
    check(simulate(seed, limits))


@pytest.mark.parametrize("seed", range(5))
def test_r19_schedules_are_carried_and_fire_once(seed: int) -> None:
    limits = replace(
        QUIET,
        delayed_share=1.0,
        engine=EngineSettings(carry_after_ms=3000),
        faults=Faults(crash_rate=0.0005),
    )
    simulation = simulate(seed, limits)
    counts = check(simulation)
    assert counts["cancelled"] > 0
    carried = sum(
        timeline.marker(at).carried_forward
        for timeline in read_timelines(simulation.records(simulation.topics.markers)).values()
        for (of_schedule, _), own in timeline.of_message.items()
        for at in own
        if of_schedule
    )
    assert carried > 60


@pytest.mark.parametrize("seed", range(3))
def test_r01_steps_of_the_brokers_clock_lose_nothing(seed: int) -> None:
    check(simulate(seed, replace(only(Behaviour.SLOW), clock_steps=4)))


@pytest.mark.parametrize("seed", range(3))
def test_r10_what_grew_too_old_ends_in_the_dead_letters(seed: int) -> None:
    limits = replace(only(Behaviour.QUICK), ttl_share=1.0, workers=0, engine_starts=1)
    late_workers = replace(limits, workers=1, outages=1, max_outage_ms=60_000, messages=20)
    simulation = simulate(seed, late_workers)
    counts = check(simulation)
    assert counts["acked"] + counts["dead_lettered"] >= counts["sent"]
    assert reasons(simulation).keys() <= {b"expired"}


def test_r08_closing_workers_release_what_they_did_not_hand_out() -> None:
    limits = replace(
        only(Behaviour.SLOW, 0.6),
        chaos_ms=20_000,
        close_share=1.0,
        worker=WorkerSettings(handlers=1, batch=20),
    )
    released = 0
    for seed in range(3):
        simulation = simulate(seed, limits)
        assert check(simulation)["acked"] == 60
        for record in simulation.records(simulation.topics.messages):
            headers = dict(record.headers)
            released += ORIGIN in headers and DELIVERY_COUNT not in headers  # it still is the first
    assert released > 0


def test_a_seed_is_reproducible() -> None:
    first, second = simulate(42), simulate(42)
    for topic in (first.topics.messages, first.topics.markers, first.topics.dead_letters):
        assert first.records(topic) == second.records(topic)
    assert draw_limits(42) == draw_limits(42) != draw_limits(43)
