"""The table of the rules, cell by cell: each kind of record on each state of an entry."""

from __future__ import annotations

import pytest
from tests.unit.core_fold import START_MS, Fold, T

from kafkamq.markers.rules.delivery import DueCause
from kafkamq.types import Marker, MarkerType, MessageId, Outcome

STATES = ("unknown", "held", "waiting", "due", "ended")
NOW_MS = START_MS + 700
DELAY = 5000


def fold_in(state: str) -> Fold:
    """Message 1 in that state at NOW_MS; its first START, by consumer a, has offset 0."""
    fold = Fold()
    if state == "unknown":
        fold.tick(START_MS)
    elif state == "held":
        fold.start(START_MS)
    elif state == "waiting":
        fold.start(START_MS - 10)
        fold.nack(START_MS, delay=DELAY)
    elif state == "due":
        fold.start(START_MS, timeout=600)
        fold.crawl(START_MS, NOW_MS, 100)
    else:
        fold.start(START_MS)
        fold.ack(START_MS)
    fold.tick(NOW_MS)
    assert fold.state() == state
    return fold


def write(fold: Fold, kind: str) -> int:
    name, _, by = kind.partition(" by ")
    by = by or "a"
    if name == "START":
        return fold.start(NOW_MS, by=by, timeout=2 * T)
    if name == "KEEPALIVE(id)":
        return fold.keepalive(NOW_MS, 1, by=by, timeout=2 * T)
    if name == "KEEPALIVE(consumer)":
        return fold.keepalive(NOW_MS, by=by, timeout=2 * T)
    outcome = Outcome[name.removeprefix("END ")]
    return fold.end(NOW_MS, outcome, by=by, delay=DELAY if outcome is Outcome.NACK else 0)


# record: what becomes of unknown, held, waiting, due, ended; "-" is no change.
TABLE = {
    "START": ("held", "held", "-", "-", "due"),
    "START by b": ("held", "held", "-", "-", "due"),
    "KEEPALIVE(id)": ("-", "held", "-", "-", "-"),
    "KEEPALIVE(id) by b": ("-", "held", "-", "-", "-"),
    "KEEPALIVE(consumer)": ("-", "held", "-", "-", "-"),
    "KEEPALIVE(consumer) by b": ("-", "-", "-", "-", "-"),
    "END ACK": ("ended", "ended", "ended", "-", "-"),
    "END ACK by b": ("ended", "ended", "ended", "-", "-"),
    "END REJECT": ("-", "due", "-", "-", "-"),
    "END REJECT by b": ("-", "due", "-", "-", "-"),
    "END NACK": ("-", "waiting", "-", "-", "-"),
    "END NACK by b": ("-", "waiting", "-", "-", "-"),
    "END RELEASE": ("-", "due", "-", "-", "-"),
    "END RELEASE by b": ("-", "-", "-", "-", "-"),
    "END REDELIVERED": ("ended",) * 4 + ("-",),
    "END DEAD_LETTERED": ("ended",) * 4 + ("-",),
    "END ALREADY_ENDED": ("ended",) * 4 + ("-",),
}
CELLS = [
    pytest.param(kind, state, after, id=f"{kind}-{state}")
    for kind, row in TABLE.items()
    for state, after in zip(STATES, row, strict=True)
]


@pytest.mark.parametrize(("kind", "state", "after"), CELLS)
def test_r12_table_of_messages(kind: str, state: str, after: str) -> None:
    fold = fold_in(state)
    deadline_ms = fold.lease_end() if state in ("held", "waiting", "due") else None
    write(fold, kind)
    assert fold.state() == (state if after == "-" else after)
    if after == "-" and deadline_ms is not None:
        assert fold.lease_end() == deadline_ms, "no change is no change"
    late = state == "due" and kind.startswith("END") and after == "-"
    assert fold.tracker.late_verdicts == int(late)  # R9


DEADLINES = [
    ("START", "unknown", NOW_MS + 2 * T),
    ("START", "held", NOW_MS + 2 * T),
    ("START by b", "held", NOW_MS + 2 * T),
    ("KEEPALIVE(id)", "held", NOW_MS + 2 * T),
    ("KEEPALIVE(id) by b", "held", NOW_MS + 2 * T),
    ("KEEPALIVE(consumer)", "held", NOW_MS + 2 * T),
    ("KEEPALIVE(consumer) by b", "held", START_MS + T),
    ("END NACK", "held", NOW_MS + DELAY),
    ("END REJECT", "held", NOW_MS),
    ("END RELEASE", "held", NOW_MS),
    ("END RELEASE by b", "held", START_MS + T),
]


@pytest.mark.parametrize(("kind", "state", "deadline_ms"), DEADLINES)
def test_r12_deadlines_of_the_table(kind: str, state: str, deadline_ms: int) -> None:
    fold = fold_in(state)
    write(fold, kind)
    assert fold.lease_end() == deadline_ms


CAUSES = [
    ("END REJECT", DueCause.REJECTED),
    ("END RELEASE", DueCause.RELEASED),
    ("END NACK", DueCause.NACKED),
    ("START", DueCause.LEASE_ENDED),
]


@pytest.mark.parametrize(("kind", "cause"), CAUSES)
def test_r14_the_cause_is_named(kind: str, cause: DueCause) -> None:
    fold = fold_in("held")
    offset = write(fold, kind)
    fold.crawl(NOW_MS, NOW_MS + 2 * T + 1)
    settle = fold.settle()
    assert settle.cause is cause
    assert (settle.start_offset, settle.begin_ms) == (0, START_MS)
    has_reason = cause in (DueCause.REJECTED, DueCause.NACKED)
    assert settle.verdict_offset == (offset if has_reason else -1)


def test_r12_second_start_takes_over_but_beginning_and_start_offset_stay() -> None:
    fold = fold_in("held")
    fold.start(NOW_MS, by="b")
    fold.keepalive(NOW_MS + 100, by="a", timeout=60_000)  # not the holder any more
    assert fold.lease_end() == NOW_MS + T
    fold.end(NOW_MS + 200, Outcome.RELEASE, by="a")
    assert fold.state() == "held"
    fold.keepalive(NOW_MS + 300, by="b")
    assert fold.lease_end() == NOW_MS + 300 + T
    fold.crawl(NOW_MS + 300, NOW_MS + 301 + T)
    settle = fold.settle()
    assert (settle.start_offset, settle.begin_ms) == (0, START_MS)


def test_r12_a_second_start_does_not_prolong_max_lease() -> None:
    fold = Fold()
    fold.start(START_MS, max_lease=4000)
    fold.start(START_MS + 2000, max_lease=60_000)
    fold.crawl(START_MS + 2000, START_MS + 4000)
    assert fold.state() == "held"
    fold.tick(START_MS + 4001)
    assert fold.settle().cause is DueCause.MAX_LEASE


def test_r12_writer_of_a_keepalive_by_id_becomes_the_holder() -> None:
    fold = fold_in("held")
    fold.keepalive(NOW_MS, 1, by="b")
    fold.end(NOW_MS, Outcome.RELEASE, by="a")
    assert fold.state() == "held"
    fold.end(NOW_MS, Outcome.RELEASE, by="b")
    assert fold.state() == "due"


def test_r12_keepalive_by_id_keeps_the_timeout_of_the_start() -> None:
    """An extension is one deadline; grace and later renewals go by the START's own T."""
    fold = fold_in("held")
    fold.keepalive(NOW_MS, 1, timeout=60_000)
    fold.keepalive(NOW_MS + 100, 1)
    assert fold.lease_end() == NOW_MS + 100 + T


def test_r12_tracker_end_of_a_late_verdict_is_no_late_verdict() -> None:
    fold = fold_in("due")
    fold.redelivered(NOW_MS)
    assert fold.state() == "ended"
    assert fold.tracker.late_verdicts == 0


# ---- SCHEDULE


def scheduled_in(state: str) -> tuple[Fold, int]:
    """A fold and the offset of the first SCHEDULE record that it is about."""
    fold = Fold()
    first = fold.schedule(START_MS, 600 if state == "due" else DELAY)
    if state == "ended":
        fold.end(START_MS, Outcome.ACK, first, of_schedule=True)
    fold.tick(NOW_MS)
    if state == "unknown":
        first += 40
    assert fold.state(first, of_schedule=True) == state
    return fold, first


SCHEDULE_TABLE = {
    "SCHEDULE": ("waiting", "waiting", "-", "due"),
    "END ACK": ("ended", "ended", "-", "-"),
    "END REJECT": ("-", "-", "-", "-"),
    "END NACK": ("-", "-", "-", "-"),
    "END RELEASE": ("-", "-", "-", "-"),
    "END REDELIVERED": ("ended", "ended", "ended", "-"),
    "END DEAD_LETTERED": ("ended", "ended", "ended", "-"),
    "END ALREADY_ENDED": ("ended", "ended", "ended", "-"),
}
SCHEDULE_CELLS = [
    pytest.param(kind, state, after, id=f"{kind}-{state}")
    for kind, row in SCHEDULE_TABLE.items()
    for state, after in zip(("unknown", "waiting", "due", "ended"), row, strict=True)
]


@pytest.mark.parametrize(("kind", "state", "after"), SCHEDULE_CELLS)
def test_r12_table_of_schedules(kind: str, state: str, after: str) -> None:
    fold, first = scheduled_in(state)
    if kind == "SCHEDULE":
        offset = fold.schedule(NOW_MS, DELAY, first=first)
    else:
        fold.end(NOW_MS, Outcome[kind.removeprefix("END ")], first, of_schedule=True)
    assert fold.state(first, of_schedule=True) == (state if after == "-" else after)
    if after == "waiting":
        assert fold.lease_end(first, of_schedule=True) == NOW_MS + DELAY
        fold.crawl(NOW_MS, NOW_MS + DELAY + 1)
        assert fold.settle(first, of_schedule=True).start_offset == offset
    late = state == "due" and after == "-" and kind != "SCHEDULE"
    assert fold.tracker.late_verdicts == int(late)


@pytest.mark.parametrize("kind", ["START", "KEEPALIVE", "END"])
def test_r13_markers_of_messages_never_touch_a_schedule_of_the_same_numbers(kind: str) -> None:
    fold, first = scheduled_in("waiting")
    same = MessageId(0, first)
    if kind == "START":
        fold.start(NOW_MS, same)
    elif kind == "KEEPALIVE":
        fold.keepalive(NOW_MS, same, timeout=60_000)
    else:
        fold.ack(NOW_MS, same)
    assert fold.lease_end(first, of_schedule=True) == START_MS + DELAY


def test_r04_a_tick_changes_nothing_but_the_clock() -> None:
    fold = fold_in("held")
    fold.tick(NOW_MS + 10)
    assert fold.lease_end() == START_MS + T
    assert fold.tracker.clock_ms == NOW_MS + 10


def test_r21_an_undecodable_record_is_counted_and_passed() -> None:
    fold = fold_in("held")
    fold.record(START_MS + T + 1, None)  # the gap gives a grace: it moves the clock
    assert fold.tracker.malformed == 1
    assert fold.lease_end() == START_MS + T + 1 + T // 2
    assert fold.tracker.next_offset == fold.offset


@pytest.mark.parametrize("kind", [MarkerType.START, MarkerType.END])
def test_r21_a_marker_without_message_does_nothing(kind: MarkerType) -> None:
    fold = fold_in("held")
    fold.record(NOW_MS, Marker(kind, None, 10))
    assert fold.lease_end() == START_MS + T
