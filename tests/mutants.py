"""Mutants: for each rule, code that breaks it, and the tests that must notice.

``tools/run_mutants.py`` puts each into a copy of the tree and runs its tests; one that survives is
a rule that no test guards. A mutant's old text must occur exactly once in its file, which
``tests/unit/test_mutants.py`` checks: when code moves, its mutants move with it.
"""

from __future__ import annotations

from tests.mutant_lists.mutant import Mutant
from tests.mutant_lists.of_claims import OF_CLAIMS
from tests.mutant_lists.of_entries import OF_ENTRIES
from tests.mutant_lists.of_parallel import OF_PARALLEL
from tests.mutant_lists.of_sinks import OF_SINKS
from tests.mutant_lists.of_starts import OF_STARTS
from tests.mutant_lists.of_time import OF_TIME
from tests.mutant_lists.of_trackers import OF_TRACKERS
from tests.mutant_lists.of_workers import OF_WORKERS

__all__ = ["MUTANTS", "Mutant"]

MUTANTS = [
    *OF_TIME,
    *OF_WORKERS,
    *OF_ENTRIES,
    *OF_TRACKERS,
    *OF_STARTS,
    *OF_PARALLEL,
    *OF_CLAIMS,
    *OF_SINKS,
]
