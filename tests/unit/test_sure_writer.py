"""Records that must be written: refused, too large, or without a broker to write them to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from confluent_kafka import KafkaError
from tests.waiting import wait_until, within

from kafkamq import BrokerError
from kafkamq.errors import KafkaMQError
from kafkamq.queue import sure_writer
from kafkamq.queue.sure_writer import Form, KafkaOutlet, SureWriter

Answer = KafkaError | KafkaMQError | None


class Sender:
    """Answers each record as it is told."""

    answers: ClassVar[list[Answer]] = []
    written: ClassVar[list[bytes | None]] = []
    reported = 0
    report_s = 3600.0

    def __init__(self) -> None:
        self.check("connecting")

    def check(self, _: str) -> None: ...

    def produce(self, topic, value, key, partition, headers, reported) -> None:
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, KafkaMQError):
            raise answer
        if answer is None:
            self.written.append(value)
        reported(answer, SimpleNamespace())

    def failed(self, error: KafkaError) -> KafkaError:
        return error

    def close(self, timeout_s: float) -> None: ...


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> type[Sender]:
    monkeypatch.setattr(sure_writer, "FIRST_PAUSE_S", 0.001)
    Sender.answers, Sender.written = [], []
    return Sender


def writer_of(sender: type[Sender]) -> SureWriter:
    what = "a letter"
    return SureWriter(lambda: KafkaOutlet(sender(), what), what)  # type: ignore[arg-type]


def form(refusals: int) -> Form:
    return Form("t", -1, b"k", b"%d" % refusals, ())


def test_refusals_are_met_by_waiting_and_size_by_less(sender: type[Sender]) -> None:
    sender.answers = [
        BrokerError("no broker", code="_TRANSPORT"),
        KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED),
        KafkaError(KafkaError.MSG_SIZE_TOO_LARGE),
        KafkaError(KafkaError.NOT_ENOUGH_REPLICAS),
        BrokerError("too large here", code="MSG_SIZE_TOO_LARGE"),
    ]
    writer = writer_of(Sender)
    writer.write(form).last.result(within(30))
    assert sender.written == [b"2"]
    writer.close(1.0)


def test_what_is_not_written_by_the_end_has_failed(sender: type[Sender]) -> None:
    sender.answers = [KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)] * 100_000
    writer = writer_of(Sender)
    refused, given_up = writer.write(form), writer.write(form)
    given_up.last.cancel()
    writer.close(0.05)
    with pytest.raises(BrokerError, match="TOPIC_AUTHORIZATION_FAILED"):
        refused.last.result(0)
    with pytest.raises(BrokerError):
        writer.write(form).last.result(0)


def test_a_record_that_cannot_be_made_holds_up_no_other(sender: type[Sender]) -> None:
    def broken(refusals: int) -> Form:
        raise UnicodeEncodeError("utf-8", "\udc80", 0, 1, "surrogates not allowed")

    writer = writer_of(Sender)
    failed, fine = writer.write(broken), writer.write(form)
    fine.last.result(within(30))
    assert not failed.last.done()
    writer.close(0.05)
    with pytest.raises(KafkaMQError, match="surrogates not allowed"):
        failed.last.result(0)


def test_a_write_waits_for_nothing(sender: type[Sender], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a connection either: it is called on event loops."""
    connecting: Future[None] = Future()
    monkeypatch.setattr(Sender, "check", lambda *_: connecting.result(within(30)))
    writer = writer_of(Sender)
    written = writer.write(form)
    assert not written.last.done()
    connecting.set_result(None)
    written.last.result(within(30))
    writer.close(1.0)


def test_the_first_answer_is_told_whatever_comes_later(sender: type[Sender]) -> None:
    """Of a record that is too large its smaller form is the answer."""
    refusal = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    sender.answers = [KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), refusal]
    writer = writer_of(Sender)
    written = writer.write(form)
    with pytest.raises(BrokerError, match="TOPIC_AUTHORIZATION_FAILED"):
        written.first.result(within(30))
    written.last.result(within(30))
    other = writer.write(form)
    other.first.result(within(30))
    assert other.last.done()
    writer.close(1.0)


def test_behind_a_refusal_one_record_asks_for_all(
    sender: type[Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have their answer at once: a handler's thread would wait for it."""
    monkeypatch.setattr(sure_writer, "FIRST_PAUSE_S", 3600.0)
    refusal = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    sender.answers = [refusal]
    writer = writer_of(sender)
    refused = writer.write(form)
    assert isinstance(refused.first.exception(within(30)), BrokerError)
    behind = [writer.write(form) for _ in range(100)]
    assert all(isinstance(each.first.exception(0), BrokerError) for each in behind)
    assert sender.written == []
    writer.close(0.0)
    assert sender.written == []


def test_what_waits_is_written_when_the_refusal_is_over(sender: type[Sender]) -> None:
    """And asks fewer times than there are records until then."""
    refusal = KafkaError(KafkaError.NOT_ENOUGH_REPLICAS)
    sender.answers = [refusal] * 5
    writer = writer_of(sender)
    first = writer.write(form)
    assert isinstance(first.first.exception(within(30)), BrokerError)
    for each in [writer.write(form) for _ in range(100)]:
        each.last.result(within(30))
    first.last.result(within(30))
    assert (len(sender.written), sender.answers) == (101, [])
    writer.write(form).first.result(within(30))  # nothing is behind a refusal any more
    writer.close(1.0)


def test_what_is_refused_for_itself_holds_up_no_other_record(
    sender: type[Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sure_writer, "FIRST_PAUSE_S", 3600.0)
    sender.answers = [KafkaError(KafkaError.INVALID_RECORD)]
    writer = writer_of(sender)
    refused = writer.write(form)
    assert isinstance(refused.first.exception(within(30)), BrokerError)
    writer.write(form).first.result(within(30))
    assert not refused.last.done()
    writer.close(0.0)


def test_a_record_that_nobody_wants_any_more_is_not_written(sender: type[Sender]) -> None:
    """Whether it is wanted is asked before each try, and when it waits behind others."""
    sender.answers = [KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)]
    writer = writer_of(sender)
    refused = writer.write(form, lambda: bool(sender.answers))  # until it is refused
    assert isinstance(refused.first.exception(within(30)), BrokerError)
    never = writer.write(form, lambda: False)  # also not for the first time
    writer.write(form).last.result(within(30))
    assert refused.last.cancelled()
    assert never.last.cancelled()
    assert isinstance(never.first.exception(0), KafkaMQError)
    assert len(sender.written) == 1
    writer.close(1.0)


def test_a_record_whose_report_never_comes_is_written_again(
    sender: type[Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the one that asks for all behind a refusal: they waited until the end."""
    silent: list[Callable[..., None]] = []
    produce = sender.produce

    def lose(self: Sender, *record: Any) -> None:
        if len(silent) < 2 and not self.answers:
            silent.append(record[-1])
        else:
            produce(self, *record)

    monkeypatch.setattr(sure_writer, "MAX_PAUSE_S", 0.01)
    monkeypatch.setattr(sender, "produce", lose)
    monkeypatch.setattr(sender, "report_s", 0.01)
    sender.answers = [KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)]
    writer = writer_of(sender)
    first, behind = writer.write(form), writer.write(form)
    first.last.result(within(30))
    behind.last.result(within(30))
    assert (len(silent), len(sender.written)) == (2, 2)
    for reported in silent:  # they come after all
        reported(KafkaError(KafkaError._MSG_TIMED_OUT), SimpleNamespace())
    writer.write(form).first.result(within(30))
    assert len(sender.written) == 3
    writer.close(1.0)


def test_a_late_answer_to_an_earlier_try_says_nothing_of_the_present_one(
    sender: type[Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sure_writer, "MAX_PAUSE_S", 0.01)
    outlet = Silent()
    writer = SureWriter(lambda: outlet, "a letter")
    letter = writer.write(form)
    wait_until(lambda: len(outlet.tries) == 2, what="the second try")
    outlet.tries[0](BrokerError("too late", code="_MSG_TIMED_OUT"))
    writer.close(0.0)
    assert "no report" in str(letter.last.exception(0)), "what its first try ended with"


class Silent:
    """An outlet that answers when the test says so; only the first report is awaited briefly."""

    def __init__(self) -> None:
        self.tries: list[Callable[[KafkaMQError | None], None]] = []

    @property
    def report_s(self) -> float:
        return 3600.0 if self.tries else 0.01

    def send(self, _: Form, told: Callable[[KafkaMQError | None], None]) -> None:
        self.tries.append(told)

    def close(self, timeout_s: float) -> None: ...


def test_what_nobody_wants_is_forgotten_where_it_waits(
    sender: type[Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sure_writer, "FIRST_PAUSE_S", 3600.0)
    sender.answers = [KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)]
    writer, wanted = writer_of(sender), ["gone", "left"]
    first = writer.write(form, lambda: "gone" in wanted)
    assert isinstance(first.first.exception(within(30)), BrokerError)
    gone, left = writer.write(form, lambda: "gone" in wanted), writer.write(form, lambda: wanted)
    wanted.remove("gone")
    writer.prune()
    assert gone.last.cancelled()
    assert first.last.cancelled()
    assert not left.last.done()
    wanted.clear()
    writer.prune()
    writer.write(form).last.result(within(30))  # nothing is behind a refusal any more
    writer.close(1.0)


def test_a_record_that_does_not_say_whether_it_is_wanted_holds_up_no_other(
    sender: type[Sender], caplog: pytest.LogCaptureFixture
) -> None:
    """The writer's thread ended in silence, and nothing was written any more."""
    caplog.set_level(logging.DEBUG, sure_writer.__name__)
    answers: list[bool] = []

    def is_wanted() -> bool:
        if not answers:
            raise RuntimeError("the partition's state is being replaced")
        return answers[0]

    writer = writer_of(sender)
    unsure, fine = writer.write(form, is_wanted), writer.write(form)
    fine.last.result(within(30))
    with pytest.raises(KafkaMQError, match="state is being replaced"):
        unsure.first.result(within(30))
    writer.prune()
    assert not unsure.last.done(), "nobody knows that it is not wanted"
    (told,) = (each for each in caplog.records if each.levelno == logging.DEBUG)
    assert told.exc_info is not None
    assert "state is being replaced" in str(told.exc_info[1])
    answers.append(True)
    unsure.last.result(within(30))
    assert len(sender.written) == 2
    writer.close(1.0)
