"""What is pushed down, and ack tokens: pure parts, no Spark session."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    In,
    IsNotNull,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from kafkamq.config import ServiceConfig
from kafkamq.errors import StateError
from kafkamq.spark.options import parse_source_options
from kafkamq.spark.queues.acks import AckToken, decode_token
from kafkamq.spark.source.planning import NOTHING_PUSHED, Pushed, push
from kafkamq.spark.source.rows import _chooser
from kafkamq.types import MessageId

SERVICE = ServiceConfig(bootstrap_servers="h:1", namespace="ns")
AT = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
AT_MS = 1_767_225_600_000


def pushed(view: str, *filters: Filter) -> Pushed:
    given_options = {"view": view} if view != "records" else {"topic": "t"}
    return push(filters, parse_source_options(given_options, SERVICE))


def test_what_narrows_is_taken() -> None:
    found = pushed(
        "messages",
        EqualTo(("queue_id",), "a"),
        In(("queue_id",), ("a", "b")),
        In(("partition",), (1, 2)),
        GreaterThan(("offset",), 5),
        LessThanOrEqual(("timestamp",), AT),
        GreaterThan(("timestamp",), AT),
    )
    assert found == Pushed(frozenset("a"), frozenset([1, 2]), 5, 2**63 - 1, AT_MS, AT_MS)


def test_what_a_view_cannot_use_is_left_to_spark() -> None:
    assert pushed("deliveries", GreaterThan(("started_at",), AT)) == NOTHING_PUSHED
    assert pushed("deliveries", GreaterThan(("ended_at",), AT)) == NOTHING_PUSHED
    assert pushed("deliveries", EqualTo(("offset",), 3)) == NOTHING_PUSHED, "of the message"
    assert pushed("deliveries", LessThanOrEqual(("ended_at",), AT)).max_ms == AT_MS
    assert pushed("in_flight", EqualTo(("marker_partition",), 3)).partitions == {3}
    assert pushed("markers", EqualTo(("partition",), 3)) == NOTHING_PUSHED, "of the message"
    assert pushed("records", LessThanOrEqual(("timestamp",), AT)) == NOTHING_PUSHED
    for each in (
        Not(EqualTo(("partition",), 1)),
        IsNotNull(("partition",)),
        StringStartsWith(("queue_id",), "a"),
        EqualTo(("headers", "key"), "a"),
    ):
        assert pushed("messages", each) == NOTHING_PUSHED


@given(
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**63 - 1),
    st.sampled_from([b"", b"0123456789abcdef"]),
    st.integers(1, 2**31 - 1),
    st.integers(-1, 2**63 - 1),
)
def test_a_token_reads_back(
    partition: int, offset: int, topic_id: bytes, count: int, start: int
) -> None:
    one = MessageId(partition, offset, topic_id, 3)
    token = AckToken(one, 7, "abc", count, 60_000, start, 1_700_000_000_000)
    assert decode_token(token.encode()) == token


@pytest.mark.parametrize(
    "text", [None, "", "1/2/3", "2/0/0/0//0/c/1/1/1/1", "1/x/0/0//0/c/1/1/1/1"]
)
def test_what_is_no_token_is_refused(text: str | None) -> None:
    with pytest.raises(StateError, match="ack_token"):
        decode_token(text)


@pytest.mark.parametrize(
    ("wanted", "keys"),
    [
        ("", [None, b"\0user"]),  # a record without a key has queue_id ''
        ("a", [b"a", b"a\0user"]),
        ("a\0b", []),  # no queue's id, and no error either
        ("\N{REPLACEMENT CHARACTER}", [b"\xff", "\N{REPLACEMENT CHARACTER}".encode()]),
    ],
)
def test_no_queue_id_that_a_row_shows_is_lost(wanted: str, keys: list[bytes | None]) -> None:
    options = parse_source_options({"view": "messages"}, SERVICE)
    keeps = _chooser(options, pushed("messages", EqualTo(("queue_id",), wanted)))
    assert [key for key in keys if keeps is not None and not keeps(key)] == []
