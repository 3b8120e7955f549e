"""Records that must be written: refused, too large, or without a broker to write them to."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import ClassVar

import pytest
from confluent_kafka import KafkaError
from tests.waiting import within

from kafkamq import BrokerError
from kafkamq.errors import KafkaMQError
from kafkamq.queue import sure_writer
from kafkamq.queue.sure_writer import Form, SureWriter

Answer = KafkaError | KafkaMQError | None


class Sender:
    """Answers each record as it is told."""

    answers: ClassVar[list[Answer]] = []
    written: ClassVar[list[bytes | None]] = []
    reported = 0

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
    writer = SureWriter(Sender, "a letter")  # type: ignore[arg-type]
    writer.write(form).last.result(within(30))
    assert sender.written == [b"2"]
    writer.close(1.0)


def test_what_is_not_written_by_the_end_has_failed(sender: type[Sender]) -> None:
    sender.answers = [KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)] * 100_000
    writer = SureWriter(Sender, "a letter")  # type: ignore[arg-type]
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

    writer = SureWriter(Sender, "a letter")  # type: ignore[arg-type]
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
    writer = SureWriter(Sender, "a letter")  # type: ignore[arg-type]
    written = writer.write(form)
    assert not written.last.done()
    connecting.set_result(None)
    written.last.result(within(30))
    writer.close(1.0)


def test_the_first_answer_is_told_whatever_comes_later(sender: type[Sender]) -> None:
    """Of a record that is too large its smaller form is the answer."""
    refusal = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    sender.answers = [KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), refusal]
    writer = SureWriter(Sender, "a letter")  # type: ignore[arg-type]
    written = writer.write(form)
    with pytest.raises(BrokerError, match="TOPIC_AUTHORIZATION_FAILED"):
        written.first.result(within(30))
    written.last.result(within(30))
    other = writer.write(form)
    other.first.result(within(30))
    assert other.last.done()
    writer.close(1.0)
