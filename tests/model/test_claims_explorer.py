"""Every sequence of a few events between two clients, one crash and one step of the clock.

Breadth first from a partition that client a holds and works on, while client b wants it. Where the
random drivers of ``test_claimant_model`` go far, this goes everywhere, but only a few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.model.claim_world import Member, World
from tests.model.explorer import Event, explore, skew, wait

from kafkamq.claims.rules.steps import Delivery, Phase

DEPTH = 4
SKEW_S = 30
MAX_STATES = 12_000


def beginning(delivery: Delivery, silent_s: float) -> World:
    """Client a works, has a write under way, and has done nothing for ``silent_s``."""
    world = World(delivery)
    for client in "ab":
        world.start(client, reads_all=True, monotonic_skew_ms=0, error_s=0)
    first = world.members[0]
    while first.claimant is None or first.claimant.phase is not Phase.OWNING:
        world.claim(first)
        world.land(first)
        world.read(first)
    world.work(first, 1)
    world.now_s += 30
    world.plan(first)
    assert first.in_flight
    world.now_s += silent_s
    return world


def member(world: World, client: str) -> Member | None:
    return next((m for m in world.members if m.client == client and not m.is_dead), None)


def of(client: str, act: Callable[[World, Member], None]) -> Callable[[World], None]:
    def perform(world: World) -> None:
        found = member(world, client)
        assert found is not None, "only living members act"
        act(world, found)

    return perform


def look(world: World, found: Member) -> None:
    world.read(found)
    world.claim(found)


def work(world: World, found: Member) -> None:
    world.work(found, 1)
    world.finish_messages(found, 1, in_order=True)


def round_trip(world: World, found: Member) -> None:
    for _ in range(4):
        while found.in_flight:
            world.land(found)
        look(world, found)


def restart(client: str) -> Callable[[World], None]:
    return lambda world: world.start(client, reads_all=True, monotonic_skew_ms=0, error_s=0)


def events(world: World) -> Iterator[Event[World]]:
    yield "59 s pass", wait(59)
    yield "61 s pass", wait(61)
    if not world.skew_s:
        yield "the clock steps ahead", skew(SKEW_S)
        yield "the clock steps back", skew(-SKEW_S)
    if world.ghosts:
        yield "a dead one's write lands", lambda world: world.land_ghost(0)
    for client in "ab":
        found = member(world, client)
        if found is None:
            yield f"{client} starts again", restart(client)
            continue
        yield f"{client} reads and plans", of(client, look)
        yield f"{client} does all it can", of(client, round_trip)
        if found.in_flight:
            yield f"{client}'s write lands", of(client, World.land)
            yield f"{client}'s write is late", of(client, World.give_up_waiting)
        if found.claimant is not None and found.claimant.phase is Phase.OWNING:
            yield f"{client} works", of(client, work)
        if not world.crashes:
            yield f"{client} crashes", of(client, World.crash)


@pytest.mark.slow
@pytest.mark.parametrize("silent_s", [0, 88])
@pytest.mark.parametrize("delivery", Delivery, ids=lambda delivery: delivery.value)
def test_no_short_sequence_breaks_anything(delivery: Delivery, silent_s: float) -> None:
    found = explore(beginning(delivery, silent_s), events, depth=DEPTH, max_states=MAX_STATES)
    assert any("b does all it can" in path for _, path in found)
