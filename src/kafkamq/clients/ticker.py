"""TICKs (R4, R17), and the status of every marker partition on its compacted topic (R24).

Both are written by one idempotent producer outside of transactions: a TICK must become readable
while a transaction is under way elsewhere, and a status may be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kafkamq.config import ServiceConfig
from kafkamq.wire.status import TrackerStatus

__all__ = ["StatusReader", "Ticker"]


class Ticker:
    """Appends TICKs and status records; thread-safe but for ``close``."""

    def __init__(self, config: ServiceConfig) -> None:
        raise NotImplementedError

    def tick(
        self,
        partition: int,
        *,
        engine: str,
        epoch: int,
        on_done: Callable[[int, int], None] | None = None,
    ) -> None:
        """Append a TICK to a marker partition, without waiting.

        Args:
            partition: Of the markers topic.
            engine: The ``consumer_id`` of the TICK: who waits for it (R17).
            epoch: Its ``engine_epoch``.
            on_done: Called from ``poll`` with (partition, offset); offset -1: it failed. A TICK
                fails after 5 s, so that the next one may be appended (R4).
        """
        raise NotImplementedError

    def tick_all(
        self, partitions: Sequence[int], *, engine: str, epoch: int, timeout_s: float = 30.0
    ) -> dict[int, int]:
        """Append a TICK to each partition, wait, and return their offsets.

        Raises:
            BrokerError, DeadlineExceededError: Not all were written.
        """
        raise NotImplementedError

    def publish(self, status: TrackerStatus) -> None:
        """Write a status record, without waiting."""
        raise NotImplementedError

    def poll(self, timeout_s: float = 0.0) -> None:
        """Serve delivery reports; raises what broke the client for good (credentials, fatal)."""
        raise NotImplementedError

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Flush (bounded) and end; idempotent."""
        raise NotImplementedError


class StatusReader:
    """The latest status per (topic, partition) of a namespace; one owner thread."""

    def __init__(self, config: ServiceConfig) -> None:
        raise NotImplementedError

    @property
    def latest(self) -> dict[tuple[str, int], TrackerStatus]:
        """What was read so far."""
        raise NotImplementedError

    def read_to_end(self, *, timeout_s: float = 10.0) -> dict[tuple[str, int], TrackerStatus]:
        """Read up to what was there at the call, and return ``latest``.

        Raises:
            DeadlineExceededError: The broker did not answer in time.
        """
        raise NotImplementedError

    def poll(self, timeout_s: float = 0.1) -> list[TrackerStatus]:
        """New statuses since the last call, oldest first; malformed ones are skipped, counted."""
        raise NotImplementedError

    def close(self) -> None:
        """End the reader; idempotent."""
        raise NotImplementedError
