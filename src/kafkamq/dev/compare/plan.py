"""What is compared: who works, on what, in which phases; and what histories say of it. Pure."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any

from kafkamq.dev.history import Event
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
RECOVERY_ROUNDS = 4
RECOVERY_HANDLER_MS = 200
MAX_RECOVERY_MESSAGES = 4000
_MIN_PAYLOAD = 64


class Contender(Enum):
    MARKERS = "markers"
    OFFSETS = "offsets"
    SHARE = "share"
    CLAIMS = "claims"
    # A plain consumer group: one record after the other, offsets committed.
    GROUP = "group"


@dataclass(frozen=True, kw_only=True)
class Slow:
    share: float = 0.01
    ms: int = 1000


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


def _field(default: Any, flag: str, says: str, low: float = 0, high: float = 0, **more: Any) -> Any:
    """Return a field of `Work` and the option of ``kafkamq compare`` that sets it; ``high`` 0: no
    limits.

    ``parse`` makes the value of the option's text, which is ``text`` by default.
    """
    return field(
        default=default, metadata={"flag": flag, "help": says, "low": low, "high": high, **more}
    )


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is the same for every contender."""

    messages: int = _field(5000, "--messages", "Messages of each phase.", 1, MAX_MESSAGES)
    handler_ms: tuple[float, float] = _field(
        (0.0, 5.0),
        "--handler-ms",
        "Milliseconds of a handler, drawn evenly.",
        parse=parse_range,
        text="0-5",
        metavar="LOW-HIGH",
    )
    slow: Slow = _field(  # noqa: RUF009 - it makes a field
        Slow(),
        "--slow",
        "Slow messages of one phase: share and ms.",
        parse=parse_slow,
        text="1%:1000",
        metavar="SHARE%:MS",
    )
    failure: float = _field(
        0.0, "--failure-rate", "Share of messages whose first delivery fails.", 0.0, 1.0
    )
    keys: int = _field(1000, "--keys", "Message keys, used in turn; 0: none.", 0, MAX_MESSAGES)
    processes: int = _field(2, "--workers", "Number of worker processes.", 1, 64)
    concurrency: int = _field(100, "--concurrency", "Handlers at once in each process.", 1, 10_000)
    partitions: int = _field(8, "--partitions", "Partitions of the topics.", 1, 1000)
    payload_bytes: int = _field(100, "--payload", "Bytes of a message.", _MIN_PAYLOAD, 1_000_000)
    lease_s: float = _field(
        10.0,
        "--lease",
        "Redelivery timeout and session timeout of groups, in seconds.",
        1.0,
        3600.0,
    )
    keeps_order: bool = _field(
        True, "--order/--no-order", "Keep order by key in backends that can."
    )
    limit_s: float = _field(
        60.0, "--limit", "End each phase of a backend after this many seconds.", 1.0, 3600.0
    )
    seed: int = 1

    def __post_init__(self) -> None:
        for each in fields(self):
            value, high = getattr(self, each.name), each.metadata.get("high")
            if high and not each.metadata["low"] <= value <= high:
                limits = f"{each.metadata['low']} to {high:,}"
                raise ConfigError(f"{each.name} is {value!r}: it must be {limits}")


class PhaseKind(Enum):
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


def ordering_of(contender: Contender, work: Work) -> str:
    """Say what stays in order: the first that its backend has, or nothing when none is wanted."""
    if contender is Contender.GROUP:
        return "partition"
    backend = Backend(contender.value)
    return CAPABILITIES[backend].orders[0] if work.keeps_order else "unordered"


def handlers_at_once(contender: Contender, work: Work) -> int:
    every = work.processes * work.concurrency
    if contender is Contender.GROUP:
        return work.partitions
    return min(every, work.partitions) if ordering_of(contender, work) == "partition" else every


def phases(work: Work, contender: Contender, *, first: int = 0) -> list[Phase]:
    """Return all that a contender is measured by, in this order; numbers go on from phase to phase.

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
    slowed = _drawn(chance, work, work.messages)
    count = min(work.messages, max(1, round(work.messages * work.slow.share)))
    for place in chance.sample(range(work.messages), count):
        slowed[place] = (work.slow.ms * 1000, slowed[place][1])
    add(PhaseKind.BLOCKING, slowed, work.keys, 0)
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


def encode(item: Item, *, size: int) -> bytes:
    return f"{item.number} {item.us} {item.fails} ".encode().ljust(size, b".")


def decode(payload: bytes) -> tuple[int, int, int]:
    """Number, us, fails."""
    number, us, fails, _ = payload.split(b" ", 3)
    return int(number), int(us), int(fails)


def ideal_s(items: Sequence[Item], at_once: int) -> float:
    """Return how long these take when so many handlers are busy all the time."""
    longest_us = max(item.us for item in items)
    return max(sum(item.us for item in items) / at_once, longest_us) / 1e6


@dataclass(frozen=True, kw_only=True)
class PhaseFacts:
    messages: int
    done: int
    # From its begin until all had ended; None: not all have.
    seconds: float | None
    # Calls of the handler for each message, on average; planned failures are not counted.
    runs: float
    # From the begin until each handler's first call, ascending; None: not called.
    waits_ms: dict[int, float] = field(repr=False)
    busy: int
    keys: int
    keys_in_order: int


@dataclass(kw_only=True)
class Measured:
    """One contender; None where something was not measured, and ``notes`` say why."""

    contender: str
    ordering: str = ""
    per_second: float | None = None
    # Of that phase; ``ideal_s``: the same work with every handler busy all the time.
    seconds: float | None = None
    ideal_s: float | None = None
    latency_p50_ms: float | None = None
    latency_p99_ms: float | None = None
    blocking_s: float | None = None
    blocking_ideal_s: float | None = None
    # How long messages that are not slow then wait for their handler.
    blocked_p99_ms: float | None = None
    recovery_s: float | None = None
    keys_in_order: int | None = None
    keys: int | None = None
    # Calls of the handler for each message, over all phases but the recovery.
    runs: float | None = None
    lost: int | None = None
    # In the logs for each message, beside the message; ``extra_bytes`` likewise.
    extra_records: float | None = None
    extra_bytes: float | None = None
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest of ascending values with at least that share at or below it."""
    if not values:
        return None
    rank = max(1, -(-len(values) * share // 1))
    return values[min(len(values), int(rank)) - 1]


def judge(items: Sequence[Item], events: Iterable[Event], *, begin_s: float) -> PhaseFacts:
    """Return what became of these messages, in the order of sending, by events in any order."""
    wanted = {item.number: item for item in items}
    ours = sorted(
        (event for event in events if event["id"] in wanted), key=lambda event: event.time_s
    )
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    calls = Counter[int]()
    for event in ours:
        if event.op == "begin":
            begins.setdefault(event["id"], event.time_s)
            calls[event["id"]] += 1
        elif event.op == "end":
            ends.setdefault(event["id"], event.time_s)
    planned = sum(item.fails for item in items)
    keys, in_order = keys_in_order(items, begins, ends)
    is_done = len(ends) == len(items)
    return PhaseFacts(
        messages=len(items),
        done=len(ends),
        seconds=max(ends.values()) - begin_s if is_done else None,
        runs=(calls.total() - planned) / len(items),
        waits_ms={number: (at_s - begin_s) * 1000 for number, at_s in begins.items()},
        busy=max_busy(ours),
        keys=keys,
        keys_in_order=in_order,
    )


def keys_in_order(
    items: Iterable[Item], begins: Mapping[int, float], ends: Mapping[int, float]
) -> tuple[int, int]:
    """Return how many keys there are, and how many had their messages one after the other."""
    last: dict[str, float] = {}
    wrong: set[str] = set()
    for item in items:
        if item.key is None:
            continue
        begun, ended = begins.get(item.number), ends.get(item.number)
        if begun is None or ended is None or begun < last.get(item.key, 0):
            wrong.add(item.key)
        last[item.key] = max(last.get(item.key, 0), ended or 0)
    return len(last), len(last) - len(wrong)


def max_busy(events: Iterable[Event]) -> int:
    """Return the most handlers that ran at once, by events in the order of their times."""
    busy = most = 0
    running: set[tuple[str, int, int]] = set()
    for event in events:
        call = (event.process, event["id"], event["attempt"])
        if event.op == "begin":
            if call not in running:
                running.add(call)
                busy += 1
                most = max(most, busy)
        elif call in running:
            running.remove(call)
            busy -= 1
    return most
