"""A process's view of one coordination topic, and its members."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from datetime import timedelta

from kafkamq.claims.engine import Engine, Stats
from kafkamq.claims.member import Member, check_id
from kafkamq.claims.metrics import watch_engine
from kafkamq.claims.rules.log import Claim
from kafkamq.claims.topic import check_rules, require_topic
from kafkamq.claims.wire.marshal import COORDINATION_TOPIC
from kafkamq.config import ServiceConfig, milliseconds
from kafkamq.errors import ConfigError, StateError
from kafkamq.transport.admin import Admin as KafkaAdmin

_log = logging.getLogger(__name__)
_START_S = 30.0


class Cluster:
    """One coordination topic: its reader, its writer and everything this process claims.

    Thread-safe; context manager; make one per process. Leaving the block releases what is held.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        coordination_topic: str = COORDINATION_TOPIC,
        heartbeat_interval: float | timedelta = 60.0,
        rules: str = "safe",
        kafka: Mapping[str, str] | None = None,
    ) -> None:
        """Check the topic and begin to read it; ``ready`` waits for its end.

        Args:
            bootstrap_servers: The cluster.
            coordination_topic: Its name; Go clients know ``__marshal`` only.
            heartbeat_interval: Seconds; a silent owner is replaced after two of them. All clients
                of the topic must agree. Go clients: 60.
            rules: ``safe``: everybody goes by the log and the broker's clock. ``peer``: Go clients
                take part; nothing is claimed that their rules, too, do not call free, and a claim
                is given up when one of them heartbeats on it.
            kafka: Kafka's own properties, for example for security.

        Raises:
            ConfigError: A setting, or the topic as it is, cannot work.
            BrokerError, DeadlineExceededError: The cluster refused, or does not answer.
        """
        check_rules(rules)
        interval_ms = milliseconds(heartbeat_interval, name="heartbeat_interval")
        if interval_ms < 500:
            raise ConfigError(f"heartbeat_interval is {heartbeat_interval!r}: it must be >= 0.5 s")
        config = ServiceConfig(bootstrap_servers=bootstrap_servers, kafka=dict(kafka or {}))
        with KafkaAdmin(config) as admin:
            topic = require_topic(admin, coordination_topic, rules=rules, interval_ms=interval_ms)
        for warning in topic.warnings:
            _log.warning("coordination topic %s: %s", coordination_topic, warning)
        self._engine = Engine(config, topic, rules=rules, interval_ms=interval_ms)
        self._members: list[Member] = []
        self._is_closed = False
        try:
            self._engine.start()
            self._forget_metrics = watch_engine(self._engine)
        except BaseException:
            self._engine.close(5.0)
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Cluster({self._engine.config.bootstrap_servers}, {self.coordination_topic})"

    @property
    def coordination_topic(self) -> str:
        """Where claims are written."""
        return self._engine.topic.name

    @property
    def heartbeat_interval(self) -> float:
        """Seconds."""
        return self._engine.interval_ms / 1000

    @property
    def stats(self) -> Stats:
        """Counts of this process; a live object."""
        return self._engine.stats

    @property
    def engine(self) -> Engine:
        """For the other modules of this package."""
        return self._engine

    def ready(self, timeout: float = _START_S) -> None:
        """Wait until everything that was in the topic at the start is read.

        Raises:
            DeadlineExceededError: It is not, after ``timeout`` seconds; the call may be repeated.
            BrokerError: It cannot be read.
        """
        self._engine.wait_until(lambda: self._engine.is_ready, timeout, "reading the claims")

    def member(self, client_id: str, group_id: str) -> Member:
        """A member of a group.

        Args:
            client_id: Unique in the group; the same after a restart, to take up what was held.
                1-249 characters without ``/``.
            group_id: The group; positions are also committed to Kafka under this name.

        Raises:
            ConfigError: An id cannot work.
        """
        if self._is_closed:
            raise StateError("this Cluster is closed")
        check_id("client_id", client_id)
        check_id("group_id", group_id)
        member = Member(self._engine, client_id, group_id)
        self._members.append(member)
        return member

    def claims(self, group_id: str | None = None) -> list[Claim]:
        """Every partition that the read part of the topic names; of one group, or of all."""
        with self._engine.lock:
            now_s = self._engine.log.clock.now_s()
            return [
                claim
                for log in self._engine.log.logs
                for claim in log.claims(now_s=now_s)
                if group_id is None or claim.group == group_id
            ]

    def paused_until(self, group_id: str) -> float:
        """When the group's pause ends, epoch s by the broker; 0.0: it is not paused."""
        with self._engine.lock:
            now_s = self._engine.log.clock.now_s()
            until = max((log.paused_until(group_id) for log in self._engine.log.logs), default=0)
            return float(until) if until > now_s else 0.0

    def close(self, timeout: float = 30.0) -> None:
        """Release everything and end the clients. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline_s = time.monotonic() + timeout
        for member in self._members:
            member.close(max(0.5, deadline_s - time.monotonic()))
        self._forget_metrics()
        self._engine.close(max(1.0, deadline_s - time.monotonic()))
