"""Runs ranges of seeds beside each other: ``python -m harness.simulation 0..9999``."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from harness.simulation.claims.run import simulate_claims
from harness.simulation.parallel.run import simulate_parallel
from harness.simulation.simulator import simulate
from harness.simulation.stage import Report

_CHUNK = 25  # seeds of one process, so that none grows
_KINDS: dict[str, Callable[[int], Report]] = {
    "markers": simulate,
    "parallel": simulate_parallel,
    "claims": simulate_claims,
}
_TURNS = ("markers", "parallel", "markers", "claims")  # of seeds, where all kinds run


@dataclass
class _Outcome:
    seeds: int = 0
    turns: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    failed: dict[int, str] = field(default_factory=dict)


def _run(seeds: range, kind: str) -> _Outcome:
    outcome = _Outcome()
    for seed in seeds:
        outcome.seeds += 1
        of = kind or _TURNS[seed % len(_TURNS)]
        try:
            simulation = _KINDS[of](seed)
            outcome.turns += simulation.turns
            outcome.reached.update(dict.fromkeys(simulation.reached, 1))
            simulation.require_ok()
        except Exception as error:  # noqa: BLE001 - the others go on, and it is told
            outcome.failed[seed] = f"{of}: {type(error).__name__}: {error}"
    return outcome


def _parse(text: str) -> range:
    first, _, last = text.partition("..")
    return range(int(first), int(last or first) + 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.simulation")
    parser.add_argument("seeds", type=_parse, help="A..B, both included")
    parser.add_argument("--kind", choices=_KINDS, default="", help="one kind; else all in turns")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--stop-after", type=int, default=20, help="failures")
    arguments = parser.parse_args()
    seeds: range = arguments.seeds
    chunks = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    total, began_s = _Outcome(), time.monotonic()
    with multiprocessing.get_context("fork").Pool(arguments.jobs, maxtasksperchild=4) as pool:
        for outcome in pool.imap_unordered(partial(_run, kind=arguments.kind), chunks):
            total.seeds += outcome.seeds
            total.turns += outcome.turns
            total.reached += outcome.reached
            total.failed |= outcome.failed
            for seed, text in outcome.failed.items():
                print(f"seed {seed}: {text}", flush=True)  # noqa: T201 - a command
            if len(total.failed) >= arguments.stop_after:
                pool.terminate()
                break
    took_s = time.monotonic() - began_s
    for name, count in sorted(total.reached.items()):
        print(f"{count:7} {name}")  # noqa: T201
    print(  # noqa: T201
        f"{total.seeds} seeds in {took_s:.0f} s ({total.seeds / took_s:.1f} seeds/s, "
        f"{total.turns / max(1, total.seeds):.0f} turns a seed), {len(total.failed)} failed"
    )
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
