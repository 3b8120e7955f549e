"""A seeded simulation of a whole namespace: senders, workers, trackers, and what goes wrong.

The processes run what ships: the same `Service`, `Consumer`, `Producer` and `LocalTracker`, on a
Kafka in memory. Each seed draws its own limits and fault rates. Then the faults stop, and all must
settle. The verdict comes from the logs alone (`kafkamq.testing.checker`), and from what users
were told::

    simulate(seed=7).require_ok()
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias
from unittest.mock import patch

from harness.simulation.batches import BatchTracker, Checkpoint
from harness.simulation.cluster import SimulatedKafka
from harness.simulation.limits import Limits, draw_limits
from harness.simulation.processes import (
    QUEUE,
    QueueWorld,
    Told,
    Tracker,
    Worker,
    open_queue,
    send_all,
    write_inventions,
)
from harness.simulation.scheduler import NS_PER_S, Process
from harness.simulation.settlers import SettlerProcess, untrue
from harness.simulation.stage import Report, Stage
from harness.simulation.states import (
    ADDED,
    GATHERED,
    IDLE,
    MIXED,
    TOOK_OVER,
    acked,
    holds_batches,
    is_invented,
    of_line,
    of_logs,
    without_inventions,
)
from kafkamq.config import ServiceConfig
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.names import group_of
from kafkamq.queue.service import Service
from kafkamq.queue.wire.headers import REASON
from kafkamq.testing.checker import Problem, Verdict, check_logs
from kafkamq.testing.history import Ending, LogRecord, Timeline, read_timelines
from kafkamq.transport import log_reader
from kafkamq.types import DeadLetterReason, MarkerType, MessageId, Outcome, expand

_ENDING = (Outcome.ACK, Outcome.REDELIVERED, Outcome.DEAD_LETTERED)
_NOWHERE = ("", 0, 0)
_LOOK_S = 1.0
_PATIENCE_S = 5.0  # behind max.poll.interval.ms
_TROUBLE_S = 60.0  # ... while what was STARTed has no answer
_Actor: TypeAlias = Worker | Tracker | BatchTracker | SettlerProcess


@dataclass(kw_only=True)
class Simulation(Report):
    """A run: the logs, and what happened."""

    limits: Limits
    messages: list[LogRecord] = field(default_factory=list)
    markers: list[LogRecord] = field(default_factory=list)
    dead_letters: list[LogRecord] = field(default_factory=list)
    deleted: list[LogRecord] = field(default_factory=list)  # of the messages, and among them
    told: Told = field(default_factory=Told)

    kind = "markers"

    def require_ok(self) -> None:
        self.verdict().require_ok(self.label)

    def judge(self) -> Verdict:
        """Return what the logs say."""
        return check_logs(
            messages=self.messages,
            markers=self.markers,
            dead_letters=self.dead_letters,
            confirmed=self.told.confirmed,
            deleted={(record.partition, record.offset) for record in self.deleted},
            max_deliveries=self.limits.worker.max_deliveries,
            max_lease_ms=self.limits.worker.max_lease_ms,
        )

    def verdict(self) -> Verdict:
        """Return what the logs say, and whether users were told the truth."""
        verdict = self.judge()
        first = [Problem(kind, _NOWHERE, text) for kind, text in self.troubles()]
        verdict.problems[:0] = [*first, *self._untrue(), *self._given_up()]
        return verdict

    def _given_up(self) -> Iterator[Problem]:
        """Payloads that a tracker did not find though none was deleted (R18).

        Brokers that tell neither ids nor of all partitions may speak of another topic.
        """
        faults = self.limits.faults
        if self.limits.deletions or (faults.stale_ms and faults.no_ids_ms):
            return
        for letter in self.dead_letters:
            if dict(letter.headers).get(REASON) == DeadLetterReason.PAYLOAD_LOST.value.encode():
                place = letter.topic, letter.partition, letter.offset
                yield Problem("lost", place, "its payload was not found")

    def _untrue(self) -> Iterator[Problem]:
        """Acks that users were told are done, and in time, and that the log has otherwise (R9)."""
        acks: dict[tuple[int, int], list[bool]] = {}  # by message: whether it came in time
        for timeline in read_timelines(self.markers).values():
            for history in timeline.histories():
                if history.of_schedule:
                    continue
                place = (history.message_id.partition, history.message_id.offset)
                own = timeline.of_message[False, history.message_id]
                starts = sum(_type_at(timeline, at) is MarkerType.START for at in own)
                is_excused = starts > 1 or self.limits.faults.clock_steps > 0
                if history.ending is Ending.ACKED:
                    acks.setdefault(place, []).append(True)
                acks.setdefault(place, []).extend(is_excused for _ in history.late_at)
        if self.told.reported:
            timelines = read_timelines(self.markers)
            is_excused = self.limits.faults.clock_steps > 0
            for number, text in untrue(self.told.reported, timelines, excuses=is_excused):
                yield Problem("untrue", ("messages", *number), text)
        for message_id in self.told.acked:
            place = (message_id.partition, message_id.offset)
            if not any(acks.get(place, ())):
                text = "its ack was told to be done" + (" in time" if place in acks else "")
                yield Problem("untrue", ("messages", *place), text)


def _type_at(timeline: Timeline, at: int) -> MarkerType | None:
    marker = timeline.records[at]
    return None if marker is None else marker.type


class _Run(Stage[_Actor]):
    """A sender, workers and trackers of one queue."""

    def __init__(self, seed: int, limits: Limits) -> None:
        self.simulation = simulation = Simulation(seed=seed, limits=limits)
        super().__init__(simulation, limits, f"sim-{seed}", seed)
        self.limits = limits
        self._world = QueueWorld(self.scheduler, limits, self.kafka.servers)
        simulation.told = self._world.told
        self.rng = self._world.rng
        self.grace_s = 2 * limits.worker.redelivery_timeout_ms / 1000
        if limits.are_far_apart:
            self.settle_s *= 2
        self.checkpoint = Checkpoint()
        self._progress = _Progress()
        self._gathered: set[MessageId] = set()  # acked by who was killed then
        self._positions: dict[tuple[str, tuple[str, int]], int] = {}  # of groups

    @property
    def world(self) -> QueueWorld:
        """Return what its processes share."""
        return self._world

    def states_of(self, message: str, extra: Mapping[str, object]) -> Iterable[str]:
        return of_line(message, extra)

    def play(self) -> None:
        """Play with what lies between records, as far apart as in a log of many queues."""
        is_sparse = self.limits.are_far_apart
        sparse = patch.multiple(log_reader, MAX_READ_THROUGH=0, MAX_READ=1)
        with sparse if is_sparse else contextlib.nullcontext():
            super().play()

    def prepare(self) -> None:
        """Topics, and who is there when."""
        limits, world, rng = self.limits, self.world, self.rng
        with Service(self.kafka.servers, world.namespace) as service:
            service.create_topics(
                partitions=limits.partitions, marker_partitions=limits.marker_partitions
            )
            markers = self.kafka.cluster.topics[service.config.marker_topic]
        markers.settings["retention.ms"] = str(limits.retention_ms)
        self.kafka.cluster.groups.on_kept = self._kept
        self.kafka.cluster.groups.on_known = self._known
        self.kafka.is_watched = lambda process: process.name.startswith("w")  # workers
        self.set_alarm()
        if limits.worker.idle_share:
            self.at(_LOOK_S, self._look_at_idle)
        if limits.invented_every_ms:
            world.start("inventor", lambda _: write_inventions(world), lambda: None)
        world.start("sender", lambda _: send_all(world), lambda: None)
        self.at(0.0, self._start_tracker)
        for _ in range(limits.trackers - 1):
            self.at(rng.uniform(0, 2), self._start_tracker)
        for _ in range(limits.workers):
            self.at(rng.uniform(0, 2), self._start_worker)
        for _ in range(limits.settlers):
            self.at(rng.uniform(0, 2), self._start_settler)
        for _ in range(limits.tracker_starts - 1):
            self.at(rng.uniform(0, self.chaos_s), self._change_trackers)
        for _ in range(round(limits.workers * limits.close_share)):
            self.at(rng.uniform(0, self.chaos_s), self._close_worker)
        for _ in range(limits.deletions):
            self.at(rng.uniform(0, self.chaos_s), self._delete_messages)
        for _ in range(limits.new_marker_partitions):
            self.at(rng.uniform(0, self.chaos_s), self._add_marker_partition)

    def interrupt(self, process: Process) -> None:
        worker = self.actors[process]
        if isinstance(worker, Worker):
            worker.interrupt()

    def _look_at_idle(self) -> None:
        """R5: a worker that nobody asks keeps neither messages nor partitions from others."""
        limits, now_ns = self.limits, self.scheduler.now_ns
        patience_s = _PATIENCE_S + _TROUBLE_S * limits.faults.delays_answers
        for process, worker in self.actors.items():
            if not isinstance(worker, Worker) or worker.is_called or process.is_frozen:
                continue
            since_ns = max(worker.asked_ns, process.thawed_ns)
            idle_s = (now_ns - since_ns) / NS_PER_S - limits.worker.max_idle_ms / 1000
            if not worker.asked_ns or idle_s < patience_s:
                continue
            self.simulation.reached[IDLE] += 1
            for each in self.kafka.consumers(process):
                if places := each.assignment():
                    self._keeps(process, f"{places} without a demand")
            if worker.kept > 0:
                self._keeps(process, f"{worker.kept} messages without a demand")
        self.at(_LOOK_S, self._look_at_idle)

    def _keeps(self, process: Process, what: str) -> None:
        self.simulation.failures.append(f"{process!r} keeps {what}")

    def _kept(self, group: str, place: tuple[str, int], committed: tuple[int, str | None]) -> None:
        """A position of workers that somebody knows of never goes back, unless Kafka dropped it.

        Of a commit whose answer was lost nobody knows: its worker reads again from the one before.
        """
        before = self._positions.get((group, place), 0)
        is_of_workers = group == group_of(self.world.config, QUEUE)
        if committed[0] < before and is_of_workers and not self.limits.faults.lost_offsets:
            text = f"{group} went back from {before} to {committed[0]} in {place}"
            self.simulation.failures.append(text)

    def _known(self, group: str, place: tuple[str, int], offset: int) -> None:
        self._positions[group, place] = max(offset, self._positions.get((group, place), 0))

    def is_settled(self) -> bool:
        """Say whether every message and every SCHEDULE has ended, by an END that came in time."""
        if not self._progress.is_settled(self.kafka, self.world.config):
            return False
        self._read_logs()
        return not self.simulation.verdict().lost

    def keep(self) -> None:
        """The logs."""
        self._read_logs()
        simulation = self.simulation
        simulation.reached += of_logs(simulation.markers, simulation.dead_letters)
        simulation.reached += Counter({GATHERED: len(self._gathered - acked(simulation.markers))})

    def _read_logs(self) -> None:
        simulation, config, kafka = self.simulation, self.world.config, self.kafka
        simulation.messages = [*simulation.deleted, *kafka.all_records(config.message_topic)]
        simulation.markers = [*without_inventions(kafka.all_records(config.marker_topic))]
        simulation.dead_letters = [
            each for each in kafka.all_records(config.dead_letter_topic) if not is_invented(each)
        ]

    def _delete_messages(self) -> None:
        """DeleteRecords under holds: of one partition, below the queue's position."""
        config, cluster = self.world.config, self.kafka.cluster
        topic, number = config.message_topic, self.rng.randrange(self.limits.partitions)
        kept = cluster.groups.committed(group_of(config, QUEUE), (topic, number))
        if kept is not None:
            before = self.rng.randint(0, kept[0])
            records, _ = self.kafka.records(topic, number)
            self.simulation.deleted += [each for each in records if each.offset < before]
            cluster.delete_records(topic, number, before)

    def _add_marker_partition(self) -> None:
        """Under what is held; who tracks in batches claims it with the next start."""
        topic = self.world.config.marker_topic
        is_under_holds = holds_batches(self.kafka.all_records(topic))
        if self.is_chaos and not is_under_holds:
            self.at(0.1, self._add_marker_partition)
            return
        self.simulation.reached[ADDED] += is_under_holds
        self.kafka.cluster.add_partitions(topic, 1)
        for each in self.actors.values():
            if isinstance(each, BatchTracker):
                each.is_closing = True

    # ---- processes

    @property
    def _workers(self) -> list[Worker]:
        return [each for each in self.actors.values() if isinstance(each, Worker)]

    @property
    def _trackers(self) -> list[Tracker | BatchTracker]:
        found = self.actors.values()
        return [each for each in found if not isinstance(each, (Worker, SettlerProcess))]

    def _start_worker(self) -> None:
        name = f"w{self.simulation.started['worker']}"
        self.simulation.started["worker"] += 1
        worker = Worker(self.world)
        kinds = {each.is_batched for each in [worker, *self._workers]}
        self.simulation.reached[MIXED] += len(kinds) > 1
        process = self.world.start(name, worker.main, lambda: self._worker_ended(process))
        self.actors[process] = worker

    def _worker_ended(self, process: Process) -> None:
        worker = self.actors.pop(process, None)
        if isinstance(worker, Worker) and not self.kafka.is_writing(process):
            self._gathered.update(worker.acked)
        self.kafka.changed(process)
        self.later(self._start_worker)

    def _start_settler(self) -> None:
        world = self.world
        name = f"s{self.simulation.started['settler']}"
        self.simulation.started["settler"] += 1
        settler = SettlerProcess(
            world, lambda service: open_queue(world, service, is_batched=False)
        )
        process = world.start(name, settler.main, lambda: self._settler_ended(process))
        self.actors[process] = settler

    def _settler_ended(self, process: Process) -> None:
        self.actors.pop(process, None)
        self.kafka.changed(process)
        self.later(self._start_settler)

    def _close_worker(self) -> None:
        if self._workers:
            self.rng.choice(self._workers).is_closing = True

    def _start_tracker(self) -> None:
        name = f"t{self.simulation.started['tracker']}"
        self.simulation.started["tracker"] += 1
        tracker: Tracker | BatchTracker = Tracker(self.world)
        if self.rng.random() < self.limits.tracker.batch_share:
            tracker = self._batch_tracker(name)
        process = self.world.start(name, tracker.main, lambda: self._tracker_ended(process))
        self.actors[process] = tracker

    def _batch_tracker(self, name: str) -> BatchTracker:
        if self.limits.stand_by:  # on a checkpoint of its own
            taken_over = partial(self.simulation.reached.update, [TOOK_OVER])
            checkpoint = Checkpoint(engine=name)
            return BatchTracker(self.world, checkpoint, self.kafka.changed, taken_over)
        for process, each in list(self.actors.items()):
            if isinstance(each, BatchTracker):  # one query on one checkpoint
                self.actors.pop(process)
                process.on_death.clear()  # this one takes its place
                process.kill()
                self.kafka.changed(process)
        return BatchTracker(self.world, self.checkpoint, self.kafka.changed)

    def _tracker_ended(self, process: Process) -> None:
        self.kafka.changed(process)
        self.actors.pop(process, None)
        if len(self._trackers) < self.limits.trackers:
            self.later(self._start_tracker)

    def _change_trackers(self) -> None:
        if self._trackers and self.rng.random() < 0.5:
            self.rng.choice(self._trackers).is_closing = True
        else:
            self._start_tracker()


class _Progress:
    """Reads along what was ended, to know when nothing is left to do."""

    def __init__(self) -> None:
        self._open: set[tuple[bool, int, int]] = set()
        self._ended: set[tuple[bool, int, int]] = set()

    def is_settled(self, kafka: SimulatedKafka, config: ServiceConfig) -> bool:
        """Return whether every message and every SCHEDULE has ended."""
        for record in kafka.news(config.message_topic):
            self._open.add((False, record.partition, record.offset))
        for record in kafka.news(config.marker_topic):
            marker = decode_marker(record.value)
            if marker.type is MarkerType.SCHEDULE and not marker.carried_forward:
                self._open.add((True, record.partition, record.offset))
            if marker.type is not MarkerType.END or marker.outcome not in _ENDING:
                continue
            for each in expand(marker):
                if (one := each.message_id) is not None:
                    self._ended.add((each.of_schedule, one.partition, one.offset))
        self._open -= self._ended
        return not self._open


def simulate(seed: int, limits: Limits | None = None) -> Simulation:
    """Run one seed, with its own limits or with yours."""
    run = _Run(seed, draw_limits(seed) if limits is None else limits)
    run.play()
    return run.simulation
