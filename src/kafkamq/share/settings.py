"""What a share group may do, read from the broker, and what is set for it."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import ConfigError, KafkaMQError
from kafkamq.queue.rules.capabilities import Feature, backends_with
from kafkamq.transport.admin import Admin
from kafkamq.transport.broker_release import broker_release

_log = logging.getLogger(__name__)
_MIN_RELEASE = (4, 2)
_LOCK = "share.record.lock.duration.ms"
_START = "share.auto.offset.reset"
_ISOLATION = "share.isolation.level"
# Groups have this setting from Kafka 4.3 on.
_COUNT = "share.delivery.count.limit"
_SESSION = "share.session.timeout.ms"
_SESSION_MS = 10_000
_BROKER_LOCK = "group.share.record.lock.duration.ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareLimits:
    min_lock_ms: int
    max_lock_ms: int
    # Behind these deliveries the broker gives a record up, in silence.
    max_deliveries: int
    max_members: int
    session_ms: int
    min_session_ms: int
    max_session_ms: int
    # Whether that is the group's own setting, which ``configure_group`` sets.
    is_of_group: bool = False

    def after_set_up(self, wanted: int) -> int:
        """Return after how many deliveries the broker gives up when ``configure_group`` has run."""
        return self.handed_out(wanted) + 1 if self.is_of_group else self.max_deliveries

    def handed_out(self, wanted: int) -> int:
        """Return how often it is handed out; the broker's last delivery is for the dead letter."""
        return min(wanted, self.max_deliveries - 1)


def read_limits(admin: Admin, group_id: str) -> ShareLimits:
    cluster = admin.cluster()
    broker = cluster.settings
    if _BROKER_LOCK not in broker or _is_older(admin.config, list(cluster.brokers.values())):
        others = ", ".join(each.value for each in backends_with((Feature.LONG_HANDLERS,)))
        raise ConfigError(
            f"backend 'share' needs Kafka 4.2 or newer at {admin.config.bootstrap_servers}; "
            f"{others} work with what is there"
        )
    group = admin.group_settings(group_id)
    is_of_group = _COUNT in group
    limit = broker.get("group.share.delivery.count.limit", "5")
    if is_of_group:
        # The limit is what may be asked for, not what a consumer asked for before.
        limit = broker.get("group.share.max.delivery.count.limit", group[_COUNT])
    return ShareLimits(
        min_lock_ms=int(broker.get("group.share.min.record.lock.duration.ms", "15000")),
        max_lock_ms=int(broker.get("group.share.max.record.lock.duration.ms", "60000")),
        max_deliveries=int(limit),
        max_members=int(broker.get("group.share.max.size", "200")),
        session_ms=int(group.get(_SESSION, broker.get("group.share.session.timeout.ms", "45000"))),
        min_session_ms=int(broker.get("group.share.min.session.timeout.ms", "45000")),
        max_session_ms=int(broker.get("group.share.max.session.timeout.ms", "60000")),
        is_of_group=is_of_group,
    )


def _is_older(config: ServiceConfig, addresses: Sequence[str]) -> bool:
    """Return whether a broker says that it is; one that does not say is taken to be new enough."""
    release = broker_release(config, addresses[0]) if addresses else None
    if release is None:
        return False
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    return numbers < _MIN_RELEASE


def share_lock_ms(queue: QueueConfig, limits: ShareLimits) -> int:
    """Get the lock that a queue gets: its redelivery timeout, raised to what the broker allows."""
    wanted = queue.redelivery_timeout_ms
    if wanted > limits.max_lock_ms:
        others = ", ".join(each.value for each in backends_with((Feature.LONG_HANDLERS,)))
        raise ConfigError(
            f"queue {queue.queue_id!r}: redelivery_timeout is {wanted / 1000:g} s: backend 'share' "
            f"locks for {limits.max_lock_ms / 1000:g} s at most; {others} hold messages longer"
        )
    return max(wanted, limits.min_lock_ms)


def configure_group(admin: Admin, group_id: str, *, lock_ms: int, max_deliveries: int) -> None:
    """Set a share group's lock, where it starts, and, where it is the group's, its limit."""
    wanted = {_LOCK: str(lock_ms), _START: "earliest", _ISOLATION: "read_committed"}
    known = admin.group_settings(group_id)
    if _COUNT in known:
        wanted[_COUNT] = str(max_deliveries + 1)
    changes = {name: value for name, value in wanted.items() if known.get(name) != value}
    if changes:
        admin.set_group(group_id, changes)


def shorten_session(admin: Admin, group_id: str, limits: ShareLimits) -> int:
    """Set after how long, in ms, a silent member's partitions go to others; what it is then.

    The property ``session.timeout.ms``, else 10 s, as far as the brokers allow (45 s at least where
    they were not told otherwise). Where all members of a partition die at once nobody reads it
    until then. A refusal is logged.
    """
    asked = session_ms_of(admin.config)
    wanted = min(max(asked, limits.min_session_ms), limits.max_session_ms)
    if wanted == limits.session_ms:
        return wanted
    try:
        admin.set_group(group_id, {_SESSION: str(wanted)})
    except KafkaMQError as refused:
        _log.warning(
            "the session timeout of a share group stays as it is",
            extra={"group": group_id, "ms": limits.session_ms, "error": str(refused)},
        )
        return limits.session_ms
    return wanted


def session_ms_of(config: ServiceConfig) -> int:
    value = str(config.kafka.get("session.timeout.ms", _SESSION_MS))
    if not value.isdecimal():
        raise ConfigError(f"session.timeout.ms is {value!r}: it must be a number of milliseconds")
    return int(value)
