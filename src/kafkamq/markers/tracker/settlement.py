"""Performs what a tracker planned: copies, dead letters, ENDs and the position, in transactions.

R14-R16, R18, R19. A plan is settled by windows of its next rows. Each is read again from the
logs, because payloads never enter a tracker's state, and becomes one transaction with the position
of the tracker and the count of rows done. No row waits for another's absence: what brokers do not
know yet, or do not answer for, counts as done, and its owner asks for it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, FencedError
from kafkamq.markers.rules.delivery import Carry, Rows, Settle, size_of
from kafkamq.markers.tracker.ledger import Ledger, OpenLedgers, is_later_start
from kafkamq.markers.tracker.reading import Rereader
from kafkamq.markers.tracker.rewriting import Part, Rewriter
from kafkamq.transport.errors import (
    REFUSALS,
    Meaning,
    OutcomeUnknownError,
    TransactionAbortedError,
    meaning,
)
from kafkamq.transport.log_reader import Patience

_log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 8
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 2.0
_LOOK_S = 0.5
# The longest transaction; it begins when its rows are ready (R22).
_WRITE_S = 8.0
# A full transaction takes a third of what it may take for the brokers.
_FULL_S = 10.0 / 3
# A transaction's bytes before it is known what goes through, and the least of a slow link.
_FIRST_BYTES = 4 * 1024 * 1024
_LEAST_BYTES = 64 * 1024
_MAX_GROWTH = 4
# Full transactions behind one that failed that stay smaller.
_CAREFUL = 10
_FIRST_ROW_BYTES = 1024.0
# The least rows of a window, unless they take longer: a settlement may not.
_LEAST_ROWS = 16
_LEAST_S = 4.0
_READ_S = 1.0
# Of a member: the partition went to another one of the group.
_HOPELESS = REFUSALS | {Meaning.NO_MEMBER, Meaning.STALE_MEMBER}


@dataclass(slots=True)
class SettleReport:
    """What one ``settle`` did.

    ``skipped`` rows were done by an earlier attempt. ``left`` is for what the time was too short:
    none of these transactions began. ``awaited`` cannot be settled yet: ask for it again later.
    """

    copies: int = 0
    dead_letters: int = 0
    carried: int = 0
    payload_lost: int = 0
    skipped: int = 0
    transactions: int = 0
    left: Sequence[Settle | Carry] = ()
    awaited: Sequence[Settle | Carry] = ()


class SettlementError(BrokerError):
    """Some of the actions are known not to be done: ``tracker.aborted(error.actions)`` (R15).

    Attributes:
        actions: Those whose transaction is known to have aborted or never began.
        awaited: Of these, what counts as done when the same batch is repeated.
    """

    def __init__(
        self,
        text: str,
        actions: Sequence[Settle | Carry],
        awaited: Sequence[Settle | Carry] = (),
    ) -> None:
        super().__init__(text, code="ABORTED", is_retriable=True)
        self.actions = (*awaited, *actions)
        self.awaited = tuple(awaited)


class WindowSize:
    """How many rows and bytes a window has, by what the last ones took; one owner thread.

    A window takes a second of reading, but of at least 16 rows: where a read costs the same for one
    row and for many, fewer would only be slower. Where a seek takes seconds these would take longer
    than a settlement may, and it is fewer.

    Its transaction takes a third of what went through in the time-out of the last full ones. Any
    failure halves it: a time-out does not always say so, since where the broker is the first to end
    the transaction the producer seems to be fenced. Behind a failure it stays below the size that
    failed for ten full ones. The failure of a small one, as of a tracker at rest, says nothing.
    """

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self.bytes = min(_FIRST_BYTES, max_bytes)
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._rows = max_rows
        self._row_bytes = _FIRST_ROW_BYTES
        self._refused_rows = max_rows
        self._failed_bytes = 0
        self._careful = 0

    @property
    def rows(self) -> int:
        fitting = int(self.bytes / self._row_bytes)
        return max(1, min(self._rows, self._max_rows, self._refused_rows, fitting))

    def read(self, rows: int, seconds: float) -> None:
        """So many were read: the next ones may be as many as fit at this rate."""
        # After a refusal windows are small; they grow again while nothing is refused.
        self._refused_rows = min(self._max_rows, 2 * self._refused_rows)
        if rows < self._rows and seconds <= _READ_S:
            # There were no more.
            return
        fitting = min(int(rows * _READ_S / max(seconds, 1e-9)), 4 * self._rows)
        least = min(_LEAST_ROWS, int(rows * _LEAST_S / max(seconds, 1e-9)))
        self._rows = min(self._max_rows, max(1, least, fitting))

    def written(self, rows: int, size_bytes: int, seconds: float) -> None:
        """A transaction was committed; one of less than half of the limit says nothing of that."""
        if rows:
            self._row_bytes = max(1.0, size_bytes / rows)
        if 2 * size_bytes < self.bytes:
            return
        fitting = int(size_bytes * _FULL_S / max(seconds, 1e-3))
        if _FULL_S < seconds < 2 * _FULL_S:
            # It may be what any transaction takes: as many bytes again.
            fitting = self.bytes
        limit = min(_MAX_GROWTH * self.bytes, self._max_bytes)
        if self._careful:
            self._careful -= 1
            limit = min(limit, self._failed_bytes - 1)
        self.bytes = min(max(fitting, _LEAST_BYTES), limit)

    def failed(self, size_bytes: int) -> None:
        """A transaction was not committed, and was not refused for its records."""
        if size_bytes > _LEAST_BYTES:
            self.bytes = min(self.bytes, max(size_bytes // 2, _LEAST_BYTES))
            self._failed_bytes, self._careful = size_bytes, _CAREFUL

    def refused(self, rows: int) -> None:
        """One of so many rows was refused for its size: find which, by halves."""
        self._refused_rows = max(1, rows // 2)


class ActionSettler:
    """Settles actions of any marker partition of one namespace; one owner thread.

    Its read_committed readers of the markers and messages topics are kept between calls. Settlers
    that share ``patience`` share their searches for messages that are not there yet.
    """

    def __init__(
        self,
        config: ServiceConfig,
        tracker: TrackerConfig,
        patience: Patience | None = None,
    ) -> None:
        self.size = WindowSize(tracker.max_offsets_per_commit, tracker.max_transaction_bytes)
        self.rereader = Rereader(config, patience)
        self.rewriter = Rewriter(config, tracker, self.rereader)

    def settle(
        self,
        ledger: Ledger,
        actions: Sequence[Settle | Carry],
        *,
        position: int,
        batch: int,
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
        deadline_s = time.monotonic() + timeout_s
        rows = Rows(actions)
        run = Settlement(self, ledger, rows, position, batch, members, deadline_s=deadline_s)
        pause_s = _FIRST_PAUSE_S
        attempt = 0
        while True:
            cause = run.attempt(reopen=reopen)
            if cause is None:
                return run.report
            attempt += 1
            if attempt == _MAX_ATTEMPTS or meaning(cause) in _HOPELESS or run.left_s() <= pause_s:
                raise run.not_done(cause)
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

    def prepare(self) -> None:
        """Connect before there is something to settle: the first one would be late by that."""
        self.rereader.prepare()

    def close(self) -> None:
        self.rereader.close()


@dataclass(slots=True)
class Settlement:
    """One plan, and how much of it is done; made for one ``ActionSettler.settle``."""

    settler: ActionSettler
    ledger: Ledger
    rows: Rows
    position: int
    batch: int
    members: Sequence[bytes]
    deadline_s: float
    report: SettleReport = field(default_factory=SettleReport)
    _done: int = 0
    _has_begun: bool = False
    _awaited: list[tuple[int, Settle | Carry]] = field(default_factory=list)
    _unknown: BrokerError | None = None
    _is_behind_refusal: bool = False

    def left_s(self) -> float:
        """Return what is left of the bound; a little at least, so that a last attempt can end."""
        return max(0.5, self.deadline_s - time.monotonic())

    def attempt(self, *, reopen: bool) -> BrokerError | None:
        """Go on behind what is done; returns what is in the way, None when all is done."""
        ledger = self.ledger
        try:
            if ledger.is_resting:
                ledger.resume(timeout_s=self.left_s())
            elif not ledger.is_open:
                if not reopen:
                    raise OutcomeUnknownError("the ledger must be opened again", code="NOT_OPEN")
                ledger.open(timeout_s=self.left_s())
            # The ledger is read: now it is known.
            self._unknown = None
            if ledger.is_past(self.batch):
                self.report.skipped = len(self.rows)
                return None
            self._begin()
            while self.step():
                pass
        except TransactionAbortedError as error:
            return error
        except (FencedError, OutcomeUnknownError) as error:
            if not reopen or is_later_start(error):
                raise
            self._unknown = error
            return error
        except (BrokerError, DeadlineExceededError) as error:
            # What was not committed explicitly did not happen.
            ledger.abort()
            if isinstance(error, BrokerError):
                return error
            return BrokerError(str(error), code="DEADLINE", is_retriable=True)
        self.report.awaited = [row for _, row in self._awaited]
        return None

    def _begin(self) -> None:
        self._done = self.ledger.rows_done(self.batch)
        self._awaited = [(end, row) for end, row in self._awaited if end <= self._done]
        if not self.report.transactions:
            self.report.skipped = self._done
        if not self.rows:
            self.ledger.begin()
            self._commit(0)

    def step(self) -> bool:
        """Settle one window of rows; False: all that there is time for is done."""
        rows, done, settler = self.rows, self._done, self.settler
        if done >= len(rows):
            return False
        if self._has_begun and time.monotonic() > self.deadline_s - _WRITE_S:
            if done > self.ledger.rows_done(self.batch):
                self.ledger.begin()
                self._commit(done)
            self.report.left = rows.part(done)
            return False
        size, began_s = settler.size, time.monotonic()
        max_bytes = size.bytes
        partition = self.ledger.key.partition
        window = settler.rereader.window(
            partition,
            rows.part(done, done + size.rows),
            deadline_s=began_s + self.left_s(),
            max_bytes=max_bytes,
        )
        rows_read = sum(found.row.bits.bit_count() for found in window)
        size.read(rows_read, time.monotonic() - began_s)
        part = settler.rewriter.part(partition, window, max_bytes=max_bytes)
        if not part.rows:
            self._wait()
        elif not part.records or self._write(part):
            self._done += part.rows
            self._awaited += [(self._done, row) for row in part.awaited]
            self._has_begun = True
        return True

    def _wait(self) -> None:
        if time.monotonic() + _LOOK_S > self.deadline_s:
            where = f"{self.ledger.key.topic}[{self.ledger.key.partition}]"
            raise BrokerError(
                f"{where}: what its markers name is not known yet, or cannot be read",
                code="UNKNOWN_PARTITION",
                is_retriable=True,
            )
        time.sleep(_LOOK_S)

    def _write(self, part: Part) -> bool:
        """Return one part, in one transaction (R15); False: something in it is too large (R11)."""
        ledger, settler = self.ledger, self.settler
        producer, began_s = ledger.producer, time.monotonic()
        ledger.begin()
        try:
            producer.produce_records(part.records, timeout_s=self._writing_s())
            self._commit(self._done + part.rows)
        except (BrokerError, DeadlineExceededError) as error:
            if self._is_too_large(part, error):
                return False
            settler.size.failed(part.size_bytes)
            # A partition may have no leader any more.
            settler.rereader.ask_again()
            raise
        rows = part.rows - sum(map(size_of, part.awaited))
        settler.size.written(rows, part.size_bytes, time.monotonic() - began_s)
        self._is_behind_refusal = False
        report = self.report
        report.copies += part.copies
        report.dead_letters += part.dead_letters
        report.carried += part.carried
        report.payload_lost += part.payload_lost
        return True

    def _is_too_large(self, part: Part, error: Exception) -> bool:
        """Return whether a record was refused for its size, or only for one before it that was."""
        if isinstance(error, (FencedError, OutcomeUnknownError, DeadlineExceededError)):
            return False
        ledger = self.ledger
        # Which serves the reports: what follows the refused record is refused for that alone.
        ledger.abort()
        is_too_large, is_behind = ledger.producer.too_large > 0, self._is_behind_refusal
        self._is_behind_refusal = is_too_large
        # Behind a refusal one more fails: the sequence number of what was refused is missing.
        goes_on = is_too_large or (is_behind and ledger.is_open)
        if not goes_on or time.monotonic() > self.deadline_s:
            return False
        if is_too_large:
            if part.rows == 1:
                row = self.rows.part(self._done, self._done + 1)[0]
                self.settler.rewriter.refused(ledger.key.partition, row)
            self.settler.size.refused(part.rows)
        return True

    def _commit(self, rows_done: int) -> None:
        self.ledger.commit(
            self.position,
            batch=self.batch,
            rows_done=rows_done,
            members=self.members,
            timeout_s=self._writing_s(),
        )
        self.report.transactions += 1

    def _writing_s(self) -> float:
        """Say what a transaction may take: never a rest of the bound that is too short for it."""
        return max(_WRITE_S, self.deadline_s - time.monotonic())

    def not_done(self, cause: BrokerError) -> BrokerError:
        """Say what is known: with an unknown outcome nobody may ask again yet."""
        if self._unknown is not None:
            return self._unknown
        key, done = self.ledger.key, self.ledger.rows_done(self.batch)
        actions = self.rows.part(done)
        awaited = [row for end, row in self._awaited if end <= done]
        count = sum(map(size_of, (*awaited, *actions)))
        where = f"{key.topic}[{key.partition}]"
        text = f"{where}: {count} actions of batch {self.batch} are not done: {cause}"
        error = SettlementError(text, actions, awaited)
        error.__cause__ = cause
        return error


class SettlerPool:
    """One settler for each worker thread, and ledgers that share producers; thread-safe."""

    def __init__(self, config: ServiceConfig, tracker: TrackerConfig) -> None:
        self.ledgers = OpenLedgers()
        self._config = config
        self._tracker = tracker
        self._patience = Patience()
        self._idle: SimpleQueue[ActionSettler] = SimpleQueue()
        self._is_closed = False

    def add(self) -> None:
        """Connect one more settler."""
        settler = ActionSettler(self._config, self._tracker, self._patience)
        settler.prepare()
        self._keep(settler)

    def run(self, ledger: Ledger, job: Callable[[ActionSettler], SettleReport]) -> SettleReport:
        """Do something with the ledger and a settler that is idle."""
        settler = self._idle.get()
        try:
            with self.ledgers.using(ledger):
                return job(settler)
        finally:
            settler.rereader.forget()
            self._keep(settler)

    def close(self, ledgers: Iterable[Ledger]) -> None:
        """End the settlers, these ledgers and all that are kept, or when they are used no more."""
        self._is_closed = True
        self.ledgers.close_all(ledgers)
        self._close_idle()

    def _keep(self, settler: ActionSettler) -> None:
        self._idle.put(settler)
        if self._is_closed:
            self._close_idle()

    def _close_idle(self) -> None:
        with suppress(Empty):
            while True:
                self._idle.get_nowait().close()
