"""Range claims: the wire, the fold and a member."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from tests.waiting import wait_until, within
from typer.testing import CliRunner

from kafkamq.aio import claims as aio
from kafkamq.claims import RangeClaims, init_topic
from kafkamq.claims.audit import range_logs
from kafkamq.claims.rules.ranges import (
    RangeLog,
    RangeMember,
    RangeWrite,
    decode_range,
    encode_range,
)
from kafkamq.claims.wire.marshal import coordination_partition
from kafkamq.cli.app import app
from kafkamq.config import ServiceConfig
from kafkamq.errors import LeaseLostError, StateError, WireError
from kafkamq.transport.clients import open_producer
from kafkamq.transport.memory.cluster import cluster_of, forget_cluster
from kafkamq.types import RangeRecord, RangeType

INTERVAL_S = 10
CLAIM, BEAT, DONE, FREE = RangeType.CLAIM, RangeType.BEAT, RangeType.DONE, RangeType.FREE


class Told:
    """A log of one partition, and readers of it."""

    def __init__(self) -> None:
        self.records: list[tuple[float, RangeRecord]] = []
        self.log = RangeLog("g", "t", INTERVAL_S)

    def add(
        self,
        at_s: float,
        type: RangeType,
        who: str,
        first: int,
        next: int,
        frontier: int = 0,
        seen: int | None = None,  # all that there is
    ) -> int:
        seen = len(self.records) if seen is None else seen
        record = RangeRecord(type, who, who, "g", "t", 0, first, next, frontier, seen)
        self.log.apply(record, offset=len(self.records), broker_time_s=at_s)
        self.log.check()
        self.records.append((at_s, record))
        return len(self.records) - 1

    def held(self, who: str, log: RangeLog | None = None) -> list[tuple[int, int]]:
        return [(e.first, e.next) for e in (log or self.log).held(0, who)]

    def reader(self, first: int) -> RangeLog:
        log = RangeLog("g", "t", INTERVAL_S, since_s=self.records[first][0] if first else None)
        for offset in range(first, len(self.records)):
            at_s, record = self.records[offset]
            log.apply(record, offset=offset, broker_time_s=at_s)
            log.check()
        return log


def test_the_wire() -> None:
    record = RangeRecord(CLAIM, "i", "c", "g", "t", 3, 10, 20, 5, 9)
    value = encode_range(record)
    assert value == b"ClaimRange/2/9/i/c/g/t/3/10/20/5"
    assert decode_range(value) == record
    bad = [
        *(None, b"", b"ClaimRange", value + b"/1", value.replace(b"ClaimRange", b"Claim")),
        *(value.replace(b"/3/", b"/-3/"), value.replace(b"/g/", b"/\xff/"), b"/" * 20_000),
        *(value.replace(b"/10/", b"/1_0/"), value.replace(b"/2/", b"/1/")),
    ]
    for each in bad:
        with pytest.raises(WireError):
            decode_range(each)
    for wrong in (replace(record, group="a/b"), replace(record, first=-1)):
        with pytest.raises(WireError):
            encode_range(wrong)


def test_rc2_ranges_follow_each_other_and_the_first_claim_wins() -> None:
    told = Told()
    told.add(0, CLAIM, "a", 100, 200)
    told.add(0, CLAIM, "b", 100, 200)
    told.add(1, CLAIM, "b", 200, 300)
    told.add(1, CLAIM, "c", 350, 400)  # not at the frontier
    told.add(1, CLAIM, "c", 250, 400)
    told.add(1, CLAIM, "c", 300, 300)
    assert (told.held("a"), told.held("b"), told.held("c")) == ([(100, 200)], [(200, 300)], [])
    assert told.log.frontier(0) == 300


def test_rc2_what_a_silent_owner_held_is_claimed_again_as_it_was() -> None:
    told = Told()
    told.add(0, CLAIM, "a", 0, 100)
    told.add(19, CLAIM, "b", 0, 100)
    assert told.held("b") == []
    told.add(20, CLAIM, "b", 0, 90)
    assert told.held("b") == []
    token = told.add(20, CLAIM, "b", 0, 100)
    assert told.held("b") == [(0, 100)]
    assert told.log.held(0, "b")[0].token == token
    told.add(21, BEAT, "a", 0, 100)  # a zombie
    told.add(21, DONE, "a", 0, 100)
    assert told.held("b") == [(0, 100)]


def test_rc4_done_in_parts_and_given_back() -> None:
    told = Told()
    told.add(0, CLAIM, "a", 0, 100)
    told.add(1, DONE, "a", 0, 40)
    assert told.held("a") == [(40, 100)]
    assert told.log.position(0) == 40
    told.add(2, FREE, "a", 40, 100)
    assert told.held("a") == []
    told.add(2, CLAIM, "b", 40, 100)
    told.add(3, DONE, "b", 40, 100)
    assert told.log.position(0) == told.log.frontier(0) == 100


def test_rc3_a_reader_from_the_middle_waits_and_then_knows_all() -> None:
    told = Told()
    told.add(0, CLAIM, "a", 0, 100)
    told.add(0, CLAIM, "b", 100, 200)
    told.add(1, DONE, "b", 100, 200)
    middle = told.add(30, BEAT, "a", 0, 100, 200)  # heard at 10 and 20 as well
    told.add(31, BEAT, "b", 0, 0, 200)
    log = told.reader(middle)
    assert not log.is_warm
    told.add(40, BEAT, "a", 0, 100, 200)
    told.add(50, BEAT, "a", 0, 100, 200)
    log = told.reader(middle)
    assert log.is_warm
    assert told.held("a", log) == [(0, 100)]
    assert log.frontier(0) == 200


def test_rc3_a_reader_from_the_middle_claims_nothing_before_and_knows_zombies() -> None:
    told = Told()
    told.add(0, CLAIM, "a", 0, 100)
    middle = told.add(30, BEAT, "a", 0, 100, 200)
    told.add(31, BEAT, "z", 50, 150, 200)  # a zombie: its range overlaps
    told.add(32, CLAIM, "c", 200, 300)
    log = told.reader(middle)
    assert told.held("c", log) == []
    assert told.held("z", log) == []


def test_rc3_who_read_from_the_beginning_knows_every_range() -> None:
    told = Told()
    told.add(0, CLAIM, "a", 0, 100)
    told.add(1, BEAT, "z", 500, 600, 700)  # of a range that nobody gave it
    assert told.held("z") == []
    assert told.log.frontier(0) == 100


def test_rc4_a_reader_from_the_middle_hears_what_is_abandoned() -> None:
    told = Told()
    told.add(0, CLAIM, "dead", 0, 100)
    told.add(0, CLAIM, "b", 100, 200)
    middle = told.add(60, BEAT, "b", 100, 200, 200)
    told.add(61, FREE, "b", 0, 100, 200)
    told.add(70, BEAT, "b", 100, 200, 200)
    told.add(80, BEAT, "b", 100, 200, 200)
    log = told.reader(middle)
    assert [(e.first, e.next) for e in log.abandoned(0, now_s=80)] == [(0, 100)]
    assert log.position(0) == 0
    told.add(81, CLAIM, "c", 0, 100)
    assert told.held("c") == told.held("c", told.reader(middle)) == [(0, 100)]


def test_rc4_what_was_only_told_to_be_free_belongs_to_who_beats_or_ends_it() -> None:
    told = Told()
    told.add(0, CLAIM, "dead", 0, 100)
    told.add(25, CLAIM, "c", 0, 100)
    middle = told.add(26, FREE, "b", 0, 100, 100)  # of one that had not read the claim
    assert told.held("c") == [(0, 100)]
    told.add(27, BEAT, "c", 0, 100, 100)
    log = told.reader(middle)
    assert told.held("c", log) == [(0, 100)]
    assert log.abandoned(0, now_s=28) == []
    told.add(28, DONE, "c", 0, 60)
    told.add(29, FREE, "z", 60, 100, 100)  # who does not own it frees nothing
    assert told.held("c", told.reader(middle)) == told.held("c") == [(60, 100)]
    # ... and the same without a beat between.
    told = Told()
    told.add(0, CLAIM, "c", 0, 100)
    middle = told.add(1, FREE, "b", 0, 100, 100)
    told.add(2, DONE, "c", 0, 60)
    assert told.held("c", told.reader(middle)) == [(60, 100)]


def test_rc4_a_reader_from_the_middle_does_not_know_who_claimed_what_it_saw_freed() -> None:
    """It cannot judge the claim, and believes who ends the range."""
    told = Told()
    told.add(0, CLAIM, "a", 0, 100)
    middle = told.add(2, BEAT, "a", 0, 100, 100)
    told.add(3, FREE, "a", 0, 100, 100)
    told.add(4, CLAIM, "b", 0, 100)
    told.add(5, DONE, "b", 0, 100)
    log = told.reader(middle)
    assert not log.is_open(0, 0, 100)
    assert not told.log.is_open(0, 0, 100)


def a_late_sender(told: Told) -> tuple[int, int]:
    """What b read of a's range before it was done, and c's beat behind that."""
    told.add(0, CLAIM, "a", 0, 100, 0, 0)
    seen = told.add(1, BEAT, "a", 0, 100, 100, 1) + 1
    told.add(25, BEAT, "c", 0, 0, 100, 2)
    told.add(25, BEAT, "a", 0, 100, 100, 3)
    told.add(26, DONE, "a", 0, 100, 100, 4)
    return seen, told.add(27, BEAT, "c", 0, 0, 100, 5)


def test_rc4_what_another_member_has_done_in_part_is_open() -> None:
    told = Told()
    told.add(0, CLAIM, "a", 0, 100)
    told.add(31, CLAIM, "b", 0, 100, 100, 1)  # a was silent
    told.add(32, DONE, "b", 0, 20, 100, 2)
    assert told.log.is_open(0, 0, 100)
    assert not told.log.is_open(0, 0, 20)


@pytest.mark.parametrize("type", [FREE, BEAT])
def test_rc4_a_late_sender_does_not_bring_back_what_is_done(type: RangeType) -> None:
    told = Told()
    seen, after = a_late_sender(told)
    told.add(28, type, "b", 0, 100, 100, seen)  # it decided so before it read the end
    assert not told.log.is_open(0, 0, 100)
    for middle in (1, after - 2, after):  # who read the end, and who began behind it
        assert not told.reader(middle).is_open(0, 0, 100), middle


def test_rc4_who_claimed_what_a_late_sender_tells_free_may_hold_it() -> None:
    told = Told()
    told.add(0, CLAIM, "a", 0, 100, 0, 0)
    told.add(24, FREE, "b", 0, 100, 100, 1)
    middle = told.add(25, CLAIM, "c", 0, 100, 100, 2)
    told.add(26, FREE, "b", 0, 100, 100, middle)
    log = told.reader(middle)
    assert log.is_open(0, 0, 100)
    assert log.abandoned(0, now_s=45) == []
    told.add(27, BEAT, "c", 0, 100, 100, middle + 1)
    assert told.held("c", told.reader(middle)) == told.held("c") == [(0, 100)]


def test_rc3_a_reader_from_the_middle_judges_claims_at_the_frontier_that_others_saw() -> None:
    told = Told()
    told.add(0, CLAIM, "a", 0, 100, 0, 0)
    middle = told.add(20, BEAT, "a", 0, 100, 100, 1)
    told.add(30, BEAT, "a", 0, 100, 100, 2)
    told.add(38, CLAIM, "b", 100, 200, 100, 3)  # and b is silent from now on
    told.add(40, BEAT, "a", 0, 100, 100, 3)
    log = told.reader(middle)
    assert log.is_warm
    assert log.frontier(0) == told.log.frontier(0) == 200


def test_rc3_a_range_whose_end_is_under_way_is_not_renewed_behind_it() -> None:
    """Who reads only what comes behind the end would take the beat for a living range."""
    told = Told()
    told.add(0, CLAIM, "me", 0, 10)
    member = a_member(told, "me", ahead=0)

    def beats(at_s: float) -> list[tuple[int, int]]:
        writes = member.plan(round(at_s * 1000), at_s, ends={0: 100}, bases={0: 0})
        found = [each.record for each in writes if each.record.type is BEAT]
        return [(each.first, each.next) for each in found]

    assert beats(1) == [(0, 10)]
    end = member.end(DONE, (0, 0, 10), 2000)
    assert beats(5) == [(0, 0)]
    member.on_written(end, -1)  # nobody knows: it may not stand there
    assert beats(9) == [(0, 10)]


def test_rc4_what_is_abandoned_is_told_once_an_interval() -> None:
    told = Told()
    told.add(0, CLAIM, "dead", 0, 10)
    told.add(0, CLAIM, "me", 10, 20)
    member = a_member(told, "me", ahead=0)

    def frees(at_s: float) -> int:
        writes = member.plan(round(at_s * 1000), at_s, ends={0: 100}, bases={0: 0})
        for write in writes:
            record = write.record
            if record.type is not CLAIM:
                told.add(at_s, record.type, "me", record.first, record.next, 20)
        return sum(write.record.type is FREE for write in writes)

    assert [frees(at_s) for at_s in (10, 19, 24, 28, 32, 36, 40)] == [0, 0, 1, 0, 0, 1, 0]


def test_what_is_abandoned_at_a_time() -> None:
    told = Told()
    told.add(100, CLAIM, "a", 0, 100)
    assert told.log.abandoned(0, now_s=119.9) == []
    (left,) = told.log.abandoned(0, now_s=120)
    assert (left.first, left.next) == (0, 100)


def a_member(told: Told, who: str, ahead: int = 1) -> RangeMember:
    return RangeMember(
        told.log, client=who, instance=who, size=10, ahead=ahead,
        interval_ms=INTERVAL_S * 1000,
    )  # fmt: skip


def test_rc6_abandoned_ranges_come_first_and_claims_are_awaited() -> None:
    told = Told()
    told.add(0, CLAIM, "dead", 0, 10)
    told.add(19, BEAT, "other", 0, 0, 10)
    member = a_member(told, "me")

    def claims(at_s: float) -> list[tuple[int, int]]:
        writes = member.plan(round(at_s * 1000), at_s, ends={0: 100}, bases={0: 0})
        found = [write.record for write in writes if write.record.type is CLAIM]
        return [(record.first, record.next) for record in found]

    assert claims(20) == [(0, 10), (10, 20)]
    assert claims(20.1) == [], "they are not read back yet"


def test_rc2_the_second_claim_of_a_partition_waits_for_the_first() -> None:
    """Any first claim is accepted: were the first one lost, nobody would do what it names."""
    told = Told()
    member = a_member(told, "me", ahead=1)

    def claims(at_s: float) -> list[tuple[int, int]]:
        writes = member.plan(round(at_s * 1000), at_s, ends={0: 100}, bases={0: 5})
        found = [write for write in writes if write.record.type is CLAIM]
        for write in found:
            member.on_written(write, told.add(at_s, CLAIM, "me", *_range(write)))
        member.observe([0])
        return [_range(write) for write in found]

    assert claims(1) == [(5, 15)]
    assert claims(2) == [(15, 25)]


def _range(write: RangeWrite) -> tuple[int, int]:
    return write.record.first, write.record.next


def test_rc6_what_has_no_messages_keeps_it_from_nothing_that_has_some() -> None:
    told = Told()
    member = a_member(told, "me", ahead=1)

    def claims(at_s: float, ends: dict[int, int]) -> list[tuple[int, int]]:
        writes = member.plan(round(at_s * 1000), at_s, ends=ends, bases=dict.fromkeys(ends, 0))
        found = [write for write in writes if write.record.type is CLAIM]
        for write in found:
            told.log.apply(write.record, offset=told.log.next_offset, broker_time_s=at_s)
            member.on_written(write, told.log.next_offset - 1)
        member.observe([0, 1, 2])
        return [(write.record.partition, write.record.first) for write in found]

    assert claims(1, {0: 0, 1: 0, 2: 0}) == [(0, 0), (1, 0)]
    assert claims(2, {0: 0, 1: 0, 2: 0}) == []
    assert claims(3, {0: 0, 1: 0, 2: 5}) == [(2, 0)]
    assert claims(4, {0: 5, 1: 0, 2: 5}) == [], "two have messages"


def test_rc7_a_range_is_live_for_one_interval_from_before_the_write() -> None:
    told = Told()
    member = a_member(told, "me", ahead=0)
    (write,) = (
        each
        for each in member.plan(1000, 1, ends={0: 5}, bases={0: 0})
        if each.record.type is CLAIM
    )
    at = told.add(2, CLAIM, "me", write.record.first, write.record.next)
    ((partition, held),) = member.held([0])
    assert not member.is_live(partition, held, 1001), "not read back"
    member.on_written(write, at)
    member.observe([0])
    assert member.is_live(partition, held, 10_999)
    assert not member.is_live(partition, held, 11_000)


@pytest.mark.parametrize("seed", range(20))
def test_members_never_hold_the_same_offsets_and_all_is_done_once(seed: int) -> None:
    """Three members, of which two die, on one log with a clock that steps."""
    chance = random.Random(seed)
    told = Told()
    members = {
        who: RangeMember(
            told.log, client=who, instance=who, size=10, ahead=1,
            interval_ms=INTERVAL_S * 1000,
        )
        for who in "abc"
    }  # fmt: skip
    now_s, done = 100.0, list[int]()
    for step in range(3000):
        now_s += chance.choice([0.1, 0.5, 1.0])
        if step == 400:
            del members["a"]
        if step == 800:
            del members["b"]
        who = chance.choice(list(members))
        member, now_ms = members[who], round(now_s * 1000)
        writes = member.plan(now_ms, now_s, ends={0: 300}, bases={0: 0})
        for partition, each in member.held([0]):
            if member.is_live(partition, each, now_ms) and chance.random() < 0.3:
                if each.next <= 300:
                    done += range(each.first, each.next)
                    place = (partition, each.first, each.next)
                    writes.append(member.end(DONE, place, now_ms))
                break
        for write in writes:
            record = write.record
            at = told.add(now_s, record.type, who, record.first, record.next, record.frontier)
            member.on_written(write, at)
        member.observe([0])
    assert sorted(done) == list(range(300))


def write(servers: str, count: int) -> None:
    producer = open_producer({"bootstrap.servers": servers})
    for number in range(count):
        producer.produce("work", b"%d" % number, partition=0)
    producer.flush(10)


@pytest.fixture
def work() -> Iterator[str]:
    """The servers of a cluster with 60 messages in the one partition of "work"."""
    name = uuid.uuid4().hex
    servers = f"memory://{name}"
    cluster_of(servers).create_topic("work", 1)
    write(servers, 60)
    init_topic(servers, "kafkamq.ranges", heartbeat_interval=2)
    yield servers
    forget_cluster(name)


def test_nothing_is_kept_of_ranges_that_are_done(work: str) -> None:
    ids = {"client_id": "a", "group_id": "g"}
    with RangeClaims(work, "work", size=2, heartbeat_interval=2, **ids) as claims:
        kept = []
        for _ in range(30):
            claimed = claims.next_range(within(30))
            assert claimed is not None
            assert len(list(claimed)) == 2
            claimed.done()
            own = [each for each in vars(claims).values() if isinstance(each, set | dict)]
            kept.append(sum(map(len, own)))
        assert kept[-1] <= kept[0]


def once(servers: str, name: str, *, size: int = 20, ahead: int = 1) -> RangeClaims:
    return RangeClaims(
        servers,
        "work",
        client_id=name,
        group_id="g",
        size=size,
        ahead=ahead,
        heartbeat_interval=2,
        delivery="at-most-once",
    )


def test_rc8_at_most_once_nothing_comes_again_and_what_was_not_handed_out_does(work: str) -> None:
    seen: list[int] = []
    with once(work, "a") as claims:
        claimed = claims.next_range(within(30))
        assert claimed is not None
        with pytest.raises(StateError, match="use batches"):
            iter(claimed)
        batch = next(claimed.batches())
        seen += [message.offset for message in batch.messages]
        assert (batch.token, seen) == (claimed.token, list(range(20)))
        with pytest.raises(StateError, match="at most once"):
            claimed.done()
    with once(work, "b") as claims:  # which takes what a has claimed ahead
        for claimed in claims:
            for batch in claimed.batches():
                seen += [message.offset for message in batch.messages]
            if len(seen) >= 60:
                break
    assert sorted(seen) == list(range(60))


def test_rc8_what_is_left_of_a_range_whose_batches_were_left_comes_again(work: str) -> None:
    seen: list[int] = []
    with once(work, "a", size=300) as claims:  # a batch holds 200
        for _ in range(4):  # more than it holds at once
            claimed = claims.next_range(within(30))
            assert claimed is not None
            with suppress(ZeroDivisionError):
                for batch in claimed.batches():
                    seen += [message.offset for message in batch.messages]
                    raise ZeroDivisionError
            write(work, 10)
    assert seen == list(range(90))


def test_rc8_a_range_that_is_iterated_again_is_not_given_beside(work: str) -> None:
    with once(work, "a", size=300, ahead=0) as claims:
        claimed = claims.next_range(within(30))
        assert claimed is not None
        assert len(next(claimed.batches())) == 60  # the iterator is left at once
        write(work, 10)
        again = claimed.batches()
        assert len(next(again)) == 10
        write(work, 10)
        wait_until(lambda: claims.engine.ends[0] == 80)
        assert claims.next_range(0) is None
        assert len(next(again)) == 10


def test_rc8_what_is_left_of_a_range_comes_again_with_asyncio(work: str) -> None:
    seen: list[int] = []

    async def run() -> None:
        options = {"client_id": "a", "group_id": "g", "delivery": "at-most-once", "size": 300}
        async with aio.RangeClaims(work, "work", heartbeat_interval=2, **options) as claims:
            for _ in range(4):
                claimed = await claims.next_range(within(30))
                assert claimed is not None
                with suppress(ZeroDivisionError):
                    async for batch in claimed.batches():
                        seen.extend(message.offset for message in batch.messages)
                        raise ZeroDivisionError
                write(work, 10)

    asyncio.run(run())
    assert seen == list(range(90))


def test_rc8_what_another_member_has_ended_is_not_handed_out(work: str) -> None:
    zombie, heir = once(work, "a"), once(work, "b")
    try:
        held = zombie.next_range(within(30))
        assert held is not None
        zombie.engine.stop()  # it reads and beats no more, and takes itself for the owner
        found: list[int] = []
        for claimed in heir:
            for batch in claimed.batches():
                found += [message.offset for message in batch.messages]
            if len(found) >= 60:
                break
        assert sorted(found) == list(range(60))  # the zombie's two ranges, too
        with pytest.raises(LeaseLostError):
            next(held.batches())
    finally:
        zombie.close(1.0)
        heir.close()


def test_rc8_only_the_done_that_ended_a_range_is_believed() -> None:
    """a takes a range over and ends it; b's own RangeDone comes behind, and ends nothing."""
    log = RangeLog("g", "t", 60)
    members = {
        name: RangeMember(log, client=name, instance=name, size=10, ahead=0, interval_ms=60_000)
        for name in "ab"
    }
    offsets = itertools.count()

    def land(name: str, write: RangeWrite, at_s: float) -> None:
        offset = next(offsets)
        if log.apply(write.record, offset=offset, broker_time_s=at_s):
            for member in members.values():
                member.on_ended(write.record)
        members[name].on_written(write, offset)

    (_, claim) = members["b"].plan(0, 0.0, ends={0: 10}, bases={0: 0})
    land("b", claim, 0.0)
    late = members["b"].end(DONE, (0, 0, 10), 1)  # under way for long
    (*_, again) = members["a"].plan(0, 200.0, ends={0: 10}, bases={0: 0})
    land("a", again, 200.0)
    own = members["a"].end(DONE, (0, 0, 10), 1)
    land("a", own, 200.0)
    land("b", late, 200.0)
    assert (own.has_ended, late.has_ended) == (True, False)


def test_ranges_of_a_group_that_is_gone_are_free(work: str) -> None:
    """Nothing in the log is later than their last record, which is of yesterday."""
    cluster, now_ms = cluster_of(work), cluster_of(work).now_ms
    cluster.now_ms = lambda: now_ms() - 86_400_000
    record = RangeRecord(CLAIM, "i", "c", "g", "work", 0, 0, 20, 0, 0)
    producer = open_producer({"bootstrap.servers": work})
    producer.produce("kafkamq.ranges", encode_range(record))
    producer.flush(10)
    cluster.now_ms = now_ms
    config = ServiceConfig(bootstrap_servers=work)
    ((log, now_s),) = range_logs(config, "kafkamq.ranges", interval_s=2)
    (left,) = log.abandoned(0, now_s=now_s)
    assert (left.first, left.next) == (0, 20)
    assert log.age_s(left, now_s=now_s) >= 86_000


def test_the_command_goes_on_behind_a_range_that_it_lost(
    work: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    printed: list[int] = []

    def print_json(row: dict[str, int]) -> None:
        printed.append(row["offset"])
        if len(printed) == 1:  # another member takes its range
            config = ServiceConfig(bootstrap_servers=work)
            ((log, _),) = range_logs(config, "kafkamq.ranges", interval_s=30)
            client, instance = log.open_ranges(0)[0].owner
            place = ("g", "work", 0, 0, 20, log.frontier(0), log.next_offset)
            producer = open_producer({"bootstrap.servers": work})
            for record in (
                RangeRecord(FREE, instance, client, *place),
                RangeRecord(CLAIM, "i", "b", *place),
            ):
                value, number = encode_range(record), coordination_partition("work", 8)
                producer.produce("kafkamq.ranges", value, partition=number)
            producer.flush(10)

    monkeypatch.setattr("kafkamq.cli.output.print_json", print_json)
    found = CliRunner().invoke(
        app,
        [
            *("claims", "ranges", "consume", "g", "work", "--client", "a", "--json", "-b", work),
            *("--size", "20", "--interval", "30", "--count", "40"),
        ],
    )
    assert found.exit_code == 0, found.output
    assert printed == list(range(60))
    assert "going on with the next range" in caplog.text


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
def test_an_iteration_ends_when_another_thread_closes(work: str, delivery: str) -> None:
    ids = {"client_id": "a", "group_id": "g", "delivery": delivery}
    claims = RangeClaims(work, "work", size=100, ahead=0, heartbeat_interval=2, **ids)
    read = threading.Event()

    def work_on() -> int:
        claimed = claims.next_range(within(30))
        assert claimed is not None
        seen = 0
        for batch in claimed.batches():
            seen += len(batch)
            if seen == 60:
                read.set()  # from here on it waits for messages
        return seen

    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work_on)
        assert read.wait(within(30))
        claims.close()
        assert working.result(within(30)) == 60


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
def test_a_close_sees_what_is_being_ended_through(
    work: str, delivery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {"group_id": "g", "delivery": delivery, "size": 20, "ahead": 0}
    claims = RangeClaims(work, "work", client_id="a", heartbeat_interval=10, **ids)
    claimed = claims.next_range(within(30))
    assert claimed is not None
    ending, end = threading.Event(), claims.engine.end

    def told(*of: Any) -> RangeWrite:
        ending.set()
        return end(*of)

    def work_on() -> int:
        if claims.is_once:
            return sum(map(len, claimed.batches()))
        seen = len(list(claimed))
        claimed.done()
        return seen

    monkeypatch.setattr(claims.engine, "end", told)
    offline = cluster_of(work).faults.offline
    with ThreadPoolExecutor(2) as threads:
        offline.add(("kafkamq.ranges", coordination_partition("work", 8)))
        working = threads.submit(work_on)
        assert ending.wait(within(30))
        closing = threads.submit(claims.close)
        wait_until(lambda: claims.is_stopped)
        offline.clear()
        assert working.result(within(30)) == 20
        closing.result(within(30))
    with RangeClaims(work, "work", client_id="b", heartbeat_interval=10, **ids) as heir:
        found = heir.next_range(within(30))
        assert found is not None
        assert found.first == 20


def test_rc8_a_batch_that_meets_a_close_is_not_done(
    work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {"group_id": "g", "delivery": "at-most-once", "size": 20, "ahead": 0}
    claims = RangeClaims(work, "work", client_id="a", heartbeat_interval=10, **ids)
    claimed = claims.next_range(within(30))
    assert claimed is not None
    is_read, goes_on, handed_out = threading.Event(), threading.Event(), list[int]()
    done, leave = claims.done, claims.engine.leave

    def end_late(*of: Any) -> None:
        is_read.set()
        assert goes_on.wait(within(30))
        done(*of)

    def leave_behind(timeout_s: float) -> None:
        claims.engine.stop()
        goes_on.set()
        handed_out.append(working.result(within(30)))
        leave(timeout_s)

    monkeypatch.setattr(claims, "done", end_late)
    monkeypatch.setattr(claims.engine, "leave", leave_behind)
    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(lambda: sum(map(len, claimed.batches())))
        assert is_read.wait(within(30))
        claims.close()
    with RangeClaims(work, "work", client_id="b", heartbeat_interval=10, **ids) as heir:
        found = heir.next_range(within(30))
        assert found is not None
        assert (handed_out, found.first) == ([0], 0)


def test_a_range_that_is_done_waits_for_no_other_one(
    work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {"client_id": "a", "group_id": "g"}
    with RangeClaims(work, "work", size=20, ahead=1, heartbeat_interval=20, **ids) as claims:
        first, second = claims.next_range(within(30)), claims.next_range(within(30))
        assert first is not None
        assert second is not None
        send, withheld = claims.engine.send, list[RangeWrite]()

        def send_first(write: RangeWrite) -> None:
            if write.record.type is DONE and write.record.first == second.first:
                withheld.append(write)
            else:
                send(write)

        monkeypatch.setattr(claims.engine, "send", send_first)
        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(second.done, second.next)
            wait_until(lambda: withheld)
            first.done(first.next)
            assert not other.done()
            send(withheld[0])
            other.result(within(30))
