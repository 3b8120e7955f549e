"""A Spark checkpoint with damaged files: the tracker says so, and what it advises loses nothing."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.spark.tracker_runs import PATIENCE_S, Logs, settled, tracking, verdict
from tests.waiting import wait_until

import kafkamq.spark.tracker.tracker as spark_tracker
from kafkamq.spark.failures import QueryFailedError
from kafkamq.spark.tracker.tracker import SparkTracker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(900)]


def cut(file: Path) -> None:
    """Leave half of what was written, as a crash of the machine may."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def spoil(file: Path) -> None:
    file.write_bytes(bytes(range(128, 256)))


def newest(folder: Path) -> Path:
    """Of the files that Spark names by the number of their batch."""
    return folder / str(max(int(file.name) for file in folder.iterdir() if file.name.isdigit()))


def state(checkpoint: Path) -> list[Path]:
    """All versions: which one is read depends on whether the last batch was cut short."""
    return [*checkpoint.glob("state/0/*/*.changelog"), *checkpoint.glob("state/0/*/*.zip")]


DAMAGE: dict[str, tuple[Callable[[Path], None], Callable[[Path], list[Path]]]] = {
    "offsets cut": (cut, lambda folder: [newest(folder / "offsets")]),
    "commits spoilt": (spoil, lambda folder: [newest(folder / "commits")]),
    "state cut": (cut, state),
    "metadata spoilt": (spoil, lambda folder: [folder / "metadata"]),
    "metadata gone": (Path.unlink, lambda folder: [folder / "metadata"]),
    "note cut": (cut, lambda folder: [folder / "kafkamq.json"]),
}


def test_damaged_files_are_told_and_lose_nothing(
    spark: SparkSession,
    bootstrap: str,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F4: each of them in a copy of one checkpoint; then that of the last copy is deleted."""
    logs = Logs(bootstrap, namespace, marker_partitions=1)
    sound = tmp_path / "sound"
    with tracking(logs, spark, str(sound)) as running:
        fired = logs.send(10)
        logs.start(*fired, timeout_ms=200)
        wait_until(lambda: settled(logs, *fired), timeout_s=PATIENCE_S)
        held = logs.send(10)
        logs.start(*held, timeout_ms=8000)
        wait_until(lambda: running.statuses()[0].entries == 10, timeout_s=PATIENCE_S)
    monkeypatch.setattr(spark_tracker, "MAX_FAILURES", 0)  # what is told is the same each time
    for name, (harm, files) in DAMAGE.items():
        copy = tmp_path / name
        shutil.copytree(sound, copy)
        found = files(copy)
        assert found, name
        for file in found:
            harm(file)
        damaged = SparkTracker(logs.config, checkpoint=str(copy), spark=spark, trigger_s=0.2)
        with (
            pytest.raises(QueryFailedError, match=r"may be damaged\. Delete it") as raised,
            damaged,
        ):
            damaged.wait(PATIENCE_S)
        assert str(copy) in str(raised.value), name
    assert not settled(logs, *held), "no damaged one came as far as that"
    shutil.rmtree(copy)
    with tracking(logs, spark, str(copy)):
        wait_until(lambda: settled(logs, *held), timeout_s=PATIENCE_S)
    assert Counter(logs.copied()) == Counter((one.partition, one.offset) for one in fired + held)
    verdict(logs).require_ok()
