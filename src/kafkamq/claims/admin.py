"""Pauses a live group, and moves its positions, all or nothing, while its members run.

Positions are set in four steps: the group is paused, what is to move is claimed, it is released
elsewhere, and the group is resumed.

Nothing moves before everything is held: until then each partition is held at its old position, and
whatever goes wrong, each is given back there. Then all are released at their new positions. These
are one record for each partition, so a process that dies between them leaves some moved and the
rest at their old positions; everything short of that is all or nothing.

A group is paused by a ReleaseGroup record on each coordination partition concerned, and resumed by
one whose expiry is long past; a pause that was there before is put back instead. Each of these is
read back before the next step, so that the caller sees what it did. Members that do not know the
record (the last Go version) do not release: then the deadline ends the attempt.

Source: Marshal PROTOCOL.md, ReleaseGroup; the section on setting positions was never written.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import TypeAlias

from kafkamq.claims.cluster import Cluster
from kafkamq.claims.engine import ClaimSession, Engine, Listener
from kafkamq.claims.log_engine import check_id, require_work
from kafkamq.claims.rules.steps import ClaimantConfig, End, Finish, Phase
from kafkamq.config import milliseconds, wait_seconds
from kafkamq.errors import BrokerError, ConfigError, DeadlineExceededError
from kafkamq.transport.clock import monotonic_ms
from kafkamq.types import MarshalRecord, MarshalType, PartitionId

Position: TypeAlias = int | str | datetime
"""An offset, ``"earliest"``, ``"latest"``, or the first message at or after a time."""
_UNDER_WAY = 2**63
_PATIENCE_S = 5.0
_MAX_DRIFT_S = 1.0
# Brokers whose clocks differ never agree.
_MAX_PAUSES = 3
# A change that failed early must still not leave the group paused.
MIN_RESUME_S = 10.0
_RETRY_MS = 200
_RELEASE_S = 30.0


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
            before_s, began_ms = self._engine.clock.now_s(), monotonic_ms()
            until_s = int(before_s + lasts_s) + 1
            self._write(self._everywhere(until_s), timeout_s)
            # The record itself tells the broker's time, which an idle log did not.
            passed_s = (monotonic_ms() - began_ms) / 1000
            if abs(self._engine.clock.now_s() - before_s - passed_s) < _MAX_DRIFT_S:
                break
        return float(until_s)

    def resume(self, *, timeout: float | timedelta = 30.0) -> None:
        """End the group's pause."""
        timeout_s = wait_seconds(timeout, may_be_endless=True)
        self._cluster.ready(timeout_s)
        self._write(self._everywhere(0), timeout_s)

    def paused_until(self) -> float:
        """Return when the pause ends, epoch s by the broker; 0.0: the group is not paused."""
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
        self, positions: Mapping[PartitionId, Position], *, timeout: float | timedelta | None = None
    ) -> dict[PartitionId, int]:
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
        change = _Change(engine, self.group_id, self._ids, targets)
        deadline_s = time.monotonic() + patience_ms / 1000
        with engine.lock:
            now_s = int(engine.clock.now_s())
            numbers = sorted({engine.partition_of(topic) for topic, _ in targets})
            before = {
                number: engine.log.logs[number].paused_until(self.group_id) for number in numbers
            }
        # The pause outlasts everything, also what a member's wrong clock takes off. A longer one of
        # somebody else is not shortened, nor ended.
        until_s = now_s + 2 * (patience_ms // 1000) + 60
        pauses = {number: max(until_s, before_s) for number, before_s in before.items()}
        try:
            try:
                self._write(pauses, patience_ms / 1000)
            except DeadlineExceededError:
                change.fail("the group could not be paused")
            else:
                change.run(deadline_s - time.monotonic())
        finally:
            # An interrupt must not leave the group paused, either.
            now_s = int(engine.clock.now_s())
            left = {number: at_s if at_s > now_s else 0 for number, at_s in before.items()}
            is_resumed = True
            try:
                self._write(left, max(patience_ms / 1000, MIN_RESUME_S))
            except DeadlineExceededError:
                is_resumed = False
        return change.result(is_resumed=is_resumed)

    # ---- how

    def _everywhere(self, expires_at_s: int) -> dict[int, int]:
        return dict.fromkeys(range(self._engine.topic.partitions), expires_at_s)

    def _write(self, expiries: Mapping[int, int], timeout_s: float) -> None:
        """Write a ReleaseGroup to each of these coordination partitions, and read all back."""
        engine, (client, instance) = self._engine, self._ids
        # Where each partition's release stands in the log; -1: it is to be sent.
        ends = dict.fromkeys(expiries, -1)
        logs = engine.log.logs

        def is_read() -> bool:
            for partition in [number for number, at in ends.items() if at < 0]:
                ends[partition] = _UNDER_WAY
                record = MarshalRecord(
                    MarshalType.RELEASE_GROUP,
                    time_s=int(engine.clock.now_s()),
                    instance=instance,
                    client=client,
                    group=self.group_id,
                    expires_at_s=expiries[partition],
                    version=0,
                )
                engine.send(partition, record, partial(ends.__setitem__, partition))
            return all(0 <= at < logs[number].next_offset for number, at in ends.items())

        engine.wait_until(is_read, timeout_s, f"writing a pause of group {self.group_id}")

    def _resolve(self, positions: Mapping[PartitionId, Position]) -> dict[PartitionId, int]:
        admin, found = self._engine.admin, dict[PartitionId, int]()
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
    """Claims partitions, and releases all of them elsewhere, or none; nothing is read.

    The caller's thread drives the claimants, under the engine's lock.
    """

    def __init__(
        self, engine: Engine, group: str, ids: tuple[str, str], targets: Mapping[PartitionId, int]
    ) -> None:
        self._engine = engine
        self._group = group
        self._ids = ids
        self._targets = dict(targets)
        self._sessions: dict[PartitionId, ClaimSession] = {}
        self._next_try_ms: dict[PartitionId, int] = {}
        self._last_end: dict[PartitionId, End] = {}
        self._is_moving = False
        self._moved: dict[PartitionId, int] = {}
        # Why each partition that was not moved was not; empty when all were.
        self._failures: dict[PartitionId, str] = {}

    def run(self, timeout_s: float) -> None:
        """Move all once they are held; if they are not in time, give back what is held."""
        engine = self._engine
        try:
            engine.wait_until(self._move, timeout_s, "setting positions")
        except DeadlineExceededError:
            with engine.lock:
                self._give_back()
        engine.wait_until(
            self._is_over, 2 * engine.interval_ms / 1000 + _RELEASE_S, "setting positions"
        )

    def fail(self, why: str) -> None:
        for place in self._targets:
            self._failures.setdefault(place, why)

    def result(self, *, is_resumed: bool) -> dict[PartitionId, int]:
        failures, group = self._failures, self._group
        still = "" if is_resumed else f"; group {group} is still paused: resume it"
        moved = ", ".join(f"{topic}[{number}]" for topic, number in sorted(self._moved))
        error_text = "; ".join(
            f"{topic}[{number}]: {why}" for (topic, number), why in sorted(failures.items())
        )
        if not failures:
            if still:
                raise BrokerError(f"positions of group {group} were changed: {moved}{still}")
            return self._moved
        if not self._is_moving:
            raise DeadlineExceededError(
                f"no position of group {group} was changed, because not all partitions could"
                f" be claimed: {error_text}{still}"
            )
        raise BrokerError(
            f"positions of group {group} were changed in part: {error_text}; changed: {moved};"
            f" set them again{still}"
        )

    # ---- under the engine's lock

    def _move(self) -> bool:
        """Release all at their new positions if all are held; else claim what is not."""
        now_ms = monotonic_ms()
        for place in self._targets:
            is_due = now_ms >= self._next_try_ms.get(place, now_ms)
            if place not in self._sessions and is_due:
                config = self._claimant_config(*place)
                self._sessions[place] = self._engine.attempt(config, self, is_fenced=True)
        self._drive()
        # What is held must stay so until the last of them is released.
        safe = [
            each
            for each in (session.claimant for session in self._sessions.values())
            if each.phase is Phase.OWNING
            and each.lease_until_ms - now_ms >= each.config.lease_ms // 4
        ]
        if len(safe) == len(self._targets):
            self._is_moving = True
            for place, session in self._sessions.items():
                session.claimant.release(now_ms, offset=self._targets[place])
        return self._is_moving

    def _give_back(self) -> None:
        for place in self._targets:
            session = self._sessions.get(place)
            if session is None or session.claimant.phase is not Phase.OWNING:
                end = self._last_end.get(place, End.TIMED_OUT)
                self._failures[place] = f"could not be claimed: {end.value}"
        self.fail("another partition could not be claimed")
        for session in self._sessions.values():
            session.claimant.release(monotonic_ms())

    def _is_over(self) -> bool:
        self._drive()
        return not self._sessions

    def _drive(self) -> None:
        for session in list(self._sessions.values()):
            self._engine.drive(session)

    def _claimant_config(self, topic: str, partition: int) -> ClaimantConfig:
        client, instance = self._ids
        return ClaimantConfig(
            client=client,
            instance=instance,
            group=self._group,
            topic=topic,
            partition=partition,
            interval_ms=self._engine.interval_ms,
            retry_ms=100,
            reclaim=False,
            release_if_behind=False,
            ignores_pause=True,
        )

    def on_offsets(self, session: ClaimSession, earliest: int, latest: int, committed: int) -> None:
        """Keep the target within the log."""
        target = self._targets[session.place]
        self._targets[session.place] = min(max(target, earliest), max(latest, earliest))
        super().on_offsets(session, earliest, latest, committed)

    def on_finish(self, session: ClaimSession, step: Finish) -> None:
        place = session.place
        del self._sessions[place]
        self._last_end[place] = step.reason
        self._next_try_ms[place] = monotonic_ms() + _RETRY_MS
        if not self._is_moving:
            return
        if step.is_confirmed and step.reason is End.RELEASED:
            self._moved[place] = self._targets[place]
        else:
            self._failures[place] = f"may not have moved: {step.reason.value}"
