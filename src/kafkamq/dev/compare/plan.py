"""What is compared: who works, on what, in which phases. Pure."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kafkamq.errors import ConfigError
from kafkamq.queue.rules.capabilities import CAPABILITIES
from kafkamq.types import Backend

MAX_MESSAGES = 1_000_000
MAX_HANDLER_MS = 60_000
LATENCY_MESSAGES = 300
LATENCY_INTERVAL_MS = 10
ORDER_MESSAGES = 2000
ORDER_KEYS = 200
ORDER_FAILURE = 0.02
RECOVERY_ROUNDS = 4  # for each handler
RECOVERY_HANDLER_MS = 200
MAX_RECOVERY_MESSAGES = 4000
_MIN_PAYLOAD = 64


class Contender(Enum):
    """Who works."""

    MARKERS = "markers"
    OFFSETS = "offsets"
    SHARE = "share"
    CLAIMS = "claims"
    GROUP = "group"  # a plain consumer group: one record after the other, offsets committed


@dataclass(frozen=True, kw_only=True)
class Slow:
    """Some messages take longer."""

    share: float = 0.01
    ms: int = 1000


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is the same for every contender."""

    messages: int = 5000  # of the phases that measure throughput
    # How long a handler sleeps, uniform between the two.
    handler_ms: tuple[float, float] = (0.0, 5.0)
    slow: Slow = Slow()  # the share of messages that block others, in the phase that has them
    failure: float = 0.0  # share of messages whose first delivery is given back
    keys: int = 1000  # how many there are, dealt in turn; 0: none
    processes: int = 2  # worker processes
    concurrency: int = 100  # handlers at once in each
    partitions: int = 8  # of the topic
    lease_s: float = 10.0  # redelivery timeout, and session timeout of groups (6 s at least)
    payload_bytes: int = 100  # of a message, at least 64
    keeps_order: bool = True  # let each contender keep the order that it can; False: none
    limit_s: float = 60.0  # for one phase; what has not ended by then is said
    seed: int = 1  # draws what is slow and what fails

    def __post_init__(self) -> None:
        for name, low, high in (
            ("messages", 1, MAX_MESSAGES),
            ("keys", 0, MAX_MESSAGES),
            ("processes", 1, 64),
            ("concurrency", 1, 10_000),
            ("partitions", 1, 1000),
            ("lease_s", 1.0, 3600.0),
            ("payload_bytes", _MIN_PAYLOAD, 1_000_000),
            ("limit_s", 1.0, 3600.0),
            ("failure", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value!r}: it must be {low} to {high:,}")


class PhaseKind(Enum):
    """What a phase shows."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    BLOCKING = "blocking"
    ORDER = "order"
    RECOVERY = "recovery"


@dataclass(frozen=True, slots=True)
class Item:
    """One message: how long its handler sleeps, and how many of its deliveries fail."""

    number: int
    key: str | None
    us: int
    fails: int = 0


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Messages that are sent together; with ``interval_ms``, one by one."""

    kind: PhaseKind
    items: tuple[Item, ...]
    interval_ms: int = 0

    @property
    def numbers(self) -> range:
        return range(self.items[0].number, self.items[-1].number + 1)


def backend_of_contender(contender: Contender) -> Backend | None:
    """None: none of ours."""
    return None if contender is Contender.GROUP else Backend(contender.value)


def ordering_of(contender: Contender, work: Work) -> str:
    """What stays in order: the first that its backend has, or nothing when none is wanted."""
    backend = backend_of_contender(contender)
    if backend is None:
        return "partition"
    return CAPABILITIES[backend].orders[0] if work.keeps_order else "unordered"


def handlers_at_once(contender: Contender, work: Work) -> int:
    """How many handlers can run at the same time."""
    every = work.processes * work.concurrency
    if contender is Contender.GROUP:
        return work.partitions
    return min(every, work.partitions) if ordering_of(contender, work) == "partition" else every


def phases(work: Work, contender: Contender, *, first: int = 0) -> list[Phase]:
    """All that a contender is measured by, in this order; numbers go on from phase to phase.

    The recovery has a few rounds of messages for each handler that can run at once, so that it
    takes everybody the same time.
    """
    chance = random.Random(work.seed)
    found = []
    number = first

    def add(kind: PhaseKind, drawn: Sequence[tuple[int, int]], keys: int, interval: int) -> None:
        nonlocal number
        items = tuple(
            Item(number + place, f"k{place % keys}" if keys else None, us, fails)
            for place, (us, fails) in enumerate(drawn)
        )
        number += len(items)
        found.append(Phase(kind=kind, items=items, interval_ms=interval))

    count = min(LATENCY_MESSAGES, work.messages)
    add(PhaseKind.LATENCY, [(0, 0)] * count, work.keys, LATENCY_INTERVAL_MS)
    add(PhaseKind.THROUGHPUT, _drawn(chance, work, work.messages), work.keys, 0)
    add(PhaseKind.BLOCKING, _slowed(chance, work), work.keys, 0)
    failure = max(work.failure, ORDER_FAILURE)
    count = min(ORDER_MESSAGES, work.messages)
    add(PhaseKind.ORDER, _drawn(chance, work, count, failure), min(ORDER_KEYS, count), 0)
    count = min(MAX_RECOVERY_MESSAGES, RECOVERY_ROUNDS * handlers_at_once(contender, work))
    add(PhaseKind.RECOVERY, [(RECOVERY_HANDLER_MS * 1000, 0)] * count, count, 0)
    return found


def _drawn(
    chance: random.Random, work: Work, count: int, failure: float | None = None
) -> list[tuple[int, int]]:
    low, high = (int(ms * 1000) for ms in work.handler_ms)
    share = work.failure if failure is None else failure
    failing = set(chance.sample(range(count), round(count * share)))
    return [(chance.randint(low, high), int(place in failing)) for place in range(count)]


def _slowed(chance: random.Random, work: Work) -> list[tuple[int, int]]:
    drawn = _drawn(chance, work, work.messages)
    count = max(1, round(work.messages * work.slow.share))
    for place in chance.sample(range(work.messages), min(count, work.messages)):
        drawn[place] = (work.slow.ms * 1000, drawn[place][1])
    return drawn


def encode(item: Item, *, size: int) -> bytes:
    return f"{item.number} {item.us} {item.fails} ".encode().ljust(size, b".")


def decode(payload: bytes) -> tuple[int, int, int]:
    """Number, us, fails."""
    number, us, fails, _ = payload.split(b" ", 3)
    return int(number), int(us), int(fails)


def ideal_s(items: Sequence[Item], at_once: int) -> float:
    """How long these take when so many handlers are busy all the time."""
    longest_us = max(item.us for item in items)
    return max(sum(item.us for item in items) / at_once, longest_us) / 1e6


def parse_range(text: str) -> tuple[float, float]:
    """``"0-5"`` or ``"3"``: milliseconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:-\s*(\d+(?:\.\d+)?)\s*)?", text)
    if found is None:
        raise ConfigError(f"--handler-ms is {text!r}: give milliseconds, as 0-5 or 3")
    low = float(found[1])
    high = low if found[2] is None else float(found[2])
    if not low <= high <= MAX_HANDLER_MS:
        raise ConfigError(f"--handler-ms is {text!r}: from low to high, {MAX_HANDLER_MS} at most")
    return low, high


def parse_slow(text: str) -> Slow:
    """``"1%:1000"``: the share of messages and their milliseconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*:\s*(\d+)\s*", text)
    if found is None:
        raise ConfigError(f"--slow is {text!r}: give share and milliseconds, as 1%:1000")
    share, ms = float(found[1]) / 100, int(found[2])
    if share > 1 or ms > MAX_HANDLER_MS:
        raise ConfigError(f"--slow is {text!r}: at most 100% and {MAX_HANDLER_MS} ms")
    return Slow(share=share, ms=ms)
