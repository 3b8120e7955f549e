"""What the Go client decides, as data; and why the safe rules may differ where it is unsafe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.claim_fold import ClaimFold

from kafkamq.claims.rules.log import ClaimLog
from kafkamq.claims.wire.marshal import decode
from kafkamq.errors import WireError
from kafkamq.types import MarshalRecord

VECTORS = json.loads(
    (Path(__file__).parents[1] / "vectors" / "marshal-scenarios.json").read_text(encoding="utf-8")
)
STATE = VECTORS["state"]
DEFECTS = [case["id"] for case in STATE if "peer_defect" in case]


def fold(case: dict[str, Any], rules: str) -> ClaimLog:
    log = ClaimLog(rules, VECTORS["constants"]["heartbeat_interval_s"])
    for offset, message in enumerate(case["messages"]):
        log.apply(
            read(message),
            offset=offset,
            observed_at_s=message["observed_at"],
            broker_time_s=message["observed_at"],
        )
        log.check()
    return log


def read(message: dict[str, Any]) -> MarshalRecord | None:
    if message["decodes"]:
        return decode(message["value"])
    with pytest.raises(WireError):
        decode(message["value"])
    return None


def answer(log: ClaimLog, query: dict[str, Any]) -> dict[str, Any]:
    claim = log.claim(query["group"], query["topic"], query["partition"], now_s=query["now"])
    return {
        "claimed": claim.is_valid,
        "client": claim.client,
        "instance": claim.instance,
        "last": {
            "client": claim.last_client,
            "heartbeat": claim.heartbeat_s,
            "instance": claim.last_instance,
            "offset": claim.offset,
            "release": claim.release_s,
        },
        "owned_by_as_client": claim.is_valid and claim.client == query["as_client"],
    }


@pytest.mark.parametrize("case", STATE, ids=lambda case: case["id"])
def test_peer_rules_answer_as_the_go_client(case: dict[str, Any]) -> None:
    log = fold(case, "peer")
    assert [answer(log, query) for query in case["queries"]] == case["expected"]
    assert log.malformed == sum(not message["decodes"] for message in case["messages"])


@pytest.mark.parametrize(
    "case", [case for case in STATE if "peer_defect" not in case], ids=lambda case: case["id"]
)
def test_safe_rules_answer_the_same_where_the_go_client_is_safe(case: dict[str, Any]) -> None:
    log = fold(case, "safe")
    assert [answer(log, query) for query in case["queries"]] == case["expected"]


def test_every_defect_is_treated_below() -> None:
    assert DEFECTS == ["future-heartbeat-is-unclaimed"]


def test_future_heartbeat_is_claimed_and_why_that_is_safe() -> None:
    """The Go client takes a heartbeat from the future for stale, so that a second owner starts
    beside a living one. To the safe rules the sender's clock says nothing: the claim holds from
    the broker's time of the record on, for two intervals, so nobody else is let in meanwhile, and
    it ends, so that a partition is not lost to a wrong clock.
    """
    case = next(case for case in STATE if case["id"] == "future-heartbeat-is-unclaimed")
    log = fold(case, "safe")
    for query in case["queries"]:
        assert answer(log, query)["owned_by_as_client"]
        claim = log.claim("gr", "test1", 0, now_s=query["now"])
        assert not claim.is_claimable
        assert claim.offset == 3
    assert log.claim("gr", "test1", 0, now_s=1119).is_valid
    assert log.claim("gr", "test1", 0, now_s=1120).is_claimable

    for skew_s in (5, 10**9):  # and a second claim is refused, where the Go client lets it in
        owners = {}
        for rules in ("peer", "safe"):
            told = ClaimFold(rules)
            told.beat(1000, "a", 3, time_s=1000 + skew_s)
            told.claims(1001, "b")
            owners[rules] = told.owner(1002)
        assert owners == {"peer": "b.i-b", "safe": "a.i-a"}


def test_with_go_clients_in_the_group_a_claim_needs_both_rules() -> None:
    """An owner whose clock is ahead counts longer for the Go client than for the safe rules, one
    whose clock is behind shorter: neither rule alone keeps away from what the other one holds.
    """
    for sender_s, peer, safe in ((1060, False, True), (940, True, False)):
        told = {rules: ClaimFold(rules) for rules in ("peer", "safe")}
        now_s = {True: 1130, False: 1070}[safe]
        for claims in told.values():
            claims.beat(1000, "a", 3, time_s=sender_s)
        assert told["peer"].at(now_s).is_claimable == peer
        assert told["safe"].at(now_s).is_claimable == safe


@pytest.mark.parametrize("case", VECTORS["pause"], ids=lambda case: case["title"])
@pytest.mark.parametrize("rules", ["peer", "safe"])
def test_pauses(case: dict[str, Any], rules: str) -> None:
    log = ClaimLog(rules)
    for offset, value in enumerate(case["messages"]):
        log.apply(decode(value), offset=offset, observed_at_s=1000, broker_time_s=1000)
    for now_s, group, expected in case["queries"]:
        assert log.is_paused(group, now_s=now_s) == expected
