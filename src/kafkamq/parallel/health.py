"""What a probe wants to know of a parallel consumer."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

from kafkamq.parallel.engine import Engine, State

MAX_SILENCE_S = 30.0  # without a poll for so long, the consumer's thread is stuck
_ALIVE = (State.RUNNING, State.PAUSED, State.DRAINING, State.CLOSING)


@dataclass(frozen=True, slots=True)
class Health:
    """A moment of a parallel consumer.

    Attributes:
        state: As ``State``'s values: unused, running, paused, draining, closing, closed, failed.
        is_alive: For a liveness probe: it polls, has not failed, and its handlers have not all hung
            for ``hung_after``.
        is_ready: For a readiness probe: alive, partitions are assigned, and its handlers have not
            all hung for 5 minutes.
        partitions: Assigned (topic, partition)s.
        waiting: Records polled that wait for a worker.
        in_flight: Records in workers' hands, and those whose results a stream holds.
        uncommitted: Partitions with progress that is not committed yet.
        since_poll_s: Seconds since the last poll ended; None: there was none.
        since_commit_s: Seconds since the last confirmed commit; None: there was none.
        error: Why it failed, or empty.
        hung_s: For how long all handlers have hung: none has ended, or their event loop is blocked.
            0: they work.
        oldest_s: For how long the oldest call of a handler has gone on; None: none is under way.
        oldest: Its record, the first one of a list: topic-partition@offset; or empty.
    """

    state: str
    is_alive: bool
    is_ready: bool
    partitions: tuple[tuple[str, int], ...]
    waiting: int
    in_flight: int
    uncommitted: int
    since_poll_s: float | None
    since_commit_s: float | None
    error: str
    hung_s: float = 0.0
    oldest_s: float | None = None
    oldest: str = ""


def health_of(engine: Engine) -> Health:
    """The engine at this moment; from any thread, at once."""
    slots = engine.slots()
    now_s = monotonic()
    stats, scheduler = engine.stats, engine.work_queue.scheduler
    since_poll_s = now_s - stats.last_poll_s if stats.last_poll_s else None
    assignments = engine.assignments()
    is_alive = (
        engine.state in _ALIVE
        and (since_poll_s is None or since_poll_s < MAX_SILENCE_S)
        and slots.hung_s(now_s) <= engine.config.hung_after_ms / 1000
    )
    oldest = slots.oldest
    return Health(
        state=engine.state.value,
        is_alive=is_alive,
        is_ready=is_alive and bool(assignments) and slots.is_ready(now_s),
        partitions=tuple(sorted(assignment.place for assignment in assignments)),
        waiting=scheduler.waiting_count,
        in_flight=engine.work_queue.in_flight_count(),
        uncommitted=sum(d.partition.tracker.version != d.committed_version for d in assignments),
        since_poll_s=since_poll_s,
        since_commit_s=now_s - stats.last_commit_s if stats.last_commit_s else None,
        error="" if engine.failure is None else str(engine.failure),
        hung_s=slots.hung_s(now_s),
        oldest_s=None if oldest is None else max(0.0, now_s - oldest.began_s),
        oldest="" if oldest is None else str(oldest),
    )
