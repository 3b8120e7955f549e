"""What is shown of a parallel consumer: its state for a probe, and its metrics.

The metrics' names are a contract: ``queue`` is the consumer group, ``partition`` is
``topic/number``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic

from kafkamq.metrics import Counter, Gauge, health, register
from kafkamq.metrics.catalog import Labels
from kafkamq.metrics.health import Handlers
from kafkamq.parallel.commits import Assignment
from kafkamq.parallel.engine import Engine, State

MAX_SILENCE_S = 30.0
_ALIVE = (State.RUNNING, State.PAUSED, State.DRAINING, State.CLOSING)
_GROUP, _PARTITION = ("queue",), ("queue", "partition")

_COUNTED = {
    "polled": Counter("kafkamq_parallel_polled", "Records read.", _GROUP),
    "processed": Counter("kafkamq_parallel_processed", "Records done.", _GROUP),
    "failed": Counter("kafkamq_parallel_failed", "Attempts that failed.", _GROUP),
    "dead_lettered": Counter("kafkamq_parallel_dead_lettered", "Dead letters written.", _GROUP),
    "skipped": Counter(
        "kafkamq_parallel_skipped", "Records given up without a dead letter.", _GROUP
    ),
    "stalls": Counter(
        "kafkamq_parallel_stalls", "Records that held the committed offset back for long.", _GROUP
    ),
    "commits": Counter("kafkamq_parallel_commits", "Commits that Kafka confirmed.", _GROUP),
    "commit_failures": Counter(
        "kafkamq_parallel_commits_failed", "Commits that were repeated.", _GROUP
    ),
    "maps_cut": Counter(
        "kafkamq_parallel_maps_cut", "Commits with a part of the map, as it was too long.", _GROUP
    ),
    "maps_ignored": Counter(
        "kafkamq_parallel_maps_ignored", "Commit metadata that was no offset map.", _GROUP
    ),
}
WAITING = Gauge("kafkamq_parallel_waiting", "Records read that wait for a worker.", _GROUP)
IN_FLIGHT = Gauge("kafkamq_parallel_in_flight", "Records in workers' or a stream's hands.", _GROUP)
CONCURRENCY = Gauge("kafkamq_parallel_concurrency", "Handlers that may be at work at once.", _GROUP)
RUNNING = Gauge("kafkamq_parallel_running", "1: it reads and hands out; else 0.", _GROUP)
OPEN = Gauge("kafkamq_parallel_open", "Records read and not done.", _PARTITION)
COMMITTED = Gauge("kafkamq_parallel_committed_offset", "The offset committed last.", _PARTITION)
HIGHEST_DONE = Gauge(
    "kafkamq_parallel_highest_done_offset", "The highest that is done.", _PARTITION
)
MAP_CHARS = Gauge(
    "kafkamq_parallel_map_characters", "Length of the map committed last.", _PARTITION
)
PAUSED = Gauge("kafkamq_parallel_paused", "1: not fetched, as enough is open; else 0.", _PARTITION)

register({**_COUNTED, **globals()})


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
    """Return the engine at this moment; from any thread, at once."""
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


def watch_engine(engine: Engine) -> Callable[[], None]:
    """Show an engine's figures, and watch over its loop, from now on; the result ends that."""
    group = engine.config.group_id
    ends = _watch_figures(engine)
    loop = health.add(
        f"parallel consumer of {group}",
        max_age_s=MAX_SILENCE_S,
        is_ready=lambda: engine.state is State.RUNNING and bool(engine.assignments()),
    )
    engine.on_turn = loop.beat
    handlers = Handlers(
        f"handlers of parallel consumer {group}",
        engine.config.hung_after_ms / 1000,
        engine.slots,
        queue=group,
    )
    health.watch(handlers)

    def end() -> None:
        health.remove(loop)
        health.remove(handlers)
        for forget in ends:
            forget()

    return end


def _watch_figures(engine: Engine) -> list[Callable[[], None]]:
    group, stats, scheduler = engine.config.group_id, engine.stats, engine.work_queue.scheduler

    def figure(ask: Callable[[], float]) -> Callable[[], Mapping[Labels, float]]:
        return lambda: {(group,): float(ask())}

    def of_partitions(ask: Callable[[Assignment], float]) -> Callable[[], Mapping[Labels, float]]:
        return lambda: {
            (group, f"{assignment.place[0]}/{assignment.place[1]}"): float(ask(assignment))
            for assignment in engine.assignments()
        }

    return [
        *(family.watch(figure(partial(getattr, stats, name))) for name, family in _COUNTED.items()),
        WAITING.watch(figure(lambda: scheduler.waiting_count)),
        IN_FLIGHT.watch(figure(engine.work_queue.in_flight_count)),
        CONCURRENCY.watch(figure(lambda: engine.concurrency)),
        RUNNING.watch(figure(lambda: engine.state is State.RUNNING)),
        OPEN.watch(of_partitions(lambda assignment: assignment.partition.tracker.open_count)),
        COMMITTED.watch(of_partitions(lambda assignment: assignment.committed_offset)),
        HIGHEST_DONE.watch(
            of_partitions(lambda assignment: assignment.partition.tracker.highest_succeeded)
        ),
        MAP_CHARS.watch(of_partitions(lambda assignment: len(assignment.metadata))),
        PAUSED.watch(of_partitions(lambda assignment: assignment.is_paused)),
    ]
