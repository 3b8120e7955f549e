"""Two rule sets over the coordination log: who owns a partition after each record.

``PeerRules`` decide as the Go client does: the age of a claim is the observer's clock minus the
time that the sender wrote, a heartbeat from the future counts as stale, and whoever heartbeats
owns. They are for groups with such clients, and to tell what those clients believe.

``SafeRules`` decide from the log alone, so that every reader comes to the same conclusion:

- S1 Time is log time: the positive differences between the broker's timestamps of consecutive
  records (``queue/rules/log_clock.py``). No sender's and no observer's clock takes part.
- S2 A ClaimingPartition is accepted when the partition is free, or its owner was last heard two
  intervals ago or more, at that record. Its offset is the fencing token.
- S3 Once a claim was accepted, a heartbeat of anybody else is ignored while the claim holds, with
  one exception: an instance of the same client that did not own the partition before takes over
  (a restart); the instance that it replaces can do nothing any more, and the position does not
  move back.
- S4 A heartbeat on a partition that nobody holds makes its sender the owner: so does the Go
  client, and a claim beside it would make two. A former owner, whose heartbeat may have been
  under way for long, moves the position only from its second heartbeat on, and only forward.
- S5 Where no accepted claim has been seen, heartbeats hand over, as in the peer's rules.
- S6 A release frees the partition and sets the position only when it comes from the last owner.
- S7 A reader that starts in the middle of the log cannot know whose claim was accepted before.
  Everybody who wrote about the partition within two intervals may be the owner: while one of these
  contenders may still hold it, no claim is accepted and nobody is owner for certain. (The true
  owner, if there is one, is among them; so such a reader accepts a claim only where all others do.)
  Where they differ about the position, the smallest may be the true one; but not that of a release
  after which another one claimed the partition and heartbeat.

Sources: Marshal PROTOCOL.md, "Determining World State" and "Partition Assignment for Consumption".
"""

from __future__ import annotations

from math import floor

from kafkamq.claims.rules.entry import ClaimState, Contender, Entry, Owner
from kafkamq.errors import StateError
from kafkamq.queue.rules.log_clock import LogClock
from kafkamq.types import MarshalRecord

_MAX_RETIRED = 32
_MAX_CONTENDERS = 64
_OTHERS: Owner = ("", "others")  # stands for contenders beyond the limit


class PeerRules:
    """As the Go client decides; times in seconds."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._observed_s = 0

    def advance(self, observed_at_s: float, broker_time_s: float | None) -> None:
        self._observed_s = floor(observed_at_s)

    def heartbeat(self, entry: Entry, record: MarshalRecord, at: int) -> bool:
        owner = (record.client, record.instance)
        if not entry.has_owner or owner != entry.owner or not entry.heartbeat_s:
            entry.own(owner, at)
        entry.offset = record.offset
        entry.heartbeat_s = record.time_s
        entry.release_s = 0
        entry.renewed_at = at
        return True

    def claim(self, entry: Entry, record: MarshalRecord, at: int) -> bool:
        if self._holds(entry, self._observed_s):
            return False
        entry.own((record.client, record.instance), at)
        entry.heartbeat_s = record.time_s
        entry.release_s = 0
        entry.renewed_at = at
        return True

    def release(self, entry: Entry, record: MarshalRecord, at: int) -> bool:
        if (record.client, record.instance) != entry.owner:
            return False
        if not entry.has_owner and record.group:  # the peer's empty entry belongs to no group
            return False
        entry.offset = record.offset
        entry.heartbeat_s = 0
        entry.release_s = record.time_s
        entry.released_at = at
        return True

    def intend(self, entry: Entry, record: MarshalRecord, at: int) -> bool:
        if (record.client, record.instance) != entry.owner:
            return False
        if not self._holds(entry, self._observed_s):
            return False
        entry.intent_at = at
        return True

    def state(self, entry: Entry, now_s: float) -> tuple[ClaimState, float]:
        """The state and the age at the observer's ``now_s``."""
        if not entry.heartbeat_s:
            return ClaimState.FREE, float("inf")
        age_s = floor(now_s) - entry.heartbeat_s
        if not 0 <= age_s < 2 * self._interval_s:
            return ClaimState.STALE, age_s
        return (ClaimState.FRESH if age_s <= self._interval_s else ClaimState.UNKNOWN), age_s

    def is_claimable(self, entry: Entry | None, now_s: float) -> bool:
        return entry is None or not self._holds(entry, floor(now_s))

    def rivals(self, entry: Entry, now_s: float) -> int:
        return 0

    def is_certain(self, entry: Entry | None, now_s: float) -> bool:
        return True

    def _holds(self, entry: Entry, now_s: int) -> bool:
        age_s = now_s - entry.heartbeat_s
        return entry.heartbeat_s != 0 and 0 <= age_s < 2 * self._interval_s


class SafeRules:
    """S1-S7; times in milliseconds of the log's clock."""

    def __init__(self, interval_s: float, since_s: float | None) -> None:
        self._clock = LogClock()
        self._interval_ms = round(interval_s * 1000)
        self._stale_ms = round(2 * interval_s * 1000)
        self._since_ms = None if since_s is None else round(since_s * 1000)
        self._trusted: set[str] = set()

    def trust(self, instance: str) -> None:
        """An instance of this process: it is known that it did not own anything before."""
        self._trusted.add(instance)

    def advance(self, observed_at_s: float, broker_time_s: float | None) -> None:
        """Go to the next record."""
        if broker_time_s is None:
            raise StateError("the safe rules need the broker's time of every record")
        self._clock.advance(max(0, round(broker_time_s * 1000)))  # S1

    def heartbeat(self, entry: Entry, record: MarshalRecord, at: int) -> bool:
        owner = (record.client, record.instance)
        is_new = self._is_new(entry, record)
        if entry.contenders is not None:
            self._contend(entry, record, at, is_new=is_new)
        elif owner == entry.owner and entry.is_held:
            offset = max(entry.offset, record.offset) if entry.visits else record.offset
            entry.visits += bool(entry.visits)
            self._renew(entry, record, at, offset=offset)
        elif self._is_doubtful(entry, owner, is_new=is_new):
            self._doubt(entry)
            self._contend(entry, record, at, is_new=is_new)
        elif not self._holds(entry) or not entry.is_grounded:  # S4, S5
            is_former = self._is_former(entry, owner)
            if not self._holds(entry) and owner != entry.owner and entry.has_owner:
                self._retire(entry, entry.owner)
            entry.own(owner, at)
            entry.visits = int(is_former)
            entry.is_grounded = False
            self._renew(entry, record, at, offset=entry.offset if is_former else record.offset)
        elif record.client == entry.client and owner not in entry.retired:  # S3: a restart
            self._hand_over(entry, owner, at)
            self._renew(entry, record, at, offset=max(entry.offset, record.offset))
        else:  # S3
            entry.rival_at = at
            return False
        return True

    def claim(self, entry: Entry, record: MarshalRecord, at: int) -> bool:
        owner = (record.client, record.instance)
        self._is_new(entry, record)
        if entry.contenders is not None:
            if not self._is_warm() or self._live(entry, self._clock.now_ms):  # S7
                self._note(entry, owner, None).claimed_at = at
                return False
            entry.offset, max_offset = entry.offsets()
            entry.contenders = None
            entry.has_owner = False  # whether the last one that was seen owned it is not known
        elif self._holds(entry):  # S2: not even by its own holder
            return False
        else:
            max_offset = entry.max_offset
        self._hand_over(entry, owner, at)
        entry.is_grounded = True
        self._renew(entry, record, at, offset=entry.offset)
        entry.max_offset = max_offset
        return True

    def release(self, entry: Entry, record: MarshalRecord, at: int) -> bool:
        owner = (record.client, record.instance)
        if entry.contenders is not None:
            contender = self._note(entry, owner, record.offset)
            contender.is_open = contender is entry.contenders.get(_OTHERS)
            contender.released_at = at
        if owner != entry.owner or not entry.has_owner:  # S6
            return False
        entry.is_held = False
        if entry.visits > 1:
            entry.offset = max(entry.offset, record.offset)
        elif not entry.visits:
            entry.offset = record.offset
        entry.max_offset = 0
        entry.heartbeat_s = 0
        entry.release_s = record.time_s
        entry.released_at = at
        return True

    def intend(self, entry: Entry, record: MarshalRecord, at: int) -> bool:
        if (record.client, record.instance) != entry.owner or not self._holds(entry):
            return False
        entry.intent_at = at
        return True

    def state(self, entry: Entry, now_s: float) -> tuple[ClaimState, float]:
        """The state and the age; ``now_s`` is the broker's time, as well as it is known."""
        if not entry.is_held:
            return ClaimState.FREE, float("inf")
        age_ms = self._now_ms(now_s) - entry.beat_ms
        if age_ms >= self._stale_ms:
            state = ClaimState.STALE
        else:
            state = ClaimState.FRESH if age_ms <= self._interval_ms else ClaimState.UNKNOWN
        return state, age_ms / 1000

    def is_claimable(self, entry: Entry | None, now_s: float) -> bool:
        now_ms = self._now_ms(now_s)
        if entry is None:
            return self._is_warm(now_ms)
        if entry.contenders is not None:
            return self._is_warm(now_ms) and not self._live(entry, now_ms)
        return not (entry.is_held and now_ms - entry.beat_ms < self._stale_ms)

    def rivals(self, entry: Entry, now_s: float) -> int:
        """How many other clients may hold it."""
        if entry.contenders is None:
            return 0
        live = self._live(entry, self._now_ms(now_s))
        return sum(1 for client, _ in live if client != entry.client)

    def is_certain(self, entry: Entry | None, now_s: float) -> bool:
        if entry is None:
            return self._is_warm(self._now_ms(now_s))
        return entry.contenders is None

    # ---- S7: the log was read from its middle

    def begin(self, entry: Entry) -> None:
        """An entry is made for a partition that no record has named so far."""
        if not self._is_warm():
            entry.contenders = {}

    def _is_warm(self, now_ms: int | None = None) -> bool:
        """Whoever holds a partition now has written about it since reading began."""
        if self._since_ms is None:
            return True
        if now_ms is None:
            now_ms = self._clock.now_ms
        return now_ms - self._since_ms >= self._stale_ms

    def _is_new(self, entry: Entry, record: MarshalRecord) -> bool:
        """The first record here of an instance that never owned anything before."""
        instance = record.instance
        if instance not in self._trusted or instance in entry.used:
            return False
        entry.used = (*entry.used, instance)
        return True

    def _is_doubtful(self, entry: Entry, owner: Owner, *, is_new: bool) -> bool:
        """A heartbeat of ``owner``, who does not hold it, may mean more than is known here."""
        client = owner[0]
        if self._since_ms is None or (client == entry.client and is_new):
            return False
        if not self._holds(entry):
            return not self._is_former(entry, owner)
        return not entry.is_grounded or (client == entry.client and owner not in entry.retired)

    def _is_former(self, entry: Entry, owner: Owner) -> bool:
        """It owned the partition by right, and does not any more."""
        if owner in entry.retired:
            return True
        return owner == entry.owner and entry.has_owner and not entry.is_held

    def _doubt(self, entry: Entry) -> None:
        """From here on the owner is not certain any more."""
        entry.contenders = {}
        if entry.has_owner:
            contender = Contender(entry.beat_ms, is_open=entry.is_held, offset=entry.offset)
            entry.contenders[entry.owner] = contender
        entry.is_grounded = False

    def _contend(self, entry: Entry, record: MarshalRecord, at: int, *, is_new: bool) -> None:
        """Fold a heartbeat while the owner is not certain."""
        owner = (record.client, record.instance)
        assert entry.contenders is not None, "only where the owner is not certain"
        claimed_at = self._note(entry, owner, record.offset).claimed_at
        for former, contender in list(entry.contenders.items()):
            if not contender.is_open and contender.released_at < claimed_at:
                del entry.contenders[former]
        if owner != entry.owner or not entry.is_held:
            entry.own(owner, at)
        self._renew(entry, record, at, offset=record.offset)
        live = self._live(entry, self._clock.now_ms)
        is_alone = all(client == record.client for client, _ in live)
        if is_new and is_alone and self._is_warm():
            # A restart of this process's client (S3): whoever held it was of the same client.
            entry.offset = entry.offsets()[1]
            for former in live:
                if former != owner:
                    self._retire(entry, former)
            entry.contenders = None

    def _note(self, entry: Entry, owner: Owner, offset: int | None) -> Contender:
        contenders = entry.contenders
        assert contenders is not None, "only where the owner is not certain"
        contender = contenders.get(owner)
        if contender is None:
            if len(contenders) >= _MAX_CONTENDERS:
                owner = self._make_room(contenders, owner)
            contender = contenders.setdefault(owner, Contender(0))
        contender.beat_ms = self._clock.now_ms
        contender.is_open = True
        if offset is not None:
            contender.offset = offset
        return contender

    def _make_room(self, contenders: dict[Owner, Contender], owner: Owner) -> Owner:
        now_ms = self._clock.now_ms
        for key, contender in list(contenders.items()):
            if not contender.is_open or now_ms - contender.beat_ms >= self._stale_ms:
                del contenders[key]
        return owner if len(contenders) < _MAX_CONTENDERS else _OTHERS

    def _live(self, entry: Entry, now_ms: int) -> list[Owner]:
        """Who may hold it at ``now_ms``."""
        return [
            owner
            for owner, contender in (entry.contenders or {}).items()
            if contender.is_open and now_ms - contender.beat_ms < self._stale_ms
        ]

    # ---- helpers

    def _now_ms(self, now_s: float) -> int:
        """A broker's time on the log's clock; never before the last record."""
        now_ms = round(now_s * 1000)
        if self._clock.last_ms < 0:
            return now_ms
        return self._clock.now_ms + max(0, now_ms - self._clock.last_ms)

    def _holds(self, entry: Entry) -> bool:
        return entry.is_held and self._clock.now_ms - entry.beat_ms < self._stale_ms

    def _renew(self, entry: Entry, record: MarshalRecord, at: int, *, offset: int) -> None:
        entry.offset = offset
        entry.max_offset = 0
        entry.is_held = True
        entry.beat_ms = self._clock.now_ms
        entry.heartbeat_s = record.time_s
        entry.release_s = 0
        entry.renewed_at = at

    def _hand_over(self, entry: Entry, owner: Owner, at: int) -> None:
        """The owner changes, or begins again; what it was before is remembered (S3, S4)."""
        if entry.has_owner and owner != entry.owner:
            self._retire(entry, entry.owner)
        entry.retired = tuple(former for former in entry.retired if former != owner)
        entry.own(owner, at)

    def _retire(self, entry: Entry, owner: Owner) -> None:
        others = (former for former in entry.retired if former != owner)
        entry.retired = (*others, owner)[-_MAX_RETIRED:]
