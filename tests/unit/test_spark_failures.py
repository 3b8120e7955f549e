"""What a query's end is turned into."""

from __future__ import annotations

from kafkamq.errors import FencedError
from kafkamq.spark.failures import QueryFailedError, advised


def test_a_query_that_never_worked_points_at_its_checkpoint() -> None:
    said = str(advised(QueryFailedError("the Spark query ended: {"), "file:///c"))
    assert said.startswith("the Spark query ended: {; ")
    assert "the checkpoint file:///c may be damaged. Delete it" in said


def test_our_own_errors_say_enough() -> None:
    error = FencedError("another one took over")
    assert advised(error, "file:///c") is error
