"""What a tracker knows of one message, and the words for its states."""

from __future__ import annotations

from kafkamq.markers.rules.holders import Holder

__all__ = [
    "ASKED",
    "CARRY",
    "CAUSE_SHIFT",
    "CHUNK_OFFSETS",
    "DUE",
    "ENDED_MEMORY_MS",
    "GRACED",
    "HELD",
    "NEVER",
    "STATE",
    "WAITING",
    "Entry",
]

CHUNK_OFFSETS = 4096
ENDED_MEMORY_MS = 60_000  # R12; longer than the 20 s + 30 s of R5
NEVER = 1 << 62

# States (two lowest bits of Entry.flags), then marks.
HELD, WAITING, DUE = 0, 1, 2
STATE = 3
GRACED = 4  # had its grace (R3); a KEEPALIVE of its holder since then arms it again
CARRY = 8  # a SCHEDULE that has to be appended again (R19)
ASKED = 16  # an action was handed out and is not known to have failed (R15)
CAUSE_SHIFT = 8  # above: the DueCause of a due entry


class Entry:
    """What a tracker knows of one message (R18); times are of the log clock."""

    __slots__ = ("begin_ms", "deadline_ms", "flags", "holder", "start_offset", "verdict_offset")

    def __init__(
        self,
        deadline_ms: int,
        start_offset: int,
        begin_ms: int,
        flags: int,
        holder: Holder | None,
        verdict_offset: int = -1,
    ) -> None:
        self.deadline_ms = deadline_ms
        self.start_offset = start_offset
        self.begin_ms = begin_ms
        self.flags = flags
        self.holder = holder  # while HELD
        self.verdict_offset = verdict_offset  # of the END with a reason; -1: none
