"""Kafka's errors as ours, and the callback that keeps what no call is told."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
from confluent_kafka import KafkaError, KafkaException

from kafkamq.errors import BrokerError, DataLossError, DeadlineExceededError, FencedError
from kafkamq.transport.errors import ErrorWatch, broker_error, kafka_error


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError._FENCED, FencedError),
        (KafkaError.PRODUCER_FENCED, FencedError),
        (KafkaError.INVALID_PRODUCER_EPOCH, FencedError),
        (KafkaError._TIMED_OUT, DeadlineExceededError),
        (KafkaError._AUTO_OFFSET_RESET, DataLossError),
        (KafkaError.OFFSET_OUT_OF_RANGE, DataLossError),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, BrokerError),
    ],
)
def test_kinds(code: int, kind: type[Exception]) -> None:
    assert type(broker_error(KafkaError(code), "doing it")) is kind
    assert type(broker_error(KafkaException(KafkaError(code)), "doing it")) is kind


@pytest.mark.parametrize(
    ("code", "is_retriable"),
    [
        (KafkaError.NOT_ENOUGH_REPLICAS, True),
        (KafkaError.COORDINATOR_NOT_AVAILABLE, True),
        (KafkaError._ALL_BROKERS_DOWN, True),
        (KafkaError._DESTROY_BROKER, True),
        (KafkaError._WAIT_COORD, True),
        (KafkaError._AUTHENTICATION, False),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, False),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, False),
        (KafkaError.MSG_SIZE_TOO_LARGE, False),
    ],
)
def test_what_may_be_repeated(code: int, is_retriable: bool) -> None:
    error = broker_error(KafkaError(code), "doing it")
    assert isinstance(error, BrokerError)
    assert error.is_retriable is is_retriable
    assert error.code == KafkaError(code).name()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (KafkaError.UNKNOWN_TOPIC_OR_PART, "kafkamq create"),
        (KafkaError._UNKNOWN_TOPIC, "kafkamq create"),
        (KafkaError._AUTHENTICATION, "sasl.username"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, "grant"),
        (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "kafkamq."),
        (KafkaError.UNSUPPORTED_VERSION, "2.8"),
        (KafkaError._RESOLVE, "host names"),
    ],
)
def test_the_text_says_what_to_do(code: int, said: str) -> None:
    text = str(broker_error(KafkaError(code), "reading topic x"))
    assert text.startswith("reading topic x failed")
    assert said in text


def test_an_exception_without_a_kafka_error() -> None:
    assert kafka_error(KafkaException("odd")).code() == KafkaError._FAIL


@pytest.mark.parametrize("code", [KafkaError._AUTHENTICATION, KafkaError._SSL])
def test_wrong_credentials_are_raised_at_once(code: int) -> None:
    watch = ErrorWatch("host:9092")
    watch.check("doing it")
    watch(KafkaError(code, "said by the broker"))
    with pytest.raises(BrokerError, match=r"host:9092.*said by the broker"):
        watch.check("doing it")


def test_a_fatal_error_is_raised_at_once() -> None:
    watch = ErrorWatch("host:9092")
    watch(KafkaError(KafkaError._FENCED, "gone", True))
    with pytest.raises(FencedError):
        watch.check("doing it")


def test_a_refusal_that_is_not_repeated_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by review: one refusal (a broker that had just started) ended a consumer forever."""
    watch = ErrorWatch("host:9092")
    refusal = KafkaError(KafkaError.SASL_AUTHENTICATION_FAILED, "no such user")
    watch(refusal)
    watch.forget()  # a call succeeded
    watch.check("doing it")
    watch(refusal)
    said_s = time.monotonic()
    for after_s, is_over in ((59.0, False), (61.0, True)):
        monkeypatch.setattr(time, "monotonic", lambda now=said_s + after_s: now)
        with nullcontext() if is_over else pytest.raises(BrokerError):
            watch.check("doing it")


@pytest.mark.parametrize(
    "code", [KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE]
)
def test_a_broker_that_is_away_is_only_named_at_the_bound(code: int) -> None:
    watch = ErrorWatch("host:9092")
    watch(KafkaError(code, "connection refused"))
    watch.check("doing it")
    error = watch.deadline("doing it", 5)
    assert "doing it did not end within 5 s at host:9092: no broker answers" in str(error)
    watch.forget()
    assert "no broker answers" not in str(watch.deadline("doing it", 5))


@pytest.mark.parametrize("more", ["", ", 1 identical error(s) suppressed"])
def test_what_librdkafka_says_of_itself_is_not_repeated(more: str) -> None:
    watch = ErrorWatch("host:9092")
    told = "host:9092/bootstrap: Connect to host:9092 failed: Connection refused"
    watch(KafkaError(KafkaError._TRANSPORT, f"{told} (after 0ms in state CONNECT{more})"))
    assert "(Connect to host:9092 failed: Connection refused);" in str(watch.silence())
