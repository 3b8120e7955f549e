"""The red control: a history that was edited must be found out, whatever the edit.

Each test takes a run that is in order, changes one thing in its logs as a broken tracker, worker or
sender would have written it, and the checker must name it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
from harness.simulation.limits import Behaviour, Faults, Limits, WorkerSettings
from harness.simulation.simulator import Simulation, simulate

from kafkamq.markers.wire.marker_writer import encode_end
from kafkamq.markers.wire.markers import decode_marker, encode_marker
from kafkamq.queue.wire.headers import DELIVERY_COUNT, ORIGIN, REASON
from kafkamq.testing.checker import CheckFailedError, Verdict, check_logs
from kafkamq.testing.history import LogRecord
from kafkamq.types import Headers, Marker, MarkerType, MessageId, Outcome

LIMITS = Limits(
    messages=60,
    delayed_share=0.3,
    cancelled_share=0.5,
    faults=Faults(freeze_every=2000, max_freeze_ms=8000),
    behaviours=(
        (Behaviour.QUICK, 0.6),
        (Behaviour.SLOW, 0.1),
        (Behaviour.NACKS, 0.1),
        (Behaviour.REJECTS, 0.1),
        (Behaviour.HANGS, 0.1),
    ),
    # The last handler that hangs ends the run: before the ACKs in front of it are forgotten (R12).
    worker=WorkerSettings(max_lease_ms=10_000),
)


@cache
def simulation() -> Simulation:
    return simulate(1, LIMITS)


@dataclass
class Logs:
    messages: list[LogRecord]
    markers: list[LogRecord]
    dead_letters: list[LogRecord]

    def check(self, **options: object) -> Verdict:
        return check_logs(  # type: ignore[arg-type]
            messages=self.messages,
            markers=self.markers,
            dead_letters=self.dead_letters,
            **options,
        )

    def find_end(self, outcome: Outcome, *, of_schedule: bool = False) -> LogRecord:
        """The first END with that outcome."""
        return next(
            record
            for record in self.markers
            if (marker := decode_marker(record.value)).type is MarkerType.END
            and marker.outcome is outcome
            and marker.of_schedule is of_schedule
        )

    def of(self, message_id: MessageId | None) -> list[LogRecord]:
        """The markers of a message, SCHEDULEs aside."""
        return [
            record
            for record in self.markers
            if (marker := decode_marker(record.value)).message_id == message_id
            and not marker.of_schedule
        ]

    def copies(self) -> list[LogRecord]:
        return [record for record in self.messages if ORIGIN in dict(record.headers)]

    def change(self, old: LogRecord, new: LogRecord) -> None:
        records = getattr(self, {"m": "messages", "k": "markers", "d": "dead_letters"}[_kind(old)])
        records[records.index(old)] = new

    def append(self, record: LogRecord) -> None:
        """Append it as the last record of its partition."""
        records = getattr(
            self, {"m": "messages", "k": "markers", "d": "dead_letters"}[_kind(record)]
        )
        last = max((r.offset for r in records if r.partition == record.partition), default=-1)
        records.append(replace(record, offset=last + 1))


def _kind(record: LogRecord) -> str:
    return {"messages": "m", "markers": "k", "dead-letters": "d"}[record.topic.split(".")[-1]]


@pytest.fixture
def logs() -> Logs:
    run = simulation()
    return Logs(list(run.messages), list(run.markers), list(run.dead_letters))


def kinds(verdict: Verdict) -> set[str]:
    return {problem.kind for problem in verdict.problems}


def with_header(headers: Headers, name: str, value: bytes) -> Headers:
    return (*[header for header in headers if header[0] != name], (name, value))


def test_the_unedited_run_is_in_order_and_has_everything(logs: Logs) -> None:
    verdict = logs.check(confirmed=simulation().told.confirmed)
    verdict.require_ok()
    assert verdict.is_ok
    assert verdict.sent == 60
    assert min(verdict.redelivered, verdict.dead_lettered, verdict.cancelled) > 3
    assert verdict.lost == 0
    assert len(verdict.lateness_ms) >= verdict.redelivered + verdict.dead_lettered


def test_a_copy_is_missing(logs: Logs) -> None:
    second = (each for each in logs.copies() if dict(each.headers)[DELIVERY_COUNT] == b"2")
    logs.messages.remove(next(second))
    verdict = logs.check()
    assert "lost" in kinds(verdict)
    assert verdict.lost == 1
    with pytest.raises(CheckFailedError, match="copy with delivery count 2 is missing"):
        verdict.require_ok()


def test_a_copy_was_written_twice(logs: Logs) -> None:
    logs.append(logs.copies()[0])
    verdict = logs.check(must_be_settled=False)
    assert kinds(verdict) == {"unexplained"}


def test_a_copy_without_its_end(logs: Logs) -> None:
    """The transaction was none: the copy is there, its END is not."""
    logs.markers.remove(logs.find_end(Outcome.REDELIVERED))
    assert {"unexplained", "lost"} <= kinds(logs.check())


def test_the_end_was_written_twice(logs: Logs) -> None:
    end = logs.find_end(Outcome.REDELIVERED)
    logs.append(end)
    assert {"unexplained", "lost"} <= kinds(logs.check())


def test_the_end_and_its_copy_were_written_twice(logs: Logs) -> None:
    """Two engines settled the same message: a first delivery, as a copy names no later one."""
    copy = next(each for each in logs.copies() if dict(each.headers)[DELIVERY_COUNT] == b"2")
    partition, offset = (dict(copy.headers)[ORIGIN] or b"").split(b"/")[1:3]
    place = int(partition), int(offset)
    ends = (
        record
        for record in logs.markers
        if (marker := decode_marker(record.value)).outcome is Outcome.REDELIVERED
        and marker.message_id is not None
        and (marker.message_id.partition, marker.message_id.offset) == place
    )
    logs.append(next(ends))
    logs.append(copy)
    assert "unexplained" in kinds(logs.check(must_be_settled=False))


@pytest.mark.parametrize("outcome", [Outcome.REDELIVERED, Outcome.DEAD_LETTERED])
def test_the_end_came_before_the_message_was_due(logs: Logs, outcome: Outcome) -> None:
    """Swap the END with the marker before it of the same message: a START, NACK or REJECT."""
    end = logs.find_end(outcome)
    own = logs.of(decode_marker(end.value).message_id)
    before = own[own.index(end) - 1]
    logs.change(end, replace(end, value=before.value))
    logs.change(before, replace(before, value=end.value))
    assert "unexplained" in kinds(logs.check(must_be_settled=False))


def test_due_by_a_single_millisecond_too_early(logs: Logs) -> None:
    """Strictness: at the deadline itself nothing is due; the END's own time does not count."""
    message_id = MessageId(0, 900)
    start = Marker(MarkerType.START, message_id, 1000, b"queue", b"x", consumer_id="w")
    times = [5_000_000_000_000 + late_ms for late_ms in (0, 900, 1000, 1000)]
    place = logs.markers[0]
    tick = Marker(MarkerType.TICK, consumer_id="e")
    end = Marker(MarkerType.END, message_id, outcome=Outcome.REDELIVERED)
    origin = ((ORIGIN, b"sim.messages/0/900/1"), (DELIVERY_COUNT, b"2"))
    copy = replace(logs.messages[0], key=b"queue", value=b"x", headers=origin)
    for extra_ms, is_ok in ((0, False), (1, True)):
        edited = Logs(list(logs.messages), list(logs.markers), [*logs.dead_letters])
        times[2] = 5_000_000_001_000 + extra_ms
        times[3] = 5_000_000_009_000
        for at_ms, marker in zip(times, (start, tick, tick, end), strict=True):
            value = encode_marker(marker)
            edited.append(replace(place, timestamp_ms=at_ms, value=value))
        edited.append(copy)
        assert edited.check(must_be_settled=False).is_ok is is_ok


def test_acked_in_time_and_redelivered(logs: Logs) -> None:
    ack = logs.find_end(Outcome.ACK)
    message_id = decode_marker(ack.value).message_id
    assert message_id is not None
    logs.append(replace(ack, value=encode_end(message_id, Outcome.REDELIVERED)))
    original = next(
        record
        for record in logs.messages
        if (record.partition, record.offset) == (message_id.partition, message_id.offset)
    )
    origin = b"sim.messages/%d/%d/1" % (message_id.partition, message_id.offset)
    headers = (*original.headers, (ORIGIN, origin), (DELIVERY_COUNT, b"2"))
    logs.append(replace(original, headers=headers))
    assert "unexplained" in kinds(logs.check(must_be_settled=False))


def test_an_ack_is_missing(logs: Logs) -> None:
    logs.markers.remove(logs.find_end(Outcome.ACK))
    verdict = logs.check()
    assert kinds(verdict) == {"lost"}
    assert logs.check(must_be_settled=False).is_ok


def test_a_message_that_nobody_started(logs: Logs) -> None:
    logs.append(replace(logs.messages[0], headers=()))
    assert kinds(logs.check()) == {"lost"}


def test_a_confirmed_message_is_not_in_the_log(logs: Logs) -> None:
    place = simulation().told.confirmed[0]
    for records in (logs.messages, logs.markers):
        records[:] = [r for r in records if (r.topic, r.partition, r.offset) != place]
    verdict = logs.check(confirmed=simulation().told.confirmed, must_be_settled=False)
    assert "lost" in kinds(verdict)


@pytest.mark.parametrize("count", [b"1", b"3"])
def test_a_copy_counts_wrongly(logs: Logs, count: bytes) -> None:
    copy = next(c for c in logs.copies() if dict(c.headers).get(DELIVERY_COUNT) == b"2")
    headers = with_header(copy.headers, DELIVERY_COUNT, count)
    logs.change(copy, replace(copy, headers=headers))
    assert {"lost", "unexplained", "count"} <= kinds(logs.check())


def test_a_start_names_another_count_than_its_message(logs: Logs) -> None:
    start = next(r for r in logs.markers if decode_marker(r.value).type is MarkerType.START)
    marker = replace(decode_marker(start.value), delivery_count=2)
    logs.change(start, replace(start, value=encode_marker(marker)))
    assert "count" in kinds(logs.check())


@pytest.mark.parametrize("part", ["value", "key", "header", "id"])
def test_a_copy_differs_from_its_message(logs: Logs, part: str) -> None:
    copy = logs.copies()[0]
    changed = {
        "value": replace(copy, value=b"quick 99"),
        "key": replace(copy, key=b"other"),
        "header": replace(copy, headers=tuple(h for h in copy.headers if h[0] != "n")),
        "id": replace(copy, headers=with_header(copy.headers, "kafkamq-id", b"other")),
    }[part]
    logs.change(copy, changed)
    assert "content" in kinds(logs.check())


def test_a_dead_letter_is_missing(logs: Logs) -> None:
    del logs.dead_letters[0]
    verdict = logs.check()
    assert kinds(verdict) == {"lost"}
    assert verdict.lost == 1


def test_a_dead_letter_was_written_twice(logs: Logs) -> None:
    logs.append(logs.dead_letters[0])
    assert kinds(logs.check()) == {"unexplained"}


def test_a_dead_letter_without_its_end(logs: Logs) -> None:
    logs.markers.remove(logs.find_end(Outcome.DEAD_LETTERED))
    assert "unexplained" in kinds(logs.check())


@pytest.mark.parametrize("reason", [b"expired", b"max-lease", b"payload-lost", b"nonsense"])
def test_a_dead_letter_names_a_wrong_reason(logs: Logs, reason: bytes) -> None:
    letter = logs.dead_letters[0]
    headers = with_header(letter.headers, REASON, reason)
    logs.change(letter, replace(letter, headers=headers))
    assert kinds(logs.check()) == {"reason"}


def test_rejected_and_exhausted_are_told_apart(logs: Logs) -> None:
    for letter in list(logs.dead_letters):
        swapped = b"rejected" if dict(letter.headers)[REASON] != b"rejected" else b"max-deliveries"
        headers = with_header(letter.headers, REASON, swapped)
        logs.change(letter, replace(letter, headers=headers))
    problems = logs.check().problems
    assert [problem.kind for problem in problems] == ["reason"] * len(logs.dead_letters)


@pytest.mark.parametrize("part", ["value", "header", "origin", "count"])
def test_a_dead_letter_differs(logs: Logs, part: str) -> None:
    letter = logs.dead_letters[0]
    changed = {
        "value": replace(letter, value=b"other"),
        "header": replace(letter, headers=tuple(h for h in letter.headers if h[0] != "n")),
        "origin": replace(letter, headers=tuple(h for h in letter.headers if h[0] != ORIGIN)),
        "count": replace(letter, headers=with_header(letter.headers, DELIVERY_COUNT, b"77")),
    }[part]
    logs.change(letter, changed)
    assert logs.check().problems


def test_dead_too_early(logs: Logs) -> None:
    """A copy was due, a dead letter was written."""
    end = logs.find_end(Outcome.REDELIVERED)
    message_id = decode_marker(end.value).message_id
    assert message_id is not None
    logs.change(end, replace(end, value=encode_end(message_id, Outcome.DEAD_LETTERED)))
    assert "unexplained" in kinds(logs.check())


def test_copied_instead_of_buried(logs: Logs) -> None:
    end = logs.find_end(Outcome.DEAD_LETTERED)
    message_id = decode_marker(end.value).message_id
    assert message_id is not None
    logs.change(end, replace(end, value=encode_end(message_id, Outcome.REDELIVERED)))
    assert "unexplained" in kinds(logs.check())


def fired(logs: Logs) -> tuple[LogRecord, LogRecord]:
    """The END of a SCHEDULE that fired, and the message that it became."""
    end = logs.find_end(Outcome.REDELIVERED, of_schedule=True)
    first = decode_marker(end.value).message_id
    assert first is not None
    schedule = next(
        r for r in logs.markers if (r.partition, r.offset) == (first.partition, first.offset)
    )
    value = decode_marker(schedule.value).value
    message = next(r for r in logs.messages if r.value == value)
    return end, message


def test_a_schedule_fired_and_its_message_is_missing(logs: Logs) -> None:
    _, message = fired(logs)
    logs.messages.remove(message)
    assert "lost" in kinds(logs.check())


def test_a_schedule_never_fired(logs: Logs) -> None:
    end, message = fired(logs)
    logs.markers.remove(end)
    logs.messages.remove(message)
    assert "lost" in kinds(logs.check())


def test_a_schedule_fired_twice(logs: Logs) -> None:
    end, message = fired(logs)
    logs.append(end)
    logs.append(message)
    assert "unexplained" in kinds(logs.check(must_be_settled=False))


def test_a_cancelled_schedule_fired(logs: Logs) -> None:
    cancel = logs.find_end(Outcome.ACK, of_schedule=True)
    first = decode_marker(cancel.value).message_id
    assert first is not None
    end = encode_end(first, Outcome.REDELIVERED, of_schedule=True)
    logs.append(replace(cancel, value=end))
    assert {"unexplained"} <= kinds(logs.check())


def test_the_end_of_a_tracker_without_any_start(logs: Logs) -> None:
    end = replace(logs.markers[0], value=encode_end(MessageId(0, 12345), Outcome.REDELIVERED))
    logs.append(end)
    assert "unexplained" in kinds(logs.check())


@pytest.mark.parametrize("engine", ["", "e9"])
@pytest.mark.parametrize("is_late", [False, True])
def test_r12_a_start_behind_the_ack(logs: Logs, engine: str, is_late: bool) -> None:
    """It explains one extra copy, if the ACK was forgotten: after 60 s, or by an engine's start."""
    acks = [
        record
        for record in logs.markers
        if (marker := decode_marker(record.value)).type is MarkerType.END
        and marker.outcome is Outcome.ACK
        and not marker.of_schedule
        and decode_marker(logs.of(marker.message_id)[0].value).delivery_count < 2  # a copy may live
    ]
    ack = max(acks, key=lambda record: record.timestamp_ms)
    end_ms = max(record.timestamp_ms for record in logs.markers)
    assert end_ms - ack.timestamp_ms < 50_000, "the ACK must not be forgotten yet"
    message_id = decode_marker(ack.value).message_id
    assert message_id is not None
    start = logs.of(message_id)[0]
    count = max(1, decode_marker(start.value).delivery_count)
    own = [decode_marker(each.value) for each in logs.markers if each.partition == ack.partition]
    known = next(marker for marker in own if marker.type is MarkerType.TICK)
    tick = Marker(MarkerType.TICK, consumer_id=engine or known.consumer_id, engine_epoch=1)
    begin_ms = end_ms + (61_000 if is_late else 0)
    for after_ms in (0, 900, 1800, 2700, 3600):
        value = start.value if after_ms == 0 else encode_marker(tick)
        logs.append(replace(ack, timestamp_ms=begin_ms + after_ms, value=value))
    end = encode_end(message_id, Outcome.REDELIVERED)
    logs.append(replace(ack, timestamp_ms=begin_ms + 3700, value=end))
    place = (message_id.partition, message_id.offset)
    original = next(r for r in logs.messages if (r.partition, r.offset) == place)
    first = dict(original.headers).get(ORIGIN) or b"sim.messages/%d/%d/1" % place
    headers = with_header(original.headers, ORIGIN, first)
    headers = with_header(headers, DELIVERY_COUNT, b"%d" % (count + 1))
    logs.append(replace(original, headers=headers))
    verdict = logs.check(must_be_settled=False)
    assert verdict.is_ok is bool(engine or is_late), verdict.problems
    assert verdict.extra_copies == 1


EDITS: list[Callable[[Logs], None]] = [
    lambda logs: logs.markers.sort(key=lambda record: record.offset, reverse=True),
    lambda logs: logs.messages.reverse(),
    lambda logs: logs.dead_letters.reverse(),
]


@pytest.mark.parametrize("edit", EDITS)
def test_the_order_in_which_records_are_given_does_not_matter(
    logs: Logs, edit: Callable[[Logs], None]
) -> None:
    edit(logs)
    logs.check().require_ok()


@pytest.mark.parametrize("is_ended", [False, True])
def test_r12_a_start_behind_the_ack_has_an_end_behind_it(logs: Logs, is_ended: bool) -> None:
    ack = logs.find_end(Outcome.ACK)
    message_id = decode_marker(ack.value).message_id
    assert message_id is not None
    logs.append(replace(ack, value=logs.of(message_id)[0].value))
    if is_ended:
        logs.append(replace(ack, value=encode_end(message_id, Outcome.ALREADY_ENDED)))
    assert kinds(logs.check()) == (set() if is_ended else {"unexplained"})


def test_r12_what_a_tracker_calls_ended_had_an_end(logs: Logs) -> None:
    ack = logs.find_end(Outcome.ACK)
    message_id = decode_marker(ack.value).message_id
    assert message_id is not None
    at = logs.markers.index(ack)
    logs.markers[at] = replace(ack, value=encode_end(message_id, Outcome.ALREADY_ENDED))
    assert "lost" in kinds(logs.check())
