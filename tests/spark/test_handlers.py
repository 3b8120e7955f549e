"""``map_messages`` by itself: verdicts, order by key, coroutines; no Kafka."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tests.waiting import within

from kafkamq.errors import ConfigError
from kafkamq.spark import map_messages
from kafkamq.types import Ack, Nack, Reject

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

    from kafkamq.spark.handlers import StreamMessage

pytestmark = pytest.mark.spark

SCHEMA = (
    "ack_token STRING, value BINARY, user_key BINARY, id STRING, queue_id STRING, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>, delivery_count INT, timestamp TIMESTAMP"
)


def frame(spark: SparkSession, rows: list[tuple[bytes, bytes | None]]) -> DataFrame:
    full = [
        (f"t{n}", value, key, f"id-{n}", "emails", [("a", b"1"), ("a", b"2")], 3, None)
        for n, (value, key) in enumerate(rows)
    ]
    return spark.createDataFrame(full, SCHEMA).coalesce(1)


def run(result: DataFrame) -> list[Row]:
    return result.selectExpr("*").orderBy("id").collect()


def test_what_a_handler_returns(spark: SparkSession) -> None:
    def handler(message: StreamMessage) -> object:
        assert message.headers == {"a": b"2"}
        assert (message.queue_id, message.delivery_count) == ("emails", 3)
        returned: dict[bytes | None, object] = {
            b"none": None, b"ack": Ack(), b"bytes": b"out", b"text": "é",
            b"nack": Nack(1.5, "later"), b"reject": Reject("bad"), b"wrong": 7,
        }  # fmt: skip
        return returned[message.payload]

    values = [b"none", b"ack", b"bytes", b"text", b"nack", b"reject", b"wrong", b"unknown"]
    rows = run(map_messages(frame(spark, [(value, None) for value in values]), handler))
    assert [(row.verdict, row.delay, row.result) for row in rows] == [
        ("ack", None, None), ("ack", None, None), ("ack", None, b"out"),
        ("ack", None, "é".encode()), ("nack", 1.5, None), ("reject", None, None),
        ("nack", None, None), ("nack", None, None),
    ]  # fmt: skip
    assert [row.reason for row in rows[4:6]] == ["later", "bad"]
    assert rows[6].reason.startswith("TypeError: the handler returned a int")
    assert rows[7].reason == "KeyError: b'unknown'"


def test_a_keys_messages_run_in_order_and_others_beside_them(spark: SparkSession) -> None:
    def handler(message: StreamMessage) -> bytes:
        begin = time.monotonic_ns()
        time.sleep(0.1)
        return b"%d %d %d" % (begin, time.monotonic_ns(), threading.get_ident())

    rows = [(b"%d" % n, b"k%d" % (n % 3)) for n in range(12)]
    found = run(map_messages(frame(spark, rows), handler, concurrency=3))
    spans: dict[bytes, list[tuple[int, int]]] = {}
    for row in sorted(found, key=lambda row: int(row.value)):
        begin, end, _ = map(int, row.result.split())
        spans.setdefault(row.user_key, []).append((begin, end))
    for own in spans.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(own))
    firsts = [own[0] for own in spans.values()]
    assert max(begin for begin, _ in firsts) < min(own[-1][1] for own in spans.values())


def test_coroutines_are_in_flight_together(spark: SparkSession) -> None:
    """300 calls that all wait for each other: they can only end if all have begun."""

    def make() -> object:
        state: dict[str, asyncio.Event | int] = {"begun": 0}

        async def handler(message: StreamMessage) -> None:
            event = state.setdefault("event", asyncio.Event())
            assert isinstance(event, asyncio.Event)
            assert isinstance(state["begun"], int)
            state["begun"] += 1
            if state["begun"] == 300:
                event.set()
            await asyncio.wait_for(event.wait(), within(60))

        return handler

    rows: list[tuple[bytes, bytes | None]] = [(b"x", None)] * 300
    found = run(map_messages(frame(spark, rows), make(), concurrency=300))  # type: ignore[arg-type]
    assert [row.verdict for row in found] == ["ack"] * 300


def test_an_object_whose_call_is_a_coroutine(spark: SparkSession) -> None:
    class Handler:
        async def __call__(self, message: StreamMessage) -> bytes:
            return b"done"

    (found,) = run(map_messages(frame(spark, [(b"x", None)]), Handler()))
    assert (found.verdict, found.result) == ("ack", b"done")


def test_wrong_calls(spark: SparkSession) -> None:
    rows = frame(spark, [(b"x", None)])
    with pytest.raises(ConfigError, match="concurrency is 0"):
        map_messages(rows, lambda message: None, concurrency=0)
    with pytest.raises(ConfigError, match="verdict is taken"):
        map_messages(rows.selectExpr("*", "'ack' AS verdict"), lambda message: None)
