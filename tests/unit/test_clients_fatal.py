"""librdkafka's fatal errors: raised out of poll and flush, at times wrapped by Python."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from kafkamq.errors import BrokerError
from kafkamq.transport.errors import ErrorWatch, is_fatal, kafka_error, raised_error


def wrapped(cause: BaseException | None) -> SystemError:
    error = SystemError("<function report> returned a result with an exception set")
    error.__cause__ = cause
    return error


def test_the_error_is_found_also_behind_a_callback() -> None:
    error = KafkaException(KafkaError(KafkaError._FATAL, "gone"))
    assert raised_error(error) is error
    assert raised_error(wrapped(error)) is error


def test_an_error_that_a_report_lost_is_one_all_the_same() -> None:
    lost = SystemError("<method 'flush' ...> returned NULL without setting an exception")
    assert kafka_error(raised_error(lost)).code() == KafkaError._FATAL


@pytest.mark.parametrize("cause", [None, ValueError("of a callback")])
def test_another_system_error_stays_one(cause: BaseException | None) -> None:
    with pytest.raises(SystemError):
        raised_error(wrapped(cause))


def test_missing_rights_are_not_waited_for() -> None:
    assert is_fatal(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED))
    assert is_fatal(KafkaError(KafkaError._AUTHENTICATION))
    assert not is_fatal(KafkaError(KafkaError._TRANSPORT))


def test_a_refused_certificate_is_no_broken_connection() -> None:
    watch = ErrorWatch("broker:9093")
    watch(KafkaError(KafkaError._TRANSPORT, "Disconnected"))
    watch.check("connecting")
    watch(KafkaError(KafkaError._TRANSPORT, "SSL routines::ssl/tls alert bad certificate"))
    with pytest.raises(BrokerError, match="certificate"):
        watch.check("connecting")
