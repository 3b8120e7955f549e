"""What a claimant hands out and how far it is: at least once by offset, at most once by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kafkamq.claims.rules.health import HealthMonitor, HealthVerdict
from kafkamq.claims.rules.log import Claim, ClaimState
from kafkamq.claims.rules.positions import DeliveredOffsets, StartPosition, start_position
from kafkamq.claims.rules.steps import ClaimantConfig, Delivery, End, HandOut
from kafkamq.errors import StateError


def may_reclaim(config: ClaimantConfig, claim: Claim) -> bool:
    """C4: fresh only, though the Go client takes over any claim that holds."""
    return (
        config.reclaim
        and claim.client == config.client
        and claim.state is ClaimState.FRESH
        and not claim.rivals
    )


@dataclass(slots=True)
class ClaimBatch:
    """At most once: what is to be handed out; it is announced, then committed."""

    first_offset: int
    next_offset: int
    is_wanted: bool = True  # the application waits for it
    is_announced: bool = False  # its ClaimingMessages was read back
    is_sent: bool = False  # its heartbeat is on its way


class ClaimWork:
    """The messages of one session; whether any may be handed out is the claimant's to say."""

    __slots__ = ("_config", "_health", "_offsets", "batch", "start", "untaken_offset")

    def __init__(self, config: ClaimantConfig) -> None:
        self._config = config
        self._health: HealthMonitor | None = None
        self._offsets = DeliveredOffsets(0)
        self.untaken_offset: int | None = None  # of what C6 let be handed out, and nobody took
        self.start: StartPosition | None = None
        self.batch: ClaimBatch | None = None

    @property
    def position(self) -> int:
        """Next offset to consume; -1 while it is not known."""
        return -1 if self.start is None else self._offsets.position

    @property
    def outstanding(self) -> int:
        return self._offsets.outstanding

    @property
    def is_idle(self) -> bool:
        """Nothing is waited for."""
        return not self._offsets.outstanding and self.batch is None

    @property
    def is_pressing(self) -> bool:
        """A batch is to be announced or committed at once."""
        batch = self.batch
        return batch is not None and (batch.is_wanted or not batch.is_announced)

    @property
    def is_at_most_once(self) -> bool:
        return self._config.delivery is Delivery.AT_MOST_ONCE

    def coordination_offset(self, claim: Claim) -> int:
        """Where several are possible: the larger one loses messages, the smaller one repeats."""
        return claim.max_offset if self.is_at_most_once else claim.offset

    def find_start(
        self, claim: Claim, earliest_offset: int, latest_offset: int, committed_offset: int
    ) -> None:
        self.begin(
            start_position(
                coordination_offset=self.coordination_offset(claim),
                committed_offset=committed_offset,
                earliest_offset=earliest_offset,
                latest_offset=latest_offset,
                take_larger=self.is_at_most_once,
            )
        )

    def begin(self, start: StartPosition) -> None:
        self.start = start
        self._offsets = DeliveredOffsets(start.offset)

    def watch(self, monotonic_ms: int) -> None:
        """Consuming begins: watch its speed from now on."""
        self._health = HealthMonitor(
            monotonic_ms,
            interval_ms=self._config.interval_ms,
            release_if_behind=self._config.release_if_behind,
            is_whole_topic=self._config.is_whole_topic,
        )

    def judge(self, latest_offset: int, monotonic_ms: int) -> End | None:
        if self._health is None:
            return None
        self._offsets.advance()
        verdict = self._health.check(self.position, latest_offset, monotonic_ms)
        if verdict is HealthVerdict.HEALTHY:
            return None
        return End.STUCK if verdict is HealthVerdict.STUCK else End.BEHIND

    def advance(self) -> int:
        """C5: the position, moved to the first offset that is not committed."""
        self._offsets.advance()
        return self.position

    def deliver(self, offsets: Sequence[int], monotonic_ms: int) -> None:
        self._offsets.deliver(offsets)
        self._saw_messages(monotonic_ms)

    def commit(self, offset: int) -> None:
        if not self._offsets.commit(offset):
            raise StateError(f"offset {offset} was not handed out, or is committed already")

    def forget(self, offset: int) -> None:
        self._offsets.forget(offset)

    def offer(
        self, first_offset: int, next_offset: int, monotonic_ms: int, *, is_wanted: bool
    ) -> None:
        if not self.position <= first_offset < next_offset:
            raise StateError(
                f"a batch from {first_offset} to {next_offset} is offered at {self.position}"
            )
        self.batch = ClaimBatch(first_offset, next_offset, is_wanted)
        self._saw_messages(monotonic_ms)

    def want_batch(self) -> bool:
        if self.batch is not None:
            self.batch.is_wanted = True
        return self.batch is not None

    def drop_unwanted(self) -> None:
        """Nobody will ask for a batch any more; what was only announced may be repeated."""
        if self.batch is not None and not self.batch.is_wanted:
            self.batch = None

    def hand_out_batch(self) -> HandOut | None:
        """C6: its heartbeat was read back; None: there is no batch, or it was not its heartbeat."""
        batch = self.batch
        if batch is None or not (batch.is_announced and batch.is_sent):
            return None
        self.batch = None
        self._offsets = DeliveredOffsets(batch.next_offset)
        self.untaken_offset = batch.first_offset
        return HandOut(batch.first_offset, batch.next_offset)

    def _saw_messages(self, monotonic_ms: int) -> None:
        if self._health is not None:
            self._health.on_messages(monotonic_ms)
