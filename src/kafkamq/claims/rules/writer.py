"""The writes of one claimant: one at a time, and each is read back before the next."""

from __future__ import annotations

from dataclasses import dataclass

from kafkamq.claims.rules.steps import ClaimantConfig, Step, Write
from kafkamq.types import MarshalRecord, MarshalType


@dataclass(slots=True)
class PendingWrite:
    """The write that was not read back yet."""

    ticket: int
    type: MarshalType
    sent_ms: int  # monotonic, before it was sent
    position: int = 0  # what it says: the next offset to consume
    offset: int = -1  # where it stands in the log; -1: not known


class ClaimWriter:
    """Names writes, remembers the pending one, and paces repetitions of failed ones."""

    __slots__ = ("_config", "_steps", "_tickets", "pending", "retry_ms")

    def __init__(self, config: ClaimantConfig, steps: list[Step]) -> None:
        self._config = config
        self._steps = steps  # what is written is appended here
        self._tickets = 0
        self.pending: PendingWrite | None = None
        self.retry_ms = -(2**62)  # nothing is written before

    def can_write(self, monotonic_ms: int) -> bool:
        return self.pending is None and monotonic_ms >= self.retry_ms

    def is_read(self, next_offset: int) -> bool:
        """The pending write stands in the log, and the log was read up to it."""
        return self.pending is not None and 0 <= self.pending.offset < next_offset

    def on_written(self, ticket: int, offset: int) -> None:
        if self.pending is not None and self.pending.ticket == ticket:
            self.pending.offset = offset

    def on_failed(self, ticket: int, monotonic_ms: int) -> bool:
        """It may be in the log all the same; False: the ticket is not of the pending write."""
        if self.pending is None or self.pending.ticket != ticket:
            return False
        self.pause(monotonic_ms)
        return True

    def pause(self, monotonic_ms: int) -> None:
        self.pending = None
        self.retry_ms = monotonic_ms + self._config.retry_ms

    def clear(self, monotonic_ms: int) -> None:
        self.pending = None
        self.retry_ms = monotonic_ms

    def write(
        self,
        type: MarshalType,
        monotonic_ms: int,
        now_s: float,
        *,
        offset: int = 0,
        commit_offset: int = -1,
        must_commit: bool = False,
    ) -> None:
        config = self._config
        self._tickets += 1
        self.pending = PendingWrite(self._tickets, type, monotonic_ms, offset)
        record = MarshalRecord(
            type,
            time_s=int(now_s),
            instance=config.instance,
            client=config.client,
            group=config.group,
            topic=config.topic,
            partition=config.partition,
            offset=offset,
        )
        self._steps.append(Write(self._tickets, record, commit_offset, must_commit))
