"""The in-process redelivery tracker (engine "local"): reads markers, settles what is due.

Replicas share the partitions of the markers topic through an ordinary consumer group and are one
engine (R22). The loop's thread reads, folds and plans; starts and settlements of partitions run in
a few worker threads, so that a transaction of one partition holds up nobody else. The rules are in
``markers/rules/redelivery.py`` and ``markers/rules/ticks.py``; no ``if`` about them belongs here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import methodcaller

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import (
    DataLossError,
    DeadlineExceededError,
    FencedError,
    KafkaMQError,
    StateError,
    UnsupportedVersionError,
    WireError,
)
from kafkamq.markers.rules.delivery import Carry, Settle
from kafkamq.markers.rules.hold import NEVER
from kafkamq.markers.tracker.ledger import MAX_OPEN
from kafkamq.markers.tracker.metrics import TrackerMetrics, observe_lateness
from kafkamq.markers.tracker.partition import ENGINE, Phase, Started, TrackedPartition, sign_of
from kafkamq.markers.tracker.records import Quarantine, Ticker
from kafkamq.markers.tracker.settlement import SettlementError, SettleReport, SettlerPool
from kafkamq.markers.tracker.succession import Succession
from kafkamq.markers.tracker.takeover import PartitionStarter
from kafkamq.markers.wire.markers import decode_slim
from kafkamq.markers.wire.records import TrackerStatus
from kafkamq.metrics.health import Loop, health
from kafkamq.queue.topics import require_topics
from kafkamq.queue.wire.headers import Origin
from kafkamq.runtime.jobs import Workers
from kafkamq.transport.admin import Admin
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import REFUSALS, OutcomeUnknownError, is_fatal, is_retriable, meaning
from kafkamq.transport.follower import Follower
from kafkamq.transport.group_consumer import COOPERATIVE, GroupConsumer
from kafkamq.transport.record import LOG_APPEND_TIME, Record
from kafkamq.types import Marker, PartitionId

_log = logging.getLogger(__name__)

_THREADS = 4
# A TICK may be late by this, too.
_POLL_S = 0.02
_STATUS_S = 1.0
_PATIENCE_S = 30.0
_CLOSE_S = 15.0
_SETTLE_S = 20.0
_MAX_TURN_S = 30.0
_BATCH = 5000
_NEW_PARTITIONS_MS = 30_000
# What a killed replica's partitions wait for their next owner.
_SESSION_MS = 6_000
_STRATEGY = "partition.assignment.strategy"
_WAIT_S = 0.2


class LocalTracker:
    """One replica of the in-process tracker of a namespace; one owner thread.

    Args:
        timeout_s: Bound of each question to the cluster before it runs.

    Raises:
        ConfigError: The topics cannot be used (R23, R25); says why and what to do.
        BrokerError, DeadlineExceededError: The cluster cannot be asked.
    """

    def __init__(
        self,
        config: ServiceConfig,
        tracker: TrackerConfig | None = None,
        *,
        timeout_s: float = 30.0,
    ) -> None:
        self._config = config
        self._tracker = tracker if tracker is not None else TrackerConfig()
        self.warnings = require_topics(
            config, max_lease_ms=self._tracker.max_lease_ms, timeout_s=timeout_s
        )
        with Admin(config, timeout_s=timeout_s) as admin:
            topic = admin.require_topic(config.marker_topic)
        retention_ms = int(topic.settings.get("retention.ms", "-1"))
        self._carry_after_ms = retention_ms // 4 if retention_ms >= 0 else NEVER  # R19
        self._partitions: dict[int, TrackedPartition] = {}
        self._settlers = SettlerPool(config, self._tracker)
        self._ledgers = self._settlers.ledgers
        self._starter = PartitionStarter(
            config, self._tracker, partitions=topic.partitions, ledgers=self._ledgers
        )
        self._ticker = Ticker(config)
        self._quarantine = Quarantine(config)
        self._workers = Workers(_THREADS, name="kafkamq-tracker")
        for _ in range(_THREADS):
            self._workers.submit(self._settlers.add, lambda _: None, _raise)
        self._starting = 0
        self._next_status_s = 0.0
        self.is_over = False
        # All replicas share partitions out in one way, whatever the user chose for queues.
        kafka = {name: value for name, value in config.kafka.items() if name != _STRATEGY}
        # The member is assigned the partitions and fences transactions (R22); the reader reads.
        self.member = GroupConsumer(
            replace(config, kafka=kafka),
            self,
            [config.marker_topic],
            group_id=tracker_group(config),
            strategy=COOPERATIVE,
            session_ms=_SESSION_MS,
            ignores=lambda error: not is_fatal(error),
            topic_metadata_refresh_interval_ms=_NEW_PARTITIONS_MS,
        )
        self._reader = Follower(
            config,
            f"reading {config.marker_topic}",
            ignores=lambda error: not is_fatal(error),
            enable_partition_eof=True,
        )
        self._metrics = TrackerMetrics(config, self.statuses)
        name = f"tracker of {config.namespace}"
        self._loop = health.add(name, max_age_s=_MAX_TURN_S, is_ready=self._is_ready)

    # ---- running

    def run(self, stop: threading.Event | None = None) -> None:
        """Track until ``stop`` is set, then close.

        Raises:
            FencedError: Another engine took over.
            DataLossError: A position lies outside the log.
            UnsupportedVersionError: A marker of a newer version (R21).
            BrokerError: What waiting does not mend: credentials, permissions.
        """
        stop = stop if stop is not None else threading.Event()
        try:
            while not stop.is_set():
                self.run_once()
        except BaseException:
            self._end()
            raise
        self.close()

    def run_once(self, timeout_s: float = _POLL_S) -> int:
        """Read, fold, plan, and hand out what is to be done, once; return the records read."""
        if self.is_over:
            raise StateError("this tracker is closed")
        self._loop.beat()
        self._workers.deliver()
        records = self._read(timeout_s)
        if records or self._reader.ends:
            self._fold(records)
        self._guard_positions()
        for part in list(self._partitions.values()):
            self._act(part)
        self._ticker.poll()
        now_s = time.monotonic()
        if now_s >= self._next_status_s:
            self._next_status_s = now_s + _STATUS_S
            self._publish()
            sign = sign_of(self._config, self._partitions.values())
            if sign is not None:
                self._ticker.sign(sign)
        return len(records)

    def _publish(self) -> None:
        for part in self._partitions.values():
            status = part.status()
            if status is not None:
                self._ticker.publish(status)

    @contextmanager
    def in_thread(self) -> Iterator[LocalTracker]:
        """Run in a thread of its own; leaving the block stops it and raises what stopped it."""
        stop = threading.Event()
        failures: list[BaseException] = []
        # What has failed does not beat any more, so this process is not live.
        hung: list[Loop] = []

        def run() -> None:
            try:
                self.run(stop)
            except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
                _log.error("the tracker has stopped", extra={"why": str(error)})
                failures.append(error)
                hung.append(health.add(f"{self._loop.name} that has failed", max_age_s=0.0))

        thread = threading.Thread(target=run, name="kafkamq-tracker", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            thread.join(2 * _CLOSE_S + _SETTLE_S)
            for loop in hung:
                health.remove(loop)
            if failures:
                # This goes also when the block has failed, which then is but a consequence.
                raise failures[0]
        if thread.is_alive():
            raise DeadlineExceededError("the tracker's thread did not end; it is abandoned")

    @property
    def is_live(self) -> bool:
        """Return whether it has partitions, and has read its own TICK in each of them (R17)."""
        parts = list(self._partitions.values())
        return bool(parts) and all(
            part.phase is Phase.READING and part.core.is_live for part in parts
        )

    def _is_ready(self) -> bool:
        """A replica without partitions stands by, which is all that it can do."""
        return self.member.is_member and (not self._partitions or self.is_live)

    @property
    def partitions(self) -> frozenset[int]:
        return frozenset(self._partitions)

    def statuses(self) -> list[TrackerStatus]:
        """Return the last status of each partition; any thread may ask."""
        statuses = [part.last_status for part in list(self._partitions.values())]
        return [status for status in statuses if status is not None]

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Let settlements end, write the positions, leave the group; idempotent.

        Raises:
            BrokerError: What ended a settlement meanwhile.
        """
        if self.is_over:
            return
        deadline_s = time.monotonic() + timeout_s
        try:
            while self._workers.running and time.monotonic() < deadline_s:
                self._workers.deliver(0.1)
            for part in list(self._partitions.values()):
                if part.is_behind() and part.core.is_live and not part.is_busy:
                    self._settle(part, ())
            while self._workers.running and time.monotonic() < deadline_s:
                self._workers.deliver(0.1)
            # What it had read stays known when the ledgers have expired.
            self._publish()
        finally:
            self._end()

    def _end(self) -> None:
        """End the clients; what is under way is aborted or finished by the next owner."""
        if self.is_over:
            return
        self.is_over = True
        health.remove(self._loop)
        self._metrics.close()
        self._workers.close()
        # It revokes, which ends what is read.
        self.member.close()
        self._reader.close()
        ledgers = (part.ledger for part in self._partitions.values())
        self._settlers.close(ledger for ledger in ledgers if ledger is not None)
        self._ticker.close(timeout_s=2.0)
        self._quarantine.close()
        self._starter.close()

    # ---- the group, inside of ``_read`` and ``_end``

    def assigned(self, places: Sequence[PartitionId]) -> Mapping[PartitionId, int]:
        """The member never fetches."""
        numbers = [number for _, number in places]
        for number in numbers:
            self._partitions[number] = TrackedPartition(
                self._config.marker_topic, number, self._tracker, self._carry_after_ms
            )
        _log.info("partitions assigned", extra={"partitions": numbers})
        return {}

    def revoked(self, places: Sequence[PartitionId], *, is_lost: bool) -> None:
        """Read these no more, whether they were lost or are given back."""
        self._reader.drop(places)
        numbers = [number for _, number in places]
        for number in numbers:
            part = self._partitions.pop(number, None)
            # A settlement under way may still commit: it is as valid as if it had been quicker.
            # Afterwards the next owner's init fences it, and the group's generation does.
            if part is not None and part.ledger is not None and not part.is_busy:
                self._ledgers.close(part.ledger)
        _log.info("partitions revoked", extra={"partitions": numbers})

    def _is_ours(self, part: TrackedPartition) -> bool:
        return self._partitions.get(part.number) is part

    # ---- reading

    def _read(self, timeout_s: float) -> Sequence[Record]:
        """Serve the group, then return the records that there are; waits for the first.

        While the quarantine is full nothing is read, and it waits as long.

        Raises:
            BrokerError: Credentials, or another error that waiting does not mend.
            DataLossError: A partition's records were deleted before they were read.
        """
        if not self.member.is_joined:
            # Members must poll, so it does not join before somebody does.
            self.member.join()
        is_full = self._quarantine.is_full
        # Rebalances happen in here; the member itself has nothing to read.
        self.member.poll(1, timeout_s if is_full else 0.0)
        if is_full:
            self._reader.ends.clear()
            return ()
        records = self._reader.poll(_BATCH, timeout_s)
        for place, position in self._reader.outside.items():
            raise self._data_loss(place, position)
        return records

    def _data_loss(self, place: PartitionId, wanted: int) -> DataLossError:
        """Say how many records are gone, if the broker still tells."""
        where = f"{place[0]}[{place[1]}]"
        error_text = (
            f"{where}: the position {wanted} is not in the log: it was truncated or recreated"
        )
        try:
            first, _ = self._reader.bounds(place, timeout_s=5.0)
            if 0 <= wanted < first:
                error_text = (
                    f"{where}: up to {first - wanted} records were deleted before they were read"
                    f" ({wanted} to {first - 1}), and messages may be lost; the retention is too"
                    " short for this tracker"
                )
        except KafkaMQError:
            pass
        return DataLossError(error_text, code="OFFSET_OUT_OF_RANGE")

    def _fold(self, records: Sequence[Record]) -> None:
        parts = self._partitions
        topic = self._config.marker_topic
        current = -1
        part: TrackedPartition | None = None
        touched = set()
        for record in records:
            number = record.partition()
            if number != current and number is not None:
                current = number
                part = parts.get(number)
                touched.add(number)
            if part is None or part.phase is not Phase.READING:
                continue
            offset = record.offset()
            assert offset is not None, "records have an offset"
            kind, timestamp_ms = record.timestamp()
            marker: Marker | None
            try:
                marker = decode_slim(record.value())
            except UnsupportedVersionError as error:
                raise UnsupportedVersionError(
                    error.reason, topic=topic, partition=current, offset=offset
                ) from None
            except WireError as error:
                marker = None
                self._set_aside(record, current, offset, error)
            if kind != LOG_APPEND_TIME:
                timestamp_ms = -1
            part.core.apply(offset, timestamp_ms, marker)
        for (_, number), offset in self._reader.ends.items():
            part = parts.get(number)
            if part is not None and part.phase is Phase.READING:
                part.end = offset
                touched.add(number)
        for number in touched:
            part = parts.get(number)
            if part is not None and part.phase is Phase.READING:
                # The TICK rules measure silence from here (R4).
                part.ticks.on_read(monotonic_ms(), part.core.next_offset)

    def _guard_positions(self) -> None:
        """No position goes behind a record that is not in the quarantine yet (R21)."""
        has_pending = self._quarantine.has_pending
        self._quarantine.poll()
        if has_pending:
            first = self._quarantine.first_pending()
            for part in self._partitions.values():
                part.kept_from = first.get(part.number, -1)

    def _set_aside(self, record: Record, number: int, offset: int, error: WireError) -> None:
        """Pass a record that the core has counted, when it is copied with its place (R21)."""
        origin = Origin(self._config.marker_topic, number, offset, max(0, record.timestamp()[1]))
        _log.warning(
            "a record that is no marker was set aside",
            extra={
                "topic": origin.topic,
                "partition": number,
                "offset": offset,
                "reason": error.reason,
            },
        )
        self._quarantine.put(origin, key=record.key(), value=record.value(), error=error.reason)

    # ---- acting

    def _act(self, part: TrackedPartition) -> None:
        """Whatever a partition needs now.

        What nobody waits for is begun by an idle worker: behind a thousand starts, or positions, a
        redelivery would be late. But one start is always under way: all are busy for as long as
        more falls due than they can settle.
        """
        is_idle = self._workers.running < _THREADS
        if part.phase is Phase.WAITING:
            if (is_idle or not self._starting) and part.may_try() and not part.is_busy:
                self._start(part)
            return
        now_ms = monotonic_ms()
        if part.wants_tick(now_ms) and part.ledger is not None:
            part.tick_sent(now_ms)
            self._ticker.tick(
                part.number,
                engine=part.token,
                epoch=part.ledger.epoch,
                on_done=partial(self._tick_done, part),
            )
        actions = part.plan()
        if actions or (is_idle and part.wants_position(self._turns())):
            self._settle(part, actions)

    def _turns(self) -> int:
        return -(-len(self._partitions) // MAX_OPEN)

    def _tick_done(self, part: TrackedPartition, _number: int, offset: int) -> None:
        if self._is_ours(part) and part.phase is Phase.READING:
            part.tick_done(offset)

    def _start(self, part: TrackedPartition) -> None:
        """Open the ledger in a worker (R22)."""
        part.phase = Phase.STARTING
        part.is_busy = True
        self._starting += 1
        old, part.ledger = part.ledger, None
        self._workers.submit(
            partial(self._starter.start, part.number, old),
            partial(self._started, part),
            partial(self._start_failed, part),
        )

    def _started(self, part: TrackedPartition, started: Started | None) -> None:
        part.is_busy = False
        self._starting -= 1
        if not self._is_ours(part):
            if started is not None:
                self._ledgers.close(started.ledger)
        elif started is None:
            self._try_later(part, "the owner of partition 0 has not started yet")
        else:
            self._quarantine.passed(part.number, started.position)
            part.start(started, is_written_soon=self._turns() == 1)
            self._reader.place({(self._config.marker_topic, part.number): started.position})
            if part.number == 0:
                for other in self._partitions.values():
                    # Those that wait may have waited for its epoch.
                    if other.phase is Phase.WAITING:
                        other.retry_s = 0.0

    def _start_failed(self, part: TrackedPartition, error: KafkaMQError) -> None:
        part.is_busy = False
        self._starting -= 1
        if not self._is_ours(part):
            return
        if not is_retriable(error):
            raise error
        self._try_later(part, str(error))

    def _try_later(self, part: TrackedPartition, why: str) -> None:
        part.phase = Phase.WAITING
        part.failed()
        waited_s = time.monotonic() - part.waits_since_s
        level = logging.WARNING if waited_s > _PATIENCE_S else logging.DEBUG
        _log.log(
            level,
            "a partition cannot start yet",
            extra={"partition": part.number, "waited_s": round(waited_s), "why": why},
        )

    def _settle(self, part: TrackedPartition, actions: Sequence[Settle | Carry]) -> None:
        """Perform a plan in a worker; without actions, write the position (R15, R22)."""
        ledger = part.ledger
        assert ledger is not None, "a partition that is read has a ledger"
        part.is_busy = True
        position = part.position()
        began_s = time.monotonic()
        settle = methodcaller(
            "settle",
            ledger,
            actions,
            position=position,
            batch=part.batch,
            members=(self.member.membership(),),
            reopen=False,
            timeout_s=_SETTLE_S,
        )
        self._workers.submit(
            partial(self._settlers.run, ledger, settle),
            partial(self._settled, part, position, actions, began_s),
            partial(self._settle_failed, part, len(actions)),
        )

    def _settled(
        self,
        part: TrackedPartition,
        position: int,
        actions: Sequence[Settle | Carry],
        began_s: float,
        report: SettleReport,
    ) -> None:
        part.is_busy = False
        observe_lateness(part.number, actions, report, time.monotonic() - began_s)
        if self._is_ours(part):
            # There was no time for them: they are asked for again.
            part.core.aborted(report.left)
            part.awaited.add(report.awaited)
            part.settled(position, report)
        elif part.ledger is not None:
            self._ledgers.close(part.ledger)

    def _settle_failed(self, part: TrackedPartition, count: int, error: KafkaMQError) -> None:
        part.is_busy = False
        if not self._is_ours(part):
            if part.ledger is not None:
                self._ledgers.close(part.ledger)
            return
        error_text = {"actions": count, "error": type(error).__name__, "why": str(error)}
        _log.warning("a settlement failed", extra={"partition": part.number, **error_text})
        if isinstance(error, SettlementError):
            cause = error.__cause__
            if cause is not None and meaning(cause) in REFUSALS:
                raise cause
            # They are known not to be done: they are asked for again.
            part.core.aborted(error.actions)
            part.batch += 1
            part.failed()
        elif isinstance(error, FencedError | OutcomeUnknownError):
            # Another replica has it now, or only the ledger can tell: start again (R15, R17).
            self._reader.drop([(self._config.marker_topic, part.number)])
            part.wait()
            part.failed()
        else:
            raise error


def _raise(error: KafkaMQError) -> None:
    raise error


def tracker_group(config: ServiceConfig) -> str:
    """Return the group through which replicas of the local tracker share the markers partitions."""
    return f"kafkamq.{config.marker_topic}.tracker"


def run_standing_by(
    config: ServiceConfig, tracker: TrackerConfig | None, stop: threading.Event
) -> None:
    """Wait, track, and wait again when another engine has taken over, until ``stop`` is set.

    Raises:
        ConfigError: The topics cannot be used (R23, R25).
        KafkaMQError: As ``LocalTracker.run``, but for a later start of another engine.
    """
    while not stop.is_set():
        with Succession(config, engine=ENGINE, stands_by=True) as succession:
            succession.stand_by(ENGINE)
            _log.info("standing by", extra={"topic": config.marker_topic})
            while not succession.wait(_WAIT_S):
                if stop.is_set():
                    return
            # Until it gives its own signs.
            succession.take_over(ENGINE)
            local = LocalTracker(config, tracker)
            for warning in local.warnings:
                _log.warning("topic check: %s", warning)
            try:
                local.run(stop)
            except FencedError as error:
                _log.warning("standing by again: %s", error)
