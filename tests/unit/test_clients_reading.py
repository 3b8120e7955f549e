"""Which of the wanted offsets a log gives, and where reading goes on (R18)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkamq.transport.record_reader import MAX_READ_THROUGH, _Scan


@dataclass
class Record:
    at: int

    def offset(self) -> int:
        return self.at


def play(wanted: list[int], log: list[int], end: int) -> list[tuple[int, bool]]:
    scan = _Scan(wanted)
    result = []
    for at in log:
        if scan.remains:
            answers = scan.take(Record(at))  # type: ignore[arg-type]
            result += [(offset, found is not None) for offset, found in answers]
    result += [(offset, False) for offset in scan.pass_to(end)]
    return result


@given(st.sets(st.integers(0, 60), min_size=1), st.sets(st.integers(0, 60)))
def test_every_wanted_offset_is_answered_once_and_rightly(wanted: set[int], log: set[int]) -> None:
    answers = play(sorted(wanted), sorted(log), 61)
    assert answers == [(offset, offset in log) for offset in sorted(wanted)]


def test_what_lies_beyond_the_end_is_not_answered() -> None:
    scan = _Scan([3, 9])
    assert list(scan.pass_to(5)) == [3]
    assert scan.remains
    assert scan.target == 9
    assert scan.waited_s() >= 0.0
    assert list(scan.pass_to(-1)) == []


@pytest.mark.parametrize(
    ("gap", "is_far"), [(MAX_READ_THROUGH, False), (MAX_READ_THROUGH + 1, True)]
)
def test_only_wide_gaps_are_sought(gap: int, is_far: bool) -> None:
    scan = _Scan([0, 1 + gap])
    list(scan.take(Record(0)))  # type: ignore[arg-type]
    assert scan.is_far is is_far


def test_nothing_is_far_when_nothing_remains() -> None:
    scan = _Scan([0])
    list(scan.take(Record(0)))  # type: ignore[arg-type]
    assert not scan.is_far
