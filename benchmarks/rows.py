"""The rows that every benchmark prints, for people and as JSON."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

__all__ = ["IS_BRIEF", "Row", "finish", "scaled", "show"]

SCALE = float(os.environ.get("BENCH_SCALE", "1"))
"""Of all sizes. Below 1 the figures show that each row still measures, and nothing else."""
IS_BRIEF = SCALE < 1
"""Then nothing is run only to be warm."""


def scaled(size: int, *, least: int = 1) -> int:
    """How large it is in this run."""
    return max(least, round(size * SCALE))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result."""

    row: str
    ours: float | None  # None: not done in time
    peer: float | None
    ratio: float | None
    unit: str
    goal: float | None
    ok: bool


def show(*rows: Row) -> None:
    """Rows for people, on stderr, as they come."""
    for row in rows:
        ours = "not done in time" if row.ours is None else f"{_number(row.ours)} {row.unit}"
        peer = "" if row.peer is None else f"  peer {_number(row.peer)}"
        ratio = "" if row.ratio is None else f"  ratio {row.ratio:.3g}"
        goal = "" if row.goal is None else f"  goal {row.goal:g} {'ok' if row.ok else 'MISSED'}"
        print(f"{row.row:58} {ours}{peer}{ratio}{goal}", file=sys.stderr, flush=True)


def finish(rows: Sequence[Row], *, as_json: bool) -> int:
    """The last line, if it is wanted; the exit code: 1 when a goal is missed.

    Of a run that is scaled down only what is no number is wrong.
    """
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
    if IS_BRIEF:
        return int(not all(row.ours is not None and math.isfinite(row.ours) for row in rows))
    return 0 if all(row.ok for row in rows) else 1


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
