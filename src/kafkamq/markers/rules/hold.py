"""What a tracker knows of messages that it holds together (R31): holds, holders, and the leaves.

A hold has one holder while it is held: a consumer with the terms of its leases. A KEEPALIVE without
message id renews all of them by renewing the consumer. Holds of one log lie in leaves, which the
table (``table.py``) divides and joins.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from kafkamq.types import MessageId

CHUNK_OFFSETS = 4096
# The offsets of a page are the bound on what a record must look at (R31).
PAGE_BITS = 64
# Longer than the 20 s + 30 s of R5 (R12).
ENDED_MEMORY_MS = 60_000
NEVER = 1 << 62
# A leaf of the most holds can be divided between two pages; one of fewer joins a neighbour.
MAX_HOLDS = 2 * PAGE_BITS
MIN_HOLDS = MAX_HOLDS // 8
_CHUNK_PAGES = CHUNK_OFFSETS // PAGE_BITS
_MAX_IDLE = 256

LogKey = tuple[bool, bytes, int, int]
"""(of_schedule, topic_id, leader_epoch, partition): what an offset belongs to (R13)."""

# States (two lowest bits of Hold.flags), then marks.
HELD, WAITING, DUE = 0, 1, 2
STATE = 3
# It had its grace (R3); a KEEPALIVE of its holder since then arms it again.
GRACED = 4
# It is a SCHEDULE that has to be appended again (R19).
CARRY = 8
# An action was handed out and is not known to have failed (R15).
ASKED = 16
# Above stands the DueCause of what is due.
CAUSE_SHIFT = 8


@dataclass(slots=True, eq=False)
class Hold:
    """Messages of one page of 64 offsets with the same facts (R18, R31); times are log time."""

    bits: int
    start_offset: int
    begin_ms: int
    deadline_ms: int
    flags: int
    holder: Holder | None
    # Where the END with a reason stands; -1: there is none.
    verdict_offset: int = -1
    # A lower bound of when it changes by itself.
    wake_ms: int = NEVER

    def split(self, bits: int) -> Hold:
        self.bits ^= bits
        part = Hold(
            bits,
            self.start_offset,
            self.begin_ms,
            self.deadline_ms,
            self.flags,
            self.holder,
            self.verdict_offset,
            self.wake_ms,
        )
        if self.holder is not None:
            self.holder.references += 1
        return part


def lowest(bits: int, count: int) -> int:
    while bits.bit_count() > count:
        bits ^= 1 << bits.bit_length() - 1
    return bits


class Consumer:
    """What renewed the leases of a consumer; its renewals are numbered."""

    __slots__ = ("_numbers", "_own", "_own_ms", "_untils", "renewals", "renewed_ms")

    def __init__(self) -> None:
        self.renewals = 0
        self.renewed_ms = -1
        # Of one that names a time, until when, the latest first. One that is followed by a longer
        # one says nothing any more, so there are as many here as still differ.
        self._numbers = array("q")
        self._untils = array("q")
        self._own, self._own_ms = -1, -1

    def renew(self, now_ms: int, timeout_ms: int) -> None:
        """Note one more renewal; 0: for each message's own timeout."""
        self.renewed_ms = now_ms
        if timeout_ms:
            until_ms, numbers, untils = now_ms + timeout_ms, self._numbers, self._untils
            while untils and untils[-1] <= until_ms:
                untils.pop()
                numbers.pop()
            numbers.append(self.renewals)
            untils.append(until_ms)
        else:
            self._own, self._own_ms = self.renewals, now_ms
        self.renewals += 1

    def until_ms(self, first: int, timeout_ms: int) -> int:
        """Get the latest end that renewals from this number on set for a lease of this timeout."""
        own_ms = self._own_ms + timeout_ms if self._own >= first else -1
        at = bisect_left(self._numbers, first)
        return max(own_ms, self._untils[at]) if at < len(self._untils) else own_ms


@dataclass(slots=True, eq=False)
class Holder:
    """A consumer with the terms of its leases; shared by all entries that it holds."""

    number: int
    consumer_id: str
    timeout_ms: int
    max_lease_ms: int
    _consumer: Consumer
    _until_ms: int = -1
    references: int = 0
    _counted: int = field(init=False)

    def __post_init__(self) -> None:
        self._counted = self._consumer.renewals

    @property
    def renewed_ms(self) -> int:
        """Clock of the consumer's last KEEPALIVE without message id; -1: there was none."""
        return self._consumer.renewed_ms

    @property
    def renewed_until_ms(self) -> int:
        """Return before when no entry's lease ends; -1: it was never renewed."""
        consumer = self._consumer
        if self._counted < consumer.renewals:
            until_ms = consumer.until_ms(self._counted, self.timeout_ms)
            self._until_ms = max(self._until_ms, until_ms)
            self._counted = consumer.renewals
        return self._until_ms


class Holders:
    """The holders of one marker partition, by terms and by number, and their consumers."""

    def __init__(self) -> None:
        self.next_number = 0
        self.by_number: dict[int, Holder] = {}
        self._by_terms: dict[tuple[str, int, int], Holder] = {}
        self._consumers: dict[str, Consumer] = {}
        self._timeouts: dict[int, int] = {}
        self._idle = 0

    def join(
        self, consumer_id: str, timeout_ms: int, max_lease_ms: int, deadline_ms: int
    ) -> Holder:
        """Get the holder for an entry whose own deadline has just been set to ``deadline_ms``."""
        holder = self._by_terms.get((consumer_id, timeout_ms, max_lease_ms))
        if holder is not None and holder.renewed_until_ms <= deadline_ms:
            if holder.references == 0:
                self._idle -= 1
                self._timeouts[timeout_ms] = self._timeouts.get(timeout_ms, 0) + 1
            holder.references += 1
            return holder
        holder = self.restore(self.next_number, consumer_id, timeout_ms, max_lease_ms)
        self.next_number += 1
        holder.references = 1
        return holder

    def restore(
        self,
        number: int,
        consumer_id: str,
        timeout_ms: int,
        max_lease_ms: int,
        renewed_ms: int = -1,
        until_ms: int = -1,
    ) -> Holder:
        """Return a new holder of entries, or one as a state store had it; these in their order."""
        consumer = self._consumers.setdefault(consumer_id, Consumer())
        consumer.renewed_ms = max(consumer.renewed_ms, renewed_ms)
        holder = Holder(number, consumer_id, timeout_ms, max_lease_ms, consumer, until_ms)
        self._list(holder)
        return holder

    def _list(self, holder: Holder) -> None:
        self._by_terms[holder.consumer_id, holder.timeout_ms, holder.max_lease_ms] = holder
        self.by_number[holder.number] = holder
        self._timeouts[holder.timeout_ms] = self._timeouts.get(holder.timeout_ms, 0) + 1

    def leave(self, holder: Holder) -> None:
        """An entry is held no more; holders without entries are dropped now and then."""
        holder.references -= 1
        if holder.references == 0:
            self._idle += 1
            others = self._timeouts[holder.timeout_ms] - 1
            if others:
                self._timeouts[holder.timeout_ms] = others
            else:
                del self._timeouts[holder.timeout_ms]
            if self._idle > _MAX_IDLE and 2 * self._idle > len(self.by_number):
                self._sweep()

    def renew(self, consumer_id: str, now_ms: int, timeout_ms: int) -> None:
        """A KEEPALIVE of this consumer; ``timeout_ms`` 0 means each message's own timeout."""
        consumer = self._consumers.get(consumer_id)
        if consumer is not None:
            consumer.renew(now_ms, timeout_ms)

    def shortest_timeout_ms(self) -> int:
        return min(self._timeouts, default=0)

    def used(self) -> list[Holder]:
        return [holder for holder in self.by_number.values() if holder.references > 0]

    def _sweep(self) -> None:
        used = self.used()
        consumers = {holder.consumer_id: self._consumers[holder.consumer_id] for holder in used}
        self._consumers = consumers
        self._by_terms.clear()
        self.by_number.clear()
        self._timeouts.clear()
        self._idle = 0
        for holder in used:
            self._list(holder)


def log_key(message_id: MessageId, of_schedule: bool) -> LogKey:
    return of_schedule, message_id.topic_id, message_id.leader_epoch, message_id.partition


class Leaf:
    """Neighbours of one log, by their pages; all holds of a page are in one leaf.

    ``wake_ms`` and ``first_offset`` are lower bounds of when one of them changes by itself, and of
    their START offsets.
    """

    __slots__ = ("first_offset", "holds", "log", "number", "pages", "wake_ms")

    def __init__(self, log: HoldLog, number: int) -> None:
        self.log = log
        self.number = number
        self.pages = array("q")
        self.holds: list[Hold] = []
        self.wake_ms = NEVER
        self.first_offset = NEVER

    def index(self, page: int) -> int:
        return bisect_left(self.pages, page)

    def at(self, page: int) -> list[Hold]:
        """Holds of this page; a list of the caller's."""
        first = self.index(page)
        return self.holds[first : bisect_right(self.pages, page, first)]

    def find(self, page: int, bit: int) -> int:
        first = self.index(page)
        held = [hold.bits & bit for hold in self.at(page)]
        return first + held.index(bit) if bit in held else -1

    def insert(self, page: int, hold: Hold) -> None:
        index = bisect_right(self.pages, page)
        self.pages.insert(index, page)
        self.holds.insert(index, hold)

    def remove(self, index: int) -> None:
        del self.pages[index], self.holds[index]

    def measure(self) -> None:
        self.wake_ms = min([hold.wake_ms for hold in self.holds], default=NEVER)
        self.first_offset = min([hold.start_offset for hold in self.holds], default=NEVER)

    def middle(self) -> int:
        """Return where to cut it in two; a page stays whole."""
        pages = self.pages
        middle = pages[len(pages) // 2]
        return bisect_left(pages, middle) or bisect_right(pages, middle)

    def give(self, at: int, right: Leaf) -> None:
        right.pages, self.pages = self.pages[at:], self.pages[:at]
        right.holds, self.holds = self.holds[at:], self.holds[:at]

    def join(self, right: Leaf) -> None:
        self.pages += right.pages
        self.holds += right.holds
        right.pages, right.holds = array("q"), []


class Ended:
    """Messages of one chunk that have ended (R12): a word of bits for each page that has any."""

    __slots__ = ("_pages", "_words", "last_ms", "log", "number")

    def __init__(self, log: HoldLog, number: int) -> None:
        self.log = log
        self.number = number
        self.reset(-NEVER)

    def reset(self, last_ms: int, words: Sequence[int] = ()) -> None:
        self.last_ms = last_ms
        self._pages = sum([1 << page for page, word in enumerate(words) if word])
        self._words = array("Q", [word for word in words if word])

    def of(self, page: int) -> int:
        bit = 1 << page
        return self._words[(self._pages & bit - 1).bit_count()] if self._pages & bit else 0

    def set(self, page: int, word: int) -> None:
        bit = 1 << page
        at = (self._pages & bit - 1).bit_count()
        if self._pages & bit:
            self._words[at] = word
        else:
            self._pages |= bit
            self._words.insert(at, word)

    def all(self) -> list[int]:
        return [self.of(page) for page in range(_CHUNK_PAGES)]


class HoldLog:
    __slots__ = ("ended", "firsts", "key", "last_bits", "last_page", "leaves")

    def __init__(self, key: LogKey) -> None:
        self.key = key
        self.leaves: list[Leaf] = []
        self.firsts: list[int] = []
        self.ended: dict[int, Ended] = {}
        # No page was ever greater; and all bits that were ever in it.
        self.last_page = -1
        self.last_bits = 0

    def is_new(self, page: int, bits: int) -> bool:
        """Nothing of it was ever here: so it is with nearly every START."""
        last_page = self.last_page
        return page > last_page or (page == last_page and not bits & self.last_bits)

    def leaf(self, page: int) -> Leaf | None:
        leaves = self.leaves
        if not leaves or page > self.last_page:
            return None
        # Before the first page it is in none.
        return leaves[bisect_right(self.firsts, page) - 1]

    def has_ended(self, page: int, bits: int, now_ms: int) -> int:
        """Return those of these messages that have ended and are remembered (R12)."""
        ended = self.ended.get(page // _CHUNK_PAGES)
        if ended is None or now_ms > ended.last_ms + ENDED_MEMORY_MS:
            return 0
        return bits & ended.of(page % _CHUNK_PAGES)
