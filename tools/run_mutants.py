"""Runs the mutants of ``tests/mutants.py``: each must make one of its tests fail.

Works on copies of the tree; exits with 1 when a mutant survives or cannot be judged. Options:
``--only TEXT`` (a rule like R3, or part of a description or a place), ``--jobs N``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests are not installed

from tests.mutants import MUTANTS, MisfitError, Mutant, mutated  # noqa: E402

FOLDERS = ("src", "harness", "tests", "tools")
TIMEOUT_S = 300
_FAILED = 1  # pytest: some tests failed


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant."""

    mutant: Mutant
    verdict: str  # killed, survived, or what prevents a judgement
    seconds: float


def copy_tree(target: Path) -> None:
    """What the tests need."""
    for folder in FOLDERS:  # with what is compiled: only a mutated module is compiled again
        ignored = shutil.ignore_patterns(".hypothesis")
        shutil.copytree(ROOT / folder, target / folder, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target / name)


def run_tests(root: Path, tests: Sequence[str]) -> int:
    """Exit code of pytest; -1 when it took too long."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not faults", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1
    return done.returncode


def judge(root: Path, mutant: Mutant) -> Outcome:
    """Apply the mutant in a copy of the tree, run its tests, take it back."""
    begin = time.monotonic()
    try:
        path, changed = mutated(mutant, root)
    except MisfitError as error:
        return Outcome(mutant, str(error), 0.0)
    text, times = path.read_text(encoding="utf-8"), path.stat()
    path.write_text(changed, encoding="utf-8")
    try:
        code = run_tests(root, mutant.tests)
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    # Tests that hang are tests that fail; anything else but 0 and 1 says nothing about the rule.
    verdict = {0: "survived", _FAILED: "killed", -1: "killed"}.get(
        code, f"pytest exits with {code}"
    )
    return Outcome(mutant, verdict, time.monotonic() - begin)


def run(mutants: Sequence[Mutant], jobs: int) -> list[Outcome]:
    """Judge all, several at a time, each worker in a copy of its own."""
    copies: SimpleQueue[Path] = SimpleQueue()
    broken: set[tuple[str, ...]] = set()  # tests that fail without any mutant

    def whole(tests: tuple[str, ...]) -> None:
        root = copies.get()
        code = run_tests(root, tests)
        copies.put(root)
        if code != 0:
            broken.add(tests)
            print(f"{tests} fail without any mutant (pytest exits with {code})", flush=True)

    def one(mutant: Mutant) -> Outcome:
        if mutant.tests in broken:
            return Outcome(mutant, "its tests fail without it", 0.0)
        root = copies.get()
        try:
            outcome = judge(root, mutant)
        finally:
            copies.put(root)
        mark = "ok  " if outcome.verdict == "killed" else "FAIL"
        text = f"{mark} {mutant.rule:4} {mutant.breaks}: {outcome.verdict}"
        print(f"{text} ({outcome.seconds:.1f} s)", flush=True)
        return outcome

    with tempfile.TemporaryDirectory(prefix="kafkamq-mutants-") as folder:
        for number in range(jobs):
            copy_tree(Path(folder) / str(number))
            copies.put(Path(folder) / str(number))
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(whole, sorted({mutant.tests for mutant in mutants})))
            return list(pool.map(one, mutants))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a rule like R3, or part of the description")
    parser.add_argument("--jobs", type=int, default=max(1, os.cpu_count() or 1))
    options = parser.parse_args()
    mutants = [
        mutant
        for mutant in MUTANTS
        if options.only in ("", mutant.rule)
        or options.only in mutant.breaks
        or options.only in f"{mutant.module}:{mutant.function}"
    ]
    begin = time.monotonic()
    outcomes = run(mutants, options.jobs)
    bad = [outcome for outcome in outcomes if outcome.verdict != "killed"]
    for outcome in bad:
        print(f"{outcome.mutant.rule}: {outcome.mutant.breaks}: {outcome.verdict}")
    seconds = time.monotonic() - begin
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} mutants killed in {seconds:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
