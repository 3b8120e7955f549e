"""Set the position of a live group: pause it, claim what is to move, release it elsewhere, resume.

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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from kafkamq.claims.rules.claimant import Claimant
from kafkamq.claims.rules.steps import End, Finish, Phase, Step
from kafkamq.types import MarshalRecord, MarshalType

_MIN_RESUME_MS = 10_000  # a change that failed early must still not leave the group paused

Place = tuple[str, int]
"""Topic and partition."""


class ResetPhase(Enum):
    """How far a change of positions is."""

    PAUSING = "pausing"
    CLAIMING = "claiming"  # and holding what is claimed, at the old positions
    MOVING = "moving"
    RESTORING = "restoring"  # giving back what is held, at the old positions
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
        targets: Mapping[Place, int],
        make_claimant: Callable[[Place], Claimant],
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
        self.failures: dict[Place, str] = {}
        self.moved: dict[Place, int] = {}  # where each went, as the log says
        self._targets = dict(targets)
        self._make_claimant = make_claimant
        self._ids = (instance, client, group)
        self._patience_ms = patience_ms
        self._deadline_ms = monotonic_ms + patience_ms
        self._retry_ms = retry_ms
        self._pauses = dict(pauses)
        self._read_to = read_to
        self._tickets = 0
        self._open: dict[int, tuple[int, int]] = {}  # by ticket: coordination partition, offset
        self._unsent = list(self._pauses)
        self._write_after_ms = monotonic_ms
        self._claimants: dict[Place, Claimant] = {}
        self._next_try_ms: dict[Place, int] = {}
        self._last_end: dict[Place, End] = {}
        self.is_resumed = False  # the log says that the pause has ended

    @property
    def is_over(self) -> bool:
        return self.phase is ResetPhase.OVER

    def claimant(self, place: Place) -> Claimant | None:
        """Who is to be told what became of the steps for this partition."""
        return self._claimants.get(place)

    def on_offsets(
        self, place: Place, earliest: int, latest: int, committed: int, *, monotonic_ms: int
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
    ) -> list[tuple[Place | None, Step | WriteGroup]]:
        """The steps to perform now, each with its claimant's partition; None: ``WriteGroup``."""
        steps: list[tuple[Place | None, Step | WriteGroup]] = []
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
            self._resume(monotonic_ms)
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

    def _finished(self, place: Place, step: Finish, monotonic_ms: int) -> None:
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

    def _resume(self, monotonic_ms: int) -> None:
        self.phase = ResetPhase.RESUMING
        self._open.clear()
        self._unsent = list(self._pauses)
        self._write_after_ms = monotonic_ms
        self._deadline_ms = monotonic_ms + max(self._patience_ms, _MIN_RESUME_MS)

    def _write_groups(
        self,
        steps: list[tuple[Place | None, Step | WriteGroup]],
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
