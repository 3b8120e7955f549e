"""The safe rules against a naive model, and readers that start in the middle against those that
read everything: on random logs in which anybody writes anything at any time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from kafkamq.claims.rules.log import Claim, ClaimLog
from kafkamq.types import MarshalRecord, MarshalType

INTERVAL_S = 60
GROUP, TOPIC = "gr", "t"
bounded = settings(
    deadline=None, max_examples=examples(400), suppress_health_check=[HealthCheck.too_slow]
)

Line = tuple[float, MarshalRecord | None]  # the broker's time, and the record


@st.composite
def logs(draw: st.DrawFn, max_size: int = 24, start: int = 0) -> list[Line]:
    """Records of two clients with two instances each; broker's clocks that may step back.

    From ``start`` on client a has one more instance, "new".
    """
    lines: list[Line] = []
    now_s = 1000.0
    for at in range(draw(st.integers(1, max_size))):
        now_s += draw(st.sampled_from([0, 0.5, 1, 20, 59, 60, 61, 119, 120, 121, 300, -30]))
        type = draw(
            st.sampled_from(
                [MarshalType.HEARTBEAT] * 4
                + [MarshalType.CLAIMING_PARTITION] * 3
                + [MarshalType.RELEASING_PARTITION, MarshalType.CLAIMING_MESSAGES]
            )
        )
        instance = draw(st.sampled_from(["1", "2", "new"] if 0 < start <= at else ["1", "2"]))
        record = MarshalRecord(
            type,
            time_s=draw(st.sampled_from([0, 1, 1000, 10**9])),
            instance=instance,
            client="a" if instance == "new" else draw(st.sampled_from("ab")),
            group=GROUP,
            topic=TOPIC,
            partition=0,
            offset=draw(st.integers(0, 9)),
        )
        lines.append((now_s, record))
    return lines


def apply(log: ClaimLog, lines: list[Line], start: int = 0) -> None:
    for offset in range(start, len(lines)):
        apply_one(log, offset, lines[offset])


def apply_one(log: ClaimLog, offset: int, line: Line) -> None:
    broker_s, record = line
    log.apply(record, offset=offset, observed_at_s=0, broker_time_s=broker_s)
    log.check()


def seen(log: ClaimLog, now_s: float) -> Claim:
    return log.claim(GROUP, TOPIC, 0, now_s=now_s)


# ---- the naive model


@dataclass
class Naive:
    """S1-S6, told once more, from the first record for every question."""

    lines: list[Line]
    owner: tuple[str, str] | None = None  # the last one
    former: set[tuple[str, str]] = field(default_factory=set)
    token: int = -1
    beat_s: float = 0
    is_held: bool = False
    by_claim: bool = False
    visits: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        clock_s = last_s = self.lines[0][0]
        for at, (broker_s, record) in enumerate(self.lines):
            clock_s += max(0, broker_s - last_s)
            last_s = broker_s
            assert record is not None
            self.read(at, clock_s, record, (record.client, record.instance))
        self.clock_s, self.last_s = clock_s, last_s

    def read(self, at: int, clock_s: float, record: MarshalRecord, who: tuple[str, str]) -> None:
        valid = self.is_held and clock_s < self.beat_s + 2 * INTERVAL_S
        further = max(self.offset, record.offset)
        if record.type is MarshalType.CLAIMING_PARTITION and not valid:
            self.replace(who)
            self.become(at, who, clock_s, self.offset, by_claim=True)
        elif record.type is MarshalType.RELEASING_PARTITION and who == self.owner:
            self.offset = [record.offset, self.offset, further][min(self.visits, 2)]
            self.is_held = False
        elif record.type is not MarshalType.HEARTBEAT:
            pass
        elif who == self.owner and self.is_held:
            self.offset = further if self.visits else record.offset
            self.visits += self.visits > 0
            self.beat_s = clock_s
        elif not valid or not self.by_claim:
            is_former = who in self.former or who == self.owner
            if not valid and self.owner is not None and who != self.owner:
                self.former.add(self.owner)
            offset = self.offset if is_former else record.offset
            self.become(at, who, clock_s, offset, by_claim=False)
            self.visits = int(is_former)
        elif self.owner is not None and who[0] == self.owner[0] and who not in self.former:
            self.replace(who)
            self.become(at, who, clock_s, further, by_claim=True)

    def replace(self, who: tuple[str, str]) -> None:
        if self.owner is not None:
            self.former.add(self.owner)
        self.former.discard(who)

    def become(
        self, at: int, who: tuple[str, str], clock_s: float, offset: int, *, by_claim: bool
    ) -> None:
        self.owner, self.token, self.beat_s, self.offset = who, at, clock_s, offset
        self.is_held, self.by_claim, self.visits = True, by_claim, 0

    def holder(self, now_s: float) -> tuple[str, str] | None:
        clock_s = self.clock_s + max(0, now_s - self.last_s)
        if self.is_held and clock_s < self.beat_s + 2 * INTERVAL_S:
            return self.owner
        return None


@bounded
@given(logs(), st.sampled_from([0, 1, 60, 119.5, 120, 500]))
def test_the_fold_is_the_naive_models(lines: list[Line], later_s: float) -> None:
    log = ClaimLog("safe", INTERVAL_S)
    apply(log, lines)
    now_s = lines[-1][0] + later_s
    claim, naive = seen(log, now_s), Naive(lines)
    holder = naive.holder(now_s)
    assert ((claim.client, claim.instance) if claim.is_valid else None) == holder
    assert claim.is_claimable == (holder is None)
    assert claim.offset == claim.max_offset == naive.offset
    assert claim.token == naive.token
    assert claim.is_certain


@bounded
@given(logs(), st.data())
def test_the_state_follows_from_the_log_alone(lines: list[Line], data: st.DataObject) -> None:
    """No sender's clock and no observer's: they may say anything."""
    first, second = ClaimLog("safe", INTERVAL_S), ClaimLog("safe", INTERVAL_S)
    for offset, (broker_s, record) in enumerate(lines):
        assert record is not None
        wrong = data.draw(st.integers(-(10**10), 10**10))
        other = MarshalRecord(
            record.type, wrong, record.instance, record.client, record.group, record.topic,
            record.partition, record.offset,
        )  # fmt: skip
        first.apply(record, offset=offset, observed_at_s=0, broker_time_s=broker_s)
        second.apply(other, offset=offset, observed_at_s=wrong, broker_time_s=broker_s)
    now_s = lines[-1][0] + 1
    one, two = seen(first, now_s), seen(second, now_s)
    for name in ("client", "instance", "offset", "token", "state", "age_s", "is_claimable"):
        assert getattr(one, name) == getattr(two, name)


@bounded
@given(logs(), st.lists(st.sampled_from([0, 7, 60, 120]), min_size=1, max_size=3))
def test_tokens_grow(lines: list[Line], later_s: list[float]) -> None:
    log = ClaimLog("safe", INTERVAL_S)
    token, owner = -1, ("", "")
    for offset, line in enumerate(lines):
        apply_one(log, offset, line)
        claim = seen(log, line[0])
        assert claim.token >= token
        if (claim.last_client, claim.last_instance) != owner:
            assert claim.token == offset, "a new owner has a new token"
        token, owner = claim.token, (claim.last_client, claim.last_instance)
    for wait_s in later_s:
        assert seen(log, lines[-1][0] + wait_s).token == token, "time alone moves none"


@settings(bounded, max_examples=examples(1000))
@given(st.integers(1, 20), st.data(), st.booleans())
def test_a_reader_from_the_middle_knows_less_but_nothing_wrong(
    start: int, data: st.DataObject, trusts: bool
) -> None:
    """S7: whom it takes for the owner is the owner, and it claims only what all readers free."""
    lines = data.draw(logs(start + 15, start))
    start = min(start, len(lines) - 1)
    whole = ClaimLog("safe", INTERVAL_S)
    apply(whole, lines[:start])
    # Records are found by time: every one that is not read is older than ``since``.
    since_s = max(time_s for time_s, _ in lines[:start]) + 0.25 if start else lines[0][0]
    half = ClaimLog("safe", INTERVAL_S, since_s=since_s)
    if trusts:
        half.trust("new")
    for offset in range(start, len(lines)):
        apply_one(whole, offset, lines[offset])
        apply_one(half, offset, lines[offset])
        for wait_s in (0, 60, 120, 121, 250):
            now_s = lines[offset][0] + wait_s
            true, known = seen(whole, now_s), seen(half, now_s)
            if known.is_certain and known.is_valid:
                assert (known.client, known.instance) == (true.client, true.instance)
                assert known.renewed_at == true.renewed_at
                assert known.token == true.token
            if known.is_claimable:
                assert true.is_claimable
            if known.is_certain and known.is_grounded and known.is_valid:
                assert true.is_grounded
