"""Holds in the order of their messages: each log's, in leaves of at most 128 and some (R31).

What a hold costs does not depend on how far apart the messages lie, and whoever looks for one, or
for what the clock has passed, looks through one leaf.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from kafkamq.markers.rules.hold import CHUNK_OFFSETS, ENDED_MEMORY_MS, NEVER, PAGE_BITS, Hold
from kafkamq.types import MessageId

LogKey = tuple[bool, bytes, int, int]
"""(of_schedule, topic_id, leader_epoch, partition): what an offset belongs to (R13)."""

MAX_HOLDS = 2 * PAGE_BITS  # in a leaf, so that it can be divided between two pages
MIN_HOLDS = MAX_HOLDS // 8  # with fewer it joins a neighbour
_CHUNK_PAGES = CHUNK_OFFSETS // PAGE_BITS


def log_key(message_id: MessageId, of_schedule: bool) -> LogKey:
    """The log that an identity belongs to."""
    return of_schedule, message_id.topic_id, message_id.leader_epoch, message_id.partition


class Leaf:
    """Neighbours of one log, by their pages; all holds of a page are in one leaf.

    ``wake_ms`` and ``first_offset`` are lower bounds of when one of them changes by itself, and of
    their START offsets.
    """

    __slots__ = ("first_offset", "holds", "log", "number", "pages", "wake_ms")

    def __init__(self, log: HoldLog, number: int) -> None:
        self.log = log
        self.number = number  # never used twice
        self.pages = array("q")
        self.holds: list[Hold] = []
        self.wake_ms = NEVER
        self.first_offset = NEVER

    def index(self, page: int) -> int:
        """Where the holds of this page begin, or would."""
        return bisect_left(self.pages, page)

    def at(self, page: int) -> list[Hold]:
        """Holds of this page; a list of the caller's."""
        first = self.index(page)
        return self.holds[first : bisect_right(self.pages, page, first)]

    def find(self, page: int, bit: int) -> int:
        """Which hold has this message; -1: none."""
        first = self.index(page)
        held = [hold.bits & bit for hold in self.at(page)]
        return first + held.index(bit) if bit in held else -1

    def insert(self, page: int, hold: Hold) -> None:
        """One more; the caller sees to the bounds."""
        index = bisect_right(self.pages, page)
        self.pages.insert(index, page)
        self.holds.insert(index, hold)

    def remove(self, index: int) -> None:
        """One fewer."""
        del self.pages[index], self.holds[index]

    def measure(self) -> None:
        """Find out the bounds."""
        self.wake_ms = min([hold.wake_ms for hold in self.holds], default=NEVER)
        self.first_offset = min([hold.start_offset for hold in self.holds], default=NEVER)

    def middle(self) -> int:
        """Where to cut it in two; a page stays whole."""
        pages = self.pages
        middle = pages[len(pages) // 2]
        return bisect_left(pages, middle) or bisect_right(pages, middle)

    def give(self, at: int, right: Leaf) -> None:
        """What is from there on goes to an empty leaf."""
        right.pages, self.pages = self.pages[at:], self.pages[:at]
        right.holds, self.holds = self.holds[at:], self.holds[:at]

    def join(self, right: Leaf) -> None:
        """Take all of the leaf behind."""
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
        """These only, of which the last one ended then."""
        self.last_ms = last_ms
        self._pages = sum([1 << page for page, word in enumerate(words) if word])
        self._words = array("Q", [word for word in words if word])

    def of(self, page: int) -> int:
        """Those of this page, counted within the chunk."""
        bit = 1 << page
        return self._words[(self._pages & bit - 1).bit_count()] if self._pages & bit else 0

    def set(self, page: int, word: int) -> None:
        """These are all of the page."""
        bit = 1 << page
        at = (self._pages & bit - 1).bit_count()
        if self._pages & bit:
            self._words[at] = word
        else:
            self._pages |= bit
            self._words.insert(at, word)

    def all(self) -> list[int]:
        """The words of all pages."""
        return [self.of(page) for page in range(_CHUNK_PAGES)]


class HoldLog:
    """What is open in one log, and what has ended there."""

    __slots__ = ("ended", "firsts", "key", "last_bits", "last_page", "leaves")

    def __init__(self, key: LogKey) -> None:
        self.key = key
        self.leaves: list[Leaf] = []
        self.firsts: list[int] = []  # of each leaf: no page in it is smaller
        self.ended: dict[int, Ended] = {}  # by the numbers of chunks
        self.last_page = -1  # no page was ever greater
        self.last_bits = 0  # all that was ever there in the last page

    def is_new(self, page: int, bits: int) -> bool:
        """Nothing of it was ever here: so it is with nearly every START."""
        last_page = self.last_page
        return page > last_page or (page == last_page and not bits & self.last_bits)

    def leaf(self, page: int) -> Leaf | None:
        """Where the page is, if it is anywhere."""
        leaves = self.leaves
        if not leaves or page > self.last_page:
            return None
        return leaves[bisect_right(self.firsts, page) - 1]  # before the first: it is in none

    def has_ended(self, page: int, bits: int, now_ms: int) -> int:
        """Those of these messages that have ended and are remembered (R12)."""
        ended = self.ended.get(page // _CHUNK_PAGES)
        if ended is None or now_ms > ended.last_ms + ENDED_MEMORY_MS:
            return 0
        return bits & ended.of(page % _CHUNK_PAGES)
