"""What histories of workers say: times, runs, order, how many were busy. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from kafkamq.dev.compare.plan import Item

__all__ = [
    "Event",
    "Kind",
    "Measured",
    "PhaseFacts",
    "judge",
    "keys_in_order",
    "max_busy",
    "percentile",
]


class Kind(Enum):
    """What a handler wrote; the values are in files."""

    BEGIN = 1
    END = 2  # the message is done; its ack follows
    FAIL = 3  # it is given back


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a worker's history; ``at_ns`` on this machine's monotonic clock."""

    number: int
    at_ns: int
    kind: Kind
    attempt: int
    process: int


@dataclass(frozen=True, kw_only=True)
class PhaseFacts:
    """One phase of one contender.

    Attributes:
        messages: How many there were.
        done: How many of them have ended.
        seconds: From its begin until all had ended; None: not all have.
        runs: Calls of the handler for each message, on average; planned failures not counted.
        waits_ms: From the begin until each handler's first call, ascending; None: not called.
        busy: Handlers that ran at the same time, at most.
        keys: How many keys there were.
        keys_in_order: Of these, all messages one after the other, in the order of sending.
    """

    messages: int
    done: int
    seconds: float | None
    runs: float
    waits_ms: dict[int, float] = field(repr=False)
    busy: int
    keys: int
    keys_in_order: int


@dataclass(kw_only=True)
class Measured:
    """One contender; None where something was not measured, and ``notes`` say why.

    Attributes:
        contender: Its name.
        ordering: What it was to keep in order.
        per_second: Messages of the throughput phase.
        seconds: Of that phase; ``ideal_s``: the same work with every handler busy all the time.
        latency_p50_ms: From send to handler, one message at a time; p99 likewise.
        blocking_s: With slow messages among them; ``blocking_ideal_s`` as above.
        blocked_p99_ms: How long messages that are not slow then wait for their handler.
        recovery_s: From SIGKILL of a process until every message had ended.
        keys_in_order: Of ``keys``, with failures among them.
        runs: Calls of the handler for each message, over all phases but the recovery.
        lost: Messages that nobody has ended.
        extra_records: In the logs for each message, beside the message; ``extra_bytes`` likewise.
    """

    contender: str
    ordering: str = ""
    per_second: float | None = None
    seconds: float | None = None
    ideal_s: float | None = None
    latency_p50_ms: float | None = None
    latency_p99_ms: float | None = None
    blocking_s: float | None = None
    blocking_ideal_s: float | None = None
    blocked_p99_ms: float | None = None
    recovery_s: float | None = None
    keys_in_order: int | None = None
    keys: int | None = None
    runs: float | None = None
    lost: int | None = None
    extra_records: float | None = None
    extra_bytes: float | None = None
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Of ascending values, the smallest with at least that share at or below it; None: no value."""
    if not values:
        return None
    rank = max(1, -(-len(values) * share // 1))
    return values[min(len(values), int(rank)) - 1]


def judge(items: Sequence[Item], events: Iterable[Event], *, begin_ns: int) -> PhaseFacts:
    """What became of these messages.

    Args:
        items: What was sent, in that order.
        events: Of any messages, in any order.
        begin_ns: When the work could begin.
    """
    wanted = {item.number: item for item in items}
    ours = sorted(
        (event for event in events if event.number in wanted), key=lambda event: event.at_ns
    )
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    calls = Counter[int]()
    for event in ours:
        if event.kind is Kind.BEGIN:
            begins.setdefault(event.number, event.at_ns)
            calls[event.number] += 1
        elif event.kind is Kind.END:
            ends.setdefault(event.number, event.at_ns)
    planned = sum(item.fails for item in items)
    keys, in_order = keys_in_order(items, begins, ends)
    is_done = len(ends) == len(items)
    return PhaseFacts(
        messages=len(items),
        done=len(ends),
        seconds=(max(ends.values()) - begin_ns) / 1e9 if is_done else None,
        runs=(calls.total() - planned) / len(items),
        waits_ms={number: (at - begin_ns) / 1e6 for number, at in begins.items()},
        busy=max_busy(ours),
        keys=keys,
        keys_in_order=in_order,
    )


def keys_in_order(
    items: Iterable[Item], begins: Mapping[int, int], ends: Mapping[int, int]
) -> tuple[int, int]:
    """How many keys there are, and of how many all messages were worked on one after the other.

    Args:
        items: In the order of sending; those without a key do not count.
        begins: When each was begun first.
        ends: When each had ended first.
    """
    last: dict[str, int] = {}
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
    """The most handlers that ran at once; ``events`` by time. A killed process's end with it."""
    busy = most = 0
    running: set[tuple[int, int, int]] = set()
    for event in events:
        place = (event.process, event.number, event.attempt)
        if event.kind is Kind.BEGIN:
            if place not in running:
                running.add(place)
                busy += 1
                most = max(most, busy)
        elif place in running:
            running.remove(place)
            busy -= 1
    return most
