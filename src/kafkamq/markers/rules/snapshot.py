"""A tracker's state in a state store is an index, and chunks and pages as they change (R18).

The index is JSON: the clock, the holders, and a line for each chunk; of a thousand and more only
for those that changed last, the others' lines are in pages (``chunks.py``). A chunk is what
``Chunk.dump`` writes. Chunks and pages are fetched when a record or the clock touches them.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from kafkamq.config import Options
from kafkamq.errors import UnsupportedVersionError, WireError
from kafkamq.markers.rules.chunks import (
    LIMITS,
    Chunk,
    ChunkKey,
    Page,
    PageLimits,
    Pages,
    first_key,
)
from kafkamq.markers.rules.hold import NEVER
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.rules.table import HoldTable
from kafkamq.queue.rules.log_clock import LogClock

STATE_VERSION = 4
_Line = list[str | int]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What to write: the index always, what changed, and what to remove."""

    index: bytes
    changed: dict[str, bytes]
    removed: list[str]


def chunk_id(key: ChunkKey) -> str:
    of_schedule, topic_id, leader_epoch, partition, number = key
    return f"{int(of_schedule)}/{topic_id.hex()}/{leader_epoch}/{partition}/{number}"


def _chunk_key(name: str) -> ChunkKey:
    of_schedule, topic_id, leader_epoch, partition, number = name.split("/")
    return (
        of_schedule == "1",
        bytes.fromhex(topic_id),
        int(leader_epoch),
        int(partition),
        int(number),
    )


def _page_id(number: int) -> str:
    return f"page/{number}"


def take_snapshot(tracker: RedeliveryTracker, limits: PageLimits = LIMITS) -> Snapshot:
    """Return what changed since the last snapshot; the tracker goes on as it is."""
    table, pages = tracker.table, tracker.table.pages
    here = table.here()
    gone = [each.key for each in table.chunks.values() if each.is_here and each.key not in here]
    for key in gone:
        del table.chunks[key]
    removed = [chunk_id(key) for key in gone]
    changed: dict[str, bytes] = {}
    for key, (ended, holds) in here.items():
        chunk = table.chunks.setdefault(key, Chunk(key))
        before, chunk.stored = chunk.stored, chunk.dump(ended, holds)
        chunk.is_changed = chunk.stored != before
        if chunk.is_changed:
            changed[chunk_id(key)] = chunk.stored
    listed = _listed_chunks(table, limits)
    for page in pages.open:
        if page.keys:
            _write_page(page, [table.chunks[key] for key in page.keys], changed)
        else:
            removed.append(_page_id(page.number))
    pages.open = [page for page in pages.open if page.keys]
    index: dict[str, object] = {
        "version": STATE_VERSION,
        "next_offset": tracker.next_offset,
        "clock": [tracker.clock.now_ms, tracker.clock.last_ms],
        "late_verdicts": tracker.late_verdicts,
        "malformed": tracker.malformed,
        "live": list(tracker.engine) if tracker.engine and tracker.is_live else None,
        "next_holder": tracker.holders.next_number,
        "holders": [_holder_facts(holder) for holder in tracker.holders.used()],
        "chunks": [_line(chunk) for chunk in listed],
        "pages": [_page_line(page) for page in (*pages.closed, *pages.open)],
        "next_page": pages.next_number,
    }
    return Snapshot(_encoded(index), changed, removed)


def _listed_chunks(table: HoldTable, limits: PageLimits) -> list[Chunk]:
    """Share out what is here; returns what the index lists, those that changed last at the end.

    The others are in the open pages; one that has none left is still there, without keys.
    """
    chunks, pages = table.chunks, table.pages
    paged: set[ChunkKey] = set()
    for page in pages.open:
        kept = [key for key in page.keys if key in chunks and _rests(chunks[key])]
        dissolves = len(kept) < min(limits.least, len(page.keys))
        page.keys = [] if dissolves else kept
        paged.update(page.keys)
    left = [chunk for key, chunk in chunks.items() if key not in paged]
    resting = [chunk for chunk in left if _rests(chunk)]
    busy = [chunk for chunk in left if not _rests(chunk)]
    if len(left) > limits.listed:
        surplus = len(left) - limits.kept
        _put(table, sorted(chunk.key for chunk in resting[:surplus]), limits)
        resting = resting[surplus:]
    return resting + busy


def _rests(chunk: Chunk) -> bool:
    return not (chunk.is_changed or chunk.wanted or chunk.asked)


def _put(table: HoldTable, keys: Sequence[ChunkKey], limits: PageLimits) -> None:
    """Put chunks, in order of their keys, into the pages where they belong, or into new ones."""
    pages = table.pages
    before = sorted([*pages.closed, *pages.open], key=first_key)
    inside: dict[int, list[ChunkKey]] = {}
    # By the place of the page in front of them; -1: they are before all pages.
    behind: dict[int, list[ChunkKey]] = {}
    for key in keys:
        at = bisect_right(before, key, key=first_key) - 1
        is_inside = at >= 0 and key <= before[at].last
        (inside if is_inside else behind).setdefault(at, []).append(key)
    for at, more in behind.items():
        if before and len(more) < limits.least:
            inside.setdefault(max(at, 0), []).extend(more)
        else:
            for start in range(0, len(more), limits.page):
                pages.new(more[start : start + limits.page])
    for at, more in inside.items():
        page = before[at]
        if page not in pages.open:
            table.open_pages([page])
        merged = sorted(page.keys + more)
        if len(merged) > 2 * limits.page:
            for start in range(limits.page, len(merged), limits.page):
                pages.new(merged[start : start + limits.page])
            del merged[limits.page :]
        page.keys = merged


def _write_page(page: Page, chunks: list[Chunk], changed: dict[str, bytes]) -> None:
    data = _encoded([_line(chunk) for chunk in chunks])
    if data != page.stored:
        changed[_page_id(page.number)] = page.stored = data
    page.sum_up(chunks)


def _encoded(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


_holder_facts = attrgetter(
    "number",
    "consumer_id",
    "timeout_ms",
    "max_lease_ms",
    "renewed_ms",
    "renewed_until_ms",
    "references",
)
# Of a chunk or page in the index, behind its names, in the order of the constructor.
_chunk_numbers = attrgetter("wake_ms", "size", "first_start_offset", "wanted", "asked", "ended_ms")
_page_numbers = attrgetter("wake_ms", "change_ms", "first_start_offset", "size")


def _line(chunk: Chunk) -> _Line:
    return [chunk_id(chunk.key), *_chunk_numbers(chunk)]


def _page_line(page: Page) -> _Line:
    return [page.number, chunk_id(page.first), chunk_id(page.last), *_page_numbers(page)]


def _own(tracker: RedeliveryTracker, engine: tuple[str, int], live: object) -> None:
    """Make a restored tracker an engine's; its TICK may have told the epoch (R36)."""
    told = (engine[0], live[1]) if isinstance(live, list) and live[0] == engine[0] else engine
    tracker.engine = told if engine[1] == 0 else engine
    tracker.is_live = live == list(tracker.engine)


def restore_tracker(
    index: bytes,
    load_chunk: Callable[[str], bytes],
    *,
    partition: int,
    max_lease_ms: int = Options.max_lease.default_ms,
    longest_ms: int = NEVER,
    carry_after_ms: int = NEVER,
    engine: tuple[str, int] | None = None,
) -> RedeliveryTracker:
    """Return a snapshot's tracker; ``load_chunk`` fetches chunks and pages when needed.

    It is live only for the engine that was live when the snapshot was taken (R17).

    Raises:
        UnsupportedVersionError: written by a newer version.
        WireError: not an index, or one of an older version.
    """
    tracker = RedeliveryTracker(
        partition=partition,
        max_lease_ms=max_lease_ms,
        longest_ms=longest_ms,
        carry_after_ms=carry_after_ms,
        engine=engine,
        load_chunk=lambda key: load_chunk(chunk_id(key)),
    )
    try:
        state = json.loads(index)
        version = state["version"]
        if version > STATE_VERSION:
            raise UnsupportedVersionError(
                f"tracker state of version {version}, this release reads {STATE_VERSION}: "
                "upgrade kafkamq"
            )
        if version < STATE_VERSION:
            raise WireError(
                f"tracker state of version {version}, this release reads {STATE_VERSION}: give "
                "the tracker an empty checkpoint (no message is lost)"
            )
        tracker.next_offset = state["next_offset"]
        tracker.clock = LogClock(*state["clock"])
        tracker.late_verdicts = state["late_verdicts"]
        tracker.malformed = state["malformed"]
        if engine is not None:
            _own(tracker, engine, state["live"])
        tracker.holders.next_number = state["next_holder"]
        for number, consumer_id, timeout_ms, lease_ms, renewed_ms, until_ms, references in state[
            "holders"
        ]:
            terms = consumer_id, timeout_ms, lease_ms
            holder = tracker.holders.restore(number, *terms, renewed_ms, until_ms)
            holder.references = references
        pages = Pages(
            [_stored_page(line) for line in state["pages"]],
            state["next_page"],
            lambda page: _read_page(load_chunk(_page_id(page.number))),
        )
        tracker.table.adopt([_stored_chunk(line) for line in state["chunks"]], pages)
    except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"tracker state cannot be read: {error!r}") from error
    return tracker


def _read_page(data: bytes) -> tuple[bytes, list[Chunk]]:
    return data, [_stored_chunk(line) for line in json.loads(data)]


def _stored_page(line: _Line) -> Page:
    number, first, last, *numbers = line
    wake_ms, change_ms, first_offset, size = map(int, numbers)
    keys = _chunk_key(str(first)), _chunk_key(str(last))
    return Page(int(number), *keys, wake_ms, change_ms, first_offset, size)


def _stored_chunk(line: _Line) -> Chunk:
    wake_ms, size, first, wanted, asked, ended_ms = map(int, line[1:])
    return Chunk(_chunk_key(str(line[0])), wake_ms, size, first, wanted, asked, ended_ms)
