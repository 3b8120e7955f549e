"""A namespace that a Spark tracker serves, for tests; what happened is read from the topics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.integration.tracker_logs import Logs
from tests.waiting import wait_until

from kafkamq.config import TrackerConfig
from kafkamq.spark.tracker.tracker import SparkTracker
from kafkamq.testing import Verdict, check_logs, record_of
from kafkamq.types import MessageId, Outcome

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PATIENCE_S = 300.0  # a first batch on a busy machine

__all__ = [
    "PATIENCE_S", "Logs", "engine_of", "gives_signs", "settled", "tracking", "verdict",
    "wait_until", "wait_until_live",
]  # fmt: skip


@contextmanager
def tracking(
    logs: Logs, spark: SparkSession, checkpoint: str, tracker: TrackerConfig | None = None
) -> Iterator[SparkTracker]:
    """A tracker that runs, and is live in every partition (R17)."""
    running = SparkTracker(logs.config, tracker, checkpoint=checkpoint, spark=spark, trigger_s=0.2)
    with running:
        wait_until_live(running, logs.marker_partitions)
        yield running


def wait_until_live(running: SparkTracker, partitions: int) -> None:
    def is_live() -> bool:
        running.wait(0.05)  # raises why it ended
        return sum(status.is_live for status in running.statuses().values()) == partitions

    wait_until(is_live, timeout_s=PATIENCE_S)


def engine_of(checkpoint: Path) -> str:
    """The id that a tracker has noted in its checkpoint; empty: none yet."""
    notes = sorted(checkpoint.glob("kafkamq*.json"))
    return str(json.loads(notes[0].read_text())["engine"]) if notes else ""


def gives_signs(logs: Logs, checkpoint: Path) -> bool:
    """Whether the tracker with this checkpoint says that it lives: not before its first batch."""
    return engine_of(checkpoint) in {sign.engine for sign in logs.signs()}


def settled(logs: Logs, *ids: MessageId) -> bool:
    """Whether a tracker has written an END of each of these."""
    return set(ids) <= set(logs.ends(Outcome.REDELIVERED, Outcome.DEAD_LETTERED))


def verdict(logs: Logs) -> Verdict:
    """The checker's judgement, from the topics alone."""
    return check_logs(
        messages=map(record_of, logs.read(logs.config.message_topic)),
        markers=map(record_of, logs.read(logs.config.marker_topic)),
        dead_letters=map(record_of, logs.read(logs.config.dead_letter_topic)),
        must_be_settled=False,
    )
