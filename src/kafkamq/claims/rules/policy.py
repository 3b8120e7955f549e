"""A policy says which partitions a member tries to claim next: balanced, greedy, or whole
topics.

- G1 What the same client held freshly before a restart comes first, in every mode.
- G2 ``greedy`` tries everything that is free, at once.
- G3 ``balanced`` begins with one partition and doubles the number each round, with a pause by
  chance between rounds; whenever another member was first it begins with one again. So members
  that start together share, and one that is alone has everything after a few rounds.
- G4 ``topic`` claims whole topics: partition 0 is the key, the others follow once it is held. Who
  loses one of them gives up all.
- G5 No more than ``max_claims`` (topics, in ``topic`` mode) are held or tried, also by G1.
- G6 What was given up for being too slow rests for a while, so that others can have it.
- G7 ``balanced``: a member that finds nothing free, and holds two partitions less than another one,
  asks that one for a partition by a ClaimingMessages record. No reader makes anything else of that,
  as its sender does not hold the partition. Who is asked, and holds two more than the asker, gives
  one of that topic up at a time, and lets it rest as in G6. Of several that hold so many the one
  is asked that was asked least, as some never give. A member that was too slow itself does not ask
  for a while.

Source: Marshal's Go client, its consumer options (the rules are not in PROTOCOL.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kafkamq.claims.rules.log import Owner
from kafkamq.claims.rules.steps import End
from kafkamq.types import PartitionId

_TOO_SLOW = (End.BEHIND, End.STUCK)
_RESTS = (*_TOO_SLOW, End.RIVAL, End.SHARED)
_CONTESTED = (End.REFUSED, End.HELD)
_MAX_STRIDE = 1024
# Rests for which a client that was too slow does not ask.
_SLOW_RESTS = 10
_NOBODY: Owner = ("", "")


class ClaimMode(Enum):
    BALANCED = "balanced"
    GREEDY = "greedy"
    TOPIC = "topic"


@dataclass(frozen=True, slots=True)
class Prospect:
    """One partition as a member sees it now."""

    topic: str
    partition: int
    is_ours: bool = False
    is_held: bool = False
    is_claimable: bool = False
    is_reclaimable: bool = False
    is_stale: bool = False
    owner: Owner = _NOBODY
    asker: Owner = _NOBODY


class ClaimPolicy:
    """Chooses; what it chose is tried by its caller, who reports every end."""

    def __init__(self, mode: ClaimMode, *, max_claims: int, pause_ms: int, rest_ms: int) -> None:
        self._mode = mode
        self._max_claims = max_claims
        self._pause_ms = pause_ms
        self._rest_ms = rest_ms
        self._next_ms = -(2**62)
        self._stride = 1
        self._resting: dict[PartitionId, int] = {}
        self._broken: set[str] = set()
        self._ask_ms = -(2**62)
        self._asked_with = -1
        self._asked = Counter[Owner]()

    def on_end(
        self, topic: str, partition: int, reason: End, monotonic_ms: int, *, was_held: bool
    ) -> None:
        was_lost = reason not in (End.RELEASED, End.KEPT)
        if was_held and was_lost and self._mode is ClaimMode.TOPIC:
            self._broken.add(topic)
        if reason in _RESTS:
            self._resting[topic, partition] = monotonic_ms + self._rest_ms
            if reason in _TOO_SLOW:
                self._ask_ms, self._asked_with = monotonic_ms + _SLOW_RESTS * self._rest_ms, 2**62
        elif reason in _CONTESTED:
            self._stride = 1

    def choose(
        self, prospects: Sequence[Prospect], monotonic_ms: int, *, random_unit: float = 0.5
    ) -> list[Prospect]:
        if self._mode is ClaimMode.TOPIC:
            return self._whole_topics(prospects, monotonic_ms)
        room = len(prospects)
        if self._max_claims:
            room = self._max_claims - sum(prospect.is_ours for prospect in prospects)
        back = [each for each in prospects if each.is_reclaimable and not each.is_ours]
        chosen = back[: max(0, room)]
        room -= len(chosen)
        free = [each for each in prospects if self._is_free(each, monotonic_ms)]
        if not free or room <= 0:
            return chosen
        if self._mode is ClaimMode.BALANCED:
            if monotonic_ms < self._next_ms:
                return chosen
            room = min(room, self._stride)
            self._stride = min(_MAX_STRIDE, 2 * self._stride)
            self._next_ms = monotonic_ms + int(self._pause_ms * random_unit)
        return chosen + free[:room]

    def ask(self, prospects: Sequence[Prospect], monotonic_ms: int) -> Prospect | None:
        """G7: choose a partition of another member to ask for; None: it is no time to ask."""
        ours = sum(each.is_ours for each in prospects)
        others = [each for each in prospects if each.owner != _NOBODY]
        is_full = self._mode is not ClaimMode.BALANCED or ours == self._max_claims > 0
        if is_full or not others or any(self._is_free(each, monotonic_ms) for each in prospects):
            return None
        if monotonic_ms < self._ask_ms and ours <= self._asked_with:
            return None
        counts = Counter(each.owner for each in others)
        self._asked = Counter({owner: self._asked[owner] for owner in counts})
        able = [owner for owner, count in counts.items() if count >= ours + 2]
        if not able:
            return None
        owner = min(able, key=lambda each: (self._asked[each], -counts[each]))
        self._asked[owner] += 1
        self._ask_ms, self._asked_with = monotonic_ms + self._rest_ms // 2, ours
        return next(each for each in others if each.owner == owner)

    def gives(self, prospects: Sequence[Prospect]) -> set[str]:
        """G7: choose topics to give one partition of; none while another one comes or goes."""
        asked = [each for each in prospects if each.asker != _NOBODY]
        if not asked or self._mode is not ClaimMode.BALANCED:
            return set()
        if any(each.is_ours and not each.is_held for each in prospects):
            return set()
        counts = Counter(each.owner for each in prospects)
        held = sum(each.is_held for each in prospects)
        return {each.topic for each in asked if held >= counts[each.asker] + 2}

    def take_broken_topics(self) -> set[str]:
        """G4: tell of which topics a partition was lost, to give up the others, and forget it."""
        broken, self._broken = self._broken, set()
        return broken

    def _whole_topics(self, prospects: Sequence[Prospect], monotonic_ms: int) -> list[Prospect]:
        held = {each.topic for each in prospects if each.partition == 0 and each.is_held}
        ours = {each.topic for each in prospects if each.is_ours}
        room = self._max_claims - len(ours) if self._max_claims else len(prospects)
        chosen = []
        keys = [each for each in prospects if each.partition == 0 and not each.is_ours]
        for each in sorted(keys, key=lambda each: not each.is_reclaimable):
            can_try = each.is_reclaimable or self._is_free(each, monotonic_ms)
            if can_try and room > 0 and each.topic not in ours:
                chosen.append(each)
                room -= 1
        for each in prospects:
            is_wanted = each.partition and each.topic in held and not each.is_ours
            if is_wanted and (each.is_reclaimable or self._is_free(each, monotonic_ms)):
                chosen.append(each)
        return chosen

    def _is_free(self, prospect: Prospect, monotonic_ms: int) -> bool:
        if prospect.is_ours or prospect.is_reclaimable or not prospect.is_claimable:
            return False
        rests_until_ms = self._resting.get((prospect.topic, prospect.partition))
        if rests_until_ms is None:
            return True
        if monotonic_ms < rests_until_ms:
            return False
        del self._resting[prospect.topic, prospect.partition]
        return True
