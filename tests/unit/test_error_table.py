"""The one table of Kafka's errors: what each code means, and that nobody else classifies them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException

import kafkamq
from kafkamq.errors import BrokerError, DataLossError, DeadlineExceededError, FencedError
from kafkamq.transport.errors import (
    Meaning,
    broker_error,
    has_ended,
    is_fatal,
    is_retriable,
    meaning,
)

RETRIABLE = {
    "_TRANSPORT": Meaning.BROKER_GONE,
    "_ALL_BROKERS_DOWN": Meaning.BROKER_GONE,
    "_DESTROY_BROKER": Meaning.BROKER_GONE,
    "_TIMED_OUT": Meaning.TIMED_OUT,
    "_TIMED_OUT_QUEUE": Meaning.TIMED_OUT,
    "_MSG_TIMED_OUT": Meaning.RETRIABLE,
    "_WAIT_COORD": Meaning.RETRIABLE,
    "_WAIT_CACHE": Meaning.RETRIABLE,
    "_RESOLVE": Meaning.RETRIABLE,
    "_MAX_POLL_EXCEEDED": Meaning.RETRIABLE,
    "_NOENT": Meaning.RETRIABLE,
    "LEADER_NOT_AVAILABLE": Meaning.RETRIABLE,
    "NOT_LEADER_FOR_PARTITION": Meaning.RETRIABLE,
    "REQUEST_TIMED_OUT": Meaning.RETRIABLE,
    "COORDINATOR_LOAD_IN_PROGRESS": Meaning.RETRIABLE,
    "COORDINATOR_NOT_AVAILABLE": Meaning.RETRIABLE,
    "NOT_COORDINATOR": Meaning.RETRIABLE,
    "NOT_ENOUGH_REPLICAS": Meaning.RETRIABLE,
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND": Meaning.RETRIABLE,
    "CONCURRENT_TRANSACTIONS": Meaning.RETRIABLE,
    "UNSTABLE_OFFSET_COMMIT": Meaning.RETRIABLE,
    "NETWORK_EXCEPTION": Meaning.RETRIABLE,
    "FENCED_LEADER_EPOCH": Meaning.RETRIABLE,
    "UNKNOWN_LEADER_EPOCH": Meaning.RETRIABLE,
    "OFFSET_NOT_AVAILABLE": Meaning.RETRIABLE,
    "NOT_CONTROLLER": Meaning.RETRIABLE,
    "KAFKA_STORAGE_ERROR": Meaning.RETRIABLE,
    "BROKER_NOT_AVAILABLE": Meaning.RETRIABLE,
    "REBALANCE_IN_PROGRESS": Meaning.REBALANCING,
    "ILLEGAL_GENERATION": Meaning.STALE_MEMBER,
    "STALE_MEMBER_EPOCH": Meaning.STALE_MEMBER,
    "UNKNOWN_MEMBER_ID": Meaning.NO_MEMBER,
    "FENCED_MEMBER_EPOCH": Meaning.NO_MEMBER,
    "_ASSIGNMENT_LOST": Meaning.NO_MEMBER,
    "_QUEUE_FULL": Meaning.QUEUE_FULL,
    "_PURGE_QUEUE": Meaning.PURGED,
    "_PURGE_INFLIGHT": Meaning.PURGED,
    "_PARTITION_EOF": Meaning.LOG_END,
}
REFUSED = {
    "_AUTHENTICATION": Meaning.CREDENTIALS,
    "SASL_AUTHENTICATION_FAILED": Meaning.CREDENTIALS,
    "_SSL": Meaning.CREDENTIALS,
    "TOPIC_AUTHORIZATION_FAILED": Meaning.FORBIDDEN,
    "GROUP_AUTHORIZATION_FAILED": Meaning.FORBIDDEN,
    "CLUSTER_AUTHORIZATION_FAILED": Meaning.FORBIDDEN,
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": Meaning.FORBIDDEN,
}
NEITHER = {
    "_AUTO_OFFSET_RESET": Meaning.OUTSIDE_LOG,
    "OFFSET_OUT_OF_RANGE": Meaning.OUTSIDE_LOG,
    "_UNKNOWN_TOPIC": Meaning.NO_TOPIC,
    "UNKNOWN_TOPIC_OR_PART": Meaning.NO_TOPIC,
    "_UNKNOWN_PARTITION": Meaning.NO_PARTITION,
    "_FENCED": Meaning.FENCED,
    "PRODUCER_FENCED": Meaning.FENCED,
    "INVALID_PRODUCER_EPOCH": Meaning.FENCED,
    "FENCED_INSTANCE_ID": Meaning.FENCED,
    "MSG_SIZE_TOO_LARGE": Meaning.TOO_LARGE,
    "RECORD_LIST_TOO_LARGE": Meaning.TOO_LARGE,
    "INVALID_RECORD": Meaning.INVALID_RECORD,
    "_INVALID_DIFFERENT_RECORD": Meaning.OTHERS_FAULT,
    "OFFSET_METADATA_TOO_LARGE": Meaning.METADATA_TOO_LARGE,
    "TOPIC_ALREADY_EXISTS": Meaning.EXISTS,
    "GROUP_ID_NOT_FOUND": Meaning.NO_GROUP,
    "GROUP_MAX_SIZE_REACHED": Meaning.GROUP_FULL,
    "UNSUPPORTED_VERSION": Meaning.UNSUPPORTED,
    "_UNSUPPORTED_FEATURE": Meaning.UNSUPPORTED,
}
EXPECTED = {**RETRIABLE, **REFUSED, **NEITHER, "_FATAL": Meaning.FATAL}
_EVERY_NAME = [
    name for name in dir(KafkaError) if re.fullmatch(r"_?[A-Z][A-Z0-9_]+", name) and name != "_FAIL"
]
_SRC = Path(kafkamq.__file__).parent
_YARDSTICKS = ("dev",)  # they must not share the code that they judge


def _named(name: str) -> KafkaError:
    return KafkaError(getattr(KafkaError, name))


@pytest.mark.parametrize("name", _EVERY_NAME)
def test_every_code_has_the_class_that_is_written_here(name: str) -> None:
    error = _named(name)
    wanted = EXPECTED.get(error.name(), Meaning.OTHER)
    assert meaning(error) is wanted
    assert meaning(KafkaException(error)) is wanted
    assert is_retriable(error) is (error.name() in RETRIABLE)
    assert is_fatal(error) is (error.name() in REFUSED or name == "_FATAL")
    assert has_ended(error) is (name == "_FATAL")


@pytest.mark.parametrize("name", _EVERY_NAME)
def test_our_error_says_what_kafkas_does(name: str) -> None:
    error = _named(name)
    ours = broker_error(error, "testing")
    assert meaning(ours) is meaning(error)
    assert is_retriable(ours) is is_retriable(error)
    assert isinstance(ours, FencedError) is (meaning(error) is Meaning.FENCED)
    assert isinstance(ours, DataLossError) is (meaning(error) is Meaning.OUTSIDE_LOG)
    if meaning(error) is Meaning.TIMED_OUT:
        assert isinstance(ours, DeadlineExceededError)
    else:
        assert isinstance(ours, BrokerError)
        assert ours.code == error.name()


def test_the_table_names_what_confluent_kafka_names() -> None:
    assert set(EXPECTED) <= {_named(name).name() for name in _EVERY_NAME}


def test_what_ended_the_client_is_not_retriable_whatever_its_code() -> None:
    error = KafkaError(KafkaError._TRANSPORT, "ended", True, True)
    assert is_fatal(error)
    assert has_ended(error)
    assert not is_retriable(error)


def test_librdkafkas_own_word_for_retriable_counts() -> None:
    assert is_retriable(KafkaError(KafkaError._STATE, "", False, True))


def test_a_topic_that_is_known_to_be_there_may_be_missing_for_a_while() -> None:
    for name in ("_UNKNOWN_TOPIC", "UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_PARTITION"):
        assert not is_retriable(_named(name))
        assert is_retriable(_named(name), or_missing=True)


def test_other_errors_of_ours_do_not_pass() -> None:
    assert is_retriable(DeadlineExceededError("late"))
    assert is_retriable(BrokerError("aborted", code="ABORTED", is_retriable=True))
    for error in (BrokerError("no"), ValueError("no")):
        assert not is_retriable(error)
        assert meaning(error) is Meaning.OTHER


def test_nobody_but_transport_classifies_kafkas_codes() -> None:
    """Neither by number nor by name; who makes such an error (``code=``) may name it."""
    named = "|".join(EXPECTED)
    pattern = re.compile(rf'KafkaError\.[A-Z_]|(?<!code=)"(?:{named})"')
    found = [
        f"{path.relative_to(_SRC)}:{number}: {line.strip()}"
        for path in sorted(_SRC.rglob("*.py"))
        if not str(path.relative_to(_SRC)).startswith(("transport/", *_YARDSTICKS))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []
