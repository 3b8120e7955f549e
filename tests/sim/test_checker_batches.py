"""The checkers read records with batches as what they mean: one record for each message (R27)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from harness.faults.invariants import check_run

from kafkamq.dev.demo.follow import DemoRecorder
from kafkamq.dev.history import Event
from kafkamq.markers.rules.batching import gather
from kafkamq.markers.wire.markers import encode_marker
from kafkamq.queue.wire.headers import Origin, copy_headers, dead_letter_headers
from kafkamq.testing.checker import Verdict, check_logs
from kafkamq.testing.history import LogRecord
from kafkamq.types import (
    DeadLetterReason,
    Headers,
    Marker,
    MarkerType,
    MessageBatch,
    MessageId,
    Outcome,
)

TOPIC = b"a topic's own id"
IDS = [MessageId(0, offset, TOPIC, 1) for offset in range(6)]
T_MS = 1000
START = Marker(
    MarkerType.START,
    redeliver_after_ms=T_MS,
    key=b"q",
    consumer_id="c",
    by_reference=True,
    max_deliveries=3,
)
END = Marker(MarkerType.END, consumer_id="c")


def batches_of(ids: Sequence[MessageId]) -> tuple[MessageBatch, ...]:
    return gather(ids)[0][0] if ids else ()


START_OF_THE_OTHERS = replace(START, batches=batches_of(IDS[1:]))


class Log:
    """A namespace with one partition of each topic; six messages, all in one START."""

    def __init__(self, headers: Headers = ()) -> None:
        self.messages: list[LogRecord] = []
        self.markers: list[LogRecord] = []
        self.letters: list[LogRecord] = []
        for _ in IDS:
            self.message(0, headers)
        self.mark(100, START, *IDS)

    def message(self, at_ms: int, headers: Headers = ()) -> int:
        offset = len(self.messages)
        self.messages.append(LogRecord("messages", 0, offset, at_ms, b"q", b"x", headers))
        return offset

    def mark(self, at_ms: int, marker: Marker, *ids: MessageId) -> None:
        value = encode_marker(replace(marker, batches=batches_of(ids)))
        self.markers.append(LogRecord("markers", 0, len(self.markers), at_ms, None, value, ()))

    def mark_one(self, at_ms: int, marker: Marker) -> None:
        value = encode_marker(marker)
        self.markers.append(LogRecord("markers", 0, len(self.markers), at_ms, None, value, ()))

    def tick(self, at_ms: int) -> None:
        value = encode_marker(Marker(MarkerType.TICK))
        self.markers.append(LogRecord("markers", 0, len(self.markers), at_ms, None, value, ()))

    def copy(self, one: MessageId, at_ms: int, count: int = 2) -> MessageId:
        headers = copy_headers(
            self.messages[one.offset].headers,
            delivery_count=count,
            origin=Origin("messages", 0, one.offset, 0),
        )
        return MessageId(0, self.message(at_ms, headers), TOPIC, 1)

    def bury(self, one: MessageId, reason: DeadLetterReason, *, count: int = 1) -> None:
        headers = dead_letter_headers(
            (),
            reason=reason,
            error="",
            delivery_count=count,
            origin=Origin("messages", 0, one.offset, 0),
            queue_id=b"q",
            payload_at=None,
        )
        value = None if reason is DeadLetterReason.PAYLOAD_LOST else b"x"
        self.letters.append(
            LogRecord("letters", 0, len(self.letters), 0, b"q", value, tuple(headers))
        )

    def pass_time(self) -> None:
        """The leases end, and their grace (R3)."""
        self.tick(5000)
        self.tick(9000)

    def verdict(self, **known: object) -> Verdict:
        return check_logs(
            messages=self.messages,
            markers=self.markers,
            dead_letters=self.letters,
            **known,  # type: ignore[arg-type]
        )


def kinds(verdict: Verdict) -> set[str]:
    return {problem.kind for problem in verdict.problems}


def test_what_a_batch_ends_is_ended() -> None:
    log = Log()
    log.mark(200, END, *IDS)
    verdict = log.verdict()
    verdict.require_ok()
    assert (verdict.sent, verdict.acked, verdict.late_verdicts) == (6, 6, 0)


def test_what_a_batch_leaves_open_is_lost() -> None:
    log = Log()
    log.mark(200, END, *IDS[:4])
    verdict = log.verdict()
    assert verdict.lost == 2
    assert {problem.place[2] for problem in verdict.problems} == {4, 5}


def test_copies_of_a_batch_count_on_from_their_messages() -> None:
    log = Log((("kafkamq-delivery-count", b"1"),))
    log.pass_time()
    copies = [log.copy(one, 9001) for one in IDS]
    log.mark(9002, replace(END, outcome=Outcome.REDELIVERED), *IDS)
    log.mark(9003, START, *copies)
    log.mark(9004, END, *copies)
    verdict = log.verdict()
    verdict.require_ok()
    assert (verdict.redelivered, verdict.acked) == (6, 6)


def test_a_copy_that_a_batch_does_not_explain_is_seen() -> None:
    log = Log()
    log.mark(200, END, *IDS[1:])
    log.mark(300, replace(END, outcome=Outcome.REDELIVERED), IDS[0])
    copied = log.copy(IDS[0], 299)
    log.mark(400, START, copied)
    log.mark(401, END, copied)
    assert "unexplained" in kinds(log.verdict()), "it was held"


def test_limits_are_judged_on_the_message() -> None:
    """R14: its count; the limit is the START's."""
    log = Log((("kafkamq-delivery-count", b"3"),))
    log.mark(200, END, *IDS[1:])
    log.pass_time()
    log.bury(IDS[0], DeadLetterReason.MAX_DELIVERIES, count=3)
    log.mark(9001, replace(END, outcome=Outcome.DEAD_LETTERED), IDS[0])
    log.verdict().require_ok()
    log.letters.clear()
    log.bury(IDS[0], DeadLetterReason.EXPIRED, count=3)
    assert kinds(log.verdict()) == {"reason"}


def test_two_dead_letters_of_one_message_are_matched_whatever_their_order() -> None:
    """STARTed twice: one END may say expired or the limit, the other one the limit alone."""
    last = replace(START, batches=(), message_id=IDS[0], max_deliveries=1)
    dead = replace(END, message_id=IDS[0], outcome=Outcome.DEAD_LETTERED)
    for letters in (
        (DeadLetterReason.MAX_DELIVERIES, DeadLetterReason.EXPIRED),
        (DeadLetterReason.EXPIRED, DeadLetterReason.MAX_DELIVERIES),
    ):
        log = Log()
        log.markers.clear()
        log.mark(100, START_OF_THE_OTHERS, *IDS[1:])
        log.mark(200, END, *IDS[1:])
        for begin_ms, expires_at_ms in ((300, 9500), (100_000, 0)):
            log.mark_one(begin_ms, replace(last, expires_at_ms=expires_at_ms))
            for after_ms in (5000, 9000, 9900):  # it is due at the second, and expires then
                log.tick(begin_ms + after_ms)
            log.mark_one(begin_ms + 9901, dead)
        for reason in letters:
            log.bury(IDS[0], reason)
        log.verdict().require_ok()


def test_a_payload_is_lost_only_where_the_message_is_gone() -> None:
    log = Log((("kafkamq-delivery-count", b"2"),))
    log.mark(200, END, *IDS[1:])
    log.pass_time()
    log.bury(IDS[0], DeadLetterReason.PAYLOAD_LOST)
    log.mark(9001, replace(END, outcome=Outcome.DEAD_LETTERED), IDS[0])
    assert kinds(log.verdict()) == {"lost"}
    log.verdict(deleted=[(0, 0)]).require_ok()
    del log.messages[0]
    log.verdict().require_ok()


def test_a_payload_that_is_lost_does_not_end_a_lease() -> None:
    log = Log()
    log.mark(200, END, *IDS[1:])
    log.bury(IDS[0], DeadLetterReason.PAYLOAD_LOST)
    log.mark(300, replace(END, outcome=Outcome.DEAD_LETTERED), IDS[0])
    assert kinds(log.verdict(deleted=[(0, 0)])) == {"unexplained"}


def test_a_payload_that_was_lost_excuses_one_delivery() -> None:
    log = Log()
    log.mark(200, END, *IDS[1:])
    log.pass_time()
    log.bury(IDS[0], DeadLetterReason.PAYLOAD_LOST, count=2)
    log.mark(9001, replace(END, outcome=Outcome.DEAD_LETTERED), IDS[0])
    assert "unexplained" in kinds(log.verdict(deleted=[(0, 0)]))


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_start_is_gone_only_where_its_log_was_cut(is_whole: bool) -> None:
    log = Log()
    log.mark(200, END, *IDS[1:])
    log.pass_time()
    log.bury(IDS[0], DeadLetterReason.PAYLOAD_LOST)
    log.mark(9001, replace(END, outcome=Outcome.DEAD_LETTERED), IDS[0])
    log.markers[0] = replace(log.markers[0], value=encode_marker(START_OF_THE_OTHERS))
    if not is_whole:
        log.markers[0] = replace(log.markers[0], value=encode_marker(Marker(MarkerType.TICK)))
        log.markers = [replace(each, offset=each.offset + 7) for each in log.markers]
        log.messages[1:] = []  # theirs are gone with it
    assert kinds(log.verdict()) == ({"lost"} if is_whole else set())


def test_what_was_acked_was_started_before() -> None:
    log = Log()
    log.mark(200, END, *IDS)
    log.verdict().require_ok()
    log.markers[0], log.markers[1] = (
        replace(log.markers[0], value=log.markers[1].value),
        replace(log.markers[1], value=log.markers[0].value),
    )
    verdict = log.verdict(must_be_settled=False)
    assert (kinds(verdict), verdict.lost) == ({"lost"}, 6)


def test_keepalives_of_batches_hold() -> None:
    log = Log()
    keepalive = Marker(MarkerType.KEEPALIVE, redeliver_after_ms=60_000, consumer_id="c")
    log.mark(900, keepalive, *IDS[:3])
    log.pass_time()
    late = replace(END, outcome=Outcome.REDELIVERED)
    copies = [log.copy(one, 9001) for one in IDS]
    log.mark(9002, late, *IDS)
    log.mark(9003, START, *copies)
    log.mark(9004, END, *copies)
    verdict = log.verdict()
    assert {problem.place[2] for problem in verdict.problems} == {0, 1, 2}
    assert kinds(verdict) == {"unexplained"}


def test_histories_of_faults_count_starts_and_ends_of_batches() -> None:
    log = Log()
    log.mark(150, START, *IDS[:2])
    log.mark(200, END, *IDS)
    report = check_run(
        [Event(0.0, "w", "verdict", _verdict(one)) for one in IDS],
        messages=log.messages,
        markers=log.markers,
        dead_letters=[],
        must_be_settled=False,
        judge_logs=True,
    )
    assert report.second_starts == 2
    assert not report.findings
    assert report.verdict.acked == 6


def _verdict(one: MessageId) -> dict[str, object]:
    return {"partition": 0, "offset": one.offset, "outcome": "ack"}


def test_the_demo_follows_batches() -> None:
    recorder = DemoRecorder()
    for one in IDS:
        recorder.message((0, one.offset), is_first=True)
    batches = batches_of(IDS)
    recorder.marker((0, 0), replace(START, batches=batches))
    assert recorder.snapshot(6).held == 6
    recorder.marker((0, 1), replace(END, batches=batches_of(IDS[2:])))
    assert (recorder.snapshot(6).held, recorder.snapshot(6).acked) == (2, 4)
    recorder.marker((0, 2), Marker(MarkerType.KEEPALIVE, consumer_id="c", batches=batches))
    assert recorder.keepalives == 1
