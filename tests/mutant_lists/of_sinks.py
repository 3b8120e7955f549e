"""Mutants of the Kafka sink: what is written, what is a repetition, what a row is."""

from __future__ import annotations

from tests.mutant_lists.mutant import Mutant

_LEDGER = "spark/sink/ledger.py"
_ROWS = "spark/sink/rows.py"
_TESTS = ("tests/unit/test_sink_rows.py",)

OF_SINKS = [
    Mutant(
        "exactly once",
        "a batch that is written is written again",
        _LEDGER,
        "    if entry is None or entry.batch < batch:\n        return False\n",
        "    if entry is None or entry.batch <= batch:\n        return False\n",
        _TESTS,
    ),
    Mutant(
        "exactly once",
        "a checkpoint that is an older copy goes on",
        _LEDGER,
        "    if entry.batch > batch:\n",
        "    if False:\n",
        _TESTS,
    ),
    Mutant(
        "exactly once",
        "nothing of an earlier run is waited for",
        _LEDGER,
        "entry.run != run and (cut == TASKS or entry.cut != cut)",
        "entry.run == run and (cut == TASKS or entry.cut != cut)",
        _TESTS,
    ),
    Mutant(
        "exactly once",
        "a batch that was cut into other slots is taken for the same",
        _LEDGER,
        "(cut == TASKS or entry.cut != cut)",
        "(cut == TASKS)",
        _TESTS,
    ),
    Mutant(
        "exactly once",
        "headers are no part of a row",
        _ROWS,
        "            nothing if header_marks is None else header_marks,\n",
        "            nothing,\n",
        _TESTS,
    ),
    Mutant(
        "exactly once",
        "null and a column of nulls are different rows",
        _ROWS,
        "    hashes[pd.isna(cells)] = 0\n",
        "",
        _TESTS,
    ),
]
