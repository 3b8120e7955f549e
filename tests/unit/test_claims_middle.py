"""The fold of the coordination log when it is read from its middle (S7), paused, or hostile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.claim_fold import GROUP, TOPIC, ClaimFold

from kafkamq.claims.rules.log import ClaimLog
from kafkamq.errors import ConfigError
from kafkamq.types import MarshalRecord, MarshalType

RULES = ("peer", "safe")
both = pytest.mark.parametrize("rules", RULES)


# ---- S7: from the middle of the log


def test_s7_nothing_is_claimed_before_every_holder_must_have_been_read() -> None:
    told = ClaimFold(since_s=1000)
    assert not told.log.is_ready(now_s=1119.9)
    assert not told.at(1119.9).is_claimable
    assert not told.at(1119.9).is_certain
    assert told.log.is_ready(now_s=1120)
    assert told.at(1120).is_claimable
    told.claims(1050, "a")
    assert not told.at(1050).is_certain
    assert not told.at(1169).is_claimable, "its claim may have been accepted"
    assert told.at(1170).is_claimable
    token = told.claims(1170, "b")
    claim = told.at(1170)
    assert claim.is_certain
    assert claim.is_grounded
    assert (claim.client, claim.token) == ("b", token)


def test_s7_everybody_who_wrote_may_hold_it() -> None:
    told = ClaimFold(since_s=1000)
    told.beat(1010, "a", 50)
    told.beat(1020, "b", 80)
    claim = told.at(1020)
    assert (claim.client, claim.is_certain, claim.rivals) == ("b", False, 1)
    assert (claim.offset, claim.max_offset) == (50, 80)
    told.release(1130, "b", 90)
    assert not told.at(1130).is_claimable or told.at(1130).offset == 50
    told.claims(1131, "c")
    claim = told.at(1131)
    assert claim.is_certain
    assert (claim.client, claim.offset, claim.max_offset) == ("c", 50, 90)
    told.beat(1132, "c", 90)
    claim = told.at(1132)
    assert (claim.offset, claim.max_offset) == (90, 90)


def test_s7_who_released_before_another_claimed_and_went_on_tells_no_position() -> None:
    """Whoever held it then, what the other one did stands behind that."""
    told = ClaimFold(since_s=1000)
    told.beat(1010, "a", 50)
    told.release(1020, "a", 60)
    told.claims(1021, "b")
    told.claims(1021, "late")  # it lost the race
    assert told.at(1021).offset == 60
    told.beat(1022, "b", 60)
    told.beat(1050, "b", 80)
    told.claims(1170, "c")
    claim = told.at(1170)
    assert (claim.client, claim.offset, claim.max_offset) == ("c", 80, 80)


def test_s7_who_released_tells_the_position_where_another_did_not_claim_after_that() -> None:
    """The heartbeat may be a former owner's, which was under way for long."""
    told = ClaimFold(since_s=1000)
    told.claims(1005, "b")
    told.beat(1010, "a", 50)
    told.release(1020, "a", 60)
    told.beat(1050, "b", 80)
    told.claims(1170, "c")
    claim = told.at(1170)
    assert (claim.offset, claim.max_offset) == (60, 80)


def test_s7_a_release_by_one_does_not_free_what_another_may_hold() -> None:
    """The release of a zombie: the true owner's claim stands before the part that was read."""
    told = ClaimFold(since_s=1000)
    told.beat(1130, "a", 80)
    told.beat(1131, "z", 55)
    told.release(1132, "z", 55)
    told.claims(1133, "c")
    claim = told.at(1133)
    assert not claim.is_certain
    assert not claim.is_claimable
    assert claim.client != "c"


def test_s7_a_single_owner_that_releases_frees_at_once() -> None:
    told = ClaimFold(since_s=1000)
    told.beat(1100, "a", 80)
    told.release(1125, "a", 85)
    assert told.at(1125).is_claimable
    told.claims(1126, "b")
    claim = told.at(1126)
    assert (claim.client, claim.offset, claim.is_certain) == ("b", 85, True)


def test_s7_an_unknown_instance_of_the_owners_client_makes_it_uncertain() -> None:
    """A restart, or a zombie from before the part that was read."""
    told = ClaimFold(since_s=1000)
    told.claims(1130, "a.2")
    assert told.at(1130).is_certain
    told.beat(1131, "b.1", 5)
    assert told.at(1131).is_certain, "others are ignored, whoever they are"
    told.beat(1132, "a.1", 5)
    assert not told.at(1132).is_certain
    told.beat(1133, "a.2", 7)
    assert not told.at(1133).is_certain
    assert not told.at(1251).is_claimable
    assert told.at(1253).is_claimable


def test_s7_the_own_restart_is_certain() -> None:
    told = ClaimFold(since_s=1000)
    told.log.trust("new")
    told.beat(1130, "a.1", 50)
    token = told.beat(1131, "a.new", 40)
    claim = told.at(1131)
    assert claim.is_certain
    assert (claim.instance, claim.token, claim.offset) == ("new", token, 50)
    told.beat(1132, "a.1", 60)
    assert not told.at(1132).is_certain


def test_s7_the_own_restart_beside_another_client_is_not() -> None:
    told = ClaimFold(since_s=1000)
    told.log.trust("new")
    told.beat(1130, "b.1", 50)
    told.beat(1131, "a.1", 50)
    told.beat(1132, "a.new", 50)
    assert not told.at(1132).is_certain
    told.beat(1252, "a.new", 50)
    assert not told.at(1252).is_certain, "it may have been replaced meanwhile"


def test_s7_many_contenders_are_bounded() -> None:
    told = ClaimFold(since_s=1000)
    for number in range(500):
        told.beat(1130, f"a.{number}", number)
    (entry,) = told.log._entries.values()
    assert len(entry.contenders or ()) <= 65
    for number in range(500):
        told.release(1131, f"a.{number}", number)
    told.claims(1249, "b")
    assert told.at(1249).client != "b", "somebody who has no place may hold it"
    told.claims(1369, "c")
    assert told.owner(1369) == "c.i-c"


# ---- pauses


@both
def test_pauses_are_of_one_group(rules: str) -> None:
    told = ClaimFold(rules)
    told.pause(1000, 1900)
    assert told.log.paused_until(GROUP) == 1900
    assert told.log.is_paused(GROUP, now_s=1899.9)
    assert not told.log.is_paused(GROUP, now_s=1900)
    assert not told.log.is_paused("other", now_s=1000)
    told.pause(1001, 1000)
    assert not told.log.is_paused(GROUP, now_s=1001), "resumed"
    told.claims(1002)
    assert told.owner(1002) == "a.i-a", "a pause is the members' to respect, its admin claims"


def test_paused_groups_are_bounded() -> None:
    told = ClaimFold()
    for number in range(10_050):
        told.pause(1000, 1100 if number % 2 else 5000, group=f"g{number}")
    assert len(told.log._paused) <= 10_000
    assert told.log.paused_until("g10048") == 5000
    told.pause(2000, 5000)
    assert told.log.is_paused(GROUP, now_s=2000)


# ---- hostile logs


@both
def test_malformed_and_impossible_records_are_counted_and_change_nothing(rules: str) -> None:
    told = ClaimFold(rules)
    token = told.claims(1000, "a")
    before = told.at(1000)
    told.append(None, 1000)
    for partition in (-1, -(2**63), 2**31, 2**63 - 1):
        told.claims(1000, "b", partition=partition)
        told.beat(1000, "b", partition=partition)
        assert not told.at(1000, partition).is_valid
    assert told.at(1000) == before
    assert (told.log.malformed, told.log.impossible) == (1, 8)
    assert told.at(1000).token == token
    told.claims(1000, "b", partition=2**31 - 1)
    assert told.owner(1000, 2**31 - 1) == "b.i-b", "the largest costs nothing"


@both
def test_what_nobody_holds_is_forgotten_when_there_is_too_much(rules: str) -> None:
    told = ClaimFold(rules, max_entries=100)
    told.claims(1000, "a", partition=0)
    for partition in range(1, 5000):
        told.claims(1000 + partition, "a", partition=partition)
    assert len(told.log._entries) <= 300
    assert told.owner(6000, 4999) == "a.i-a"
    told.beat(6000, "a", 5, partition=4999)
    for partition in range(5000, 5100):
        told.claims(6000, "a", partition=partition)
    assert all(told.owner(6000, partition) for partition in range(4999, 5100)), "the held are kept"


@pytest.mark.parametrize(
    "wrong",
    [{"rules": "Safe"}, {"interval_s": 0}, {"interval_s": -1}, {"interval_s": float("nan")},
     {"interval_s": float("inf")}, {"max_entries": 0}],
)  # fmt: skip
def test_settings_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ClaimLog(**wrong)  # type: ignore[arg-type]


numbers = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 3)
hostile = st.builds(
    MarshalRecord,
    st.sampled_from(MarshalType),
    time_s=numbers,
    instance=st.sampled_from(["", "1", "2"]),
    client=st.sampled_from(["", "a", "b"]),
    group=st.sampled_from(["", GROUP]),
    topic=st.sampled_from(["", TOPIC]),
    partition=numbers,
    offset=numbers,
    expires_at_s=numbers,
    version=numbers,
)


@given(
    st.sampled_from(RULES),
    st.none() | st.integers(0, 1000),
    st.lists(st.tuples(st.none() | hostile, st.floats(-1, 2000)), max_size=20),
)
def test_no_record_raises(
    rules: str, since_s: int | None, lines: list[tuple[MarshalRecord | None, float]]
) -> None:
    log = ClaimLog(rules, since_s=since_s)
    for offset, (record, at_s) in enumerate(lines):
        log.apply(record, offset=offset, observed_at_s=at_s, broker_time_s=at_s)
        log.check()
        for claim in log.claims(now_s=at_s):
            assert claim.offset <= claim.max_offset
            assert not (claim.is_valid and claim.is_claimable)
    assert log.next_offset == len(lines)
