"""Which of the wanted offsets a log gives, and where reading goes on (R18)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from confluent_kafka import Message
from hypothesis import given
from hypothesis import strategies as st

from kafkamq.transport.log_reader import MAX_READ_THROUGH, _Scan
from kafkamq.transport.record import headers_of, take_only


@dataclass
class Record:
    at: int

    def offset(self) -> int:
        return self.at


def take(scan: _Scan, at: int) -> None:
    scan.take([Record(at)])  # type: ignore[list-item]


def play(wanted: list[int], log: list[int], end: int, at_once: int) -> list[tuple[int, bool]]:
    scan = _Scan(wanted)
    found = {}
    for first in range(0, len(log), at_once):
        records = [Record(at) for at in log[first : first + at_once]]
        found |= scan.take(records)  # type: ignore[arg-type]
    result = [(offset, record is not None) for offset, record in found.items()]
    return result + [(offset, False) for offset in scan.pass_to(end, is_end=True)]


@given(st.sets(st.integers(0, 60), min_size=1), st.sets(st.integers(0, 60)), st.integers(1, 61))
def test_every_wanted_offset_is_answered_once_and_rightly(
    wanted: set[int], log: set[int], at_once: int
) -> None:
    answers = play(sorted(wanted), sorted(log), 61, at_once)
    assert answers == [(offset, offset in log) for offset in sorted(wanted)]


def test_what_lies_beyond_the_end_is_not_answered() -> None:
    scan = _Scan([3, 9])
    assert scan.pass_to(5, is_end=True) == [3]
    assert scan.remains
    assert scan.target == 9
    assert scan.is_at_end
    assert scan.pass_to(-1, is_end=True) == []


def test_a_scan_is_at_the_end_until_a_record_or_the_last_wanted_offset_comes() -> None:
    scan = _Scan([3, 9])
    scan.pass_to(5, is_end=True)
    take(scan, 7)
    assert not scan.is_at_end
    assert scan.pass_to(10, is_end=True) == [9]
    assert not scan.is_at_end


@pytest.mark.parametrize(
    ("gap", "is_far"), [(MAX_READ_THROUGH, False), (MAX_READ_THROUGH + 1, True)]
)
def test_only_wide_gaps_are_sought(gap: int, is_far: bool) -> None:
    scan = _Scan([0, 1 + gap])
    take(scan, 0)
    assert scan.is_far is is_far


def test_nothing_is_far_when_nothing_remains() -> None:
    scan = _Scan([0])
    take(scan, 0)
    assert not scan.is_far


@pytest.mark.parametrize(
    ("others", "special"),
    [
        ([], []),
        ([None], []),
        ([[]], []),
        ([[("id", None)]], [1]),
        ([[("ttl", b"1")]], [1]),
        ([[], [("id", b"1"), ("ttl", b"1")]], [2]),
        ([[("id", b"1"), ("id", b"2")], None, [("count", b"2")]], [1, 3]),
    ],
)
def test_of_records_with_their_id_alone_it_is_taken(
    others: list[list[tuple[str, bytes | None]] | None], special: list[int]
) -> None:
    plain = [("id", b"1")]
    written = (plain, *others, plain)
    records = [Message(headers=each) for each in written]  # type: ignore[arg-type]
    taken, found = take_only("id", records)
    assert found == [at for at, value in enumerate(taken) if value is None] == special
    assert [value for value in taken if value not in (None, ())] == [b"1", b"1"]
    left = [tuple(written[at] or ()) if at in special else () for at in range(len(written))]
    assert list(map(headers_of, records)) == left
