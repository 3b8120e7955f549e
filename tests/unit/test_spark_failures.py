"""What a query's end is turned into."""

from __future__ import annotations

import copy
import pickle
import subprocess
import traceback
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # no hints
from pyspark import SparkContext
from pyspark.errors import PySparkException

from kafkamq.errors import DeadlineExceededError, FencedError, KafkaMQError
from kafkamq.spark.batches import Batch
from kafkamq.spark.failures import (
    QueryFailedError,
    SparkGoneError,
    advised,
    opens_checkpoint,
    query_failure,
)
from kafkamq.spark.jobs.sql import sql_errors
from kafkamq.spark.queue_streams import Acknowledged, AckQuery
from kafkamq.spark.tables import repeated
from kafkamq.transport.errors import OutcomeUnknownError, TransactionAbortedError


def test_a_query_that_never_worked_points_at_its_checkpoint() -> None:
    said = str(advised(QueryFailedError("the Spark query ended: {"), "file:///c"))
    assert said.startswith("the Spark query ended: {; ")
    assert "the checkpoint file:///c may be damaged. Delete it" in said


def test_our_own_errors_say_enough() -> None:
    error = FencedError("another one took over")
    assert advised(error, "file:///c") is error


def test_a_full_disk_is_no_damage() -> None:
    text = "Job aborted: java.io.IOException: No space left on device\n\tat java.base"
    error = advised(query_failure(RuntimeError(text)), "file:///c")
    assert str(error).startswith(f"the Spark query ended: {text.splitlines()[0]}; a disk is full")
    assert "make room there" in str(error)
    assert "Delete it" not in str(error)


def test_what_java_says_is_the_failure() -> None:
    text = "An error occurred while calling o2.start.\n: java.io.IOException: bad \x1b[2J\n\tat"
    said = str(query_failure(RuntimeError(text)))
    assert said == "the Spark query ended: java.io.IOException: bad ?[2J"


@pytest.mark.parametrize("kind", [TransactionAbortedError, OutcomeUnknownError, FencedError])
def test_our_error_of_a_worker_is_found_in_its_traceback(kind: type[KafkaMQError]) -> None:
    try:
        raise kind("slot 3: ended")
    except KafkaMQError as error:
        text = "".join(traceback.format_exception(error))
    found = query_failure(RuntimeError(f"Job aborted: PythonException\n{text}"))
    assert (type(found), str(found)) == (kind, "slot 3: ended")


def test_a_checkpoint_is_named_by_what_the_jvm_says_of_it() -> None:
    @opens_checkpoint
    def start(error: Exception, *, checkpoint: str) -> None:
        raise error

    said = "An error occurred while calling o5.mkdirs.\n: java.io.IOException: no folder\n\tat"
    with pytest.raises(QueryFailedError, match=r"^checkpoint s3a://c: .* java.io.IOException: no"):
        start(Py4JError(said), checkpoint="s3a://c")
    ours = DeadlineExceededError("Kafka did not answer")
    with pytest.raises(DeadlineExceededError, match="Kafka did not answer"):
        start(ours, checkpoint="s3a://c")


class Query:
    """Of a JVM that is gone."""

    def awaitTermination(self, timeout: float | None = None) -> None:  # noqa: N802 - Spark's
        raise ConnectionRefusedError(111, "Connection refused")

    def stop(self) -> None:
        raise Py4JError("Answer from Java side is empty")


@pytest.mark.parametrize("timeout_s", [None, 1.0])
def test_a_query_whose_jvm_has_ended_says_so(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float | None
) -> None:
    with subprocess.Popen(["true"]) as process:
        monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=process))
        query = AckQuery(Query(), Acknowledged())  # type: ignore[arg-type]
        with pytest.raises(SparkGoneError, match="JVM has ended"):
            query.wait(timeout_s)
        query.stop()
        with pytest.raises(SparkGoneError, match="JVM has ended"), sql_errors("--where"):
            query.query.stop()


def test_an_error_of_sparks_own_is_not_its_own_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Query) -> None:
        raise PySparkException("boom")

    monkeypatch.setattr(Query, "awaitTermination", fail)
    query = AckQuery(Query(), Acknowledged())  # type: ignore[arg-type]
    with pytest.raises(PySparkException, match="boom") as caught:
        query.wait()
    assert caught.value.__cause__ is None


CONFLICT = "io.delta.exceptions.ConcurrentAppendException: [DELTA_CONCURRENT_APPEND] files"
ALTERED = "[DELTA_METADATA_CHANGED] The metadata of the Delta table has been changed"
PROTOCOL = "io.delta.exceptions.ProtocolChangedException: The protocol version has been changed"
FOUND = (
    "org.apache.iceberg.exceptions.ValidationException: Found conflicting files that can contain"
)


class Clock:
    """A merge takes a second of it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.pauses.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("kafkamq.spark.tables.time", made)
    return made


@pytest.mark.parametrize("text", [CONFLICT, ALTERED, PROTOCOL, FOUND])
def test_a_merge_is_repeated_where_another_writer_was_first(clock: Clock, text: str) -> None:
    refusals = [text] * 9

    def write() -> None:
        if refusals:
            raise PySparkException(refusals.pop())

    repeated(write, "shop.done")
    assert len(clock.pauses) == 9


def test_a_merge_at_which_another_writer_is_always_first_says_so_after_a_minute(
    clock: Clock,
) -> None:
    def write() -> None:
        raise PySparkException(FOUND)

    with pytest.raises(KafkaMQError, match=r"table shop\.done: another writer was first .* 60 s"):
        repeated(write, "shop.done")
    assert 50 < clock.now_s <= 62
    assert 2 < max(clock.pauses) <= 5


def test_a_merge_that_fails_for_another_reason_is_not_repeated(clock: Clock) -> None:
    def write() -> None:
        raise PySparkException("java.util.ConcurrentModificationException")

    with pytest.raises(PySparkException):
        repeated(write, "shop.done")
    assert not clock.pauses


@pytest.mark.parametrize("copied", [copy.copy, lambda one: pickle.loads(pickle.dumps(one))])
def test_the_number_of_a_batch_can_be_copied(copied: Callable[[Batch], Batch]) -> None:
    made = copied(Batch(5, query_id="q", is_repeated=True))
    assert (made, made.query_id, made.is_repeated) == (5, "q", True)
