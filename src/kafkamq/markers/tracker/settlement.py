"""Performs what a tracker planned: copies, dead letters, ENDs and the position, in transactions.

R14-R16, R18, R19. The STARTs are read again from the markers topic by their offsets, because
payloads never enter a tracker's state; then each part of the plan (at most 50,000 actions, 16 MiB
or what goes through in time, or what two seconds of reading gave) becomes one transaction with the
position of the tracker and the count of rows done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, FencedError
from kafkamq.markers.rules.delivery import Carry, Settle
from kafkamq.markers.rules.rows import Rows
from kafkamq.markers.tracker.ledger import Ledger
from kafkamq.markers.tracker.rewriting import Part, Rewriter
from kafkamq.transport.errors import (
    REFUSALS,
    Meaning,
    OutcomeUnknownError,
    TransactionAbortedError,
    meaning,
)
from kafkamq.transport.patience import Patience

_log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 8
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 2.0
_WRITE_S = 8.0  # what a transaction may take; it begins when its rows are ready (R22)
_LEAST_BYTES = 64 * 1024  # of a transaction, however slow the others were
_GROWS_AFTER = 10  # transactions that were full
# Of a member: the partition went to another one of the group.
_HOPELESS = REFUSALS | {Meaning.NO_MEMBER, Meaning.STALE_MEMBER}


@dataclass(slots=True)
class SettleReport:
    """What one ``settle`` did.

    ``skipped`` rows were done by an earlier attempt. ``left`` is for what the time was too short:
    none of these transactions began.
    """

    copies: int = 0
    dead_letters: int = 0
    carried: int = 0
    payload_lost: int = 0
    skipped: int = 0
    transactions: int = 0
    left: Sequence[Settle | Carry] = ()


class SettlementError(BrokerError):
    """Some of the actions are known not to be done: ``tracker.aborted(error.actions)`` (R15).

    Attributes:
        actions: Those whose transaction is known to have aborted or never began.
    """

    def __init__(self, text: str, actions: Sequence[Settle | Carry]) -> None:
        super().__init__(text, code="ABORTED", is_retriable=True)
        self.actions = tuple(actions)


class TransactionSize:
    """How many bytes a transaction takes: what goes through before it times out. Thread-safe.

    Any failure halves it. Over a slow link a transaction of the same size would time out again and
    again, and a time-out does not always say so: where the broker is the first to end the
    transaction, the producer seems to be fenced. A failure of another kind costs next to nothing,
    since small transactions that succeed make it grow again within seconds. The failure of a
    transaction that takes the least, as one of a tracker at rest, says nothing about the size.
    """

    def __init__(self, max_bytes: int) -> None:
        self.bytes = max_bytes
        self._max_bytes = max_bytes
        self._full = 0  # transactions of this size that were committed
        self._lock = threading.Lock()

    def failed(self, size_bytes: int) -> None:
        """A transaction of so many bytes was not committed, and was not refused for its records."""
        if size_bytes <= _LEAST_BYTES:
            return
        with self._lock:
            self.bytes = min(self.bytes, max(size_bytes // 2, _LEAST_BYTES))
            self._full = 0

    def committed(self, size_bytes: int) -> None:
        """A transaction of so many bytes was committed; smaller ones than the limit say nothing."""
        with self._lock:
            self._full += size_bytes >= self.bytes
            if self._full >= _GROWS_AFTER:
                self.bytes = min(2 * self.bytes, self._max_bytes)
                self._full = 0


class Settler:
    """Settles actions of any marker partition of one namespace; one owner thread.

    Holds read_committed readers of the markers and messages topics, kept between calls. Settlers
    that share ``patience`` share their searches for messages that are not there yet; those that
    share ``size`` learn from each other how large transactions may be.
    """

    def __init__(
        self,
        config: ServiceConfig,
        tracker: TrackerConfig,
        patience: Patience | None = None,
        size: TransactionSize | None = None,
    ) -> None:
        self._size = size or TransactionSize(tracker.max_transaction_bytes)
        self._rewriter = Rewriter(config, tracker, patience)

    def settle(
        self,
        ledger: Ledger,
        actions: Sequence[Settle | Carry],
        *,
        position: int,
        batch: int,
        source_hash: str = "",
        members: Sequence[bytes] = (),
        reopen: bool = True,
        timeout_s: float = 60.0,
    ) -> SettleReport:
        """Perform the actions, in the order of their START offsets; each message exactly once.

        A row is a message: a transaction may end inside of an action of several (R16), and what the
        report and errors name may be a part of one.

        Args:
            ledger: Of the marker partition that the actions are of.
            actions: Any order; the same ones for a retry of the same batch.
            position: The tracker's committable offset when it planned them.
            batch: Number of this batch; a retry goes on behind the rows that are done (R16). Call
                it without actions to write the position alone.
            source_hash: Goes into the ledger.
            members: See ``Ledger.commit``.
            reopen: True: when fenced or of unknown outcome, open the ledger again (which checks
                the epoch) and go on behind what is done. False: raise ``FencedError`` or
                ``OutcomeUnknownError``, for owners that must read the log again first (R17).
            timeout_s: When so much has passed no more is begun, and what remains of the actions is
                ``left`` in the report. A transaction that has begun gets 8 s at least.

        Raises:
            FencedError: A later start owns the partition: stop.
            SettlementError: Some actions are known not to be done; they may be asked for again.
            OutcomeUnknownError: With ``reopen=False``, or when the ledger could not be opened again
                in time: repeat the same batch, or open the ledger and look.
        """
        run = _Run(
            ledger,
            Rows(actions),
            position,
            batch,
            source_hash,
            tuple(members),
            time.monotonic() + timeout_s,
        )
        pause_s = _FIRST_PAUSE_S
        attempt = 0
        while True:
            cause = self._attempt(run, reopen=reopen)
            if cause is None:
                return run.report
            attempt += 1
            if attempt == _MAX_ATTEMPTS or meaning(cause) in _HOPELESS or run.left_s() <= pause_s:
                raise self._not_done(run, cause)
            _log.info(
                "settling again",
                extra={
                    "partition": ledger.key.partition,
                    "attempt": attempt,
                    "transactions_done": run.report.transactions,
                    "cause": str(cause),
                },
            )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _attempt(self, run: _Run, *, reopen: bool) -> BrokerError | None:
        """Go on behind what is done; returns what is in the way, None when all is done."""
        try:
            if run.ledger.is_resting:
                run.ledger.resume(timeout_s=run.left_s())
            elif not run.ledger.is_open:
                if not reopen:
                    raise OutcomeUnknownError("the ledger must be opened again", code="NOT_OPEN")
                run.ledger.open(timeout_s=run.left_s())
            run.unknown = None  # the ledger is read: now it is known
            self._perform(run)
        except TransactionAbortedError as error:
            return error
        except (FencedError, OutcomeUnknownError) as error:
            if not reopen or error.code == "LATER_START":
                raise
            run.unknown = error
            return error
        except (BrokerError, DeadlineExceededError) as error:
            run.ledger.abort()  # what was not committed explicitly did not happen
            if isinstance(error, BrokerError):
                return error
            return BrokerError(str(error), code="DEADLINE", is_retriable=True)
        return None

    def prepare(self) -> None:
        """Connect before there is something to settle: the first one would be late by that."""
        self._rewriter.prepare()

    def close(self) -> None:
        """Close the readers; idempotent."""
        self._rewriter.close()

    def _perform(self, run: _Run) -> None:
        """Everything that the ledger does not hold yet."""
        ledger = run.ledger
        if ledger.is_past(run.batch):
            run.report.skipped = len(run.rows)
            return
        done = ledger.rows_done(run.batch)
        if not run.report.transactions:
            run.report.skipped = done
        if not run.rows:
            ledger.begin()
            self._commit(run, 0)
            return
        while done < len(run.rows):
            if run.report.transactions and not run.may_read():
                run.report.left = run.rows.part(done)
                return
            part = self._rewriter.part(
                ledger.key.partition,
                run.rows,
                done,
                max_bytes=self._size.bytes,
                timeout_s=run.left_s(),
            )
            try:
                is_written = self._write(run, part)
            except (BrokerError, DeadlineExceededError):
                self._size.failed(part.size_bytes)
                raise
            if is_written:
                self._size.committed(part.size_bytes)
                done = part.end

    def _write(self, run: _Run, part: Part) -> bool:
        """One part, in one transaction (R15); False: something in it is too large (R11)."""
        ledger = run.ledger
        producer = ledger.producer
        ledger.begin()
        try:
            producer.produce_records(part.records, timeout_s=run.writing_s())
            self._commit(run, part.end)
        except (FencedError, OutcomeUnknownError):
            raise
        except BrokerError:
            # Which serves the reports: what follows the refused record is refused for that alone.
            ledger.abort()
            is_too_large, is_behind = producer.too_large > 0, run.is_behind_refusal
            run.is_behind_refusal = is_too_large
            # Behind a refusal one more fails: the sequence number of what was refused is missing.
            goes_on = is_too_large or (is_behind and ledger.is_open)
            if not goes_on or time.monotonic() > run.deadline_s:
                raise
            if is_too_large:
                self._rewriter.refused(ledger.key.partition, run.rows, part)
            return False
        run.is_behind_refusal = False
        report = run.report
        report.copies += part.copies
        report.dead_letters += part.dead_letters
        report.carried += part.carried
        report.payload_lost += part.payload_lost
        return True

    def _commit(self, run: _Run, rows_done: int) -> None:
        run.ledger.commit(
            run.position,
            batch=run.batch,
            rows_done=rows_done,
            source_hash=run.source_hash,
            members=run.members,
            timeout_s=run.writing_s(),
        )
        run.report.transactions += 1

    def _not_done(self, run: _Run, cause: BrokerError) -> BrokerError:
        """Say what is known: with an unknown outcome nobody may ask again yet."""
        if run.unknown is not None:
            return run.unknown
        done = run.ledger.rows_done(run.batch)
        where = f"{run.ledger.key.topic}[{run.ledger.key.partition}]"
        error = SettlementError(
            f"{where}: {len(run.rows) - done} actions of batch {run.batch} are not done: {cause}",
            run.rows.part(done),
        )
        error.__cause__ = cause
        return error


@dataclass(slots=True)
class _Run:
    """One ``settle``."""

    ledger: Ledger
    rows: Rows
    position: int
    batch: int
    source_hash: str
    members: tuple[bytes, ...]
    deadline_s: float  # monotonic
    report: SettleReport = field(default_factory=SettleReport)
    unknown: BrokerError | None = None  # the last commit whose outcome is not known
    is_behind_refusal: bool = False  # the last transaction had a record that was too large

    def left_s(self) -> float:
        """What is left of the bound; a little at least, so that a last attempt can end."""
        return max(0.5, self.deadline_s - time.monotonic())

    def may_read(self) -> bool:
        """Whether more rows can be read and written in time."""
        return time.monotonic() < self.deadline_s - _WRITE_S

    def writing_s(self) -> float:
        """What a transaction may take: never a rest of the bound that is too short for it."""
        return max(_WRITE_S, self.deadline_s - time.monotonic())
