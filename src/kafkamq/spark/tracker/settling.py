"""The driver beside the tracker's query: it settles what batches have folded (R15, R16, R22), and
gives silent partitions their time (R4, R24).

As in the local tracker: copies, dead letters, ENDs and position of a marker partition are
transactions of its ledger, in a few worker threads, one settlement a partition at a time. Spark's
own commits play no part in that. A batch is repeated, and what was asked for is asked for again, by
a new start of the engine alone, whose claim ends all transactions before its TICK is written (R17).
So the next batch runs while one is settled. It waits where a partition has not begun with the one
before, or has more left of it than a row may bring: a partition has one settlement, and one plan
that waits, at most.

Spark runs a batch only when there are records. What waits for a time to pass would wait forever
on a silent log, so the driver appends TICKs: one per partition at a start (R17), later by the
policy of ``markers/rules/ticks.py`` from what each batch has folded. What a TICK passes is settled
behind the batch that reads it, so it is not written while one is under way, if it can wait.
A partition that rests gets a TICK an hour, too: without a batch nobody commits its position, and
Kafka forgets one of a group that is silent for days.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import methodcaller
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import KafkaMQError
from kafkamq.markers.rules.delivery import Carry, Settle, size_of
from kafkamq.markers.rules.ticks import TickPolicy, Wake
from kafkamq.markers.tracker.ledger import MAX_OPEN, Claim, Ledger, LedgerKey, OpenLedgers
from kafkamq.markers.tracker.metrics import observe_lateness
from kafkamq.markers.tracker.partition import Awaited
from kafkamq.markers.tracker.records import Ticker
from kafkamq.markers.tracker.settlement import SettlementError, SettleReport, SettlerPool
from kafkamq.markers.wire.records import TrackerStatus, decode_status
from kafkamq.runtime.jobs import Workers
from kafkamq.spark.blocks import decode_actions
from kafkamq.spark.tracker.folding import most_actions
from kafkamq.transport.admin import Admin
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import REFUSALS, meaning

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger(__name__)
_THREADS = 4
SETTLE_S = 20.0
_CLOSE_S = 5.0
MAX_REST_MS = 3_600_000
_UNKNOWN = Wake(None, None, False)
_LEAD_MS = 150
_STATUS_S = 1.0


@dataclass(frozen=True, kw_only=True)
class FoldedRow:
    read_ms: int
    status: TrackerStatus
    actions: bytes


@dataclass(slots=True)
class _Partition:
    awaited: Awaited
    ledger: Ledger | None = None
    is_busy: bool = False
    row: FoldedRow | None = None
    left: list[Settle | Carry] = field(default_factory=list)
    written_s: float = 0.0


class RowSettling:
    """Settles for one start of the engine; one owner thread, but for ``offer``."""

    def __init__(
        self, config: ServiceConfig, tracker: TrackerConfig, *, engine: str, trigger_ms: int
    ) -> None:
        self.is_reading = False
        self.is_waiting = False
        self._config = config
        self._tracker = tracker
        self._engine = engine
        self._trigger_ms = trigger_ms
        self._epoch = 0
        self._partitions: dict[int, _Partition] = {}
        first = LedgerKey.of_markers(config, 0).transactional_id
        self._admin = Admin(config, kept_groups={first})
        self._settlers = SettlerPool(config, tracker)
        self._workers = Workers(_THREADS, name="kafkamq-tracker")
        for _ in range(_THREADS):
            self._workers.submit(self._settlers.add, lambda _: None, _raise)
        self._offered: SimpleQueue[tuple[int, Sequence[FoldedRow]]] = SimpleQueue()
        self._taken = self._next = -1
        self._waiting: set[int] = set()
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def kept(self) -> tuple[OpenLedgers, Admin]:
        return self._settlers.ledgers, self._admin

    def own(self, claimed: Claim) -> None:
        """The partitions are this start's from now on."""
        self._epoch = claimed.epoch
        for number in claimed.done:
            part = self._partition(number)
            part.ledger = claimed.ledgers.get(number) or self._ledger(number)
            part.written_s = time.monotonic()

    def adopt(self, number: int) -> None:
        """A partition that was added is this start's, too.

        Raises:
            FencedError: A later start exists.
        """
        part = self._partition(number)
        ledger = part.ledger = part.ledger or self._ledger(number)
        last = ledger.open()
        if not ledger.is_last(self._engine, self._epoch):
            ledger.adopt(self._epoch, 0 if last is None else last.position)
        self._settlers.ledgers.keep(ledger)

    def _ledger(self, number: int) -> Ledger:
        key = LedgerKey.of_markers(self._config, number)
        return Ledger(self._config, key, engine=self._engine, epoch=self._epoch, admin=self._admin)

    def _partition(self, number: int) -> _Partition:
        found = self._partitions.get(number)
        if found is None:
            found = self._partitions[number] = _Partition(Awaited(number))
        return found

    # ---- by Spark's thread

    def run(self, frame: DataFrame, batch: int) -> None:
        """A batch, as ``foreachBatch`` calls it; returns when the next one is wanted.

        Spark looks at once what there is to read then. So batches follow each other as something
        falls due, and where nothing does, by the interval.
        """
        began_ms = monotonic_ms()
        self.is_reading = True
        try:
            rows = [
                FoldedRow(
                    read_ms=began_ms,
                    status=replace(decode_status(bytes(row["status"])), batch=batch),
                    actions=bytes(row["actions"]),
                )
                for row in frame.collect()
            ]
        finally:
            self.is_reading = False
        self.offer(rows, batch)
        if any(row.actions for row in rows):
            # The owner would want the next one for their ENDs, as soon as it has its turn.
            return
        self.is_waiting = True
        with self._changed:
            until_ms = began_ms + self._trigger_ms
            while self._next < batch and not self._is_closed and until_ms > monotonic_ms():
                self._changed.wait((until_ms - monotonic_ms()) / 1000)
        self.is_waiting = False

    def offer(self, rows: Sequence[FoldedRow], batch: int) -> None:
        """Take in a batch; returns when all of its partitions have begun with the one before."""
        numbers = {row.status.partition for row in rows}
        with self._changed:
            while self._waiting & numbers and not self._is_closed:
                self._changed.wait()
            self._waiting |= numbers
        self._offered.put((batch, rows))

    # ---- by the owner

    def step(self, timeout_s: float) -> list[FoldedRow]:
        """Begin what can begin, and take in what has ended; waits that long for a batch.

        Returns:
            What came, where it is of this start.
        """
        found: list[FoldedRow] = []
        try:
            while True:
                self._taken, rows = self._offered.get(not found, timeout_s)
                found += rows
        except Empty:
            pass
        for row in found:
            self._partition(row.status.partition).row = row
        self._workers.deliver()
        for part in self._partitions.values():
            if part.row is not None and not part.is_busy:
                self._begin(part, part.row)
        return [
            replace(row, status=replace(row.status, awaited=len(self._partitions[number].awaited)))
            for number, row in ((row.status.partition, row) for row in found)
            if row.status.epoch
        ]

    def want_batch(self) -> None:
        """The next batch finds something that is due, after all that came."""
        with self._changed:
            self._next = self._taken
            self._changed.notify_all()

    def _begin(self, part: _Partition, row: FoldedRow) -> None:
        part.row = None
        with self._changed:
            self._waiting.discard(row.status.partition)
            self._changed.notify_all()
        # It stands by, and owns nothing (R36). Or the partition is added and not adopted: nothing
        # is planned there yet (R17), and a second client of its ledger would fence the one that
        # adopts it, as another start would.
        ledger = part.ledger
        if ledger is None or not row.status.epoch:
            return
        more, part.left = [*part.left, *part.awaited.take()], []
        turns = -(-len(self._partitions) // MAX_OPEN)
        since_ms = 1000 * (time.monotonic() - part.written_s)
        if row.actions or more or since_ms >= turns * self._tracker.position_interval_ms:
            self._submit(part, ledger, row, more)

    def _submit(
        self,
        part: _Partition,
        ledger: Ledger,
        row: FoldedRow,
        more: Sequence[Settle | Carry],
        unsettled: Sequence[Settle | Carry] | None = None,
    ) -> None:
        """``unsettled``: when it is repeated, what was left of it."""
        part.is_busy = True
        settled = partial(self._settled, part, ledger, row, unsettled)
        self._workers.submit(partial(self._settle, ledger, row, more), settled, _raise)

    def _settle(
        self, ledger: Ledger, row: FoldedRow, more: Sequence[Settle | Carry]
    ) -> tuple[Sequence[Settle | Carry], SettleReport | SettlementError]:
        actions = [*decode_actions(row.actions), *more]
        at, batch = row.status.committable_offset, row.status.batch
        settle = methodcaller(
            "settle", ledger, actions, position=at, batch=batch, timeout_s=SETTLE_S
        )
        try:
            return actions, self._settlers.run(ledger, settle)
        except SettlementError as error:
            return actions, error

    def _settled(
        self,
        part: _Partition,
        ledger: Ledger,
        row: FoldedRow,
        unsettled: Sequence[Settle | Carry] | None,
        done: tuple[Sequence[Settle | Carry], SettleReport | SettlementError],
    ) -> None:
        actions, outcome = done
        part.is_busy = False
        number = row.status.partition
        if isinstance(outcome, SettlementError):
            cause = outcome.__cause__
            if isinstance(cause, KafkaMQError) and meaning(cause) in REFUSALS:
                # No further try mends it.
                raise cause
            facts = {"partition": number, "actions": len(outcome.actions), "why": str(outcome)}
            _log.warning("a settlement failed", extra=facts)
            # They are known not to be done (R15).
            left = outcome.actions[len(outcome.awaited) :]
        else:
            took_s = (monotonic_ms() - row.read_ms) / 1000
            before = actions if unsettled is None else unsettled
            observe_lateness(number, before, outcome, took_s)
            left = tuple(outcome.left)
            if outcome.transactions:
                part.written_s = time.monotonic()
        part.awaited.add(outcome.awaited)
        most = most_actions(self._tracker, len(self._partitions))
        if sum(map(size_of, left)) > most and not self._is_closed:
            # The same batch goes on behind what is done. The next row, and so the next batch, waits
            # for it: each would add as much, and nothing would bound the driver's memory.
            self._submit(part, ledger, replace(row, actions=b""), actions, left)
        else:
            part.left += left

    def close(self) -> None:
        """End all clients; what has not begun the next start plans again. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        deadline_s = time.monotonic() + _CLOSE_S
        while self._workers.running and time.monotonic() < deadline_s:
            with suppress(KafkaMQError):
                # Each partition has an error when another start owns them.
                self._workers.deliver(0.1)
        # Without this Spark logs how the batch breaks.
        while self.is_reading and time.monotonic() < deadline_s:
            time.sleep(0.05)
        self._workers.close()
        ledgers = (part.ledger for part in self._partitions.values())
        self._settlers.close(ledger for ledger in ledgers if ledger is not None)
        self._admin.close()


def _raise(error: KafkaMQError) -> None:
    raise error


class TickKeeper:
    """TICKs and statuses of one start of the engine; one owner thread but for ``latest``."""

    def __init__(self, config: ServiceConfig, tracker: TrackerConfig, *, token: str) -> None:
        self._config = config
        self._max_silence_ms = tracker.max_silence_ms
        self._epoch = 0
        self._token = token
        self._ticker = Ticker(config)
        self._policies: dict[int, TickPolicy] = {}
        self._rests_since_ms: dict[int, int] = {}
        self._unpublished: set[int] = set()
        self._publish_s = 0.0
        self.latest: dict[int, TrackerStatus] = {}

    def begin(self, partitions: Sequence[int], *, epoch: int) -> None:
        """The TICKs of a start; call it when the partitions are claimed (R17).

        Raises:
            BrokerError, DeadlineExceededError: Not all were written.
        """
        self._epoch = epoch
        offsets = self._ticker.tick_all(partitions, engine=self._token, epoch=epoch)
        now_ms = monotonic_ms()
        for number, offset in offsets.items():
            policy = TickPolicy(now_ms, self._max_silence_ms, _LEAD_MS)
            self._policies[number] = policy
            policy.on_sent(now_ms)
            policy.on_delivered(offset)
            self._rests_since_ms[number] = now_ms

    def begin_added(self, partition: int) -> None:
        """Begin with a partition that the topic got later: clients remember the old count."""
        self._ticker.close()
        self._ticker = Ticker(self._config)
        self.begin([partition], epoch=self._epoch)

    def take(self, status: TrackerStatus, read_ms: int) -> None:
        """What a batch has folded of a partition, which was read at this time (monotonic)."""
        policy = self._policies.get(status.partition)
        if policy is None:
            # Its TICK of the start comes first.
            return
        self.latest[status.partition] = status
        self._unpublished.add(status.partition)
        self._rests_since_ms[status.partition] = monotonic_ms()
        policy.on_read(read_ms, status.position, status.clock_ms)

    def step(self, *, is_read_soon: bool) -> None:
        """Append the TICKs that are wanted, and publish what is new."""
        self._ticker.poll()
        now_ms = monotonic_ms()
        for number, policy in self._policies.items():
            clock_ms, wake = self._wake(number)
            rests = now_ms - self._rests_since_ms[number] >= MAX_REST_MS
            if rests or policy.wants_tick(now_ms, clock_ms, wake, is_read_soon=is_read_soon):
                policy.on_sent(now_ms)
                self._rests_since_ms[number] = now_ms
                _log.debug("TICK wanted", extra={"partition": number})
                self._ticker.tick(
                    number, engine=self._token, epoch=self._epoch, on_done=self._on_done
                )
        if time.monotonic() >= self._publish_s:
            self._publish()

    def is_due(self) -> bool:
        """Return whether the next batch finds something to be settled, or what was settled."""
        now_ms = monotonic_ms()
        for number, policy in self._policies.items():
            clock_ms, wake = self._wake(number)
            latest = self.latest.get(number)
            if policy.has_passed(now_ms, clock_ms, wake):
                return True
            if latest is not None and latest.due > latest.awaited:
                return True
        return False

    def _wake(self, number: int) -> tuple[int, Wake]:
        """Return the log's clock after what was read, and what the partition waits for."""
        latest = self.latest.get(number)
        if latest is None:
            return 0, _UNKNOWN
        return latest.clock_ms, Wake(latest.deadline_ms, latest.warn_ms, latest.due > 0)

    def _publish(self) -> None:
        if self._unpublished:
            self._publish_s = time.monotonic() + _STATUS_S
        for number in self._unpublished:
            self._ticker.publish(self.latest[number])
        self._unpublished.clear()

    def _on_done(self, partition: int, offset: int) -> None:
        policy = self._policies[partition]
        if offset < 0:
            _log.warning("a TICK was not written", extra={"partition": partition})
            policy.on_failed()
        else:
            policy.on_delivered(offset)

    def close(self) -> None:
        self._publish()
        self._ticker.close()


def take_turn(settling: RowSettling, keeper: TickKeeper, timeout_s: float) -> None:
    """Settle, append TICKs, and say whether another batch is wanted; waits that long for one.

    Raises:
        KafkaMQError: What ends this start.
    """
    for row in settling.step(timeout_s):
        keeper.take(row.status, row.read_ms)
    keeper.step(is_read_soon=not settling.is_reading)
    if keeper.is_due():
        settling.want_batch()
