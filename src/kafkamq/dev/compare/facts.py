"""What histories of workers say: times, runs, order, how many were busy. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from kafkamq.dev.compare.plan import Item


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
    """One phase of one contender."""

    messages: int  # how many there were
    done: int  # how many of them have ended
    seconds: float | None  # from its begin until all had ended; None: not all have
    runs: float  # calls of the handler for each message, on average; planned failures not counted
    # From the begin until each handler's first call, ascending; None: not called.
    waits_ms: dict[int, float] = field(repr=False)
    busy: int  # handlers that ran at the same time, at most
    keys: int  # how many keys there were
    keys_in_order: int  # of these, all messages one after the other, in the order of sending


@dataclass(kw_only=True)
class Measured:
    """One contender; None where something was not measured, and ``notes`` say why."""

    contender: str  # its name
    ordering: str = ""  # what it was to keep in order
    per_second: float | None = None  # messages of the throughput phase
    # Of that phase; ``ideal_s``: the same work with every handler busy all the time.
    seconds: float | None = None
    ideal_s: float | None = None
    latency_p50_ms: float | None = None  # from send to handler, one message at a time; p99 likewise
    latency_p99_ms: float | None = None
    blocking_s: float | None = None  # with slow messages among them; ``blocking_ideal_s`` as above
    blocking_ideal_s: float | None = None
    # How long messages that are not slow then wait for their handler.
    blocked_p99_ms: float | None = None
    recovery_s: float | None = None  # from SIGKILL of a process until every message had ended
    keys_in_order: int | None = None  # of ``keys``, with failures among them
    keys: int | None = None
    # Calls of the handler for each message, over all phases but the recovery.
    runs: float | None = None
    lost: int | None = None  # messages that nobody has ended
    # In the logs for each message, beside the message; ``extra_bytes`` likewise.
    extra_records: float | None = None
    extra_bytes: float | None = None
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Of ascending values, the smallest with at least that share at or below it; None: no value."""
    if not values:
        return None
    rank = max(1, -(-len(values) * share // 1))
    return values[min(len(values), int(rank)) - 1]


def judge(items: Sequence[Item], events: Iterable[Event], *, begin_ns: int) -> PhaseFacts:
    """What became of these messages, in the order of sending, by events in any order."""
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
    """How many keys there are, and of how many all messages were worked on one after the other."""
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
