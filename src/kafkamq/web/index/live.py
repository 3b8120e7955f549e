"""What is open now, as the tracker's rules have folded it: a picture for the pages, never changed.

Messages of one page of 64 offsets that share all facts are one ``Run``, as they are one hold (R31).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kafkamq.markers.rules.hold import DUE, HELD, PAGE_BITS, STATE
from kafkamq.markers.wire.records import TrackerStatus
from kafkamq.web.index.fold import Fold
from kafkamq.web.index.packs import places_of
from kafkamq.web.index.rows import CHUNK_OFFSETS, MARKERS, MESSAGES, place_of

MAX_RUNS = 200_000
STATES = ("in flight", "delayed", "due")
_IN_FLIGHT, _DELAYED, _DUE = STATES


@dataclass(frozen=True, slots=True)
class Run:
    """Messages of one queue are open and share all facts."""

    queue: int
    place: int
    bits: int
    state: str
    # The worker that holds them; empty: nobody does.
    consumer_id: str
    begin_ms: int
    # What was left of the lease or the wait when the picture was made; negative: it is over.
    left_ms: int

    def places(self) -> Iterator[int]:
        return places_of(self.place, self.bits)


@dataclass(slots=True)
class Counts:
    in_flight: int = 0
    delayed: int = 0
    due: int = 0
    oldest_ms: int = 0

    def add(self, run: Run) -> None:
        number = run.bits.bit_count()
        if run.state is _IN_FLIGHT:
            self.in_flight += number
        elif run.state is _DELAYED:
            self.delayed += number
        else:
            self.due += number
        if not self.oldest_ms or run.begin_ms < self.oldest_ms:
            self.oldest_ms = run.begin_ms


@dataclass(frozen=True, slots=True)
class MarkerLag:
    """It has a marker partition, and what its tracker last said of it; None: nothing yet."""

    partition: int
    position: int
    clock_ms: int
    open: int
    status: TrackerStatus | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """It has all that pages show beside the database."""

    made_ms: int = 0
    version: int = 0
    is_caught_up: bool = False
    # Why nothing can be read; empty: it can.
    error: str = ""
    counts: Mapping[int, Counts] = field(default_factory=dict)
    runs: tuple[Run, ...] = ()
    is_whole: bool = True
    markers: tuple[MarkerLag, ...] = ()
    read: int = 0
    behind: int = 0
    size_bytes: int = 0


def open_runs(fold: Fold, ages_ms: Mapping[int, int]) -> Iterator[Run]:
    """Find what is open, by marker partition; ``ages_ms``: since each one's clock was moved."""
    for marked, log in fold.markers.items():
        tracker, now_ms = log.tracker, log.tracker.clock_ms + ages_ms.get(marked, 0)
        for leaf in tracker.table.leaves():
            of_schedule, topic_id, _, partition = leaf.log.key
            if topic_id and fold.topic_id and topic_id != fold.topic_id:
                continue
            for page, hold in zip(leaf.pages, leaf.holds, strict=True):
                place = place_of(MARKERS if of_schedule else MESSAGES, partition, page * PAGE_BITS)
                until_ms = tracker.changes_at(hold, of_schedule)
                state = _IN_FLIGHT if hold.flags & STATE == HELD else _DELAYED
                if hold.flags & DUE:
                    state, until_ms = _DUE, hold.deadline_ms
                facts = hold.begin_ms, until_ms - now_ms
                consumer_id = "" if hold.holder is None else hold.holder.consumer_id
                number, at = divmod(place, CHUNK_OFFSETS)
                found = fold.chunks.get(number, changes=False).by_queue(hold.bits << at)
                for queue, bits in found.items():
                    yield Run(queue, place, bits >> at, state, consumer_id, *facts)
