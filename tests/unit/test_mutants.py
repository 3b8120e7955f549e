"""The list of mutants fits the code: ``tools/run_mutants.py`` can apply each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.mutants import MUTANTS, MisfitError, Mutant, mutated, place

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.rule}-{mutant.breaks}")
def test_a_mutant_fits_exactly_one_place(mutant: Mutant) -> None:
    place(mutant)


def test_each_breaks_its_rule_in_its_own_way() -> None:
    assert len({(mutant.rule, mutant.breaks) for mutant in MUTANTS}) == len(MUTANTS)


def test_every_rule_has_a_mutant() -> None:
    rules = {mutant.rule for mutant in MUTANTS}
    of_markers = {rule for rule in rules if rule[0] == "R" and rule[1:].isdigit()}
    assert of_markers == {f"R{number}" for number in (*range(1, 35), 37, 38)}


SOURCE = """
class Clock:
    def advance(self, ms):
        if ms < 0:  # backwards
            return 0
        self.now += ms
        return ms
"""


@pytest.mark.parametrize(
    ("function", "old", "new", "expected"),
    [
        ("Clock.advance", "ms < 0", "ms <= 0", "if ms <= 0:"),
        ("Clock.advance", "if ms < 0: ...", "if True: ...", "if True:\n            return 0"),
        ("Clock.advance", "self.now += ms", "", "return 0\n        return ms"),
        ("Clock", "return 0", "pass", "ms < 0:\n            pass"),
        ("Clock.advance", "ms", "0", None),  # more than one place
        ("Clock.advance", "ms > 0", "True", None),  # none
        ("Clock.retreat", "ms < 0", "True", None),
        ("Clock.advance", "ms < 0", "(ms < 0)", None),  # the same
    ],
)
@pytest.mark.parametrize("file", ["clock.py", "moved/hours.py"])
def test_an_edit_fits_one_place_of_one_function(
    tmp_path: Path, file: str, function: str, old: str, new: str, expected: str | None
) -> None:
    path = tmp_path / "src/kafkamq" / file
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    mutant = Mutant("R1", "time goes back", "clock", function, old, new, ())
    if expected is None:
        with pytest.raises(MisfitError):
            mutated(mutant, tmp_path)
    else:
        changed, text = mutated(mutant, tmp_path)
        assert (changed, expected in text) == (path, True)
