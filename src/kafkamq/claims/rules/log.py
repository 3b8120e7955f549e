"""The state of Marshal's coordination log: who holds which partition, and how far each group is.

``ClaimLog`` folds one partition of the coordination topic, which holds every claim of the topics
that hash to it. A group's pause is the expiry of its latest ReleaseGroup, even when an earlier one
lasted longer; it ends at the expiry. Two rule sets say who owns a partition after each record.

An *owner* is a pair of client and instance: the client's name may outlive a restart, the instance
is random and new at each start. Offsets of the claimed partition (``offset``) and offsets of the
coordination log (``token`` and what ends in ``_at``) are different things.

``PeerRules`` decide as the Go client does: the age of a claim is the observer's clock minus the
time that the sender wrote, a heartbeat from the future counts as stale, and who heartbeats
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

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import floor

from kafkamq.errors import ConfigError, StateError
from kafkamq.queue.rules.log_clock import LogClock
from kafkamq.types import MarshalRecord, MarshalType

Owner = tuple[str, str]
"""Client and instance."""

_MAX_PARTITION = 2**31 - 1
_MAX_PAUSED_GROUPS = 10_000
_MAX_RETIRED = 32
_MAX_CONTENDERS = 64
_OTHERS: Owner = ("", "others")


class ClaimState(Enum):
    """How sure it is that the last known owner lives, by the age of its last sign of life."""

    # Nobody ever claimed it, or the owner has released it.
    FREE = "free"
    FRESH = "fresh"
    # Its owner was heard within two intervals: the claim still holds.
    UNKNOWN = "unknown"
    # Its owner was silent for two intervals or more: anybody may claim.
    STALE = "stale"


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
    # The next offset to consume, the last that is known; 0 when none is.
    offset: int = 0
    # The fencing token: where the last ownership began in the coordination log.
    token: int = -1
    state: ClaimState = ClaimState.FREE
    # Since the last sign of life, by the rules' clock; it may be negative.
    age_s: float = float("inf")
    last_client: str = ""
    last_instance: str = ""
    # The sender's times of the last sign of life and of the release; 0: there is none.
    heartbeat_s: int = 0
    release_s: int = 0
    is_claimable: bool = True
    # False: the log was read from its middle, and others may hold the partition.
    is_certain: bool = True
    is_grounded: bool = False
    # When it is not certain: how many others may hold it, and the largest offset that may be true.
    rivals: int = 0
    max_offset: int = 0
    # Places in the log: the record that renewed it last, the last release that counted, the owner's
    # last ClaimingMessages, the last ignored heartbeat of somebody else, and somebody else's last
    # ClaimingMessages, with whose it is.
    renewed_at: int = -1
    released_at: int = -1
    intent_at: int = -1
    rival_at: int = -1
    asked_at: int = -1
    asker: Owner = ("", "")

    @property
    def is_valid(self) -> bool:
        return self.state in (ClaimState.FRESH, ClaimState.UNKNOWN)


@dataclass(slots=True)
class Contender:
    """A client that may hold a partition, as far as a reader knows that did not see the claim."""

    beat_ms: int
    # False: it has released, or never can hold it again.
    is_open: bool = True
    offset: int | None = None
    claimed_at: int = -1
    released_at: int = -1


@dataclass(slots=True, eq=False, repr=False)
class Entry:
    """Mutable state of one partition; the rule sets change it."""

    client: str = ""
    instance: str = ""
    has_owner: bool = False
    offset: int = 0
    # Above ``offset`` while it is not known which of them is true.
    max_offset: int = 0
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
    is_held: bool = False
    beat_ms: int = 0
    is_grounded: bool = False
    retired: tuple[Owner, ...] = ()
    # Heartbeats of an owner that is a former one (S4); 0: it is not.
    visits: int = 0
    # None: the owner is certain.
    contenders: dict[Owner, Contender] | None = None
    used: tuple[str, ...] = ()

    @property
    def owner(self) -> Owner:
        return self.client, self.instance

    def own(self, owner: Owner, token: int) -> None:
        self.client, self.instance = owner
        self.has_owner = True
        self.token = token
        self.intent_at = self.rival_at = self.asked_at = -1
        self.visits = 0

    def offsets(self) -> tuple[int, int]:
        """Return the smallest and the largest offset that may be the true one."""
        found = [c.offset for c in (self.contenders or {}).values() if c.offset is not None]
        if not found:
            return self.offset, max(self.offset, self.max_offset)
        return min(found), max(found)


class PeerRules:
    """The rules of the Go client; times are in seconds."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._observed_s = 0

    def advance(self, observed_at_s: float, broker_time_s: float | None) -> None:
        self._observed_s = floor(observed_at_s)

    def heartbeat(self, entry: Entry, record: MarshalRecord, at: int) -> None:
        owner = (record.client, record.instance)
        if not entry.has_owner or owner != entry.owner or not entry.heartbeat_s:
            entry.own(owner, at)
        entry.offset = record.offset
        entry.heartbeat_s = record.time_s
        entry.release_s = 0
        entry.renewed_at = at

    def claim(self, entry: Entry, record: MarshalRecord, at: int) -> None:
        if self._holds(entry, self._observed_s):
            return
        entry.own((record.client, record.instance), at)
        entry.heartbeat_s = record.time_s
        entry.release_s = 0
        entry.renewed_at = at

    def release(self, entry: Entry, record: MarshalRecord, at: int) -> None:
        if (record.client, record.instance) != entry.owner:
            return
        if not entry.has_owner and record.group:
            # The peer's empty entry belongs to no group.
            return
        entry.offset = record.offset
        entry.heartbeat_s = 0
        entry.release_s = record.time_s
        entry.released_at = at

    def intend(self, entry: Entry, record: MarshalRecord, at: int) -> bool:
        if (record.client, record.instance) != entry.owner:
            return False
        if not self._holds(entry, self._observed_s):
            return False
        entry.intent_at = at
        return True

    def state(self, entry: Entry, now_s: float) -> tuple[ClaimState, float]:
        """Return the state and the age at the observer's ``now_s``."""
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
    """The rules S1-S7; times are in milliseconds of the log's clock."""

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
        if broker_time_s is None:
            raise StateError("the safe rules need the broker's time of every record")
        self._clock.advance(max(0, round(broker_time_s * 1000)))  # S1

    def heartbeat(self, entry: Entry, record: MarshalRecord, at: int) -> None:
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

    def claim(self, entry: Entry, record: MarshalRecord, at: int) -> None:
        owner = (record.client, record.instance)
        self._is_new(entry, record)
        if entry.contenders is not None:
            if not self._is_warm() or self._live(entry, self._clock.now_ms):  # S7
                self._note(entry, owner, None).claimed_at = at
                return
            entry.offset, max_offset = entry.offsets()
            entry.contenders = None
            # Whether the last one that was seen owned it is not known.
            entry.has_owner = False
        elif self._holds(entry):  # S2: not even by its own holder
            return
        else:
            max_offset = entry.max_offset
        self._hand_over(entry, owner, at)
        entry.is_grounded = True
        self._renew(entry, record, at, offset=entry.offset)
        entry.max_offset = max_offset

    def release(self, entry: Entry, record: MarshalRecord, at: int) -> None:
        owner = (record.client, record.instance)
        if entry.contenders is not None:
            contender = self._note(entry, owner, record.offset)
            contender.is_open = contender is entry.contenders.get(_OTHERS)
            contender.released_at = at
        if owner != entry.owner or not entry.has_owner:  # S6
            return
        entry.is_held = False
        if entry.visits > 1:
            entry.offset = max(entry.offset, record.offset)
        elif not entry.visits:
            entry.offset = record.offset
        entry.max_offset = 0
        entry.heartbeat_s = 0
        entry.release_s = record.time_s
        entry.released_at = at

    def intend(self, entry: Entry, record: MarshalRecord, at: int) -> bool:
        if (record.client, record.instance) != entry.owner or not self._holds(entry):
            return False
        entry.intent_at = at
        return True

    def state(self, entry: Entry, now_s: float) -> tuple[ClaimState, float]:
        """Return the state and the age; ``now_s`` is the broker's time, as well as it is known."""
        if not entry.is_held:
            return ClaimState.FREE, float("inf")
        age_ms = self._clock.at(now_s) - entry.beat_ms
        if age_ms >= self._stale_ms:
            state = ClaimState.STALE
        else:
            state = ClaimState.FRESH if age_ms <= self._interval_ms else ClaimState.UNKNOWN
        return state, age_ms / 1000

    def is_claimable(self, entry: Entry | None, now_s: float) -> bool:
        now_ms = self._clock.at(now_s)
        if entry is None:
            return self._is_warm(now_ms)
        if entry.contenders is not None:
            return self._is_warm(now_ms) and not self._live(entry, now_ms)
        return not (entry.is_held and now_ms - entry.beat_ms < self._stale_ms)

    def rivals(self, entry: Entry, now_s: float) -> int:
        """Return how many other clients may hold it."""
        if entry.contenders is None:
            return 0
        live = self._live(entry, self._clock.at(now_s))
        return sum(1 for client, _ in live if client != entry.client)

    def is_certain(self, entry: Entry | None, now_s: float) -> bool:
        if entry is None:
            return self._is_warm(self._clock.at(now_s))
        return entry.contenders is None

    # ---- S7: the log was read from its middle

    def begin(self, entry: Entry) -> None:
        """An entry is made for a partition that no record has named so far."""
        if not self._is_warm():
            entry.contenders = {}

    def _is_warm(self, now_ms: int | None = None) -> bool:
        """Return whether the holder of any partition has written about it since reading began."""
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
            # A restart of this process's client (S3): its holder was of the same client.
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
        return [
            owner
            for owner, contender in (entry.contenders or {}).items()
            if contender.is_open and now_ms - contender.beat_ms < self._stale_ms
        ]

    # ---- helpers

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


class ClaimLog:
    """World state after the records that were applied, in log order.

    Attributes:
        next_offset: The first offset that was not applied.
        malformed: Records that no reader could decode; they change nothing.
        impossible: Records that name a partition which Kafka cannot have; they change nothing.
    """

    def __init__(
        self,
        rules: str = "peer",
        interval_s: float = 60,
        *,
        since_s: float | None = None,
        max_entries: int = 100_000,
    ) -> None:
        """An empty state.

        Args:
            rules: ``peer`` or ``safe``.
            interval_s: The heartbeat interval; all clients of a coordination topic must agree.
            since_s: ``safe`` only: the broker's time from which on every record is applied, when
                earlier ones are not; None: the log is read from its beginning.
            max_entries: Above this many partitions, those that nobody holds are forgotten.
        """
        if not 0 < interval_s < 1e9:
            raise ConfigError(f"interval_s is {interval_s!r}: it must be > 0")
        if max_entries < 1:
            raise ConfigError(f"max_entries is {max_entries!r}: it must be >= 1")
        self._rules: PeerRules | SafeRules
        if rules == "safe":
            self._rules = SafeRules(interval_s, since_s)
        elif rules == "peer":
            self._rules = PeerRules(interval_s)
        else:
            raise ConfigError(f"rules is {rules!r}: it must be 'peer' or 'safe'")
        self.rules = rules
        self.interval_s = interval_s
        self._max_entries = max_entries
        self._sweep_at = max_entries
        self._entries: dict[tuple[str, str, int], Entry] = {}
        self._paused: dict[str, int] = {}
        self._now_s = 0.0
        self.next_offset = 0
        self.malformed = 0
        self.impossible = 0

    def apply(
        self,
        record: MarshalRecord | None,
        *,
        offset: int,
        observed_at_s: float,
        broker_time_s: float | None = None,
    ) -> None:
        """Fold one record; total: no record raises.

        Args:
            record: What was decoded; None: the text was malformed.
            offset: The record's offset.
            observed_at_s: The observer's clock while it handles the record (``peer``).
            broker_time_s: The record's LogAppendTime; ``safe`` needs it.

        Raises:
            StateError: ``safe`` was given no ``broker_time_s``.
        """
        self._rules.advance(observed_at_s, broker_time_s)
        self._now_s = observed_at_s if broker_time_s is None else broker_time_s
        self.next_offset = offset + 1
        if record is None:
            self.malformed += 1
        elif record.type is MarshalType.RELEASE_GROUP:
            self._pause(record)
        elif not 0 <= record.partition <= _MAX_PARTITION:
            self.impossible += 1
        else:
            self._fold(record, offset)

    def claim(self, group: str, topic: str, partition: int, *, now_s: float) -> Claim:
        """Return the claim of one partition at ``now_s``.

        ``now_s`` is the observer's clock under ``peer``, and the broker's time, as well as it is
        known, under ``safe``.
        """
        entry = self._entries.get((group, topic, partition))
        rules = self._rules
        if entry is None:
            return Claim(
                group=group,
                topic=topic,
                partition=partition,
                is_claimable=rules.is_claimable(None, now_s),
                is_certain=rules.is_certain(None, now_s),
            )
        state, age_s = rules.state(entry, now_s)
        is_valid = state in (ClaimState.FRESH, ClaimState.UNKNOWN)
        least, most = entry.offsets()
        return Claim(
            group=group,
            topic=topic,
            partition=partition,
            client=entry.client if is_valid else "",
            instance=entry.instance if is_valid else "",
            offset=least,
            token=entry.token,
            state=state,
            age_s=age_s,
            last_client=entry.client,
            last_instance=entry.instance,
            heartbeat_s=entry.heartbeat_s,
            release_s=entry.release_s,
            is_claimable=rules.is_claimable(entry, now_s),
            is_certain=rules.is_certain(entry, now_s),
            is_grounded=entry.is_grounded,
            rivals=rules.rivals(entry, now_s),
            max_offset=most,
            renewed_at=entry.renewed_at,
            released_at=entry.released_at,
            intent_at=entry.intent_at,
            rival_at=entry.rival_at,
            asked_at=entry.asked_at,
            asker=entry.asker,
        )

    def claims(self, *, now_s: float) -> Iterator[Claim]:
        for group, topic, partition in list(self._entries):
            yield self.claim(group, topic, partition, now_s=now_s)

    def paused_until(self, group: str) -> int:
        """Return when the group's pause ends, epoch s; 0: it was never paused."""
        return self._paused.get(group, 0)

    def is_paused(self, group: str, *, now_s: float) -> bool:
        """The group's members may not hold a claim; ``now_s`` as in ``claim``."""
        return now_s < self._paused.get(group, 0)

    def is_ready(self, *, now_s: float) -> bool:
        """Enough was read to know every holder; a log that is read from its start always is."""
        return self._rules.is_certain(None, now_s)

    def trust(self, instance: str) -> None:
        """Name an instance of this process, so that its restarts are certain."""
        if isinstance(self._rules, SafeRules):
            self._rules.trust(instance)

    def check(self) -> None:
        for key, entry in self._entries.items():
            where = f"{key}: "
            if entry.is_grounded:
                assert entry.owner not in entry.retired, where + "an owner is not retired"
            assert entry.token < self.next_offset, where + "a token comes from the log"
            assert entry.renewed_at >= entry.token, where + "an ownership begins with its token"
            assert not (entry.heartbeat_s and entry.release_s), where + "released is not held"
            if entry.is_held or entry.is_grounded:
                assert entry.has_owner, where + "who holds it owns it"
            if entry.contenders is not None:
                assert not entry.is_grounded, where + "what is not certain is not grounded"

    def _fold(self, record: MarshalRecord, offset: int) -> None:
        rules, entry = self._rules, self._entry(record)
        if record.type is MarshalType.HEARTBEAT:
            rules.heartbeat(entry, record, offset)
        elif record.type is MarshalType.CLAIMING_PARTITION:
            rules.claim(entry, record, offset)
        elif record.type is MarshalType.RELEASING_PARTITION:
            rules.release(entry, record, offset)
        elif not rules.intend(entry, record, offset):  # G7
            entry.asked_at, entry.asker = offset, (record.client, record.instance)

    def _entry(self, record: MarshalRecord) -> Entry:
        key = (record.group, record.topic, record.partition)
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= self._sweep_at:
                self._sweep()
            entry = self._entries[key] = Entry()
            if isinstance(self._rules, SafeRules):
                self._rules.begin(entry)
        return entry

    def _sweep(self) -> None:
        """Forget what nobody holds; positions are in Kafka's committed offsets as well."""
        for key, entry in list(self._entries.items()):
            if self._rules.is_claimable(entry, self._now_s):
                del self._entries[key]
        self._sweep_at = max(self._max_entries, 2 * len(self._entries))

    def _pause(self, record: MarshalRecord) -> None:
        self._paused.pop(record.group, None)
        if len(self._paused) >= _MAX_PAUSED_GROUPS:
            for group, expires_at_s in list(self._paused.items()):
                if expires_at_s <= self._now_s:
                    del self._paused[group]
        if len(self._paused) >= _MAX_PAUSED_GROUPS:
            del self._paused[next(iter(self._paused))]
        self._paused[record.group] = record.expires_at_s
