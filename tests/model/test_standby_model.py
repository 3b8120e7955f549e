"""Trackers that stand by, under seeds: members of one log that are killed, paused, cut off (R36).

The log is a list; what its members write arrives late, and nothing is read while it cannot be
reached. The oracle is the log alone: who was active when, and whether anybody needed to take over.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kafkamq.markers.rules.standby import BEAT_MS, SILENT_BEATS, Beat, Phase, Standby

TURN_MS = 100
SIGN_MS = 1000
SETTLES_MS = 2000
TAKEOVER_MS = (SILENT_BEATS + 1) * (BEAT_MS + 2 * TURN_MS) + 2 * TURN_MS


@dataclass
class Entry:
    writer: int
    kind: str
    epoch: int = 0
    number: int = 0


@dataclass
class Log:
    entries: list[Entry] = field(default_factory=list)
    is_reachable: bool = True
    epoch: int = 0  # of the ledgers: the latest start's


class Member:
    """One start, as its shell runs the rules."""

    def __init__(self, log: Log, number: int) -> None:
        self.log, self.number = log, number
        self.rules = Standby()
        self.read = 0
        self.epoch = 0
        self.signed_ms = -SIGN_MS
        self.paused_until_ms = 0
        self.unwritten: list[Entry] = []

    @property
    def is_owner(self) -> bool:
        return self.epoch > 0 and self.epoch == self.log.epoch

    def turn(self, now_ms: int) -> None:
        if now_ms < self.paused_until_ms:
            return
        self.take_in(now_ms)
        if self.rules.phase is Phase.CHOSEN and self.log.is_reachable:
            self.log.epoch = self.epoch = self.log.epoch + 1  # R22
            self.rules.took_over(self.epoch)
        is_writing = now_ms % SETTLES_MS == 0 and self.log.is_reachable
        is_fenced = self.rules.phase is Phase.ACTIVE and is_writing and not self.is_owner
        if is_fenced or self.rules.phase is Phase.SUCCEEDED:
            self.epoch = 0
            self.rules.stand_by()
        if self.rules.phase is Phase.ACTIVE:
            if now_ms - self.signed_ms >= SIGN_MS:
                self.signed_ms = now_ms
                self._write("active", self.epoch)
            return

    def take_in(self, now_ms: int) -> None:
        """Write and read; what it does when it is chosen comes behind that."""
        if self.log.is_reachable:
            self.log.entries += self.unwritten
            self.unwritten = []
            for entry in self.log.entries[self.read :]:
                self._take(entry)
            self.read = len(self.log.entries)
        beat = self.rules.beat(now_ms)
        if beat is not None:
            self._write("bid" if beat is Beat.BID else "standby")

    def end(self) -> None:
        if self.rules.phase is Phase.ACTIVE:
            self._write("ended", self.epoch)
            if self.log.is_reachable:
                self.log.entries += self.unwritten

    def _write(self, kind: str, epoch: int = 0) -> None:
        self.unwritten.append(Entry(self.number, kind, epoch, self.rules.number))

    def _take(self, entry: Entry) -> None:
        if entry.writer == self.number:
            self.rules.own(entry.number)
        elif entry.kind == "active":
            self.rules.active(entry.epoch)
        elif entry.kind == "ended":
            self.rules.ended(entry.epoch)
        elif entry.kind == "bid":
            self.rules.bid()


class World:
    def __init__(self, seed: int = 0, members: int = 3) -> None:
        self.rng = random.Random(seed)
        self.log = Log()
        self.now_ms = 0
        self.born = 0
        self.members: list[Member] = []
        for _ in range(members):
            self.start()

    def start(self) -> Member:
        self.born += 1
        self.members.append(Member(self.log, self.born))
        return self.members[-1]

    def kill(self, member: Member) -> None:
        self.members.remove(member)

    def run(self, ms: int) -> None:
        for _ in range(ms // TURN_MS):
            self.now_ms += TURN_MS
            for member in self.rng.sample(self.members, len(self.members)):
                member.turn(self.now_ms)

    @property
    def owners(self) -> list[Member]:
        return [each for each in self.members if each.is_owner]

    @property
    def active(self) -> list[Member]:
        return [each for each in self.members if each.rules.phase is Phase.ACTIVE]

    def takes_over(self) -> Member:
        """One owner within the bound, and nobody after it."""
        self.run(TAKEOVER_MS)
        (owner,) = self.owners
        epoch = self.log.epoch
        self.run(60_000)
        assert self.owners == [owner] == self.active
        assert self.log.epoch == epoch, "they fence each other"
        return owner


@pytest.mark.parametrize("seed", range(20))
def test_one_takes_over_at_once_where_nobody_was_active(seed: int) -> None:
    world = World(seed)
    world.run(5 * TURN_MS)
    assert len(world.owners) == 1
    world.takes_over()
    assert world.log.epoch == 1, "two of them did"


@pytest.mark.parametrize("seed", range(20))
def test_one_takes_over_from_one_that_was_killed_within_its_bound(seed: int) -> None:
    world = World(seed)
    for number in range(5):
        owner = world.takes_over()
        assert world.log.epoch == number + 1
        world.kill(owner)
        world.start()


def test_what_ended_on_purpose_is_followed_at_once() -> None:
    world = World()
    owner = world.takes_over()
    owner.end()
    world.kill(owner)
    world.run(6 * TURN_MS)
    assert len(world.owners) == 1
    assert world.log.epoch == 2


def test_one_that_was_paused_stands_by_when_it_comes_back() -> None:
    world = World()
    paused = world.takes_over()
    paused.paused_until_ms = world.now_ms + 30_000
    world.run(TAKEOVER_MS)
    (heir,) = world.owners
    assert heir is not paused
    world.run(40_000)
    assert world.owners == [heir] == world.active
    assert world.log.epoch == 2


def test_a_sign_of_a_former_one_is_no_sign_of_life() -> None:
    world = World(members=2)
    former = world.takes_over()
    former.paused_until_ms = world.now_ms + 10**9
    world.run(TAKEOVER_MS)
    (heir,) = world.owners
    world.kill(heir)
    world.start()
    for _ in range(TAKEOVER_MS // TURN_MS):
        world.log.entries.append(Entry(former.number, "active", former.epoch))
        world.run(TURN_MS)
    assert len(world.owners) == 1
    assert world.log.epoch == 3


@pytest.mark.parametrize("outage_ms", [1_000, 6_000, 15_000, 120_000])
def test_a_log_that_is_away_is_no_silence(outage_ms: int) -> None:
    world = World()
    world.takes_over()
    world.log.is_reachable = False
    world.run(outage_ms)
    world.log.is_reachable = True
    world.takes_over()
    assert world.log.epoch == 1


def test_who_wins_and_dies_is_followed_by_the_others() -> None:
    world = World(members=3)
    world.kill(world.takes_over())
    begins = len(world.log.entries)

    def bids() -> list[int]:
        return [each.writer for each in world.log.entries[begins:] if each.kind == "bid"]

    while not bids():
        world.run(TURN_MS)
    (winner,) = [each for each in world.members if each.number == bids()[0]]
    world.kill(winner)  # between its bid and its claim, or right behind that
    world.run(2 * TAKEOVER_MS)
    assert len(world.owners) == 1


def test_who_is_paused_between_bid_and_claim_waits_when_it_comes_back() -> None:
    world = World(members=3)
    world.kill(world.takes_over())
    while not any(each.rules.phase is Phase.CHOSEN for each in world.members):
        world.now_ms += TURN_MS
        for member in world.members:  # its shell takes the bid in, and comes no further
            if member.rules.phase is not Phase.CHOSEN:
                member.take_in(world.now_ms)
    (paused,) = [each for each in world.members if each.rules.phase is Phase.CHOSEN]
    paused.paused_until_ms = world.now_ms + 20_000
    world.run(TAKEOVER_MS)
    (heir,) = world.owners
    paused.paused_until_ms = 0
    paused.take_in(world.now_ms)
    assert paused.rules.phase is Phase.WAITING
    world.run(30_000)
    assert world.owners == [heir]


@pytest.mark.parametrize("seed", range(60))
def test_kills_pauses_and_outages(seed: int) -> None:
    """Whatever happens: never two that think so for long, and one soon after it stops."""
    world = World(seed, members=2 + seed % 3)
    for _ in range(30):
        world.run(world.rng.randrange(100, 8_000))
        fault = world.rng.choice(["kill", "pause", "outage", "end"])
        member = world.rng.choice(world.owners or world.members)
        if fault == "outage":
            world.log.is_reachable = False
            world.run(world.rng.randrange(100, 20_000))
            world.log.is_reachable = True
        elif fault == "pause":
            member.paused_until_ms = world.now_ms + world.rng.randrange(100, 20_000)
        else:
            if fault == "end":
                member.end()
            world.kill(member)
            world.start()
    for member in world.members:
        member.paused_until_ms = 0
    world.run(SETTLES_MS + TAKEOVER_MS)  # who is fenced by a dead one learns it when it writes
    world.takes_over()
