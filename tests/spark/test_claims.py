"""Spark reads what its driver holds, and no more; the coordination log as a table."""

from __future__ import annotations

import logging
import math
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
from pyspark.errors import StreamingQueryException
from tests.integration.claim_logs import ClaimTopics
from tests.waiting import wait_until, within

from kafkamq.claims import Admin
from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, LeaseLostError
from kafkamq.spark.claims import claimed_assign, coordination_frame
from kafkamq.spark.formats import register_source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.mark.slow
def test_a_query_reads_what_is_held_and_stops_when_it_is_lost(
    spark: SparkSession, bootstrap: str, tmp_path: Path
) -> None:
    topics = ClaimTopics(bootstrap, partitions=3)
    topics.fill(30)
    config = ServiceConfig(bootstrap_servers=bootstrap)
    name = register_source(spark, config, name="claimed")
    with topics.cluster() as cluster:
        hold = cluster.member("driver", topics.group).hold(
            topics.work, claims="greedy", max_claims=2
        )
        with pytest.raises(LeaseLostError, match="wait for claims"):
            claimed_assign(hold, "no-such-topic")
        hold.wait_for_claims(2)
        assign = claimed_assign(hold, topics.work)
        held = set(assign.tokens)
        assert len(held) == 2
        frame = spark.readStream.format(name).options(**assign.options).load()
        query = (
            frame.writeStream.format("memory")
            .queryName("claimed")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )
        with assign.guard(query) as guard:
            wait_until(
                lambda: spark.table("claimed").count() == 20, timeout_s=120.0
            )  # a first batch
            read = {row.partition for row in spark.table("claimed").select("partition").collect()}
            assert read == held
            wait_until(lambda: set(hold.positions().values()) == {10})
            assert not guard.wait(timedelta(milliseconds=100))
            with pytest.raises(ConfigError, match="timeout is nan"):
                guard.wait(math.nan)
            hold.flush()
            Admin(cluster, topics.group).pause(60.0)  # whatever ends a claim
            with pytest.raises(LeaseLostError, match="are lost"):
                guard.wait(within(60.0))
        assert not query.isActive
        seen = cluster.member("o", topics.group)
        assert {seen.claim_of(topics.work, number).offset for number in held} == {10}


def test_the_log_as_a_table(spark: SparkSession, bootstrap: str) -> None:
    topics = ClaimTopics(bootstrap)
    topics.fill(4)
    with (
        topics.cluster() as cluster,
        cluster.member("a", topics.group).consumer(topics.work, claims="greedy") as consumer,
    ):
        consumer.wait_for_claims(2)
    now = int(time.time())
    place = f"{topics.group}/{topics.work}/0"
    topics.write("nonsense")
    for number in range(2):  # in turn: each believes that it owns the partition
        topics.write(f"Heartbeat/1/{now}/i1/x/{place}/{number}")
        topics.write(f"Heartbeat/1/{now}/i2/y/{place}/{number}")
    frame = coordination_frame(
        spark,
        ServiceConfig(bootstrap_servers=bootstrap),
        topic=topics.coordination,
        heartbeat_interval=topics.interval_s,
    )
    rows = frame.orderBy("coordination_offset").collect()
    events = [row.event for row in rows if row.partition == 0 and row.client == "a"]
    assert events[0] == "claimed"
    assert events[-1] == "released"
    assert set(events[1:-1]) == {"renewed"}
    owner = next(row for row in rows if row.event == "claimed" and row.partition == 0)
    assert (owner.owner_client, owner.token) == ("a", owner.coordination_offset)
    assert [row.error for row in rows if row.type is None] == [
        "the type of a coordination record is unknown"
    ]
    assert [row.client for row in rows if row.is_dual] == ["x", "y"]
    config = ServiceConfig(bootstrap_servers=bootstrap)
    for interval in (0, math.nan):
        with pytest.raises(ConfigError, match=f"heartbeat_interval is {interval}"):
            coordination_frame(spark, config, heartbeat_interval=interval)


def test_a_query_whose_guard_fails_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it was, and whatever Spark says: nobody watches the claims any more."""
    caplog.set_level(logging.DEBUG, "kafkamq.spark.claims")

    class Held:
        claims: ClassVar = {("t", 0): 1}

        def positions(self) -> dict[tuple[str, int], int]:
            return {("t", 0): 5}

        def is_held(self, topic: str, partition: int, token: int) -> bool:
            raise ZeroDivisionError

        def commit_position(self, topic: str, partition: int, offset: int) -> None:
            raise AssertionError

    class Query:
        isActive = True  # noqa: N815 - Spark's name
        lastProgress = None  # noqa: N815

        def stop(self) -> None:
            self.isActive = False

        def exception(self) -> None:
            raise ConnectionError

    query = Query()
    guard = claimed_assign(Held(), "t").guard(query)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        guard.wait(within(30.0))
    assert not query.isActive
    assert "Spark does not say how the query ended" in caplog.text


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_query_that_fails_says_why_whatever_its_guard_does(is_lost: bool) -> None:
    """The guard loses the claim as it commits the end, or Kafka does not answer it."""
    is_committing, may_end = threading.Event(), threading.Event()

    class Held:
        claims: ClassVar = {("t", 0): 1}

        def positions(self) -> dict[tuple[str, int], int]:
            return {("t", 0): 5}

        def is_held(self, topic: str, partition: int, token: int) -> bool:
            return not is_lost

        def commit_position(self, topic: str, partition: int, offset: int) -> None:
            is_committing.set()
            if is_lost:
                raise LeaseLostError("t[0] is not held any more")
            may_end.wait(within(30.0))

    class Query:
        isActive = False  # noqa: N815 - Spark's name
        lastProgress: ClassVar = {"sources": [{"endOffset": {"t": {"0": 7}}}]}  # noqa: N815

        def exception(self) -> Exception:
            return StreamingQueryException("the disk is full")

        def awaitTermination(self) -> None:  # noqa: N802
            raise self.exception()

        def stop(self) -> None:
            """Do nothing: the query has ended."""

    guard = claimed_assign(Held(), "t").guard(Query())  # type: ignore[arg-type]
    assert is_committing.wait(within(30.0))
    try:
        with pytest.raises(StreamingQueryException, match="the disk is full"):
            guard.wait(timedelta(seconds=5))
    finally:
        may_end.set()
        guard.stop()


def test_a_claim_that_ends_as_its_progress_is_committed_is_lost() -> None:
    class Held:
        claims: ClassVar = {("t", 0): 1}

        def positions(self) -> dict[tuple[str, int], int]:
            return {("t", 0): 5}

        def is_held(self, topic: str, partition: int, token: int) -> bool:
            return False

        def commit_position(self, topic: str, partition: int, offset: int) -> None:
            raise LeaseLostError("t[0] is not held any more")

    class Query:
        lastProgress: ClassVar = {"sources": [{"endOffset": {"t": {"0": 7}}}]}  # noqa: N815

    assign = claimed_assign(Held(), "t")  # type: ignore[arg-type]
    with pytest.raises(LeaseLostError, match=r"claims of t \[0\] are lost"):
        assign.commit_progress(Query())  # type: ignore[arg-type]
