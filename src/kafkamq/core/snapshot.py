"""A tracker's state in a state store: one index, and the chunks that changed (R18).

The index is JSON: the clock, the holders and a line for each chunk. A chunk is what
``Chunk.dump`` writes. Chunks are fetched when a record or the clock touches them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from kafkamq.core.chunks import Chunk, ChunkKey
from kafkamq.core.clock import LogClock
from kafkamq.core.entry import NEVER
from kafkamq.core.holders import Holder
from kafkamq.core.redelivery import RedeliveryTracker
from kafkamq.errors import UnsupportedVersionError, WireError

__all__ = ["STATE_VERSION", "Snapshot", "chunk_id", "restore_tracker", "take_snapshot"]

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What to write: the index always, the chunks that changed, and what to remove."""

    index: bytes
    changed: dict[str, bytes]  # by chunk_id
    removed: list[str]


def chunk_id(key: ChunkKey) -> str:
    """A chunk's name in the store."""
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


def take_snapshot(tracker: RedeliveryTracker) -> Snapshot:
    """What changed since the last snapshot; the tracker goes on as it is."""
    changed: dict[str, bytes] = {}
    lines: list[list[str | int]] = []
    for key, chunk in tracker.table.chunks.items():
        name = chunk_id(key)
        if chunk.dirty:
            changed[name] = chunk.dump()
            chunk.dirty = False
        lines.append(
            [
                name,
                chunk.wake_ms,
                chunk.open_count(),
                chunk.first_start_offset(),
                chunk.wanted,
                chunk.asked,
                chunk.ended_ms,
            ]
        )
    removed = [chunk_id(key) for key in tracker.table.export()]
    index = {
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
        "chunks": lines,
    }
    return Snapshot(json.dumps(index, separators=(",", ":")).encode(), changed, removed)


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
    """The tracker that a snapshot describes; chunks are fetched by ``load_chunk`` when needed.

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
        if state["version"] > STATE_VERSION:
            raise UnsupportedVersionError(
                f"tracker state of version {state['version']}, this release reads "
                f"{STATE_VERSION}: upgrade kafkamq"
            )
        tracker.next_offset = state["next_offset"]
        tracker.clock = LogClock(*state["clock"])
        tracker.late_verdicts = state["late_verdicts"]
        tracker.malformed = state["malformed"]
        if engine is not None:
            tracker.is_live = state["live"] == list(engine)
        tracker.holders.next_number = state["next_holder"]
        stored: dict[int, Holder] = {}
        for number, consumer_id, timeout_ms, lease_ms, renewed_ms, until_ms, references in state[
            "holders"
        ]:
            holder = stored[number] = Holder(number, consumer_id, timeout_ms, lease_ms)
            holder.renewed_ms = renewed_ms
            holder.renewed_until_ms = until_ms
            holder.references = references
            tracker.holders.restore(holder)
        tracker.table.adopt([_stored_chunk(line) for line in state["chunks"]], stored)
    except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"tracker state cannot be read: {error!r}") from error
    return tracker


def _stored_chunk(line: list[str | int]) -> Chunk:
    name, wake_ms, size, first, wanted, asked, ended_ms = line
    chunk = Chunk(_chunk_key(str(name)))
    chunk.entries = None
    chunk.dirty = False
    chunk.wake_ms = int(wake_ms)
    chunk.size = int(size)
    chunk.min_start_offset = int(first)
    chunk.wanted = int(wanted)
    chunk.asked = int(asked)
    chunk.ended_ms = int(ended_ms)
    return chunk
