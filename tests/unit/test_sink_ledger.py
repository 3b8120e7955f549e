"""What the exactly-once sink keeps: in its processes, and in Kafka; on Kafka in memory."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing

import pytest

from kafkamq.config import ServiceConfig
from kafkamq.queue.topics import create_topics
from kafkamq.spark.sink.ledger import MAX_RUNS, TASKS, Cell, SinkLedger
from kafkamq.transport.admin import Admin
from kafkamq.transport.memory.cluster import forget_cluster

CONFIG = ServiceConfig(bootstrap_servers="memory://sink-ledger")
TOPIC = CONFIG.ledger_topic


@pytest.fixture(autouse=True)
def topics() -> Iterator[None]:
    create_topics(CONFIG, partitions=1, marker_partitions=1)
    yield
    forget_cluster("sink-ledger")


def write(ledger: SinkLedger, *, cells: int, batch: int, run: str) -> None:
    for number in range(cells):
        with closing(Cell(ledger, number, batch=batch, cut=TASKS, run=run)) as cell:
            cell.count(3, 7)
            cell.commit()


def test_a_worker_remembers_few_of_the_writes_that_it_has_asked_about() -> None:
    """Each ``df.write`` of ``foreachBatch`` is a run of its own: one a batch, for ever."""
    with closing(SinkLedger(CONFIG, topic=TOPIC, sink="query")) as ledger:
        for batch in range(MAX_RUNS + 20):
            ledger.await_confirmation(batch=batch, run=uuid.uuid4().hex, cut=TASKS)
        assert len(ledger.settled_runs) == MAX_RUNS


@pytest.mark.parametrize(("is_alone", "groups"), [(True, 4), (False, 8)])
def test_a_write_that_no_other_run_repeats_has_a_group_for_each_task(
    is_alone: bool, groups: int
) -> None:
    """They stay for a week: a task that comes late finds there that it was done."""
    sink = f"write-{is_alone}"
    with closing(SinkLedger(CONFIG, topic=TOPIC, sink=sink, is_alone=is_alone)) as ledger:
        write(ledger, cells=4, batch=0, run="run")
        with Admin(CONFIG) as admin:
            assert len([name for name in admin.groups() if sink in name]) == groups
        with closing(Cell(ledger, 2, batch=0, cut=TASKS, run="run")) as late:
            assert late.is_repeated
