"""What must hold in a tracker after every record; for tests and simulations."""

from __future__ import annotations

from typing import Protocol

from kafkamq.markers.rules.hold import ASKED, CARRY, DUE, HELD, NEVER, STATE, Hold
from kafkamq.markers.rules.holders import Holders
from kafkamq.markers.rules.leaves import MAX_HOLDS, HoldLog, Leaf
from kafkamq.markers.rules.table import HoldTable


class _Tracker(Protocol):
    table: HoldTable
    holders: Holders
    next_offset: int

    @property
    def clock_ms(self) -> int: ...
    def changes_at(self, hold: Hold, of_schedule: bool = ...) -> int: ...
    def committable_offset(self) -> int: ...


def check_tracker(tracker: _Tracker) -> None:
    """Assert the invariants; loads every page and chunk."""
    table = tracker.table
    before = table.open, table.unsettled, table.first_start_offset()
    table.fetch_all()
    after = table.open, table.unsettled, table.first_start_offset()
    assert before == after, "a chunk is summed up"
    references: dict[int, int] = {}
    for log in table.logs.values():
        _check_log(log)
    for leaf in table.leaves():
        _check_leaf(tracker, leaf)
        for hold in leaf.holds:
            if hold.holder is not None:
                number = hold.holder.number
                references[number] = references.get(number, 0) + 1
    used = {holder.number: holder.references for holder in tracker.holders.used()}
    assert used == references, "holders count their holds"
    shortest_ms = min((holder.timeout_ms for holder in tracker.holders.used()), default=0)
    assert tracker.holders.shortest_timeout_ms() == shortest_ms, "timeouts are counted"
    assert tracker.committable_offset() <= tracker.next_offset, "a position is in the past"
    _check_table(table)


def _check_log(log: HoldLog) -> None:
    """Each page is in one leaf, and each message in one hold."""
    pages = [page for leaf in log.leaves for page in leaf.pages]
    assert pages == sorted(pages), "pages are in order"
    assert all(page <= log.last_page for page in pages), "no page is behind the last one"
    firsts = [leaf.pages[0] for leaf in log.leaves]
    assert all(map(int.__le__, log.firsts, firsts)), "leaves are found"
    assert len(set(firsts)) == len(firsts) == len(log.firsts), "a page is in one leaf"
    found: dict[int, int] = {}
    for leaf in log.leaves:
        assert leaf.log is log
        for page, hold in zip(leaf.pages, leaf.holds, strict=True):
            assert hold.bits, "a hold holds something"
            assert not hold.bits & found.get(page, 0), "a message is in one hold"
            found[page] = found.get(page, 0) | hold.bits
    if log.last_page in found:
        assert not found[log.last_page] & ~log.last_bits, "what was in the last page is known"


def _check_table(table: HoldTable) -> None:
    """What the table keeps of its holds is what they say."""
    holds = [hold for leaf in table.leaves() for hold in leaf.holds]
    assert table.open == sum(hold.bits.bit_count() for hold in holds), "messages are counted"
    unsettled = sum(hold.bits.bit_count() for hold in holds if hold.flags & (DUE | CARRY))
    assert table.unsettled == unsettled, "what is not settled is counted"
    first = min((hold.start_offset for hold in holds), default=NEVER)
    assert table.first_start_offset() == first, "the first hold is found"
    wake_ms = min((leaf.wake_ms for leaf in table.leaves()), default=NEVER)
    assert table.next_change_ms() == wake_ms, "the next change is found"


def _check_leaf(tracker: _Tracker, leaf: Leaf) -> None:
    now_ms = tracker.clock_ms
    of_schedule = leaf.log.key[0]
    assert 0 < len(leaf.holds) <= MAX_HOLDS, "a leaf has some holds"
    for page, hold in zip(leaf.pages, leaf.holds, strict=True):
        held = hold.flags & STATE == HELD
        assert held == (hold.holder is not None), "what is held has a holder"
        assert hold.start_offset < tracker.next_offset, "holds come from the log"
        assert leaf.first_offset <= hold.start_offset, "a leaf knows where it begins"
        assert not leaf.log.has_ended(page, hold.bits, now_ms), "open is not ended"
        if hold.flags & (DUE | CARRY) and not hold.flags & ASKED:
            assert leaf in tracker.table.wanting, "plan finds all"
        if not hold.flags & DUE:
            at_ms = tracker.changes_at(hold, of_schedule)
            assert at_ms >= now_ms, "what the clock has passed is due"
            assert leaf.wake_ms <= hold.wake_ms <= at_ms, "a leaf wakes in time"
