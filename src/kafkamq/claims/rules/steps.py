"""What a claimant is told, and what it asks its shell to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kafkamq.types import MarshalRecord, MarshalType


class Delivery(Enum):
    AT_LEAST_ONCE = "at-least-once"
    AT_MOST_ONCE = "at-most-once"


class Phase(Enum):
    SEEKING = "seeking"
    CLAIMING = "claiming"
    # The partition is ours, or to be taken over: where it begins is looked up.
    LOOKING = "looking"
    STARTING = "starting"
    OWNING = "owning"
    DRAINING = "draining"
    RELEASING = "releasing"
    OVER = "over"


HOLDING = (Phase.LOOKING, Phase.STARTING, Phase.OWNING, Phase.DRAINING)
"""The partition is ours, as far as the log was read, or is being taken over."""


class End(Enum):
    HELD = "held by another"
    REFUSED = "another was first"
    PAUSED = "the group is paused"
    TIMED_OUT = "the claim was not confirmed in time"
    TAKEN = "another took it"
    EXPIRED = "no heartbeat was confirmed in time"
    UNCERTAIN = "another may hold it"
    RIVAL = "a client with other rules believes that it holds it"
    FENCED = "its fenced producer failed, or another took it over"
    BEHIND = "consuming too slowly"
    STUCK = "no message for too long"
    SHARED = "given to a member with less"
    RELEASED = "released"
    KEPT = "left claimed, for a quick restart"


@dataclass(frozen=True, kw_only=True)
class ClaimantConfig:
    # Unique in the group; the same after a restart, when it is to reclaim.
    client: str
    instance: str
    group: str
    topic: str
    partition: int
    delivery: Delivery = Delivery.AT_LEAST_ONCE
    # All clients of the topic must agree on it.
    interval_ms: int = 60_000
    retry_ms: int = 500
    reclaim: bool = True
    release_if_behind: bool = True
    is_whole_topic: bool = False
    # Of the one that sets the position of a paused group.
    ignores_pause: bool = False
    # With Go clients in the group: give way when one of them heartbeats here.
    yields_to_rivals: bool = False

    @property
    def lease_ms(self) -> int:
        """Return how long a heartbeat counts for its sender; others wait twice as long (C2)."""
        return self.interval_ms

    @property
    def patience_ms(self) -> int:
        """Return how long verdicts are awaited when a claim is given up."""
        return self.interval_ms // 4

    def record(self, type: MarshalType, now_s: float, offset: int = 0) -> MarshalRecord:
        return MarshalRecord(
            type,
            time_s=int(now_s),
            instance=self.instance,
            client=self.client,
            group=self.group,
            topic=self.topic,
            partition=self.partition,
            offset=offset,
        )


@dataclass(frozen=True, slots=True)
class Write:
    """Append ``record`` to the coordination topic; answer ``on_written`` or ``on_failed``.

    ``commit_offset`` is committed to Kafka under the group's name first: best effort, as the Go
    client does; with ``must_commit`` a failed commit is a failed write, and nothing is appended.
    """

    ticket: int
    record: MarshalRecord
    commit_offset: int = -1
    must_commit: bool = False


@dataclass(frozen=True, slots=True)
class LookUp:
    """Find the partition's first and last offset and the group's committed one.

    Answer ``on_offsets`` or ``on_lookup_failed``.
    """


@dataclass(frozen=True, slots=True)
class Fetch:
    """The partition is held: read it from ``offset`` on."""

    offset: int
    deleted: int = 0
    beyond: int = 0


@dataclass(frozen=True, slots=True)
class HandOut:
    """At most once: the offered batch may be handed out, now and only now."""

    first_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Hand nothing more out and drop what is queued; unless ``is_lost``, verdicts still count."""

    reason: End
    is_lost: bool


@dataclass(frozen=True, slots=True)
class Finish:
    """The claimant has ended; a further attempt is a further claimant."""

    reason: End
    # The position; -1: it never held the partition.
    offset: int
    # The log says that we have released (or kept) it.
    is_confirmed: bool = False


Step = Write | LookUp | Fetch | HandOut | Stop | Finish
