"""Pauses a live group, and moves its positions, all or nothing, while its members run."""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import TypeAlias

from kafkamq.claims.cluster import Cluster
from kafkamq.claims.engine import Engine
from kafkamq.claims.rules.claimant import Claimant
from kafkamq.claims.rules.position_change import Place, PositionChange, WriteGroup
from kafkamq.claims.rules.steps import ClaimantConfig
from kafkamq.claims.session import ClaimSession, Listener
from kafkamq.claims.topic import check_id, require_work
from kafkamq.config import milliseconds, wait_seconds
from kafkamq.errors import BrokerError, ConfigError, DeadlineExceededError
from kafkamq.transport.clock import monotonic_ms
from kafkamq.types import MarshalRecord, MarshalType

Position: TypeAlias = int | str | datetime
"""An offset, ``"earliest"``, ``"latest"``, or the first message at or after a time."""

_UNDER_WAY = 2**63  # in place of an offset
_PATIENCE_S = 5.0  # beyond the slowest member's heartbeat
_MAX_DRIFT_S = 1.0
_MAX_PAUSES = 3  # brokers whose clocks differ never agree


class Admin:
    """Commands to one group; its members need not be stopped.

    A Go client of the last version does not know pauses: it goes on, and ``set_position`` fails
    when its time is over, having changed nothing.
    """

    def __init__(
        self, cluster: Cluster, group_id: str, *, client_id: str = "kafkamq-admin"
    ) -> None:
        """Raises ``ConfigError`` when an id cannot work."""
        check_id("client_id", client_id)
        check_id("group_id", group_id)
        self.group_id = group_id
        self._cluster = cluster
        self._engine = cluster.engine
        self._ids = (client_id, uuid.uuid4().hex[:8])

    def pause(self, for_: float | timedelta, *, timeout: float | timedelta = 30.0) -> float:
        """Let no member hold a claim for a while; returns its end, epoch s by the broker.

        Members release when they read it; who was told may finish what it has (a quarter of a
        heartbeat interval). ``wait_until_free`` waits for that.

        Raises:
            ConfigError: Not longer than a second.
            DeadlineExceededError: It is not written after ``timeout`` seconds.
        """
        lasts_s = milliseconds(for_, name="for_", minimum=1000) / 1000
        timeout_s = wait_seconds(timeout, may_be_endless=True)
        self._cluster.ready(timeout_s)
        for _ in range(_MAX_PAUSES):
            before_s, began_ms = self._engine.now_s(), monotonic_ms()
            until_s = int(before_s + lasts_s) + 1
            self._write(until_s, timeout_s)
            # The record itself tells the broker's time, which an idle log did not.
            passed_s = (monotonic_ms() - began_ms) / 1000
            if abs(self._engine.now_s() - before_s - passed_s) < _MAX_DRIFT_S:
                break
        return float(until_s)

    def resume(self, *, timeout: float | timedelta = 30.0) -> None:
        """End the group's pause."""
        timeout_s = wait_seconds(timeout, may_be_endless=True)
        self._cluster.ready(timeout_s)
        self._write(0, timeout_s)

    def paused_until(self) -> float:
        """When the pause ends, epoch s by the broker; 0.0: the group is not paused."""
        return self._cluster.paused_until(self.group_id)

    def wait_until_free(self, timeout: float | timedelta = 60.0) -> None:
        """Wait until nobody of the group holds anything.

        Raises:
            DeadlineExceededError: Somebody does, after ``timeout`` seconds.
        """
        self._engine.wait_until(
            lambda: not any(claim.is_valid for claim in self._cluster.claims(self.group_id)),
            wait_seconds(timeout, may_be_endless=True),
            f"releasing all claims of group {self.group_id}",
        )

    def set_position(
        self,
        positions: Mapping[Place, Position],
        *,
        timeout: float | timedelta | None = None,
    ) -> dict[Place, int]:
        """Move positions of the group, all or nothing: pause, claim, release elsewhere, resume.

        When it returns, the pause is over; one that the group was under before goes on.

        Args:
            positions: By topic and partition; offsets are clamped to what the log has.
            timeout: Seconds until all must be held; None: two heartbeat intervals and a bit, when
                even a dead member's claim has ended.

        Returns:
            Where each partition was moved to.

        Raises:
            ConfigError: A partition does not exist, or a position is no position.
            DeadlineExceededError: Some could not be claimed: none was moved.
            BrokerError: Some were not moved, others were, or may have been; names them. Or all
                were, and the group could not be resumed.
        """
        engine = self._engine
        patience_ms = 2 * engine.interval_ms + round(_PATIENCE_S * 1000)
        if timeout is not None:
            patience_ms = milliseconds(timeout, name="timeout", minimum=1)
        if not positions:
            return {}
        self._cluster.ready()
        engine.offsets_of(self.group_id)
        targets = self._resolve(positions)
        change = _Change(engine, self.group_id, self._ids, targets, patience_ms)
        change.run(2 * patience_ms / 1000 + 30.0)
        return change.result()

    # ---- how

    def _write(self, expires_at_s: int, timeout_s: float) -> None:
        """A ReleaseGroup on every coordination partition, and read back."""
        engine, (client, instance) = self._engine, self._ids
        with engine.lock:
            record = MarshalRecord(
                MarshalType.RELEASE_GROUP,
                time_s=int(engine.now_s()),
                instance=instance,
                client=client,
                group=self.group_id,
                expires_at_s=expires_at_s,
                version=0,
            )
        ends = dict.fromkeys(range(engine.topic.partitions), -1)  # -1: it is to be sent
        logs = engine.log.logs

        def is_read() -> bool:
            for partition in [number for number, at in ends.items() if at < 0]:
                ends[partition] = _UNDER_WAY
                engine.send(partition, record, partial(ends.__setitem__, partition))
            return all(0 <= at < logs[number].next_offset for number, at in ends.items())

        engine.wait_until(is_read, timeout_s, f"writing a pause of group {self.group_id}")

    def _resolve(self, positions: Mapping[Place, Position]) -> dict[Place, int]:
        """Turn words and times into offsets."""
        admin, found = self._engine.admin, dict[Place, int]()
        for topic in dict.fromkeys(topic for topic, _ in positions):
            check_id("topic", topic)
            count = require_work(admin, topic)
            wanted = {number: at for (name, number), at in positions.items() if name == topic}
            if not all(0 <= number < count for number in wanted):
                raise ConfigError(
                    f"{topic} has {count} partitions: positions are set for {sorted(wanted)}"
                )
            bounds = admin.log_bounds(topic, list(wanted))
            times = {}
            for number, at in wanted.items():
                if isinstance(at, datetime):
                    if at.tzinfo is None:
                        raise ConfigError(
                            f"the time {at} has no time zone: give one, for example UTC"
                        )
                    times[number] = round(at.timestamp() * 1000)
            by_time = admin.offsets_for_times(topic, times) if times else {}
            for number, at in wanted.items():
                first, end = bounds[number]
                if isinstance(at, datetime):
                    found[topic, number] = by_time.get(number, end)
                elif at == "earliest":
                    found[topic, number] = first
                elif at == "latest":
                    found[topic, number] = end
                elif isinstance(at, int) and not isinstance(at, bool) and at >= 0:
                    found[topic, number] = at
                else:
                    raise ConfigError(
                        f"the position of {topic}[{number}] is {at!r}: it must be an offset >= 0,"
                        " 'earliest', 'latest' or a datetime"
                    )
        return found


class _Change(Listener):
    """One change of positions, driven by the engine's turns; nothing is read."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        ids: tuple[str, str],
        targets: Mapping[Place, int],
        patience_ms: int,
    ) -> None:
        self._engine = engine
        self._group = group
        self._ids = ids
        self._sessions: dict[Place, ClaimSession] = {}
        client, instance = ids
        logs = engine.log.logs
        numbers = sorted({engine.partition_of(topic) for topic, _ in targets})
        self._change = PositionChange(
            targets,
            self._claimant,
            group=group,
            client=client,
            instance=instance,
            pauses={number: logs[number].paused_until(group) for number in numbers},
            read_to=lambda number: logs[number].next_offset,
            monotonic_ms=monotonic_ms(),
            patience_ms=patience_ms,
            retry_ms=200,
        )

    def run(self, timeout_s: float) -> None:
        with self._engine.lock:
            self._engine.add_ticker(self._tick)
        try:
            self._engine.wait_until(lambda: self._change.is_over, timeout_s, "setting positions")
        finally:
            with self._engine.lock:
                self._engine.remove_ticker(self._tick)

    def result(self) -> dict[Place, int]:
        change, group = self._change, self._group
        still = "" if change.is_resumed else f"; group {group} is still paused: resume it"
        moved = ", ".join(f"{topic}[{number}]" for topic, number in sorted(change.moved))
        error_text = "; ".join(
            f"{topic}[{number}]: {why}" for (topic, number), why in sorted(change.failures.items())
        )
        if not change.failures:
            if still:
                raise BrokerError(f"positions of group {group} were changed: {moved}{still}")
            return dict(change.moved)
        if not change.moved and not any("may" in why for why in change.failures.values()):
            raise DeadlineExceededError(
                f"no position of group {group} was changed, because not all partitions could"
                f" be claimed: {error_text}{still}"
            )
        raise BrokerError(
            f"positions of group {group} were changed in part: {error_text}; changed: {moved};"
            f" set them again{still}"
        )

    def _claimant(self, place: Place) -> Claimant:
        topic, partition = place
        engine, (client, instance) = self._engine, self._ids
        config = ClaimantConfig(
            client=client,
            instance=instance,
            group=self._group,
            topic=topic,
            partition=partition,
            interval_ms=engine.interval_ms,
            retry_ms=100,
            reclaim=False,
            release_if_behind=False,
            ignores_pause=True,
        )
        session = self._sessions[place] = engine.attempt(config, self, is_fenced=True)
        return session.claimant

    def on_offsets(self, session: ClaimSession, earliest: int, latest: int, committed: int) -> None:
        """They go through the change, for the limits of the target."""
        self._change.on_offsets(
            session.place, earliest, latest, committed, monotonic_ms=monotonic_ms()
        )

    def _tick(self, now_ms: int, now_s: float) -> None:
        for place, step in self._change.plan(now_ms, now_s, random_unit=random.random()):
            if isinstance(step, WriteGroup):
                self._write_group(step)
            elif place is not None:
                self._engine.perform(self._sessions[place], step)
        if self._change.is_over:
            self._engine.changed.notify_all()

    def _write_group(self, step: WriteGroup) -> None:
        def report(offset: int) -> None:
            if offset < 0:
                self._change.on_group_failed(step.ticket, monotonic_ms())
            else:
                self._change.on_group_written(step.ticket, offset)

        self._engine.send(step.coordination_partition, step.record, report)
