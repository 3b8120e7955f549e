"""The state of Marshal's coordination log: who holds which partition, and how far each group is.

``ClaimLog`` folds one partition of the coordination topic, which holds every claim of the topics
that hash to it. Who may claim, heartbeat and release is decided by a rule set: ``peer`` as the Go
client does it, ``safe`` from the log alone (``ownership``). A group's pause is the expiry of its
latest ReleaseGroup, even when an earlier one lasted longer; it ends at the expiry.

Source: Marshal PROTOCOL.md, "Determining World State".
"""

from __future__ import annotations

from collections.abc import Iterator

from kafkamq.claims.rules.entry import Claim, ClaimState, Entry
from kafkamq.claims.rules.ownership import PeerRules, SafeRules
from kafkamq.errors import ConfigError
from kafkamq.types import MarshalRecord, MarshalType

__all__ = ["Claim", "ClaimLog", "ClaimState"]

_MAX_PARTITION = 2**31 - 1  # Kafka's
_MAX_PAUSED_GROUPS = 10_000

_Key = tuple[str, str, int]


class ClaimLog:
    """World state after the records that were applied, in log order.

    Attributes:
        next_offset: The first offset that was not applied.
        malformed: Records that no reader could decode; they change nothing.
        impossible: Records that name a partition which Kafka cannot have; they change nothing.
        refused_claims: Claims of a partition that was held.
        ignored_heartbeats: Heartbeats of somebody who is not the owner (``safe`` only).
        ignored_releases: Releases by somebody who is not the owner.
        takeovers: Accepted claims of a partition whose owner had gone stale.
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
        self._entries: dict[_Key, Entry] = {}
        self._paused: dict[str, int] = {}
        self._now_s = 0.0  # of the last record, by the clock that the rules go by
        self.next_offset = 0
        self.malformed = 0
        self.impossible = 0
        self.refused_claims = 0
        self.ignored_heartbeats = 0
        self.ignored_releases = 0
        self.takeovers = 0

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
        """The claim of one partition at ``now_s``.

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
        """Every partition that was ever named, held or not."""
        for group, topic, partition in list(self._entries):
            yield self.claim(group, topic, partition, now_s=now_s)

    def paused_until(self, group: str) -> int:
        """When the group's pause ends, epoch s; 0: it was never paused."""
        return self._paused.get(group, 0)

    def is_paused(self, group: str, *, now_s: float) -> bool:
        """The group's members may not hold a claim; ``now_s`` as in ``claim``."""
        return now_s < self._paused.get(group, 0)

    def is_ready(self, *, now_s: float) -> bool:
        """Enough was read to know every holder; a log that is read from its start always is."""
        return self._rules.is_certain(None, now_s)

    def trust(self, instance: str) -> None:
        """Name an instance of this process, so that its restarts are certain (``ownership``)."""
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
            if not rules.heartbeat(entry, record, offset):
                self.ignored_heartbeats += 1
        elif record.type is MarshalType.CLAIMING_PARTITION:
            was_held = bool(entry.heartbeat_s)
            if not rules.claim(entry, record, offset):
                self.refused_claims += 1
            elif was_held:
                self.takeovers += 1
        elif record.type is MarshalType.RELEASING_PARTITION:
            if not rules.release(entry, record, offset):
                self.ignored_releases += 1
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
            del self._paused[next(iter(self._paused))]  # the one that was paused first
        self._paused[record.group] = record.expires_at_s
