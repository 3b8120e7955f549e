"""What is known of one claimed partition, and how it is shown.

An *owner* is a pair of client and instance: the client's name may outlive a restart, the instance
is random and new at each start. Offsets of the claimed partition (``offset``) and offsets of the
coordination log (``token`` and what ends in ``_at``) are different things.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

Owner = tuple[str, str]
"""Client and instance."""


class ClaimState(Enum):
    """How sure it is that the last known owner lives, by the age of its last sign of life."""

    FREE = "free"  # nobody ever claimed it, or the owner has released it
    FRESH = "fresh"  # heard within one interval
    UNKNOWN = "unknown"  # within two: the claim still holds
    STALE = "stale"  # two intervals or more: anybody may claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The claim of one partition at one moment.

    ``client`` and ``instance`` are empty when nothing valid is claimed; the fields that begin with
    ``last_`` are of the last owner, whatever its age.
    """

    group: str
    topic: str
    partition: int
    client: str = ""
    instance: str = ""
    offset: int = 0  # next to consume, the last known; 0 when none is known
    token: int = -1  # fencing token: where the last ownership began in the coordination log
    state: ClaimState = ClaimState.FREE
    age_s: float = float("inf")  # since the last sign of life, by the rules' clock; may be negative
    last_client: str = ""
    last_instance: str = ""
    heartbeat_s: int = 0  # the sender's time of the last sign of life; 0: none, or released
    release_s: int = 0  # the sender's time of the release; 0: not released
    is_claimable: bool = True  # a claim that is appended now would be accepted
    is_certain: bool = True  # False: the log was read from its middle, and others may hold it
    is_grounded: bool = False  # the owner's claim was seen and accepted
    rivals: int = 0  # when it is not certain: other clients that may hold it
    max_offset: int = 0  # when it is not certain: the largest offset that may be the true one
    renewed_at: int = -1  # the record that renewed it last
    released_at: int = -1  # the last release that counted
    intent_at: int = -1  # the owner's last ClaimingMessages record
    rival_at: int = -1  # the last ignored heartbeat of somebody else
    asked_at: int = -1  # the last ClaimingMessages record of somebody else, and whose it is
    asker: Owner = ("", "")

    @property
    def is_valid(self) -> bool:
        """Somebody holds it."""
        return self.state in (ClaimState.FRESH, ClaimState.UNKNOWN)


@dataclass(slots=True)
class Contender:
    """Somebody who may hold a partition, as far as a reader knows that did not see the claim."""

    beat_ms: int  # log clock of its last record
    is_open: bool = True  # False: it has released, or never can hold it again
    offset: int | None = None  # the last that it wrote
    claimed_at: int = -1  # its last claim in the log, and its release
    released_at: int = -1


@dataclass(slots=True, eq=False, repr=False)
class Entry:
    """Mutable state of one partition; the rule sets in ``ownership`` change it."""

    client: str = ""
    instance: str = ""
    has_owner: bool = False  # somebody ever owned it
    offset: int = 0
    max_offset: int = 0  # above ``offset`` while it is not known which of them is true
    token: int = -1
    heartbeat_s: int = 0
    release_s: int = 0
    renewed_at: int = -1
    released_at: int = -1
    intent_at: int = -1
    rival_at: int = -1
    asked_at: int = -1
    asker: Owner = ("", "")
    # What only the safe rules use:
    is_held: bool = False  # owned, and not released
    beat_ms: int = 0  # log clock of the last sign of life
    is_grounded: bool = False  # the ownership began with an accepted claim
    retired: tuple[Owner, ...] = ()  # earlier owners, the latest last
    visits: int = 0  # heartbeats of an owner that is a former one (S4); 0: it is not
    contenders: dict[Owner, Contender] | None = None  # None: the owner is certain
    used: tuple[str, ...] = ()  # trusted instances that have written here

    @property
    def owner(self) -> Owner:
        return self.client, self.instance

    def own(self, owner: Owner, token: int) -> None:
        """A new ownership begins."""
        self.client, self.instance = owner
        self.has_owner = True
        self.token = token
        self.intent_at = self.rival_at = self.asked_at = -1
        self.visits = 0

    def offsets(self) -> tuple[int, int]:
        """The smallest and the largest offset that may be the true one."""
        found = [c.offset for c in (self.contenders or {}).values() if c.offset is not None]
        if not found:
            return self.offset, max(self.offset, self.max_offset)
        return min(found), max(found)
