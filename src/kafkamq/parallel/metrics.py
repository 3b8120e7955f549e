"""Metrics of the parallel consumers of this process; their names are a contract.

``queue`` is the consumer group, ``partition`` is ``topic/number``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kafkamq.metrics import Counter, Gauge, health, register
from kafkamq.metrics.families import Labels
from kafkamq.metrics.health import Handlers
from kafkamq.parallel.commits import Assignment
from kafkamq.parallel.engine import Engine, State

MAX_SILENCE_S = 30.0
_GROUP = ("queue",)
_PARTITION = ("queue", "partition")

POLLED = Counter("kafkamq_parallel_polled", "Records read.", _GROUP)
PROCESSED = Counter("kafkamq_parallel_processed", "Records done.", _GROUP)
FAILED = Counter("kafkamq_parallel_failed", "Attempts that failed.", _GROUP)
DEAD_LETTERED = Counter("kafkamq_parallel_dead_lettered", "Dead letters written.", _GROUP)
SKIPPED = Counter("kafkamq_parallel_skipped", "Records given up without a dead letter.", _GROUP)
STALLS = Counter(
    "kafkamq_parallel_stalls", "Records that held the committed offset back for long.", _GROUP
)
COMMITS = Counter("kafkamq_parallel_commits", "Commits that Kafka confirmed.", _GROUP)
COMMITS_FAILED = Counter("kafkamq_parallel_commits_failed", "Commits that were repeated.", _GROUP)
MAPS_CUT = Counter(
    "kafkamq_parallel_maps_cut", "Commits with a part of the map, as it was too long.", _GROUP
)
MAPS_IGNORED = Counter(
    "kafkamq_parallel_maps_ignored", "Commit metadata that was no offset map.", _GROUP
)
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

register(globals())


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
        f"handlers of parallel consumer {group}", engine.config.hung_after_ms / 1000, engine.slots
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
        POLLED.watch(figure(lambda: stats.polled)),
        PROCESSED.watch(figure(lambda: stats.processed)),
        FAILED.watch(figure(lambda: stats.failed)),
        DEAD_LETTERED.watch(figure(lambda: stats.dead_lettered)),
        SKIPPED.watch(figure(lambda: stats.skipped)),
        STALLS.watch(figure(lambda: stats.stalls)),
        COMMITS.watch(figure(lambda: stats.commits)),
        COMMITS_FAILED.watch(figure(lambda: stats.commit_failures)),
        MAPS_CUT.watch(figure(lambda: stats.maps_cut)),
        MAPS_IGNORED.watch(figure(lambda: stats.maps_ignored)),
        WAITING.watch(figure(lambda: scheduler.waiting_count)),
        IN_FLIGHT.watch(figure(engine.work_queue.in_flight_count)),
        CONCURRENCY.watch(figure(lambda: engine.concurrency)),
        RUNNING.watch(figure(lambda: engine.state is State.RUNNING)),
        OPEN.watch(of_partitions(lambda assignment: assignment.partition.tracker.open_count)),
        COMMITTED.watch(of_partitions(lambda assignment: assignment.committed_offset)),
        HIGHEST_DONE.watch(
            of_partitions(lambda assignment: assignment.partition.tracker.highest_succeeded)
        ),
        MAP_CHARS.watch(of_partitions(lambda assignment: assignment.map_chars)),
        PAUSED.watch(of_partitions(lambda assignment: assignment.is_paused)),
    ]
