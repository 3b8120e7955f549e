"""The redelivery core: one marker partition's log, folded into what is open and what is due.

Every tracker, in-process or on Spark, and the simulator run this code; shells read records, call
`apply`, carry out what `plan` returns and hold no rule of their own. The rules are R1-R4 and
R12-R20 of ``docs/protocol.md``:

- A record first moves the clock, then applies (R2). What the clock has passed is due from there
  on; a held entry that a gap in the log passed gets a grace, once (R3).
- ======================  =========  ========  =========  ===========  ======
  record                  unknown    held      waiting    due          ended
  ======================  =========  ========  =========  ===========  ======
  START                   held       renewed   -          -            due
  KEEPALIVE               -          renewed   -          -            -
  END ACK                 ended      ended     ended      - (late)     -
  END NACK                -          waiting   -          - (late)     -
  END REJECT, RELEASE     -          due       -          - (late)     -
  END of a tracker        ended      ended     ended      ended        -
  SCHEDULE                waiting    -         replaced   -            due
  ======================  =========  ========  =========  ===========  ======

  What a START or SCHEDULE brings back behind its END is due for one more END, and nothing else:
  else who folds from that record on, and not from the END, would take it for open (R12, R20).
- What one record began is held together, a page of 64 offsets at most, and due together; what
  another record touches of it is split off with all its facts (R31: ``hold.py``).
- ``plan`` names what is due and not asked for. What is due stays until its END is read; "asked" is
  cleared by a known abort (`aborted`) or by a start (R15).
- After a start nothing is planned before the engine has read its own TICK (R17).

Hard state follows from the log alone. It can lie in a state store: see ``snapshot.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kafkamq.config import Options
from kafkamq.markers.rules.chunks import ChunkKey
from kafkamq.markers.rules.delivery import Carry, DueCause, Settle, action_of, row_order
from kafkamq.markers.rules.hold import (
    ASKED,
    CARRY,
    CAUSE_SHIFT,
    DUE,
    GRACED,
    HELD,
    MAX_HOLDS,
    MIN_HOLDS,
    NEVER,
    PAGE_BITS,
    STATE,
    WAITING,
    Hold,
    Holders,
    HoldLog,
    Leaf,
    LogKey,
    log_key,
    lowest,
)
from kafkamq.markers.rules.table import HoldTable
from kafkamq.markers.rules.ticks import Wake
from kafkamq.queue.rules.log_clock import LogClock
from kafkamq.types import Marker, MarkerType, MessageId, Outcome

MAX_PLAN = 50_000
MAX_GRACE_MS = 3_000  # R3
_BY_TRACKER = (Outcome.REDELIVERED, Outcome.DEAD_LETTERED, Outcome.ALREADY_ENDED)
_ENDING = (Outcome.ACK, *_BY_TRACKER)
# A member's name is looked up slowly.
_START, _END = MarkerType.START, MarkerType.END
_BIT = [1 << number for number in range(PAGE_BITS)]
_PAGE = (1 << PAGE_BITS) - 1
_Fold = Callable[[int, Marker, HoldLog, int, int], None]
"""Of a record the offset and the marker, and which bits of which page of which log it is about."""


class RedeliveryTracker:
    """Folds one marker partition; not thread-safe, owned by one shell.

    Args:
        next_offset: Where folding begins: a committed position, or the log's start.
        partition: The marker partition; a SCHEDULE's identity names it (R13).
        max_lease_ms: For STARTs that name none.
        longest_ms: The most that a START's max_lease or a NACK's delay counts: half of the
            retention (R23), so that what they hold is not deleted under them.
        carry_after_ms: Age at which a SCHEDULE is carried (R19): a quarter of the retention.
        engine: (engine id, epoch) of the owner; nothing is planned before its TICK was read (R17).
            Epoch 0: it stands by, and the TICK tells the epoch (R36).
            None: a tracker without an owner (tests, replays), live from the beginning.
        load_chunk: Fetches a chunk from a state store (``markers/rules/snapshot.py``).
    """

    def __init__(
        self,
        next_offset: int = 0,
        *,
        partition: int = 0,
        max_lease_ms: int = Options.max_lease.default_ms,
        longest_ms: int = NEVER,
        carry_after_ms: int = NEVER,
        engine: tuple[str, int] | None = None,
        load_chunk: Callable[[ChunkKey], bytes] | None = None,
    ) -> None:
        self.next_offset = next_offset
        self.partition = partition
        self.late_verdicts = 0
        self.malformed = 0
        self.clock = LogClock()
        self.holders = Holders()
        self.table = HoldTable(self.holders, self.changes_at, load_chunk)
        self.engine = engine
        self.is_live = engine is None
        self._max_lease_ms = max_lease_ms
        self._longest_ms = longest_ms
        self._carry_after_ms = carry_after_ms

    # ---- the fold

    def apply(self, offset: int, timestamp_ms: int, marker: Marker | None) -> None:
        """Fold one committed record, in offset order; total: no well-formed marker raises.

        Args:
            offset: Of the record; below ``next_offset`` it was folded already and is ignored.
            timestamp_ms: LogAppendTime; negative for any other kind of timestamp (R1).
            marker: None for a record that could not be decoded (R21): it only moves the clock.
        """
        if offset < self.next_offset:
            return
        self.next_offset = offset + 1
        # What is due is due from here on (R1, R2).
        step_ms = self.clock.advance(timestamp_ms)
        now_ms = self.clock.now_ms
        if now_ms > self.table.next_wake_ms:
            for leaf in self.table.passed(now_ms):
                self._wake(leaf, now_ms, step_ms)
        if marker is None:
            self.malformed += 1
        else:
            self.fold(offset, marker)

    def fold(self, offset: int, marker: Marker) -> None:
        """Fold what a record that has moved the clock says of each of its messages (R27)."""
        kind, of_schedule, makes = marker.type, False, False
        fold: _Fold
        if kind is _START:
            fold, makes = self._fold_start, True
        elif kind is _END:
            fold, of_schedule, makes = self._fold_end, marker.of_schedule, marker.outcome in _ENDING
        elif kind is MarkerType.KEEPALIVE:
            fold = self._fold_keepalive
        elif kind is MarkerType.SCHEDULE:
            self._fold_schedule(offset, marker)
            return
        else:
            self._fold_tick(marker)
            return
        message_id = marker.message_id
        if message_id is not None:
            page = message_id.offset // PAGE_BITS
            log = self.table.find(log_key(message_id, of_schedule), page, makes)
            if log is not None:
                fold(offset, marker, log, page, _BIT[message_id.offset % PAGE_BITS])
        elif not marker.batches and kind is MarkerType.KEEPALIVE and marker.consumer_id:
            # R7: all leases of this consumer; an empty id renews nothing.
            self.holders.renew(marker.consumer_id, self.clock.now_ms, marker.redeliver_after_ms)
        for batch in marker.batches:
            first = batch.base_offset
            page = first // PAGE_BITS
            key = of_schedule, batch.topic_id, batch.leader_epoch, batch.partition
            log = self.table.find(key, page, makes)
            if log is None:
                continue
            bits = batch.bits << first % PAGE_BITS
            while bits > _PAGE:
                here = bits & _PAGE
                if here:
                    fold(offset, marker, log, page, here)
                bits >>= PAGE_BITS
                page += 1
            fold(offset, marker, log, page, bits)

    def _fold_start(self, offset: int, marker: Marker, log: HoldLog, page: int, bits: int) -> None:
        now_ms, timeout_ms = self.clock.now_ms, marker.redeliver_after_ms
        deadline_ms = now_ms + timeout_ms
        leaf = None if log.is_new(page, bits) else log.leaf(page)
        if leaf is not None:
            for hold in leaf.at(page):
                touched = hold.bits & bits
                if touched:
                    bits ^= touched
                    if hold.flags & STATE == HELD:
                        # The newer START holds it; count, limits and beginning stay.
                        part = self.table.part(leaf, page, hold, touched)
                        self._hold(leaf, part, marker.consumer_id, timeout_ms, deadline_ms)
            self._done(leaf, page)
        if log.ended and (again := log.has_ended(page, bits, now_ms)):  # R12: a zombie's late START
            bits ^= again
            self._end_again(offset, log, page, again)
        if bits:
            max_lease_ms = marker.max_lease_ms or self._max_lease_ms
            if max_lease_ms > self._longest_ms:
                max_lease_ms = self._longest_ms
            holder = self.holders.join(marker.consumer_id, timeout_ms, max_lease_ms, deadline_ms)
            hold = Hold(bits, offset, now_ms, deadline_ms, HELD, holder)
            hold.wake_ms = deadline_ms if timeout_ms < max_lease_ms else now_ms + max_lease_ms
            self.table.enter(log, page, hold)

    def _end_again(self, offset: int, log: HoldLog, page: int, bits: int) -> None:
        """What has ended is named by a START or SCHEDULE at this offset."""
        now_ms = self.clock.now_ms
        flags = DUE | DueCause.ALREADY_ENDED << CAUSE_SHIFT
        self.table.forget_end(log, page, bits)
        self.table.enter(log, page, Hold(bits, offset, now_ms, now_ms, flags, None))
        leaf = log.leaf(page)
        assert leaf is not None, "it was just put there"
        self.table.want(leaf, bits)

    def _hold(
        self, leaf: Leaf, hold: Hold, consumer_id: str, timeout_ms: int, deadline_ms: int
    ) -> None:
        """A sign of life that sets the deadline of what is held, and its holder."""
        old = hold.holder
        assert old is not None, "what is held has a holder"
        hold.holder = self.holders.join(consumer_id, timeout_ms, old.max_lease_ms, deadline_ms)
        self.holders.leave(old)
        hold.deadline_ms = deadline_ms
        # It is armed again (R3).
        hold.flags = HELD
        self.table.note(leaf, hold)

    def _fold_keepalive(
        self, offset: int, marker: Marker, log: HoldLog, page: int, bits: int
    ) -> None:
        leaf = log.leaf(page)
        if leaf is None:
            return
        for hold in leaf.at(page):
            touched = hold.bits & bits
            holder = hold.holder
            if touched and holder is not None:
                # It never brings anything to life.
                timeout_ms = holder.timeout_ms
                deadline_ms = self.clock.now_ms + (marker.redeliver_after_ms or timeout_ms)
                part = self.table.part(leaf, page, hold, touched)
                self._hold(leaf, part, marker.consumer_id, timeout_ms, deadline_ms)
        self._done(leaf, page)

    def _fold_end(self, offset: int, marker: Marker, log: HoldLog, page: int, bits: int) -> None:
        outcome, remembers = marker.outcome, marker.outcome in _ENDING
        leaf = log.leaf(page)
        if leaf is not None:
            left, holds, pages = bits, leaf.holds, leaf.pages
            index = leaf.index(page)
            while left and index < len(holds) and pages[index] == page:
                hold = holds[index]
                touched = hold.bits & left
                left ^= touched
                index += 1
                if not touched:
                    continue
                if hold.flags & STATE == DUE and outcome not in _BY_TRACKER:
                    self.late_verdicts += touched.bit_count()  # R9
                    bits ^= touched
                elif remembers:
                    index -= self._end(leaf, index - 1, touched)
                elif hold.holder is not None:
                    self._judge(offset, marker, leaf, page, hold, touched)
            self._done(leaf, page)
        if remembers and bits:
            self.table.remember_end(log, page, bits, self.clock.now_ms)

    def _judge(
        self, offset: int, marker: Marker, leaf: Leaf, page: int, hold: Hold, touched: int
    ) -> None:
        """A worker's verdict on what is held, other than an ACK."""
        outcome, now_ms, holder = marker.outcome, self.clock.now_ms, hold.holder
        assert holder is not None, "what is held has a holder"
        if outcome is Outcome.RELEASE and holder.consumer_id != marker.consumer_id:
            return
        hold = self.table.part(leaf, page, hold, touched)
        if outcome is Outcome.RELEASE:
            self._fall_due(leaf, hold, DueCause.RELEASED, now_ms)
            return
        hold.verdict_offset = offset
        if outcome is Outcome.REJECT:
            self._fall_due(leaf, hold, DueCause.REJECTED, now_ms)
        else:
            self.holders.leave(holder)
            hold.holder = None
            hold.flags = WAITING
            hold.deadline_ms = now_ms + min(marker.redeliver_after_ms, self._longest_ms)
            self.table.note(leaf, hold)

    def _done(self, leaf: Leaf, page: int) -> None:
        """No more is done to holds of this page by this record: the leaf may be another one now."""
        # The leaf is tried when it is small, at 15, 7, 3, 1 and 0 holds: trying costs.
        count = len(leaf.holds)
        if count > MAX_HOLDS or (count < MIN_HOLDS and not count & count + 1):
            self.table.even_out(leaf, page)

    def _fold_schedule(self, offset: int, marker: Marker) -> None:
        message_id = marker.message_id or MessageId(self.partition, offset)
        page, at = divmod(message_id.offset, PAGE_BITS)
        log = self.table.find(log_key(message_id, True), page, True)
        assert log is not None, "it is made"
        bit, now_ms = _BIT[at], self.clock.now_ms
        leaf = log.leaf(page)
        index = -1 if leaf is None else leaf.find(page, bit)
        if leaf is not None and index >= 0:
            if leaf.holds[index].flags & STATE != WAITING:
                return
            # It was carried (R19): this takes the first one's place.
            self._end(leaf, index, bit)
            self._done(leaf, page)
        if log.has_ended(page, bit, now_ms):
            self._end_again(offset, log, page, bit)
        else:
            deadline_ms = now_ms + marker.redeliver_after_ms
            hold = Hold(bit, offset, now_ms, deadline_ms, WAITING, None)
            hold.wake_ms = self.changes_at(hold, True)
            self.table.enter(log, page, hold)

    def _fold_tick(self, marker: Marker) -> None:
        if self.engine == (marker.consumer_id, 0):
            # A tracker that stands by learns it (R36).
            self.engine = marker.consumer_id, marker.engine_epoch
        if self.is_live or (marker.consumer_id, marker.engine_epoch) != self.engine:
            return
        # All that a predecessor wrote has been read (R17).
        self.is_live = True
        self.table.fetch_asked()
        for leaf in self.table.leaves():
            for hold in leaf.holds:
                self._ask_again(leaf, hold)

    # ---- what the clock does

    def _wake(self, leaf: Leaf, now_ms: int, step_ms: int) -> None:
        of_schedule = leaf.log.key[0]
        wake_ms = NEVER
        for hold in leaf.holds:
            at_ms = hold.wake_ms
            if at_ms < now_ms:
                if self.changes_at(hold, of_schedule) < now_ms:
                    self._pass(leaf, hold, now_ms, step_ms)
                due = hold.flags & DUE
                hold.wake_ms = at_ms = NEVER if due else self.changes_at(hold, of_schedule)
            if at_ms < wake_ms:
                wake_ms = at_ms
        leaf.wake_ms = wake_ms

    def _pass(self, leaf: Leaf, hold: Hold, now_ms: int, step_ms: int) -> None:
        """The clock has passed the time at which this hold changes."""
        holder = hold.holder
        if holder is None:
            if hold.deadline_ms < now_ms:
                cause = DueCause.SCHEDULED if leaf.log.key[0] else DueCause.NACKED
                self._fall_due(leaf, hold, cause, hold.deadline_ms)
            elif not hold.flags & CARRY:
                hold.flags |= CARRY  # R19
                self.table.want(leaf, hold.bits)
            return
        deadline_ms = self.changes_at(hold)
        if now_ms > hold.begin_ms + holder.max_lease_ms:
            self._fall_due(leaf, hold, DueCause.MAX_LEASE, deadline_ms)
            return
        grace_ms = min(holder.timeout_ms // 2, MAX_GRACE_MS)
        had_grace = hold.flags & GRACED and holder.renewed_ms < hold.deadline_ms - grace_ms
        if step_ms * 3 > holder.timeout_ms and not had_grace:  # R3
            hold.deadline_ms = now_ms + grace_ms
            hold.flags |= GRACED
        else:
            self._fall_due(leaf, hold, DueCause.LEASE_ENDED, deadline_ms)

    def changes_at(self, hold: Hold, of_schedule: bool = False) -> int:
        """Get the last moment at which the hold is still what it is; later it is due or carried."""
        holder = hold.holder
        deadline_ms = hold.deadline_ms
        if holder is not None:
            if holder.renewed_until_ms > deadline_ms:
                deadline_ms = holder.renewed_until_ms
            limit_ms = hold.begin_ms + holder.max_lease_ms
        elif of_schedule and not hold.flags & CARRY:
            limit_ms = hold.begin_ms + self._carry_after_ms
        else:
            return deadline_ms
        return min(limit_ms, deadline_ms)

    # ---- changes of one hold

    def _fall_due(self, leaf: Leaf, hold: Hold, cause: DueCause, deadline_ms: int) -> None:
        if hold.flags & CARRY:
            self.table.unsettled -= hold.bits.bit_count()
        if hold.holder is not None:
            self.holders.leave(hold.holder)
            hold.holder = None
        hold.deadline_ms = deadline_ms
        hold.flags = DUE | cause << CAUSE_SHIFT
        hold.wake_ms = NEVER
        self.table.want(leaf, hold.bits)

    def _end(self, leaf: Leaf, index: int, bits: int) -> bool:
        """End these messages of a hold; return whether they were all of it."""
        hold = leaf.holds[index]
        count = bits.bit_count()
        if hold.flags & (DUE | CARRY):
            self.table.unsettled -= count
        self.table.open -= count
        if hold.bits != bits:
            hold.bits ^= bits
            return False
        leaf.remove(index)
        if hold.holder is not None:
            self.holders.leave(hold.holder)
        return True

    # ---- what to do

    def plan(self, limit: int = MAX_PLAN) -> Sequence[Settle | Carry]:
        """Return what is due or to be carried and not asked for, at most ``limit`` messages (R16).

        An action is a copy of a hold's bits (R32); they come by START offset, then by message. What
        it returns counts as asked (soft state, R15). Empty until the engine is live (R17).
        """
        actions: list[Settle | Carry] = []
        if not self.is_live:
            return actions
        self.table.fetch_wanted(limit)
        wanting = self.table.wanting
        for leaf in list(wanting):
            for page, hold in list(zip(leaf.pages, leaf.holds, strict=True)):
                if limit and hold.flags & (DUE | CARRY) and not hold.flags & ASKED:
                    part = self.table.part(leaf, page, hold, lowest(hold.bits, limit))
                    actions.append(action_of(leaf, page, part, self.clock.now_ms))
                    part.flags |= ASKED
                    limit -= part.bits.bit_count()
            if limit:
                del wanting[leaf]
            if len(leaf.holds) > MAX_HOLDS:
                self.table.even_out(leaf, leaf.pages[0])
            if not limit:
                break
        actions.sort(key=row_order)
        return actions

    def aborted(self, actions: Iterable[Settle | Carry]) -> None:
        """The transaction of these actions is known to have aborted: they may be asked again.

        What wants something else by now (a SCHEDULE that fell due while it was to be carried, a
        later START of the same message) was asked for by another transaction.
        """
        # What is of one hold is taken out of it together.
        wanted: dict[tuple[LogKey, int, int, bool], int] = {}
        for action in actions:
            page, at = divmod(action.message_id.offset, PAGE_BITS)
            log_of = log_key(action.message_id, action.of_schedule)
            key = log_of, page, action.start_offset, isinstance(action, Carry)
            wanted[key] = wanted.get(key, 0) | action.bits << at
        for (of_log, page, start_offset, is_carry), bits in wanted.items():
            log = self.table.find(of_log, page)
            leaf = None if log is None else log.leaf(page)
            for hold in leaf.at(page) if leaf is not None else ():
                touched = hold.bits & bits
                if not touched or hold.start_offset != start_offset:
                    continue
                if hold.flags & ASKED and is_carry != bool(hold.flags & DUE):
                    assert leaf is not None, "the hold is in it"
                    self._ask_again(leaf, self.table.part(leaf, page, hold, touched))
            if leaf is not None:
                self._done(leaf, page)

    def _ask_again(self, leaf: Leaf, hold: Hold) -> None:
        if hold.flags & ASKED:
            hold.flags &= ~ASKED
            self.table.wanting[leaf] = None

    # ---- views

    @property
    def clock_ms(self) -> int:
        return self.clock.now_ms

    def committable_offset(self) -> int:
        """Smallest offset still needed after a crash (R20)."""
        return min(self.table.first_start_offset(), self.next_offset)

    def open_count(self) -> int:
        return self.table.open

    def due_count(self) -> int:
        """Return messages with an action that is wanted or asked for and not settled."""
        return self.table.unsettled

    def in_progress(self) -> set[MessageId]:
        """Return messages that are open, whatever their state; SCHEDULEs are not among them."""
        return self.table.identities(of_schedule=False)

    def scheduled(self) -> set[MessageId]:
        """SCHEDULEs that are open, by the marker partition and offset of their first record."""
        return self.table.identities(of_schedule=True)

    def hold_of(self, message_id: MessageId, *, of_schedule: bool = False) -> Hold | None:
        """Return what is known of one message while it is open; not to be changed."""
        page, at = divmod(message_id.offset, PAGE_BITS)
        log = self.table.find(log_key(message_id, of_schedule), page)
        leaf = None if log is None else log.leaf(page)
        index = -1 if leaf is None else leaf.find(page, _BIT[at])
        return None if leaf is None or index < 0 else leaf.holds[index]

    def next_wake(self) -> Wake:
        deadline_ms, has_due = self.table.next_change_ms(), self.table.unsettled > 0
        if deadline_ms == NEVER:
            return Wake(None, None, has_due)
        warn_ms = deadline_ms - self.holders.shortest_timeout_ms() // 4
        return Wake(deadline_ms, warn_ms, has_due)

    def check(self) -> None:
        _check_tracker(self)


def _check_tracker(tracker: RedeliveryTracker) -> None:
    table = tracker.table
    before = table.open, table.unsettled, table.first_start_offset()
    table.fetch_all()
    after = table.open, table.unsettled, table.first_start_offset()
    assert before == after, "a chunk is summed up"
    references: dict[int, int] = {}
    for log in table.logs.values():
        _check_log(log)
    for leaf in table.leaves():
        _check_leaf(tracker, leaf)
        for hold in leaf.holds:
            if hold.holder is not None:
                number = hold.holder.number
                references[number] = references.get(number, 0) + 1
    used = {holder.number: holder.references for holder in tracker.holders.used()}
    assert used == references, "holders count their holds"
    shortest_ms = min((holder.timeout_ms for holder in tracker.holders.used()), default=0)
    assert tracker.holders.shortest_timeout_ms() == shortest_ms, "timeouts are counted"
    assert tracker.committable_offset() <= tracker.next_offset, "a position is in the past"
    _check_table(table)


def _check_log(log: HoldLog) -> None:
    """Each page is in one leaf, and each message in one hold."""
    pages = [page for leaf in log.leaves for page in leaf.pages]
    assert pages == sorted(pages), "pages are in order"
    assert all(page <= log.last_page for page in pages), "no page is behind the last one"
    firsts = [leaf.pages[0] for leaf in log.leaves]
    assert all(map(int.__le__, log.firsts, firsts)), "leaves are found"
    assert len(set(firsts)) == len(firsts) == len(log.firsts), "a page is in one leaf"
    found: dict[int, int] = {}
    for leaf in log.leaves:
        assert leaf.log is log
        for page, hold in zip(leaf.pages, leaf.holds, strict=True):
            assert hold.bits, "a hold holds something"
            assert not hold.bits & found.get(page, 0), "a message is in one hold"
            found[page] = found.get(page, 0) | hold.bits
    if log.last_page in found:
        assert not found[log.last_page] & ~log.last_bits, "what was in the last page is known"


def _check_table(table: HoldTable) -> None:
    holds = [hold for leaf in table.leaves() for hold in leaf.holds]
    assert table.open == sum(hold.bits.bit_count() for hold in holds), "messages are counted"
    unsettled = sum(hold.bits.bit_count() for hold in holds if hold.flags & (DUE | CARRY))
    assert table.unsettled == unsettled, "what is not settled is counted"
    first = min((hold.start_offset for hold in holds), default=NEVER)
    assert table.first_start_offset() == first, "the first hold is found"
    wake_ms = min((leaf.wake_ms for leaf in table.leaves()), default=NEVER)
    assert table.next_change_ms() == wake_ms, "the next change is found"


def _check_leaf(tracker: RedeliveryTracker, leaf: Leaf) -> None:
    now_ms = tracker.clock_ms
    of_schedule = leaf.log.key[0]
    assert 0 < len(leaf.holds) <= MAX_HOLDS, "a leaf has some holds"
    for page, hold in zip(leaf.pages, leaf.holds, strict=True):
        held = hold.flags & STATE == HELD
        assert held == (hold.holder is not None), "what is held has a holder"
        assert hold.start_offset < tracker.next_offset, "holds come from the log"
        assert leaf.first_offset <= hold.start_offset, "a leaf knows where it begins"
        assert not leaf.log.has_ended(page, hold.bits, now_ms), "open is not ended"
        if hold.flags & (DUE | CARRY) and not hold.flags & ASKED:
            assert leaf in tracker.table.wanting, "plan finds all"
        if not hold.flags & DUE:
            at_ms = tracker.changes_at(hold, of_schedule)
            assert at_ms >= now_ms, "what the clock has passed is due"
            assert leaf.wake_ms <= hold.wake_ms <= at_ms, "a leaf wakes in time"
