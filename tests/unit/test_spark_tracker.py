"""The Spark tracker's driver, where others write to the same ledgers: on a ledger of the test."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from pyspark import SparkContext

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import FencedError
from kafkamq.markers.tracker.ledger import LedgerKey
from kafkamq.markers.wire.ledger import Position
from kafkamq.spark.checkpoint import CheckpointNote
from kafkamq.spark.failures import QueryFailedError, SparkGoneError
from kafkamq.spark.tracker import tracker as module
from kafkamq.spark.tracker.query import QueryPlan
from kafkamq.spark.tracker.tracker import SparkTracker

ENGINE = "spark-1"
EPOCH = 4


@dataclass
class Committed:
    """What Kafka holds of a ledger, and who opened it last."""

    position: Position | None = None
    opened: int = 0
    adopted: list[Position] = field(default_factory=list)
    fences: int = 0  # how often a worker opens it between our opening and our writing


class FakeLedger:
    """A ledger whose producer is fenced by whoever opens it later."""

    committed: Committed

    def __init__(self, config: ServiceConfig, key: LedgerKey, *, engine: str, epoch: int) -> None:
        self.engine, self.epoch = engine, epoch

    def open(self) -> Position | None:
        self.committed.opened += 1
        self._mine = self.committed.opened
        if self.committed.fences:
            self.committed.fences -= 1
            self.committed.opened += 1
        last = self.committed.position
        if last is not None and last.epoch > self.epoch:
            raise FencedError("a later start", code="LATER_START", is_fatal=True)
        return last

    def adopt(self, epoch: int, position: int) -> None:
        if self._mine != self.committed.opened:
            raise FencedError("another instance took over", code="_FENCED", is_fatal=True)
        written = Position(position=position, epoch=epoch, engine=self.engine)
        self.committed.position = written
        self.committed.adopted.append(written)

    def close(self) -> None:
        pass


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> Committed:
    FakeLedger.committed = Committed()
    monkeypatch.setattr(module, "Ledger", FakeLedger)
    return FakeLedger.committed


def adopt() -> None:
    config = ServiceConfig(bootstrap_servers="x:1")
    tracker = SparkTracker(config, checkpoint="file:///nowhere")
    note = CheckpointNote(topic=config.marker_topic, tasks=2, engine=ENGINE)
    plan = QueryPlan(
        config=config,
        tracker=TrackerConfig(),
        note=note,
        epoch=EPOCH,
        checkpoint="file:///nowhere",
        slots=2,
        carry_after_ms=1,
        trigger_ms=1,
        max_markers=1,
    )
    tracker._adopt(plan, LedgerKey.of_markers(config, 6))


def test_an_added_partition_is_adopted_though_the_querys_workers_open_it_too(
    committed: Committed,
) -> None:
    committed.fences = 2
    committed.position = Position(position=70, epoch=EPOCH - 1, engine=ENGINE)
    adopt()
    assert [(each.position, each.epoch) for each in committed.adopted] == [(70, EPOCH)]


def test_what_a_worker_of_this_start_has_settled_is_not_forgotten(committed: Committed) -> None:
    done = Position(position=80, epoch=EPOCH, engine=ENGINE, batch=12, rows_done=3)
    committed.position = done
    adopt()
    assert committed.position is done


def test_a_later_start_ends_this_one(committed: Committed) -> None:
    committed.position = Position(position=80, epoch=EPOCH + 1, engine="local")
    with pytest.raises(FencedError, match="later start"):
        adopt()


class Query:
    """Of a JVM that is gone: everything fails, with what py4j says."""

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's
        raise ConnectionRefusedError(111, "Connection refused")


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_jvm_that_has_ended_is_one_final_error(
    has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["true"] if has_ended else ["sleep", "600"]
    with subprocess.Popen(command) as process:
        try:
            gateway = SimpleNamespace(proc=process)
            monkeypatch.setattr(SparkContext, "_gateway", gateway)
            tracker = SparkTracker(ServiceConfig(bootstrap_servers="x:1"), checkpoint="file:///no")
            found = tracker._step(SimpleNamespace(query=Query()))  # type: ignore[arg-type]
        finally:
            process.kill()
    assert isinstance(found, SparkGoneError if has_ended else QueryFailedError)
    assert ("JVM has ended" in str(found)) is has_ended
