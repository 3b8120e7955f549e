"""One claimant at its log, step by step: what it asks for, and what becomes of it."""

from __future__ import annotations

from typing import Any, TypeVar

from tests.unit.claim_fold import GROUP, TOPIC, ClaimFold

from kafkamq.claims.rules.claimant import Claimant
from kafkamq.claims.rules.log import ClaimLog
from kafkamq.claims.rules.steps import ClaimantConfig, End, Finish, LookUp, Step, Write

_Step = TypeVar("_Step", bound=Step)


class ClaimantWorld(ClaimFold):
    """``me`` = client.instance; the broker, the process and everybody else share one clock."""

    def __init__(
        self,
        me: str = "me.1",
        *,
        rules: str = "safe",
        peers: ClaimLog | None = None,
        since_s: float | None = None,
        **config: Any,
    ) -> None:
        super().__init__(rules, since_s=since_s)
        self.me = me
        self.now_s = 1000.0
        self.steps: list[Step] = []
        self.offsets = (0, 1000, -1)  # earliest, latest, committed
        self.peers = peers
        self.options = config
        self.claimant = self.attempt()

    def attempt(self) -> Claimant:
        client, _, instance = self.me.partition(".")
        config = ClaimantConfig(
            client=client, instance=instance, group=GROUP, topic=TOPIC, partition=0, **self.options
        )
        self.claimant = Claimant(self.log, config, peers=self.peers)
        return self.claimant

    @property
    def ms(self) -> int:
        return round(self.now_s * 1000)

    def plan(self, **more: float) -> list[Step]:
        """What it asks for now; nothing of it is done."""
        steps = self.claimant.plan(self.ms, self.now_s, **more)
        self.steps += steps
        return steps

    def one(self, kind: type[_Step]) -> _Step:
        """The only step of this kind that it asks for now."""
        (step,) = [step for step in self.plan() if isinstance(step, kind)]
        return step

    def land(self, write: Write, *, is_read: bool = True) -> int:
        """The write arrives, and is read back."""
        at = self.offset
        if is_read:
            at = self.append(write.record, self.now_s)
        else:
            self.offset += 1
        self.claimant.on_written(write.ticket, at)
        return at

    def go(self) -> list[Step]:
        """Everything that it asks for is done, until it asks for nothing more."""
        done: list[Step] = []
        while steps := self.plan():
            done += steps
            for step in steps:
                if isinstance(step, Write):
                    self.land(step)
                elif isinstance(step, LookUp):
                    self.look_up()
        return done

    def look_up(self) -> None:
        earliest, latest, committed = self.offsets
        self.claimant.on_offsets(earliest, latest, committed, monotonic_ms=self.ms)

    def wait(self, seconds: float) -> list[Step]:
        """Time passes, and it does its work in time."""
        done: list[Step] = []
        until_s = self.now_s + seconds
        while (wake_ms := self.claimant.wake_ms()) is not None and wake_ms <= until_s * 1000:
            self.now_s = max(self.now_s, wake_ms / 1000)
            done += self.go()
        self.now_s = until_s
        return done

    def end(self) -> End | None:
        """Why it ended; None: it has not."""
        return next((step.reason for step in self.steps if isinstance(step, Finish)), None)

    def written(self, steps: list[Step]) -> list[str]:
        """The records among them, in short."""
        return [
            f"{step.record.type.value} {step.record.offset}"
            for step in steps
            if isinstance(step, Write)
        ]
