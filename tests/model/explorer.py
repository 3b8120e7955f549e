"""Goes everywhere from a beginning, but only a few steps: breadth first, each state once."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

__all__ = ["Act", "Event", "explore", "naming", "skew", "wait"]


class World(Protocol):
    """What can be explored; it can be pickled."""

    now_s: float
    skew_s: float

    def check(self) -> None:
        """Fails an assertion where something is broken."""


W = TypeVar("W", bound=World)
Act = Callable[[W], None]
Event = tuple[str, Act[W]]


def wait(seconds: float) -> Callable[[World], None]:
    """Time passes."""

    def act(world: World) -> None:
        world.now_s += seconds

    return act


def skew(seconds: float) -> Callable[[World], None]:
    """The broker's clock steps."""

    def act(world: World) -> None:
        world.skew_s = seconds

    return act


@contextmanager
def naming(path: Iterable[str]) -> Iterator[None]:
    """What fails names the events that led there."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{error}: {', '.join(path)}") from error


def explore(
    beginning: W, events: Callable[[W], Iterable[Event[W]]], *, depth: int, max_states: int
) -> list[tuple[bytes, tuple[str, ...]]]:
    """The states behind ``depth`` events that no shorter way leads to, pickled, and their ways.

    ``events`` says what may happen in a state; every state is checked.
    """
    layer: list[tuple[bytes, tuple[str, ...]]] = [(pickle.dumps(beginning), ())]
    seen = {state for state, _ in layer}
    for _ in range(depth):
        following: list[tuple[bytes, tuple[str, ...]]] = []
        for state, path in layer:
            for name, act in events(pickle.loads(state)):
                world: W = pickle.loads(state)
                way = (*path, name)
                with naming(way):
                    act(world)
                    world.check()
                after = pickle.dumps(world)
                if after not in seen and len(seen) < max_states:
                    seen.add(after)
                    following.append((after, way))
        layer = following
    return layer
