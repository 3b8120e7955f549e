"""The redelivery core: one marker partition's log, folded into what is open and what is due.

Every tracker, in-process or on Spark, and the simulator run this code; shells read records, call
`apply`, carry out what `plan` returns and hold no rule of their own. The rules are R1-R4 and
R12-R20 of ``docs/protocol.md``:

- A record first moves the clock, then applies (R2). What the clock has passed is due from there
  on; a held entry that a gap in the log passed gets a grace, once (R3).
- ======================  =========  ========  =========  ===========  ======
  record                  unknown    held      waiting    due          ended
  ======================  =========  ========  =========  ===========  ======
  START                   held       renewed   -          -            -
  KEEPALIVE               -          renewed   -          -            -
  END ACK                 ended      ended     ended      - (late)     -
  END NACK                -          waiting   -          - (late)     -
  END REJECT, RELEASE     -          due       -          - (late)     -
  END of a tracker        ended      ended     ended      ended        -
  SCHEDULE                waiting    -         replaced   -            -
  ======================  =========  ========  =========  ===========  ======
- ``plan`` names what is due and not asked for. A due entry stays until its END is read; "asked" is
  cleared by a known abort (`aborted`) or by a start (R15).
- After a start nothing is planned before the engine has read its own TICK (R17).

Hard state follows from the log alone. Chunks can lie in a state store: see ``snapshot.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from operator import attrgetter

from kafkamq.markers.rules.chunks import Chunk, ChunkKey, chunk_key
from kafkamq.markers.rules.delivery import Carry, DueCause, Settle
from kafkamq.markers.rules.entry import (
    ASKED,
    CARRY,
    CAUSE_SHIFT,
    DUE,
    ENDED_MEMORY_MS,
    GRACED,
    HELD,
    NEVER,
    STATE,
    WAITING,
    Entry,
)
from kafkamq.markers.rules.holders import Holders
from kafkamq.markers.rules.invariants import check_tracker
from kafkamq.markers.rules.packed import PackedPage
from kafkamq.markers.rules.table import CHUNK_COST, ChunkTable
from kafkamq.markers.rules.ticks import Wake
from kafkamq.queue.rules.log_clock import LogClock
from kafkamq.types import Marker, MarkerType, MessageId, Outcome, expand

__all__ = ["MAX_PLAN", "RedeliveryTracker", "Wake"]

MAX_PLAN = 50_000  # R16: actions in one transaction
MAX_GRACE_MS = 3_000  # R3
_BY_TRACKER = (Outcome.REDELIVERED, Outcome.DEAD_LETTERED)


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
            None: a tracker without an owner (tests, replays), live from the beginning.
        load_chunk: Fetches a chunk from a state store (``markers/rules/snapshot.py``).
        max_loose: Entries that are kept as objects; if there are more the old ones are packed.
    """

    def __init__(
        self,
        next_offset: int = 0,
        *,
        partition: int = 0,
        max_lease_ms: int = 43_200_000,
        longest_ms: int = NEVER,
        carry_after_ms: int = NEVER,
        engine: tuple[str, int] | None = None,
        load_chunk: Callable[[ChunkKey], bytes] | None = None,
        max_loose: int = NEVER,
    ) -> None:
        self.next_offset = next_offset
        self.partition = partition
        self.late_verdicts = 0
        self.malformed = 0
        self.clock = LogClock()
        self.holders = Holders()
        self.table = ChunkTable(self.holders.by_number, self.changes_at, load_chunk, max_loose)
        self.engine = engine
        self.is_live = engine is None
        self._max_lease_ms = max_lease_ms
        self._longest_ms = longest_ms
        self._carry_after_ms = carry_after_ms
        self._appliers: dict[MarkerType, Callable[[int, Marker], None]] = {
            MarkerType.START: self._apply_start,
            MarkerType.KEEPALIVE: self._apply_keepalive,
            MarkerType.END: self._apply_end,
            MarkerType.SCHEDULE: self._apply_schedule,
            MarkerType.TICK: self._apply_tick,
        }

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
        step_ms = self.clock.advance(timestamp_ms)  # R1, R2: what is due is due from here on
        if self.clock.now_ms > self.table.next_wake_ms:
            self._expire(step_ms)
        self.next_offset = offset + 1
        if marker is None:
            self.malformed += 1
        else:
            for each in expand(marker) if marker.batches else (marker,):  # R27
                self._appliers[each.type](offset, each)

    def _apply_start(self, offset: int, marker: Marker) -> None:
        message_id = marker.message_id
        if message_id is None:
            return
        chunk, entries = self.table.obtain(chunk_key(message_id, False))
        slot = chunk.slot_of(message_id)
        now_ms = self.clock.now_ms
        deadline_ms = now_ms + marker.redeliver_after_ms
        entry = entries.get(slot)
        if entry is None and chunk.is_packed:
            entry = self.table.unpack(chunk, slot)
        if entry is None:
            if chunk.has_ended(slot, now_ms):  # R12: a zombie's late START
                return
            max_lease_ms = min(marker.max_lease_ms or self._max_lease_ms, self._longest_ms)
            holder = self.holders.join(
                marker.consumer_id, marker.redeliver_after_ms, max_lease_ms, deadline_ms
            )
            entry = Entry(deadline_ms, offset, now_ms, HELD, holder)
            self.table.enter(chunk, entries, slot, entry, now_ms)
        elif entry.flags & STATE == HELD and entry.holder is not None:
            # The newer START holds it; count, limits and beginning stay those of the first.
            self._hold(
                chunk, slot, entry, marker.consumer_id, marker.redeliver_after_ms, deadline_ms
            )

    def _hold(
        self,
        chunk: Chunk,
        slot: int,
        entry: Entry,
        consumer_id: str,
        timeout_ms: int,
        deadline_ms: int,
    ) -> None:
        """A sign of life that sets the deadline of one held entry, and its holder."""
        old = entry.holder
        assert old is not None, "a held entry has a holder"
        entry.holder = self.holders.join(consumer_id, timeout_ms, old.max_lease_ms, deadline_ms)
        self.holders.leave(old)
        entry.deadline_ms = deadline_ms
        entry.flags = HELD  # R3: armed again
        chunk.dirty = True
        self.table.note(chunk, slot, self.changes_at(entry))

    def _apply_keepalive(self, offset: int, marker: Marker) -> None:
        now_ms = self.clock.now_ms
        message_id = marker.message_id
        if message_id is None:  # R7: all leases of this consumer; an empty id renews nothing
            if marker.consumer_id:
                self.holders.renew(marker.consumer_id, now_ms, marker.redeliver_after_ms)
            return
        chunk, entries = self.table.find(chunk_key(message_id, False))
        slot = chunk.slot_of(message_id)
        entry = entries.get(slot) or self.table.unpack(chunk, slot)
        if entry is None or entry.flags & STATE != HELD or entry.holder is None:
            return  # it never brings anything to life
        timeout_ms = entry.holder.timeout_ms
        deadline_ms = now_ms + (marker.redeliver_after_ms or timeout_ms)
        self._hold(chunk, slot, entry, marker.consumer_id, timeout_ms, deadline_ms)

    def _apply_end(self, offset: int, marker: Marker) -> None:
        message_id = marker.message_id
        if message_id is None:
            return
        outcome = marker.outcome
        remembers = outcome is Outcome.ACK or outcome in _BY_TRACKER
        key = chunk_key(message_id, marker.of_schedule)
        chunk, entries = self.table.obtain(key) if remembers else self.table.find(key)
        slot = chunk.slot_of(message_id)
        entry = entries.get(slot)
        if entry is None and chunk.is_packed:
            entry = self.table.unpack(chunk, slot, ends=remembers)
        if entry is not None and entry.flags & STATE == DUE and outcome not in _BY_TRACKER:
            self.late_verdicts += 1  # R9
        elif remembers:
            self._end(chunk, entries, slot, entry)
        elif entry is not None and entry.flags & STATE == HELD and entry.holder is not None:
            now_ms = self.clock.now_ms
            if outcome is Outcome.REJECT:
                entry.verdict_offset = offset
                self._fall_due(chunk, entry, DueCause.REJECTED, now_ms)
            elif outcome is Outcome.NACK:
                entry.verdict_offset = offset
                self.holders.leave(entry.holder)
                entry.holder = None
                entry.flags = WAITING
                entry.deadline_ms = now_ms + min(marker.redeliver_after_ms, self._longest_ms)
                chunk.dirty = True
                self.table.note(chunk, slot, entry.deadline_ms)
            elif entry.holder.consumer_id == marker.consumer_id:  # RELEASE, by its holder only
                self._fall_due(chunk, entry, DueCause.RELEASED, now_ms)

    def _apply_schedule(self, offset: int, marker: Marker) -> None:
        message_id = marker.message_id or MessageId(self.partition, offset)
        chunk, entries = self.table.obtain(chunk_key(message_id, True))
        slot = chunk.slot_of(message_id)
        now_ms = self.clock.now_ms
        old = entries.get(slot) or self.table.unpack(chunk, slot)
        if old is None:
            if chunk.has_ended(slot, now_ms):
                return
        elif old.flags & STATE == WAITING:  # carried (R19): it takes the first one's place
            self._uncount(chunk, old)
            self.table.open -= 1
            del entries[slot]  # so that entries stay in the order of their start offsets
            if not entries:
                self.table.max_open += CHUNK_COST
        else:
            return
        entry = Entry(now_ms + marker.redeliver_after_ms, offset, now_ms, WAITING, None)
        self.table.enter(chunk, entries, slot, entry, now_ms)

    def _apply_tick(self, offset: int, marker: Marker) -> None:
        if self.is_live or (marker.consumer_id, marker.engine_epoch) != self.engine:
            return
        self.is_live = True  # R17: all that a predecessor wrote has been read
        for chunk in self.table.chunks.values():
            if chunk.asked:
                self._ask_again(chunk, self.table.entries(chunk).values())

    # ---- what the clock does

    def _expire(self, step_ms: int) -> None:
        """Let everything happen that the clock has just passed."""
        now_ms = self.clock.now_ms
        for chunk in self.table.passed(now_ms):
            self._wake(chunk, now_ms, step_ms)

    def _wake(self, chunk: Chunk, now_ms: int, step_ms: int) -> None:
        if isinstance(chunk, PackedPage):
            self._wake_page(chunk, now_ms, step_ms)
            return
        of_schedule = chunk.key[0]
        agenda = chunk.agenda
        if agenda is None or len(agenda) > 4 * chunk.open_count() + 64:
            agenda = chunk.build_agenda(
                [
                    self.changes_at(entry, of_schedule) << 12 | slot
                    for slot, entry in self.table.entries(chunk).items()
                    if not entry.flags & DUE
                ]
            )
        entries = self.table.entries(chunk)
        while agenda and agenda[0] >> 12 < now_ms:
            slot = heappop(agenda) & 0xFFF
            entry = entries.get(slot)  # what is packed wakes with its page
            if entry is None or entry.flags & DUE:
                continue
            if self.changes_at(entry, of_schedule) < now_ms:  # else it was renewed meanwhile
                self._pass(chunk, entry, now_ms, step_ms)
            if not entry.flags & DUE:
                heappush(agenda, self.changes_at(entry, of_schedule) << 12 | slot)
        chunk.wake_ms = agenda[0] >> 12 if agenda else NEVER

    def _wake_page(self, page: PackedPage, now_ms: int, step_ms: int) -> None:
        of_schedule = page.key[0]
        for index, at_ms in enumerate(page.changes_ms):
            if at_ms < now_ms:
                entry = page.read(index, self.holders.by_number)
                if self.changes_at(entry, of_schedule) < now_ms:
                    self._pass(page, entry, now_ms, step_ms)
                due = entry.flags & DUE
                page.write(index, entry, NEVER if due else self.changes_at(entry, of_schedule))
        page.wake_ms = min(page.changes_ms)

    def _pass(self, chunk: Chunk, entry: Entry, now_ms: int, step_ms: int) -> None:
        """The clock has passed the time at which this entry changes."""
        holder = entry.holder
        if holder is None:  # waiting
            if entry.deadline_ms < now_ms:
                cause = DueCause.SCHEDULED if chunk.key[0] else DueCause.NACKED
                self._fall_due(chunk, entry, cause, entry.deadline_ms)
            elif not entry.flags & CARRY:
                entry.flags |= CARRY  # R19
                self._want(chunk)
            return
        deadline_ms = self.changes_at(entry)
        if now_ms > entry.begin_ms + holder.max_lease_ms:
            self._fall_due(chunk, entry, DueCause.MAX_LEASE, deadline_ms)
            return
        grace_ms = min(holder.timeout_ms // 2, MAX_GRACE_MS)
        had_grace = entry.flags & GRACED and holder.renewed_ms < entry.deadline_ms - grace_ms
        if step_ms * 3 > holder.timeout_ms and not had_grace:  # R3
            entry.deadline_ms = now_ms + grace_ms
            entry.flags |= GRACED
            chunk.dirty = True
        else:
            self._fall_due(chunk, entry, DueCause.LEASE_ENDED, deadline_ms)

    def changes_at(self, entry: Entry, of_schedule: bool = False) -> int:
        """The last moment at which the entry is still what it is; later it is due or carried."""
        holder = entry.holder
        deadline_ms = entry.deadline_ms
        if holder is not None:
            if holder.renewed_until_ms > deadline_ms:
                deadline_ms = holder.renewed_until_ms
            limit_ms = entry.begin_ms + holder.max_lease_ms
        elif of_schedule and not entry.flags & CARRY:
            limit_ms = entry.begin_ms + self._carry_after_ms
        else:
            return deadline_ms
        return min(deadline_ms, limit_ms)

    # ---- changes of one entry

    def _fall_due(self, chunk: Chunk, entry: Entry, cause: DueCause, deadline_ms: int) -> None:
        self._uncount(chunk, entry)
        if entry.holder is not None:
            self.holders.leave(entry.holder)
            entry.holder = None
        entry.deadline_ms = deadline_ms
        entry.flags = DUE | cause << CAUSE_SHIFT
        self._want(chunk)

    def _want(self, chunk: Chunk) -> None:
        """One entry more for ``plan``."""
        chunk.wanted += 1
        chunk.dirty = True
        self.table.unsettled += 1
        self.table.wanting[chunk.key] = None

    def _end(self, chunk: Chunk, entries: dict[int, Entry], slot: int, entry: Entry | None) -> None:
        now_ms = self.clock.now_ms
        if entry is not None:
            table = self.table
            table.open -= 1
            if entries.pop(slot, None) is not None and not entries:  # else it was packed
                table.max_open += CHUNK_COST
            self._uncount(chunk, entry)
            if entry.holder is not None:
                self.holders.leave(entry.holder)
        elif chunk.has_ended(slot, now_ms):
            return
        chunk.remember_end(slot, now_ms)
        chunk.dirty = True
        forget_ms = now_ms + ENDED_MEMORY_MS
        if chunk.wake_ms > forget_ms and not chunk.open_count():  # not when its leases would end
            self.table.wake_at(chunk, forget_ms)

    def _uncount(self, chunk: Chunk, entry: Entry) -> None:
        """The entry's action is not wanted any more (it ended, or another one takes its place)."""
        if entry.flags & (DUE | CARRY):
            self.table.unsettled -= 1
            if entry.flags & ASKED:
                chunk.asked -= 1
            else:
                chunk.wanted -= 1

    # ---- what to do

    def plan(self, limit: int = MAX_PLAN) -> Sequence[Settle | Carry]:
        """What is due or to be carried and not asked for, in START order; at most ``limit``.

        What it returns counts as asked (soft state, R15). Empty until the engine is live (R17).
        What is asked for is not packed: its ENDs, which come soon, need each entry.
        """
        actions: list[Settle | Carry] = []
        if not self.is_live:
            return actions
        wanting = self.table.wanting
        for key in list(wanting):
            chunk = self.table.chunks.get(key)
            if chunk is not None and chunk.wanted:
                if len(actions) >= limit:
                    break
                for each in self.table.unpack_wanted(chunk, limit - len(actions)):
                    self._ask(each, actions, limit)
            if chunk is None or not chunk.wanted:
                del wanting[key]
        actions.sort(key=attrgetter("start_offset"))
        return actions

    def _ask(self, chunk: Chunk, actions: list[Settle | Carry], limit: int) -> None:
        for slot, entry in self.table.entries(chunk).items():
            if len(actions) >= limit:
                break
            if entry.flags & (DUE | CARRY) and not entry.flags & ASKED:
                actions.append(self._action(chunk, slot, entry))
                entry.flags |= ASKED
                chunk.wanted -= 1
                chunk.asked += 1
                chunk.dirty = True

    def aborted(self, actions: Iterable[Settle | Carry]) -> None:
        """The transaction of these actions is known to have aborted: they may be asked again.

        An entry that wants something else by now (a SCHEDULE that fell due while it was to be
        carried, a later START of the same message) was asked for by another transaction.
        """
        for action in actions:
            is_carry = isinstance(action, Carry)
            of_schedule = isinstance(action, Carry) or action.of_schedule
            chunk, entries = self.table.find(chunk_key(action.message_id, of_schedule))
            slot = chunk.slot_of(action.message_id)
            entry = entries.get(slot) or self.table.unpack(chunk, slot)
            if entry is None or entry.start_offset != action.start_offset:
                continue
            if is_carry != bool(entry.flags & DUE):
                self._ask_again(chunk, (entry,))

    def _ask_again(self, chunk: Chunk, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.flags & ASKED:
                entry.flags &= ~ASKED
                chunk.asked -= 1
                chunk.wanted += 1
                chunk.dirty = True
                self.table.wanting[chunk.key] = None

    def _action(self, chunk: Chunk, slot: int, entry: Entry) -> Settle | Carry:
        now_ms = self.clock.now_ms
        if not entry.flags & DUE:
            remaining_ms = max(0, entry.deadline_ms - now_ms)
            return Carry(entry.start_offset, chunk.identity(slot), remaining_ms)
        return Settle(
            entry.start_offset,
            chunk.identity(slot),
            chunk.key[0],
            DueCause(entry.flags >> CAUSE_SHIFT),
            entry.begin_ms,
            now_ms,
            entry.deadline_ms,
            entry.verdict_offset,
        )

    # ---- views

    @property
    def clock_ms(self) -> int:
        """The partition's log clock (R1)."""
        return self.clock.now_ms

    def committable_offset(self) -> int:
        """Smallest offset still needed after a crash (R20)."""
        return min(self.table.first_start_offset(), self.next_offset)

    def open_count(self) -> int:
        """Entries: held, waiting and due."""
        return self.table.open

    def due_count(self) -> int:
        """Actions wanted or asked for and not settled."""
        return self.table.unsettled

    def in_progress(self) -> set[MessageId]:
        """Messages with an entry, whatever its state; SCHEDULEs are not among them."""
        return self.table.identities(of_schedule=False)

    def scheduled(self) -> set[MessageId]:
        """SCHEDULEs with an entry, by the marker partition and offset of their first record."""
        return self.table.identities(of_schedule=True)

    def next_wake(self) -> Wake:
        """What the TICK rules need to know (R4)."""
        deadline_ms = self.table.next_change_ms()
        has_due = self.table.unsettled > 0
        if deadline_ms == NEVER:
            return Wake(None, None, has_due)
        warn_ms = deadline_ms - self.holders.shortest_timeout_ms() // 4
        return Wake(deadline_ms, warn_ms, has_due)

    def check(self) -> None:
        """Assert the invariants (``invariants.py``); costs as much as the state is large."""
        check_tracker(self)
