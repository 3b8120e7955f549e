"""Rows of ``benchmarks/parallel.py``: ``concurrency="auto"`` beside the best fixed setting.

Each load of the table is worked off with some fixed settings, and with "auto". What counts are the
records a second of some s, after 5 s in which "auto" may find its limit (a fixed setting has 1 s to
begin); where all is done earlier, those of the whole. The best fixed setting is measured again
behind each round of "auto", as other programs may have slowed the first one down.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.rows import Row

from kafkamq import ParallelConsumer

__all__ = ["AutoCase", "auto_rows"]

GOAL = 0.9
FOUND_S = 5.0
BEGIN_S = 1.0
MEASURED_S = 4.0
SETTINGS = (4, 16, 50, 100, 200)
_TURN_S = 0.005


@dataclass(frozen=True)
class AutoCase:
    """A load that lasts, and how it is worked off."""

    name: str
    topic: str
    messages: int
    ordering: str
    handler: Callable[..., Any]
    processes: int = 0

    @property
    def row(self) -> str:
        """What its row's name begins with."""
        return f"{self.name}, auto beside the best fixed setting"


def rate(servers: str, case: AutoCase, concurrency: int | str, begin_s: float) -> float:
    """Records a second, once it has begun."""
    options: dict[str, Any] = {"processes": case.processes}
    if case.processes and isinstance(concurrency, int):
        options["threads"] = max(1, concurrency // case.processes)
    consumer = ParallelConsumer(
        case.topic,
        group_id=f"auto-{uuid.uuid4().hex}",
        bootstrap_servers=servers,
        ordering=case.ordering,
        concurrency=concurrency,
        **options,
    )
    stats = consumer._engine.stats
    with consumer:
        consumer.poll(case.handler)
        while not stats.processed:
            time.sleep(_TURN_S)
        began_s = time.perf_counter()
        done = _look(stats, case.messages, began_s + begin_s)
        from_s = time.perf_counter()
        if done >= case.messages:
            return done / (from_s - began_s)
        _look(stats, case.messages, from_s + MEASURED_S)
        return (stats.processed - done) / (time.perf_counter() - from_s)


def _look(stats: Any, messages: int, until_s: float) -> int:
    while stats.processed < messages and time.perf_counter() < until_s:
        time.sleep(_TURN_S)
    return int(stats.processed)


def auto_rows(servers: str, cases: list[AutoCase], rounds: int) -> list[Row]:
    """A row for each; the peer is the best fixed setting."""
    found = []
    for case in cases:
        rates = {setting: rate(servers, case, setting, BEGIN_S) for setting in SETTINGS}
        best = max(rates, key=lambda setting: rates[setting])
        ours, fixed = [], [rates[best]]
        for _ in range(rounds):
            ours.append(rate(servers, case, "auto", FOUND_S))
            fixed.append(rate(servers, case, best, BEGIN_S))
        mine, peer = statistics.median(ours), statistics.median(fixed)
        name = f"{case.row} ({best})"
        found.append(Row(name, mine, peer, mine / peer, "messages/s", GOAL, mine >= GOAL * peer))
    return found
