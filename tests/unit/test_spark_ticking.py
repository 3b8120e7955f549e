"""When a TICK is written just before Spark reads it, and when it was read."""

from __future__ import annotations

import pytest

from kafkamq.spark.ticking import Lag, batch_is_near

MIDNIGHT_MS = 1_795_305_600_000.0


@pytest.mark.parametrize(
    ("trigger_ms", "past_ms", "is_near"),
    [
        (1000, 0, False),
        (1000, 840, False),
        (1000, 860, True),
        (1000, 999, True),
        (5000, 900, False),
        (5000, 4900, True),
        (100, 1, True),  # batches follow each other more closely than TICKs can be timed
        (0, 500, True),
    ],
)
def test_a_batch_is_near_before_a_multiple_of_the_trigger(
    trigger_ms: int, past_ms: int, is_near: bool
) -> None:
    assert batch_is_near(trigger_ms, MIDNIGHT_MS + past_ms) is is_near


def test_a_slow_batch_does_not_make_the_lag_long() -> None:
    lag = Lag()
    lag.note(2500)  # the first one of a query
    assert lag.hear(1, 10_000) == 0
    for _ in range(4):
        lag.note(450)
    assert lag.hear(5, 20_000) == 450
    lag.note(2500)
    assert lag.hear(6, 23_000) == 450
    for _ in range(5):
        lag.note(9000)
    assert lag.hear(11, 90_000) == 3000


def test_a_batch_was_not_read_before_the_one_before_it_was_heard_of() -> None:
    lag = Lag()
    for batch in range(5):
        lag.hear(batch, 3000 * (batch + 1))
        lag.note(2500)
    assert lag.hear(5, 15_400) == 400  # a quick one, and nobody knows how quick yet
    assert lag.hear(5, 15_500) == 500  # another partition of it
    assert lag.hear(4, 15_550) == 550  # told again
