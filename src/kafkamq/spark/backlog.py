"""What of a queue waits in each partition, and which of it the next batch takes.

The driver looks at each record once (Kafka sends records whole, so their payloads come along) and
keeps what the STARTs of the queue's messages need, bounded, until they are in a batch. The last
allowed delivery of a message is a batch by itself (R6), and every second one where some wait.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from kafkamq.spark.queues.starting import Waiting
from kafkamq.transport.log_reader import LogRange, Record

_MAX_SKIPPED = 200_000
MAX_KEPT = 100_000
_OFFSET = attrgetter("offset")


@dataclass(slots=True)
class _Part:
    begin: int
    position: int
    own: list[Waiting] = field(default_factory=list)
    last: list[int] = field(default_factory=list)

    @property
    def first(self) -> int:
        """Return the place of the first message, or how far there is none."""
        return self.own[0].offset if self.own else self.position

    @property
    def ready(self) -> int:
        """Return messages in front of the first last delivery."""
        return self.index(self.last[0]) if self.last else len(self.own)

    def index(self, offset: int) -> int:
        """Return how many messages lie before an offset."""
        return bisect_left(self.own, offset, key=_OFFSET)

    def begin_at(self, offset: int) -> None:
        """Everything before is in a batch."""
        del self.own[: self.index(offset)]
        del self.last[: bisect_left(self.last, offset)]
        self.begin = offset
        self.position = max(self.position, offset)


@dataclass(eq=False)
class Backlog:
    topic: str
    # Gives the records of a range.
    read: Callable[[LogRange], Iterator[list[Record]]]
    # What is kept of a record; None: it is another queue's.
    of: Callable[[Record], Waiting | None]
    is_last: Callable[[Waiting], bool]

    def __post_init__(self) -> None:
        self._parts: dict[int, _Part] = {}
        self._was_alone = True
        self._alone = -1

    def clear(self) -> None:
        self._parts.clear()

    def cut(self, starts: Mapping[int, int], ends: Mapping[int, int], rows: int) -> dict[int, int]:
        """Say where a batch of about ``rows`` messages ends in each partition, with even shares."""
        parts = {
            number: self._part(number, starts[number])
            for number in sorted(ends)
            if ends[number] > starts[number]
        }
        taken = self._shared_out(parts, ends, rows)
        alone = [number for number, part in parts.items() if part.last and not part.ready]
        if alone and not (self._was_alone and any(taken.values())):
            number = next((each for each in alone if each > self._alone), alone[0])
            self._was_alone, self._alone = True, number
            return {**starts, number: parts[number].last[0] + 1}
        self._was_alone = False
        cuts = {number: _end(parts[number], taken[number], ends[number]) for number in parts}
        return {**starts, **cuts}

    def messages(self, number: int, start: int, end: int) -> list[Waiting] | None:
        """Return the queue's messages between two offsets; None: they are not known."""
        part = self._parts.get(number)
        if part is None or part.begin > start or part.position < end:
            return None
        return part.own[part.index(start) : part.index(end)]

    def begins(self, starts: Mapping[int, int]) -> dict[int, int]:
        """Return where the next batch begins; before are other queues' messages alone."""
        return {
            number: max(start, self._parts[number].first) if number in self._parts else start
            for number, start in starts.items()
        }

    def _part(self, number: int, start: int) -> _Part:
        part = self._parts.get(number)
        if part is None or part.begin > start:
            part = self._parts[number] = _Part(start, start)
        part.begin_at(start)
        return part

    def _shared_out(
        self, parts: Mapping[int, _Part], ends: Mapping[int, int], rows: int
    ) -> dict[int, int]:
        """Return how many messages the batch takes of each partition, one at least."""
        taken = dict.fromkeys(parts, 0)
        active = list(parts)
        left = rows
        while active and left > 0:
            share = max(1, left // len(active))
            unsated = []
            for number in active:
                part, wanted = parts[number], taken[number] + share
                self._look(number, part, ends[number], wanted, MAX_KEPT // len(parts))
                more = min(wanted, part.ready) - taken[number]
                taken[number] += more
                left -= more
                if more == share:
                    unsated.append(number)
            active = unsated
        return taken

    def _look(self, number: int, part: _Part, end: int, wanted: int, kept: int) -> None:
        """Read on until so many messages are ready, a last delivery waits, or the log ends."""
        if part.last or part.ready >= wanted or part.position >= end:
            return
        for records in self.read(LogRange(self.topic, number, part.position, end)):
            for record in records:
                if len(part.own) >= max(wanted, kept):
                    part.position = record.offset()
                    return
                one = self.of(record)
                if one is not None:
                    part.own.append(one)
                    if self.is_last(one):
                        part.last.append(one.offset)
            part.position = records[-1].offset() + 1
            if part.last or part.ready >= wanted:
                return
        part.position = end


def _end(part: _Part, taken: int, end: int) -> int:
    if taken < len(part.own) or part.position < end:
        return part.own[taken - 1].offset + 1 if taken else part.begin
    # Other queues' messages alone are no batch, but they are not looked at again and again.
    return end if taken or end - part.begin > _MAX_SKIPPED else part.begin
