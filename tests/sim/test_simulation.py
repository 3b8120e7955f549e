"""The whole protocol, simulated: each seed breaks other things, and the logs must be in order.

What runs is what ships. A failure names its seed: ``make sim SEEDS=N..N`` shows it again.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from harness.simulation.limits import (
    Behaviour,
    Faults,
    Limits,
    TrackerSettings,
    WorkerSettings,
    draw_limits,
)
from harness.simulation.simulator import Simulation, simulate
from harness.simulation.stage import SWAPPED
from harness.simulation.states import IDLE, STATES
from tests.examples import examples

from kafkamq.queue.wire.headers import DELIVERY_COUNT, ORIGIN, REASON
from kafkamq.testing.checker import LogRecord
from kafkamq.testing.history import read_timelines

SEEDS = 125
QUICK_SEEDS = examples(SEEDS)
CHUNK = 25
# Half a million turns each, where others take some ten thousand; others reach all their states.
LONG_SEEDS = (93,)
STATE_SEEDS = 500  # all states are reached by so many
MANY_SEEDS = 3380


def check(simulation: Simulation) -> Counter[str]:
    """The verdict, as numbers."""
    verdict = simulation.verdict()
    verdict.require_ok(simulation.label)
    names = ("sent", "acked", "redelivered", "dead_lettered", "cancelled", "extra_copies")
    counts = Counter({name: getattr(verdict, name) for name in names})
    counts.update(late=verdict.late_verdicts, twice=verdict.processed_twice)
    return counts


@cache
def reached_by(first: int) -> frozenset[str]:
    """The states that a chunk of seeds reaches; fails with the first seed that is not in order."""
    reached: set[str] = set()
    for seed in set(range(first, first + CHUNK)) - set(LONG_SEEDS):
        simulation = simulate(seed)
        check(simulation)
        reached.update(simulation.reached)
    return frozenset(reached)


@pytest.mark.parametrize("first", range(0, QUICK_SEEDS, CHUNK))
def test_seeds(first: int) -> None:
    reached_by(first)


@pytest.mark.faults
@pytest.mark.parametrize("seed", LONG_SEEDS)
def test_seeds_that_take_long(seed: int) -> None:
    check(simulate(seed))


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_the_seeds_reach_every_state() -> None:
    reached = frozenset[str]().union(*(reached_by(first) for first in range(0, STATE_SEEDS, CHUNK)))
    assert sorted(STATES.union([SWAPPED]) - reached) == []


def test_what_lies_far_apart_comes_out_where_a_seek_takes_seconds() -> None:
    """Nothing of a plan came out before all of it was read, which took too long each time."""
    assert draw_limits(6704).faults.fetch_ms == 4000
    check(simulate(6704))


def test_no_more_is_due_than_a_seed_lets_be_read() -> None:
    """One START in two seconds was invented, and to read one took as long: it never settled."""
    assert draw_limits(920051).are_far_apart
    check(simulate(920051))


def test_who_tracks_in_batches_notices_partitions_that_a_broker_did_not_tell_of() -> None:
    """It began with old metadata, and nobody tracked the partition that was added before."""
    check(simulate(71002))


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + MANY_SEEDS, MANY_SEEDS // 10))
def test_many_seeds(first: int) -> None:
    for seed in range(first, first + MANY_SEEDS // 10):
        check(simulate(seed))


# ---- the same seed, the same run


def digest(simulation: Simulation) -> str:
    """Of all that stands in the logs."""
    logs: list[list[LogRecord]] = [simulation.messages, simulation.markers, simulation.dead_letters]
    return hashlib.sha256(repr((logs, simulation.turns)).encode()).hexdigest()


_DIGESTS = "import sys; from tests.sim.test_simulation import *; print(*map(digest, map(simulate, "
_DIGESTS += "map(int, sys.argv[1:]))))"


def test_a_seed_gives_the_same_logs_in_every_process() -> None:
    seeds = ("3", "5", "14", "17", "36", "53")
    found = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", _DIGESTS, *seeds]
        answer = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=120
        )
        found.append(answer.stdout.split())
    assert len(set(found[0])) == len(seeds)
    assert found[0] == found[1]
    assert found[0][0] == digest(simulate(3))
    assert draw_limits(42) == draw_limits(42) != draw_limits(43)


# ---- one thing at a time

QUIET = Limits(workers=3, messages=60, delayed_share=0.2, cancelled_share=0.3, ttl_share=0.0)
WORKER = QUIET.worker


def only(behaviour: Behaviour, share: float = 0.2) -> Limits:
    behaviours = ((Behaviour.QUICK, 1.0 - share), (behaviour, share))
    return replace(QUIET, behaviours=behaviours, delayed_share=0.0)


def behaviours_sent(simulation: Simulation, behaviour: Behaviour) -> int:
    """First copies of messages that behave so."""
    prefix = behaviour.value.encode() + b" "
    payloads = {record.value or b"" for record in simulation.messages}
    return sum(payload.startswith(prefix) for payload in payloads)


def reasons(simulation: Simulation) -> Counter[bytes]:
    return Counter(dict(letter.headers)[REASON] or b"" for letter in simulation.dead_letters)


@pytest.mark.parametrize("seed", range(examples(5)))
@pytest.mark.parametrize("batch_share", [0.0, 1.0])
@pytest.mark.parametrize("exactly_once", [False, True])
def test_without_faults_every_message_is_delivered_once(
    seed: int, batch_share: float, exactly_once: bool
) -> None:
    limits = replace(
        QUIET,
        tracker=TrackerSettings(batch_share=batch_share),
        worker=replace(WORKER, exactly_once=exactly_once),
    )
    counts = check(simulate(seed, limits))
    assert counts["acked"] + counts["cancelled"] == counts["sent"] == 60
    assert counts["redelivered"] == counts["twice"] == counts["dead_lettered"] == 0


@pytest.mark.parametrize("seed", range(examples(5)))
@pytest.mark.parametrize("behaviour", [Behaviour.SLOW, Behaviour.EXTENDS])
def test_r07_a_slow_handler_keeps_its_message(seed: int, behaviour: Behaviour) -> None:
    simulation = simulate(seed, only(behaviour, 0.5))
    counts = check(simulation)
    assert behaviours_sent(simulation, behaviour) > 10
    assert counts["acked"] == 60
    assert counts["redelivered"] == 0


@pytest.mark.parametrize("seed", range(examples(5)))
def test_r06_poison_takes_nothing_with_it_into_the_dead_letters(seed: int) -> None:
    # Several workers: a commit waits until a dead one's session is over, longer than a lease lasts.
    simulation = simulate(seed, only(Behaviour.POISON, 0.1))
    counts = check(simulation)
    poison = behaviours_sent(simulation, Behaviour.POISON)
    assert poison > 0
    assert counts["dead_lettered"] == poison
    assert counts["acked"] == 60 - poison
    assert reasons(simulation) == {b"max-deliveries": poison}


@pytest.mark.parametrize("seed", range(examples(3)))
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


@pytest.mark.parametrize("seed", range(examples(3)))
def test_r08_what_a_handler_raises_is_a_nack(seed: int) -> None:
    simulation = simulate(seed, only(Behaviour.FAILS))
    counts = check(simulation)
    assert counts["acked"] == 60
    assert counts["redelivered"] == 2 * behaviours_sent(simulation, Behaviour.FAILS)


@pytest.mark.parametrize("seed", range(examples(5)))
def test_r14_a_hanging_handler_loses_its_message_at_max_lease(seed: int) -> None:
    limits = replace(only(Behaviour.HANGS), worker=WorkerSettings(max_lease_ms=9000, handlers=12))
    simulation = simulate(seed, limits)
    counts = check(simulation)
    assert counts["redelivered"] >= behaviours_sent(simulation, Behaviour.HANGS) > 0
    assert counts["acked"] == 60


@pytest.mark.parametrize("seed", range(examples(6)))
@pytest.mark.parametrize("batch_share", [0.0, 0.5, 1.0])
def test_r17_r22_engines_take_over_and_nothing_is_copied_twice(
    seed: int, batch_share: float
) -> None:
    limits = replace(
        only(Behaviour.NACKS, 0.5),
        tracker_starts=6,
        tracker=TrackerSettings(max_actions=2, batch_share=batch_share),
        faults=Faults(task_loss_rate=0.05),
    )
    simulation = simulate(seed, limits)
    counts = check(simulation)
    assert counts["redelivered"] == 2 * behaviours_sent(simulation, Behaviour.NACKS)
    assert counts["extra_copies"] == counts["twice"] == 0


@pytest.mark.parametrize("seed", range(examples(5)))
def test_r15_engines_that_die_all_the_time(seed: int) -> None:
    faults = Faults(kill_every=300, lost_reply_rate=0.02, latency_ms=100)
    limits = replace(only(Behaviour.NACKS, 0.5), faults=faults, trackers=2, tracker_starts=3)
    simulation = simulate(seed, limits)
    check(simulation)
    assert simulation.deaths > 5


@pytest.mark.parametrize("seed", range(examples(5)))
def test_r19_schedules_are_carried_and_fire_once(seed: int) -> None:
    limits = replace(
        QUIET, delayed_share=1.0, worker=replace(WORKER, max_lease_ms=6000), retention_ms=12_000
    )
    simulation = simulate(seed, limits)
    counts = check(simulation)
    assert counts["cancelled"] > 0
    carried = sum(
        timeline.marker(at).carried_forward
        for timeline in read_timelines(simulation.markers).values()
        for (of_schedule, _), own in timeline.of_message.items()
        for at in own
        if of_schedule
    )
    assert carried > 60


@pytest.mark.parametrize("seed", range(examples(3)))
def test_r01_steps_of_the_brokers_clock_lose_nothing(seed: int) -> None:
    check(simulate(seed, replace(only(Behaviour.SLOW), faults=Faults(clock_steps=4))))


@pytest.mark.parametrize("seed", range(examples(3)))
def test_r10_what_grew_too_old_ends_in_the_dead_letters(seed: int) -> None:
    limits = replace(
        only(Behaviour.QUICK),
        ttl_share=1.0,
        workers=1,
        messages=20,
        faults=Faults(outages=1, max_outage_ms=60_000),
    )
    simulation = simulate(seed, limits)
    counts = check(simulation)
    assert counts["acked"] + counts["dead_lettered"] >= counts["sent"]
    assert reasons(simulation).keys() <= {b"expired"}


def test_r08_closing_workers_release_what_they_did_not_hand_out() -> None:
    limits = replace(
        only(Behaviour.SLOW, 0.6),
        chaos_ms=20_000,
        close_share=1.0,
        worker=replace(WORKER, handlers=1, receive_buffer=20),
    )
    released = 0
    for seed in range(3):
        simulation = simulate(seed, limits)
        assert check(simulation)["acked"] == 60
        for record in simulation.messages:
            headers = dict(record.headers)
            released += ORIGIN in headers and DELIVERY_COUNT not in headers  # it still is the first
    assert released > 0


BATCHES = replace(WORKER, batch_markers=True, receive_many=8, receive_buffer=20)


@pytest.mark.parametrize("seed", range(examples(2)))
@pytest.mark.parametrize("batch_share", [0.0, 1.0])
def test_r32_what_is_deleted_under_a_batch_is_a_dead_letter_each(
    seed: int, batch_share: float
) -> None:
    limits = replace(
        only(Behaviour.NACKS, 0.5),
        worker=BATCHES,
        tracker=TrackerSettings(batch_share=batch_share, max_actions=2),
        deletions=120,
    )
    simulation = simulate(seed, limits)
    check(simulation)
    assert reasons(simulation)[b"payload-lost"] > 0


@pytest.mark.parametrize("seed", range(examples(2)))
@pytest.mark.parametrize("batch_share", [0.0, 1.0])
def test_r32_messages_that_cannot_be_read_are_never_taken_for_lost(
    seed: int, batch_share: float
) -> None:
    """And all are delivered again."""
    limits = replace(
        only(Behaviour.NACKS, 0.5),
        worker=BATCHES,
        tracker=TrackerSettings(batch_share=batch_share),
        faults=Faults(outages=8, max_outage_ms=30_000),
    )
    simulation = simulate(seed, limits)
    counts = check(simulation)
    assert counts["redelivered"] >= 2 * behaviours_sent(simulation, Behaviour.NACKS) > 0
    assert reasons(simulation).keys() == {b"max-deliveries"}


@pytest.mark.parametrize("seed", range(examples(3)))
def test_r18_starts_that_name_nothing_hold_up_no_other_ones(seed: int) -> None:
    """Each is looked for for a minute, and the next one comes before."""
    limits = replace(only(Behaviour.NACKS, 0.5), worker=BATCHES, invented_every_ms=15_000)
    simulation = simulate(seed, limits)
    check(simulation)
    assert 0 < simulation.settled_s < 90, "simulated time, of which half a minute is for faults"


@pytest.mark.parametrize("seed", range(examples(2)))
def test_r05_a_worker_that_is_asked_for_nothing_keeps_nothing_from_others(seed: int) -> None:
    """Its application is slow for minutes, and signals interrupt what it calls."""
    worker = WorkerSettings(
        idle_ms=60_000, idle_share=0.3, max_idle_ms=12_000, max_lease_ms=200_000, max_deliveries=9
    )
    limits = Limits(worker=worker, faults=Faults(interrupt_every=20))
    simulation = simulate(2 + seed, limits)
    assert check(simulation)["sent"] == 40
    assert simulation.reached[IDLE]


@pytest.mark.parametrize("seed", range(examples(2)))
def test_r22_a_settling_transaction_that_times_out_is_made_smaller(seed: int) -> None:
    limits = Limits(
        faults=Faults(copy_ms=1500),
        marker_partitions=1,
        partitions=1,
        messages=60,
        large_share=1.0,
        delayed_share=0.9,
        is_due_together=True,
    )
    simulation = simulate(seed, limits)
    check(simulation)
    assert simulation.reached["a settlement failed"]
