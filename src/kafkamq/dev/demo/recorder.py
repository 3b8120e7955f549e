"""Follows the demo's topics record by record: what is sent, held, settled. Pure.

It drives the progress display and tells when everything is settled. The verdict does not use it:
that is a Spark SQL job over the whole logs (``verdict.py``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kafkamq.types import Marker, MarkerType, Outcome, expand

Place = tuple[int, int]  # partition, offset


@dataclass(slots=True)
class DemoRecorder:
    """Counts of one run; the topics may be read in any interleaving."""

    queue_of: dict[Place, str] = field(default_factory=dict)  # copies seen, by place
    ended: dict[Place, Outcome] = field(default_factory=dict)  # by the END that counts
    started: set[Place] = field(default_factory=set)
    scheduled: set[Place] = field(default_factory=set)
    fired: set[Place] = field(default_factory=set)
    first_copies: Counter[str] = field(default_factory=Counter)
    dead: Counter[str] = field(default_factory=Counter)
    keepalives: int = 0
    ticks: int = 0

    def message(self, place: Place, queue_id: str, *, is_first: bool) -> None:
        self.queue_of[place] = queue_id
        if is_first:
            self.first_copies[queue_id] += 1

    def dead_letter(self, queue_id: str) -> None:
        self.dead[queue_id] += 1

    def marker(self, place: Place, marker: Marker) -> None:
        """A record of the markers topic, at ``place`` there."""
        if marker.type is MarkerType.TICK:
            self.ticks += 1
        elif marker.type is MarkerType.KEEPALIVE:
            self.keepalives += 1
        elif marker.batches:
            for each in expand(marker):
                self.marker(place, each)
        elif marker.type is MarkerType.SCHEDULE:
            self.scheduled.add(place if marker.message_id is None else _place(marker))
        elif marker.type is MarkerType.START:
            self.started.add(_place(marker))
        elif marker.of_schedule:
            self.fired.add(_place(marker))
        elif marker.outcome is Outcome.ACK:
            self.ended.setdefault(_place(marker), Outcome.ACK)
        elif marker.outcome in (Outcome.REDELIVERED, Outcome.DEAD_LETTERED):
            self.ended[_place(marker)] = marker.outcome

    @property
    def sent(self) -> int:
        """Messages that were sent: first copies, and delayed ones that are still to come."""
        return sum(self.first_copies.values()) + len(self.scheduled - self.fired)

    @property
    def held(self) -> int:
        """Copies that a worker has taken and nothing has ended."""
        return len(self.started - self.ended.keys())

    def count(self, outcome: Outcome) -> int:
        """Copies with this end."""
        return sum(1 for found in self.ended.values() if found is outcome)

    def is_settled(self, planned: int) -> bool:
        """Whether all of ``planned`` messages are in the logs and nothing is open."""
        return (
            self.sent >= planned
            and self.scheduled <= self.fired
            and self.queue_of.keys() <= self.ended.keys()
        )

    def open_copies(self) -> int:
        return len(self.queue_of.keys() - self.ended.keys())


def _place(marker: Marker) -> Place:
    assert marker.message_id is not None  # the decoder refuses such STARTs and ENDs
    return marker.message_id.partition, marker.message_id.offset
