"""State that was written before is read, and folds on as if it had been here.

``tests/vectors/tracker-state-4.json`` was written once, from the log below.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from kafkamq.errors import KafkaMQError, UnsupportedVersionError, WireError
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.rules.snapshot import STATE_VERSION, restore_tracker, take_snapshot
from kafkamq.types import Marker, MarkerType, MessageId, Outcome

VECTOR = Path(__file__).parents[1] / "vectors" / "tracker-state-4.json"
TOPIC_ID = bytes(range(16))
START_MS = 1_000_000
Log = list[tuple[int, Marker]]


def one(offset: int) -> MessageId:
    return MessageId(0, offset, TOPIC_ID, 3)


def written_log() -> Log:
    """Everything that state can hold: held, renewed, waiting, scheduled, due, ended; two chunks."""
    log: Log = [(START_MS, Marker(MarkerType.TICK, consumer_id="spark-1", engine_epoch=2))]
    for number in range(40):
        start = Marker(
            MarkerType.START,
            one(number * 150),
            5_000 if number % 7 == 0 else 60_000,
            consumer_id=f"worker-{number % 3}",
            delivery_count=1 + number % 2,
            max_lease_ms=600_000 if number % 5 else 0,
        )
        log.append((START_MS + number * 10, start))
    verdicts = {1: Outcome.ACK, 2: Outcome.NACK, 3: Outcome.REJECT, 4: Outcome.RELEASE}
    for number in range(40):
        outcome = verdicts.get(number % 9)
        if outcome is not None:
            end = Marker(
                MarkerType.END,
                one(number * 150),
                30_000 if outcome is Outcome.NACK else 0,
                consumer_id=f"worker-{number % 3}",
                outcome=outcome,
            )
            log.append((START_MS + 1000 + number, end))
    log.append((START_MS + 2000, Marker(MarkerType.SCHEDULE, None, 90_000, consumer_id="sender")))
    keepalive = Marker(MarkerType.KEEPALIVE, None, 60_000, consumer_id="worker-1")
    log.append((START_MS + 8000, keepalive))
    return log


def later_log() -> Log:
    """Written after the upgrade: an end for what was held, and time for everything else."""
    return [
        (START_MS + 9000, Marker(MarkerType.END, one(750), consumer_id="worker-2")),
        (START_MS + 40_000, Marker(MarkerType.START, one(9000), 60_000, consumer_id="worker-9")),
        (START_MS + 900_000, Marker(MarkerType.TICK, consumer_id="spark-1", engine_epoch=2)),
    ]


def folded(tracker: RedeliveryTracker, log: Log) -> RedeliveryTracker:
    for timestamp_ms, marker in log:
        tracker.apply(tracker.next_offset, timestamp_ms, marker)
    return tracker


def fresh() -> RedeliveryTracker:
    return RedeliveryTracker(0, engine=("spark-1", 2))


def test_state_that_was_written_before_folds_on() -> None:
    stored = json.loads(VECTOR.read_text(encoding="utf-8"))
    restored = restore_tracker(
        stored["index"].encode(),
        lambda name: base64.b64decode(stored["chunks"][name]),
        partition=0,
        engine=("spark-1", 2),
    )
    here = folded(fresh(), written_log())
    assert restored.in_progress() == here.in_progress()
    assert restored.committable_offset() == here.committable_offset()
    assert restored.plan() == here.plan()
    folded(restored, later_log())
    folded(here, later_log())
    restored.check()
    assert restored.in_progress() == here.in_progress()
    planned = restored.plan()
    assert len(planned) > 20
    assert planned == here.plan()


@pytest.mark.parametrize(
    ("newer", "error", "what_to_do"),
    [
        (1, UnsupportedVersionError, "upgrade kafkamq"),
        (-1, WireError, "give the tracker an empty checkpoint"),
    ],
)
def test_state_of_another_version_is_not_touched(
    newer: int, error: type[KafkaMQError], what_to_do: str
) -> None:
    index = json.loads(take_snapshot(fresh()).index)
    index["version"] = STATE_VERSION + newer
    with pytest.raises(error, match=what_to_do):
        restore_tracker(json.dumps(index).encode(), lambda name: b"", partition=0)
