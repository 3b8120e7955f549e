"""A tracker's state is kept in a state store: one index, and the chunks and pages that changed
(R18).

The index is JSON: the clock, the holders, and a line for each chunk; of a thousand and more only
for those that changed last, the others' lines are in pages (``chunks.py``). A chunk is what
``Chunk.dump`` writes. Chunks and pages are fetched when a record or the clock touches them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from kafkamq.errors import UnsupportedVersionError, WireError
from kafkamq.markers.rules.chunks import (
    LIMITS,
    Chunk,
    ChunkKey,
    Page,
    PageLimits,
    Pages,
    listed_chunks,
)
from kafkamq.markers.rules.hold import NEVER
from kafkamq.markers.rules.redelivery import RedeliveryTracker
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
    listed = listed_chunks(table, limits)
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
        "holders": [
            [
                holder.number,
                holder.consumer_id,
                holder.timeout_ms,
                holder.max_lease_ms,
                holder.renewed_ms,
                holder.renewed_until_ms,
                holder.references,
            ]
            for holder in tracker.holders.used()
        ],
        "chunks": [_line(chunk) for chunk in listed],
        "pages": [_page_line(page) for page in (*pages.closed, *pages.open)],
        "next_page": pages.next_number,
    }
    return Snapshot(_encoded(index), changed, removed)


def _write_page(page: Page, chunks: list[Chunk], changed: dict[str, bytes]) -> None:
    data = _encoded([_line(chunk) for chunk in chunks])
    if data != page.stored:
        changed[_page_id(page.number)] = page.stored = data
    page.sum_up(chunks)


def _encoded(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _line(chunk: Chunk) -> _Line:
    return [
        chunk_id(chunk.key),
        chunk.wake_ms,
        chunk.size,
        chunk.first_start_offset,
        chunk.wanted,
        chunk.asked,
        chunk.ended_ms,
    ]


def _page_line(page: Page) -> _Line:
    return [
        page.number,
        chunk_id(page.first),
        chunk_id(page.last),
        page.wake_ms,
        page.change_ms,
        page.first_start_offset,
        page.size,
    ]


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
    max_lease_ms: int = 43_200_000,
    longest_ms: int = NEVER,
    carry_after_ms: int = NEVER,
    engine: tuple[str, int] | None = None,
) -> RedeliveryTracker:
    """Return the tracker that a snapshot describes; ``load_chunk`` fetches chunks and pages when
    needed.

    It is live only for the engine that was live when the snapshot was taken (R17).

    Raises:
        UnsupportedVersionError: written by a newer version.
        WireError: not an index.
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
            raise WireError(f"tracker state of version {version}, which no release has written")
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
    number, first, last, wake_ms, change_ms, first_offset, size = line
    return Page(
        int(number),
        _chunk_key(str(first)),
        _chunk_key(str(last)),
        wake_ms=int(wake_ms),
        change_ms=int(change_ms),
        first_start_offset=int(first_offset),
        size=int(size),
    )


def _stored_chunk(line: _Line) -> Chunk:
    name, wake_ms, size, first, wanted, asked, ended_ms = line
    chunk = Chunk(_chunk_key(str(name)))
    chunk.wake_ms = int(wake_ms)
    chunk.size = int(size)
    chunk.first_start_offset = int(first)
    chunk.wanted = int(wanted)
    chunk.asked = int(asked)
    chunk.ended_ms = int(ended_ms)
    return chunk
