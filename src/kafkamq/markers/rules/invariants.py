"""What must hold in a tracker after every record; for tests and simulations."""

from __future__ import annotations

from typing import Protocol

from kafkamq.markers.rules.chunks import Chunk
from kafkamq.markers.rules.entry import ASKED, CARRY, DUE, HELD, NEVER, STATE, Entry
from kafkamq.markers.rules.holders import Holders
from kafkamq.markers.rules.packed import PackedPage
from kafkamq.markers.rules.table import ChunkTable

__all__ = ["check_tracker"]


class _Tracker(Protocol):
    table: ChunkTable
    holders: Holders
    next_offset: int

    @property
    def clock_ms(self) -> int: ...
    def changes_at(self, entry: Entry, of_schedule: bool = ...) -> int: ...
    def committable_offset(self) -> int: ...


def check_tracker(tracker: _Tracker) -> None:
    """Assert the invariants; loads every page and chunk."""
    table = tracker.table
    before = table.open, table.first_start_offset(), table.next_change_ms()
    table.open_pages(table.pages.closed)
    after = table.open, table.first_start_offset(), table.next_change_ms()
    assert before == after, "a page is summed up"
    _check_packed(tracker)
    table.unpack_all()
    references: dict[int, int] = {}
    for chunk in tracker.table.chunks.values():
        _check_chunk(tracker, chunk)
        for entry in tracker.table.entries(chunk).values():
            if entry.holder is not None:
                number = entry.holder.number
                references[number] = references.get(number, 0) + 1
    used = {holder.number: holder.references for holder in tracker.holders.used()}
    assert used == references, "holders count their entries"
    shortest_ms = min((holder.timeout_ms for holder in tracker.holders.used()), default=0)
    assert tracker.holders.shortest_timeout_ms() == shortest_ms, "timeouts are counted"
    assert tracker.committable_offset() <= tracker.next_offset, "a position is in the past"
    _check_table(tracker)


def _check_packed(tracker: _Tracker) -> None:
    """Pages are in order, and wake in time."""
    pages = [each for each in tracker.table.chunks.values() if isinstance(each, PackedPage)]
    rows = sum(page.open_count() for page in pages)
    assert tracker.table.packed.count == rows, "rows are counted"
    _check_table(tracker)
    for page in pages:
        assert page.offsets, "a page without rows is gone"
        assert list(page.offsets) == sorted(set(page.offsets)), "rows are in order"
        assert page.wake_ms <= min(page.changes_ms), "a page wakes in time"
        assert page.wanted == len(page.wanted_offsets()), "wanted rows are counted"


def _check_table(tracker: _Tracker) -> None:
    """What the table keeps of its chunks is what they say."""
    table = tracker.table
    chunks = table.chunks.values()
    filled = [chunk for chunk in chunks if chunk.open_count()]
    assert table.open == sum(chunk.open_count() for chunk in chunks), "entries are counted"
    unsettled = sum(chunk.wanted + chunk.asked for chunk in chunks)
    assert table.unsettled == unsettled, "what is not settled is counted"
    assert all(chunk.key in table.wanting for chunk in chunks if chunk.wanted), "plan finds all"
    first = min((chunk.first_start_offset() for chunk in filled), default=NEVER)
    assert table.first_start_offset() == first, "the first entry is found"
    wake_ms = min((chunk.wake_ms for chunk in filled), default=NEVER)
    assert table.next_change_ms() == wake_ms, "the next change is found"


def _check_chunk(tracker: _Tracker, chunk: Chunk) -> None:
    now_ms = tracker.clock_ms
    entries = tracker.table.entries(chunk)
    actionable = [entry for entry in entries.values() if entry.flags & (DUE | CARRY)]
    asked = sum(1 for entry in actionable if entry.flags & ASKED)
    assert chunk.asked == asked, "asked entries are counted"
    assert chunk.wanted == len(actionable) - asked, "wanted entries are counted"
    starts = [entry.start_offset for entry in entries.values()]
    assert starts == sorted(starts), "entries are in the order of their first markers"
    for slot, entry in entries.items():
        held = entry.flags & STATE == HELD
        assert held == (entry.holder is not None), "held entries have a holder"
        assert entry.start_offset < tracker.next_offset, "entries come from the log"
        assert not chunk.has_ended(slot, now_ms), "open is not ended"
        if not entry.flags & DUE:
            at_ms = tracker.changes_at(entry, chunk.key[0])
            assert at_ms >= now_ms, "what the clock has passed is due"
            assert chunk.wake_ms <= at_ms, "a chunk wakes in time"
