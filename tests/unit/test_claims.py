"""The fold of the coordination log: the peer's rules, and S1-S6 of the safe ones."""

from __future__ import annotations

import pytest
from tests.unit.claim_fold import GROUP, TOPIC, ClaimFold

from kafkamq.claims.rules.log import ClaimLog, ClaimState
from kafkamq.errors import StateError
from kafkamq.types import MarshalRecord, MarshalType

RULES = ("peer", "safe")
both = pytest.mark.parametrize("rules", RULES)


@both
def test_an_unknown_partition_is_free(rules: str) -> None:
    claim = ClaimLog(rules).claim(GROUP, TOPIC, 0, now_s=1000)
    assert (claim.client, claim.instance, claim.offset, claim.token) == ("", "", 0, -1)
    assert claim.state is ClaimState.FREE
    assert claim.is_claimable
    assert claim.is_certain
    assert not claim.is_valid


@both
def test_states_by_age(rules: str) -> None:
    told = ClaimFold(rules)
    told.claims(1000)
    states = {age: told.at(1000 + age).state.value for age in (0, 60, 61, 119, 120, 10**6)}
    assert states == {
        0: "fresh", 60: "fresh", 61: "unknown", 119: "unknown", 120: "stale", 10**6: "stale"
    }  # fmt: skip
    assert told.at(1030).age_s == 30
    assert told.at(1119).client == "a"
    assert (told.at(1120).client, told.at(1120).last_client) == ("", "a")


@both
@pytest.mark.parametrize("interval_s", [0.5, 3, 7.5])
def test_the_interval_can_be_set(rules: str, interval_s: float) -> None:
    told = ClaimFold(rules, interval_s=interval_s)
    told.claims(1000)
    edge_s = 1000 + 2 * interval_s
    assert told.at(edge_s).is_claimable
    told.claims(edge_s, "b")
    assert told.owner(edge_s) == "b.i-b"
    told.claims(edge_s + 2 * interval_s - 0.001 if rules == "safe" else edge_s, "c")
    assert told.owner(edge_s) == "b.i-b"


@both
def test_tokens_are_the_offsets_of_the_claims(rules: str) -> None:
    told = ClaimFold(rules)
    told.append(None, 999)
    first = told.claims(1000, "a")
    told.claims(1001, "b")
    told.beat(1002, "a", 5)
    assert told.at(1002).token == first == 1
    told.release(1003, "a", 9)
    assert told.at(1003).token == first, "a release ends nothing that has a token"
    second = told.claims(1004, "b")
    assert told.at(1004).token == second > first
    third = told.claims(1200, "c")
    told.beat(1201, "c", 9)
    assert told.at(1201).token == third > second


@both
def test_renewals_and_intents_are_known_by_their_offsets(rules: str) -> None:
    told = ClaimFold(rules)
    token = told.claims(1000, "a")
    assert told.at(1000).renewed_at == token
    beat = told.beat(1001, "a", 5)
    intent = told.intend(1002, "a", 20)
    told.intend(1003, "b", 30)
    claim = told.at(1003)
    assert (claim.renewed_at, claim.intent_at, claim.offset) == (beat, intent, 5)
    told.intend(1121, "a", 20)
    assert told.at(1121).intent_at == intent, "what is stale announces nothing"
    told.claims(1122, "b")
    assert told.at(1122).intent_at == -1, "a new owner has announced nothing"


@both
def test_partitions_topics_and_groups_are_apart(rules: str) -> None:
    told = ClaimFold(rules)
    told.claims(1000, "a", partition=1)
    told.claims(1000, "b", group="other", partition=1)
    told.claims(1000, "c", topic="other", partition=1)
    assert told.owner(1000, 1) == "a.i-a"
    assert told.owner(1000, 0) == ""
    assert told.at(1000, 1, group="other").client == "b"
    assert [claim.client for claim in told.log.claims(now_s=1000)] == ["a", "b", "c"]


# ---- the peer's rules


def test_peer_judges_by_its_own_clock() -> None:
    """The same records, observed late: another owner. That is why nobody should decide so."""
    owners = {}
    for lag_s in (0, 200):
        log = ClaimLog("peer")
        for offset, (time_s, client) in enumerate([(1000, "a"), (1050, "b")]):
            record = MarshalRecord(
                MarshalType.CLAIMING_PARTITION, time_s, f"i-{client}", client, GROUP, TOPIC
            )
            log.apply(record, offset=offset, observed_at_s=time_s + lag_s)
        owners[lag_s] = log.claim(GROUP, TOPIC, 0, now_s=1051).client
    assert owners == {0: "a", 200: "b"}


def test_peer_zombie_takes_over_and_rewinds() -> None:
    told = ClaimFold("peer")
    told.claims(1000, "a")
    told.beat(1001, "a", 55)
    told.claims(1121, "b")
    told.beat(1122, "b", 80)
    token = told.beat(1123, "a", 55)
    claim = told.at(1123)
    assert (claim.client, claim.offset, claim.token) == ("a", 55, token)


def test_peer_counts_a_heartbeat_without_a_time_as_none() -> None:
    told = ClaimFold("peer")
    told.beat(1000, "a", 5, time_s=0)
    assert told.owner(1) == ""
    assert told.at(1).is_claimable
    told.beat(1000, "a", 5, time_s=-5)
    assert told.owner(1) == "a.i-a"
    assert told.owner(115) == ""


def test_peer_truncates_its_clock() -> None:
    told = ClaimFold("peer")
    told.beat(1000, "a", 5)
    assert told.owner(999.9) == ""
    assert told.owner(1119.9) == "a.i-a"
    told.claims(1119.9, "b", time_s=1119)
    assert told.owner(1119) == "a.i-a"


@both
def test_release_checks_client_and_instance(rules: str) -> None:
    told = ClaimFold(rules)
    told.claims(1000, "a.1")
    told.beat(1001, "a.1", 5)
    for who in ("b.1", "a.2", ".1", "a."):
        told.release(1002, who, 99)
    claim = told.at(1002)
    assert (claim.client, claim.offset) == ("a", 5)
    told.release(1500, "a.1", 7)  # stale, and still the last owner
    claim = told.at(1500)
    assert (claim.state, claim.offset, claim.release_s) == (ClaimState.FREE, 7, 1500)
    told.release(1501, "a.1", 8)  # nobody came between
    assert told.at(1501).offset == 8


@both
def test_a_release_of_what_nobody_owned_is_ignored(rules: str) -> None:
    told = ClaimFold(rules)
    told.release(1000, "a", 5)
    told.append(MarshalRecord(MarshalType.RELEASING_PARTITION, 1, "", "", GROUP, TOPIC, 0, 5), 1000)
    assert told.at(1000).offset == 0


@both
def test_empty_ids_own_as_others_do(rules: str) -> None:
    told = ClaimFold(rules)
    told.append(MarshalRecord(MarshalType.HEARTBEAT, 1000, "", "", "", "", 0, 5), 1000)
    claim = told.log.claim("", "", 0, now_s=1001)
    assert claim.is_valid
    assert (claim.client, claim.offset) == ("", 5)


# ---- the safe rules


def test_s1_times_of_senders_and_observers_do_not_count() -> None:
    told = ClaimFold()
    for at_s, time_s in ((1000, 10**9), (1001, 0), (1002, -5)):
        told.beat(at_s, "a", 5, time_s=time_s)
        told.claims(at_s, "b", time_s=10**9)
        assert told.owner(at_s) == "a.i-a"
        assert told.owner(at_s + 119) == "a.i-a"
        assert told.owner(at_s + 120) == ""
    record = MarshalRecord(MarshalType.HEARTBEAT, 1, "i-a", "a", GROUP, TOPIC)
    told.log.apply(record, offset=99, observed_at_s=10**9, broker_time_s=1003)
    assert told.owner(1122) == "a.i-a"


def test_s1_needs_the_brokers_time() -> None:
    record = MarshalRecord(MarshalType.HEARTBEAT, 1, "i-a", "a", GROUP, TOPIC)
    with pytest.raises(StateError, match="broker"):
        ClaimLog("safe").apply(record, offset=0, observed_at_s=1)
    ClaimLog("peer").apply(record, offset=0, observed_at_s=1)


def test_s1_a_brokers_clock_that_steps_back_costs_nothing() -> None:
    told = ClaimFold()
    told.claims(1000, "a")
    told.beat(970, "a", 5)  # another broker leads, 30 s behind: no time has passed
    assert told.owner(1089) == "a.i-a"
    assert told.owner(1090) == ""
    told.claims(1080, "b")  # 110 s later
    assert told.owner(1080) == "a.i-a"
    told.claims(1090, "b")
    assert told.owner(1090) == "b.i-b"
    assert told.owner(900) == "b.i-b", "a question from before the last record is about now"


def test_s2_not_even_the_holder_claims_again() -> None:
    told = ClaimFold()
    token = told.claims(1000, "a")
    told.claims(1100, "a")
    claim = told.at(1120)
    assert (claim.token, claim.is_claimable) == (token, True), "it was not renewed"


def test_s3_heartbeats_of_others_are_ignored() -> None:
    """The zombie of the peer's rules takes nothing and rewinds nothing."""
    told = ClaimFold()
    told.claims(1000, "a")
    told.beat(1001, "a", 55)
    token = told.claims(1121, "b")
    told.beat(1122, "b", 80)
    rival = told.beat(1123, "a", 55)
    claim = told.at(1123)
    assert (claim.client, claim.offset, claim.token) == ("b", 80, token)
    assert claim.rival_at == rival, "but it is seen"
    told.release(1124, "a", 55)
    assert told.at(1124).offset == 80
    told.claims(1243, "c")
    assert told.at(1243).rival_at == -1


def test_s3_a_restart_takes_over_and_its_former_instance_does_not_come_back() -> None:
    told = ClaimFold()
    told.claims(1000, "a.1")
    told.beat(1001, "a.1", 10)
    token = told.beat(1030, "a.2", 10)
    assert told.owner(1030) == "a.2"
    assert told.at(1030).token == token
    told.beat(1031, "a.1", 30)
    told.release(1032, "a.1", 30)
    told.claims(1033, "a.1")
    claim = told.at(1033)
    assert (claim.instance, claim.offset, claim.token) == ("2", 10, token)
    told.beat(1040, "a.3", 10)
    told.beat(1041, "a.2", 10)
    told.beat(1041, "a.1", 10)
    assert told.owner(1041) == "a.3"
    told.claims(1170, "a.1")
    assert told.owner(1170) == "a.1", "a claim is a new beginning for everybody"


def test_s3_a_restart_does_not_move_the_position_back() -> None:
    """Its heartbeat was written before it could know how far the former instance came."""
    told = ClaimFold()
    told.claims(1000, "a.1")
    told.beat(1001, "a.1", 50)
    told.beat(1002, "a.2", 10)
    assert told.at(1002).offset == 50
    told.beat(1003, "a.2", 10)
    assert told.at(1003).offset == 10, "what the owner itself says counts"


def test_s3_also_for_a_client_that_lost_the_partition_before() -> None:
    told = ClaimFold()
    told.claims(1000, "a.1")
    told.claims(1120, "b.1")
    told.claims(1240, "a.2")
    told.beat(1241, "a.2", 70)
    told.beat(1242, "a.1", 5)
    claim = told.at(1242)
    assert (claim.instance, claim.offset) == ("2", 70)


def test_s4_a_heartbeat_on_a_free_partition_holds_it() -> None:
    told = ClaimFold()
    told.claims(1000, "a")
    told.beat(1001, "a", 50)
    told.release(1002, "a", 50)
    token = told.beat(1003, "b", 60)
    claim = told.at(1003)
    assert (claim.client, claim.offset, claim.token) == ("b", 60, token)
    assert not claim.is_grounded
    told.claims(1004, "c")
    assert told.owner(1004) == "b.i-b"


@pytest.mark.parametrize("late", [55, 95])
def test_s4_a_former_owner_does_not_move_the_position(late: int) -> None:
    told = ClaimFold()
    told.claims(1000, "a")
    told.beat(1001, "a", 55)
    told.claims(1121, "b")
    told.beat(1122, "b", 80)
    told.release(1123, "b", 80)
    told.beat(1124, "a", late)
    claim = told.at(1124)
    assert (claim.client, claim.offset) == ("a", 80)
    told.release(1125, "a", 80)
    told.beat(1126, "a", late)  # its own late heartbeat, behind its release
    assert told.at(1126).offset == 80
    told.claims(1246, "c")
    assert told.at(1246).offset == 80


def test_s4_a_former_owner_that_goes_on_moves_the_position_forward() -> None:
    """Its second heartbeat was not under way when it lost the partition: it is consuming."""
    told = ClaimFold()
    told.claims(1000, "a")
    told.claims(1121, "b")
    told.release(1122, "b", 80)
    offsets = []
    for offset in (55, 60, 90, 85):
        told.beat(1123, "a", offset)
        offsets.append(told.at(1123).offset)
    told.release(1124, "a", 70)
    offsets.append(told.at(1124).offset)
    assert offsets == [80, 80, 90, 90, 90]
    told.beat(1125, "a", 10)
    told.release(1126, "a", 10)
    assert told.at(1126).offset == 90, "the release of a first heartbeat's sender moves nothing"
    told.claims(1127, "a")
    told.beat(1128, "a", 20)
    assert told.at(1128).offset == 20, "an owner by right says where it is"


def test_s4_a_stale_owner_that_nobody_replaced_goes_on() -> None:
    told = ClaimFold()
    token = told.claims(1000, "a")
    told.beat(1300, "a", 9)
    claim = told.at(1300)
    assert (claim.client, claim.offset, claim.token) == ("a", 9, token)
    assert claim.is_grounded


def test_s5_without_a_claim_heartbeats_hand_over() -> None:
    told = ClaimFold()
    told.beat(1000, "a", 5)
    told.beat(1001, "b", 9)
    assert told.owner(1001) == "b.i-b"
    told.beat(1002, "a", 7)
    claim = told.at(1002)
    assert (claim.client, claim.offset) == ("a", 7)
