"""Pauses a live group, and moves its positions, all or nothing, while its members run.

``PositionChange``, which is pure, sets positions: it pauses the group, claims what is to move,
releases it elsewhere, and resumes.

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

import random
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from functools import partial
from typing import TypeAlias

from kafkamq.claims.cluster import Cluster
from kafkamq.claims.engine import ClaimSession, Engine, Listener
from kafkamq.claims.log_engine import check_id, require_work
from kafkamq.claims.rules.claimant import Claimant
from kafkamq.claims.rules.steps import ClaimantConfig, End, Finish, Phase, Step
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
_MIN_RESUME_MS = 10_000


class ResetPhase(Enum):
    """How far a change of positions is."""

    PAUSING = "pausing"
    CLAIMING = "claiming"
    MOVING = "moving"
    RESTORING = "restoring"
    RESUMING = "resuming"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class WriteGroup:
    """Append ``record`` to that coordination partition; answer on the change, not a claimant."""

    ticket: int
    coordination_partition: int
    record: MarshalRecord


class PositionChange:
    """One attempt to move the positions of a group."""

    def __init__(
        self,
        targets: Mapping[PartitionId, int],
        make_claimant: Callable[[PartitionId], Claimant],
        *,
        group: str,
        client: str,
        instance: str,
        pauses: Mapping[int, int],
        read_to: Callable[[int], int],
        monotonic_ms: int,
        patience_ms: int,
        retry_ms: int = 500,
    ) -> None:
        self.phase = ResetPhase.PAUSING
        # Why each partition that was not moved was not; empty when all were.
        self.failures: dict[PartitionId, str] = {}
        self.moved: dict[PartitionId, int] = {}
        self._targets = dict(targets)
        self._make_claimant = make_claimant
        self._ids = (instance, client, group)
        self._patience_ms = patience_ms
        self._deadline_ms = monotonic_ms + patience_ms
        self._retry_ms = retry_ms
        self._pauses = dict(pauses)
        self._read_to = read_to
        self._tickets = 0
        self._open: dict[int, tuple[int, int]] = {}
        self._unsent = list(self._pauses)
        self._write_after_ms = monotonic_ms
        self._claimants: dict[PartitionId, Claimant] = {}
        self._next_try_ms: dict[PartitionId, int] = {}
        self._last_end: dict[PartitionId, End] = {}
        self.is_resumed = False

    @property
    def is_over(self) -> bool:
        return self.phase is ResetPhase.OVER

    def claimant(self, place: PartitionId) -> Claimant | None:
        """Return who is to be told what became of the steps for this partition."""
        return self._claimants.get(place)

    def on_offsets(
        self, place: PartitionId, earliest: int, latest: int, committed: int, *, monotonic_ms: int
    ) -> None:
        """Answer to a claimant's ``LookUp``: it goes through here, for the limits of the target."""
        self._targets[place] = min(max(self._targets[place], earliest), max(latest, earliest))
        claimant = self._claimants.get(place)
        if claimant is not None:
            claimant.on_offsets(earliest, latest, committed, monotonic_ms=monotonic_ms)

    def on_group_written(self, ticket: int, offset: int) -> None:
        """A ``WriteGroup`` stands at ``offset`` in its coordination partition."""
        if ticket in self._open:
            self._open[ticket] = (self._open[ticket][0], offset)

    def on_group_failed(self, ticket: int, monotonic_ms: int) -> None:
        """It failed, or nobody knows; it is repeated."""
        if ticket in self._open:
            self._unsent.append(self._open.pop(ticket)[0])
            self._write_after_ms = monotonic_ms + self._retry_ms

    def plan(
        self, monotonic_ms: int, now_s: float, *, random_unit: float = 0.5
    ) -> list[tuple[PartitionId | None, Step | WriteGroup]]:
        """Return the steps to perform now, each with its claimant's partition; None:
        ``WriteGroup``.
        """
        steps: list[tuple[PartitionId | None, Step | WriteGroup]] = []
        if self.phase is ResetPhase.PAUSING:
            # The pause outlasts everything, also what a member's wrong clock takes off.
            until_s = int(now_s) + 2 * (self._patience_ms // 1000) + 60
            if self._write_groups(steps, until_s, monotonic_ms, now_s):
                self.phase = ResetPhase.CLAIMING
            elif monotonic_ms >= self._deadline_ms:
                self._fail("the group could not be paused")
        if self.phase is ResetPhase.CLAIMING:
            self._claim(monotonic_ms)
        for place in list(self._claimants):
            claimant = self._claimants[place]
            for step in claimant.plan(monotonic_ms, now_s, random_unit=random_unit):
                steps.append((place, step))
                if isinstance(step, Finish):
                    self._finished(place, step, monotonic_ms)
        if self.phase in (ResetPhase.MOVING, ResetPhase.RESTORING) and not self._claimants:
            self.phase = ResetPhase.RESUMING
            self._open.clear()
            self._unsent = list(self._pauses)
            self._write_after_ms = monotonic_ms
            self._deadline_ms = monotonic_ms + max(self._patience_ms, _MIN_RESUME_MS)
        if self.phase is ResetPhase.RESUMING:
            self.is_resumed = self._write_groups(steps, 0, monotonic_ms, now_s)
            if self.is_resumed or monotonic_ms >= self._deadline_ms:
                self.phase = ResetPhase.OVER
        return steps

    def _claim(self, monotonic_ms: int) -> None:
        missing = [place for place in self._targets if place not in self._claimants]
        owning = [c for c in self._claimants.values() if c.phase is Phase.OWNING]
        # What is held must stay so until the last of them is released.
        safe = [c for c in owning if c.lease_until_ms - monotonic_ms >= c.config.lease_ms // 4]
        if len(safe) == len(self._targets):
            self.phase = ResetPhase.MOVING
            for place, claimant in self._claimants.items():
                claimant.release(monotonic_ms, offset=self._targets[place])
        elif monotonic_ms >= self._deadline_ms:
            for place in self._targets:
                held = self._claimants.get(place)
                if held is None or held.phase is not Phase.OWNING:
                    end = self._last_end.get(place, End.TIMED_OUT)
                    self.failures[place] = f"could not be claimed: {end.value}"
            self._fail("another partition could not be claimed")
            for claimant in self._claimants.values():
                claimant.release(monotonic_ms)
        else:
            for place in missing:
                if monotonic_ms >= self._next_try_ms.get(place, monotonic_ms):
                    self._claimants[place] = self._make_claimant(place)

    def _finished(self, place: PartitionId, step: Finish, monotonic_ms: int) -> None:
        del self._claimants[place]
        self._last_end[place] = step.reason
        self._next_try_ms[place] = monotonic_ms + self._retry_ms
        if self.phase is ResetPhase.MOVING:
            if step.is_confirmed and step.reason is End.RELEASED:
                self.moved[place] = self._targets[place]
            else:
                self.failures[place] = f"may not have moved: {step.reason.value}"

    def _fail(self, why: str) -> None:
        self.phase = ResetPhase.RESTORING
        for place in self._targets:
            self.failures.setdefault(place, why)

    def _write_groups(
        self,
        steps: list[tuple[PartitionId | None, Step | WriteGroup]],
        expires_at_s: int,
        monotonic_ms: int,
        now_s: float,
    ) -> bool:
        """Write to every coordination partition; True: all of it was read back."""
        if monotonic_ms >= self._write_after_ms:
            instance, client, group = self._ids
            for partition in self._unsent:
                self._tickets += 1
                self._open[self._tickets] = (partition, -1)
                was_until_s = self._pauses[partition]
                record = MarshalRecord(
                    MarshalType.RELEASE_GROUP,
                    time_s=int(now_s),
                    instance=instance,
                    client=client,
                    group=group,
                    # A longer pause of somebody else is not shortened, nor ended.
                    expires_at_s=max(expires_at_s, was_until_s if was_until_s > now_s else 0),
                    version=0,
                )
                steps.append((None, WriteGroup(self._tickets, partition, record)))
            self._unsent = []
        for ticket, (partition, offset) in list(self._open.items()):
            if 0 <= offset < self._read_to(partition):
                del self._open[ticket]
        return not (self._unsent or self._open)


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
            self._write(until_s, timeout_s)
            # The record itself tells the broker's time, which an idle log did not.
            passed_s = (monotonic_ms() - began_ms) / 1000
            if abs(self._engine.clock.now_s() - before_s - passed_s) < _MAX_DRIFT_S:
                break
        return float(until_s)

    def resume(self, *, timeout: float | timedelta = 30.0) -> None:
        """End the group's pause."""
        timeout_s = wait_seconds(timeout, may_be_endless=True)
        self._cluster.ready(timeout_s)
        self._write(0, timeout_s)

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
        self,
        positions: Mapping[PartitionId, Position],
        *,
        timeout: float | timedelta | None = None,
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
                time_s=int(engine.clock.now_s()),
                instance=instance,
                client=client,
                group=self.group_id,
                expires_at_s=expires_at_s,
                version=0,
            )
        # Where each partition's release stands in the log; -1: it is to be sent.
        ends = dict.fromkeys(range(engine.topic.partitions), -1)
        logs = engine.log.logs

        def is_read() -> bool:
            for partition in [number for number, at in ends.items() if at < 0]:
                ends[partition] = _UNDER_WAY
                engine.send(partition, record, partial(ends.__setitem__, partition))
            return all(0 <= at < logs[number].next_offset for number, at in ends.items())

        engine.wait_until(is_read, timeout_s, f"writing a pause of group {self.group_id}")

    def _resolve(self, positions: Mapping[PartitionId, Position]) -> dict[PartitionId, int]:
        """Turn words and times into offsets."""
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
    """One change of positions, driven by the engine's turns; nothing is read."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        ids: tuple[str, str],
        targets: Mapping[PartitionId, int],
        patience_ms: int,
    ) -> None:
        self._engine = engine
        self._group = group
        self._ids = ids
        self._sessions: dict[PartitionId, ClaimSession] = {}
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

    def result(self) -> dict[PartitionId, int]:
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

    def _claimant(self, place: PartitionId) -> Claimant:
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
