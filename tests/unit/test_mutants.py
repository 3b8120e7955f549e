"""The list of mutants fits the code: ``tools/run_mutants.py`` can apply each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.rule}-{mutant.breaks}")
def test_a_mutants_old_text_occurs_exactly_once(mutant: Mutant) -> None:
    text = (ROOT / "src/kafkamq" / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    assert mutant.old != mutant.new
    for test in mutant.tests:
        if test.startswith("tests/"):
            assert (ROOT / test).exists(), test


def test_every_rule_has_a_mutant() -> None:
    rules = {mutant.rule for mutant in MUTANTS}
    of_markers = {rule for rule in rules if rule[0] == "R" and rule[1:].isdigit()}
    assert of_markers == {f"R{number}" for number in range(1, 27)}
