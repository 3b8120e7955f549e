"""What a tracker knows of messages that it holds together (R31), and the words for its states."""

from __future__ import annotations

from kafkamq.markers.rules.holders import Holder

CHUNK_OFFSETS = 4096
PAGE_BITS = 64  # offsets of a page: the bound on what a record must look at (R31)
ENDED_MEMORY_MS = 60_000  # R12; longer than the 20 s + 30 s of R5
NEVER = 1 << 62

# States (two lowest bits of Hold.flags), then marks.
HELD, WAITING, DUE = 0, 1, 2
STATE = 3
GRACED = 4  # had its grace (R3); a KEEPALIVE of its holder since then arms it again
CARRY = 8  # a SCHEDULE that has to be appended again (R19)
ASKED = 16  # an action was handed out and is not known to have failed (R15)
CAUSE_SHIFT = 8  # above: the DueCause of what is due


class Hold:
    """Messages of one page of 64 offsets with the same facts (R18, R31); times are log time."""

    __slots__ = (
        "begin_ms",
        "bits",
        "deadline_ms",
        "flags",
        "holder",
        "start_offset",
        "verdict_offset",
        "wake_ms",
    )

    def __init__(
        self,
        bits: int,
        start_offset: int,
        begin_ms: int,
        deadline_ms: int,
        flags: int,
        holder: Holder | None,
        verdict_offset: int = -1,
    ) -> None:
        self.bits = bits  # bit i: offset i of its page
        self.start_offset = start_offset
        self.begin_ms = begin_ms
        self.deadline_ms = deadline_ms
        self.flags = flags
        self.holder = holder  # while HELD
        self.verdict_offset = verdict_offset  # of the END with a reason; -1: none
        self.wake_ms = NEVER  # a lower bound of when it changes by itself

    def split(self, bits: int) -> Hold:
        """Some of its messages as a hold of their own, with all its facts (R31)."""
        self.bits ^= bits
        part = Hold(
            bits,
            self.start_offset,
            self.begin_ms,
            self.deadline_ms,
            self.flags,
            self.holder,
            self.verdict_offset,
        )
        part.wake_ms = self.wake_ms
        if self.holder is not None:
            self.holder.references += 1
        return part


def lowest(bits: int, count: int) -> int:
    """The lowest of these bits, so many at most."""
    while bits.bit_count() > count:
        bits ^= 1 << bits.bit_length() - 1
    return bits
