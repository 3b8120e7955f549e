"""What a query's end is turned into."""

from __future__ import annotations

from kafkamq.errors import FencedError
from kafkamq.spark.failures import QueryFailedError, advised, query_failure


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
