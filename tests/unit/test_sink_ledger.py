"""What the exactly-once sink keeps: in its processes, and in Kafka; on Kafka in memory."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest

from kafkamq.config import ServiceConfig
from kafkamq.errors import StateError
from kafkamq.queue.topics import create_topics
from kafkamq.spark.sink.ledger import MAX_RUNS, TASKS, Cell, CellEntry, SinkLedger
from kafkamq.spark.sink.sink import clear_sink_ledger
from kafkamq.transport.admin import Admin
from kafkamq.transport.memory.cluster import forget_cluster

CONFIG = ServiceConfig(bootstrap_servers="memory://sink-ledger")
TOPIC = CONFIG.ledger_topic


@pytest.fixture(autouse=True)
def topics() -> Iterator[None]:
    create_topics(CONFIG, partitions=1, marker_partitions=1)
    yield
    forget_cluster("sink-ledger")


def write(ledger: SinkLedger, *, cells: Iterable[int], batch: int, run: str) -> None:
    for number in cells:
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
        write(ledger, cells=range(4), batch=0, run="run")
        with Admin(CONFIG) as admin:
            assert len([name for name in admin.groups() if sink in name]) == groups
        with closing(Cell(ledger, 2, batch=0, cut=TASKS, run="run")) as late:
            assert late.is_repeated


def forget(groups: list[str]) -> None:
    """As the broker does with what was not renewed for ``offsets.retention.minutes``."""
    with Admin(CONFIG) as admin:
        for deleted in admin.client.delete_consumer_groups(groups).values():
            deleted.result()


def test_what_tells_the_number_of_cells_is_renewed_with_them() -> None:
    """A batch that a later run cuts into fewer tasks waits for all that was written of it."""
    with closing(SinkLedger(CONFIG, topic=TOPIC, sink="query")) as ledger:
        write(ledger, cells=range(5), batch=0, run="first")
        ranges = sorted({ledger.range_group(cell) for cell in range(5)})
        forget(ranges)
        write(ledger, cells=range(5), batch=1, run="first")
        with Admin(CONFIG) as admin:
            assert set(ranges) <= admin.groups()


def test_cells_of_an_earlier_release_are_found_whose_number_is_forgotten() -> None:
    """Any of them may have been renewed alone: a new number of cells renewed its own range."""
    cells = [*range(21), 5000]
    with closing(SinkLedger(CONFIG, topic=TOPIC, sink="query")) as ledger:
        write(ledger, cells=cells, batch=3, run="first")
        forget(sorted({ledger.range_group(cell) for cell in cells} - {ledger.range_group(3)}))
        assert sorted(ledger.entries()) == cells
        assert clear_sink_ledger(CONFIG, sink_id="query") == len(cells) + 2
        assert not ledger.entries()


def test_cells_that_no_broker_lists_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their coordinator is just elected, or their first transaction being committed."""
    with closing(SinkLedger(CONFIG, topic=TOPIC, sink="query")) as ledger:
        write(ledger, cells=range(5), batch=3, run="first")
        monkeypatch.setattr(Admin, "groups", lambda _: frozenset())
        assert sorted(ledger.entries()) == [0, 1, 2, 3, 4]


def test_a_batch_that_is_found_again_keeps_what_a_third_run_needs() -> None:
    """And says as before whose it was: cells that are in question yet are waited for."""
    with closing(SinkLedger(CONFIG, topic=TOPIC, sink="query")) as ledger:
        write(ledger, cells=range(5), batch=3, run="first")
        last = ledger.last()
        forget([ledger.last_group, *sorted({ledger.range_group(cell) for cell in range(5)})])
        write(ledger, cells=[4], batch=3, run="second")
        assert ledger.last() == last
        with Admin(CONFIG) as admin:
            assert ledger.range_group(4) in admin.groups()


def test_a_checkpoint_that_is_an_older_copy_leaves_the_last_batch_as_it_is() -> None:
    with closing(SinkLedger(CONFIG, topic=TOPIC, sink="query")) as ledger:
        write(ledger, cells=[0, 1], batch=3, run="first")
        write(ledger, cells=[1], batch=4, run="first")
        last = ledger.last()
        write(ledger, cells=[0], batch=3, run="second")
        assert ledger.last() == last


class SlowLedger(SinkLedger):
    """A look takes longer than a batch's patience; the other tasks are done meanwhile."""

    now_s = 0.0

    def entries(self) -> dict[int, CellEntry]:
        found = super().entries()
        if not self.now_s:
            write(self, cells=range(2), batch=3, run="second")
        self.now_s += 1000
        return found


@pytest.mark.parametrize("cells", [2, 3])
def test_a_batch_is_judged_by_a_look_that_began_behind_the_deadline(
    monkeypatch: pytest.MonkeyPatch, cells: int
) -> None:
    with closing(SlowLedger(CONFIG, topic=TOPIC, sink="query")) as ledger:
        clock = SimpleNamespace(monotonic=lambda: ledger.now_s, sleep=lambda wait_s: None)
        monkeypatch.setattr("kafkamq.spark.sink.ledger.time", clock)
        write(ledger, cells=range(cells), batch=3, run="first")
        with closing(Cell(ledger, 9, batch=3, cut=TASKS, run="second")) as new:
            new.count(1, 1)
            if cells == 2:
                assert new.commit()
            else:
                with pytest.raises(StateError, match="those numbered 2 were not found again"):
                    new.commit()


def test_a_slot_whose_rows_changed_stops_and_others_are_written_as_they_are() -> None:
    """Slots do not wait for each other: that would need as many cores as before."""
    with closing(SinkLedger(CONFIG, topic=TOPIC, sink="query")) as ledger:
        with closing(Cell(ledger, 0, batch=1, cut="slots=2", run="first")) as cell:
            cell.count(1, 7)
            assert cell.commit()
        with closing(Cell(ledger, 1, batch=1, cut="slots=2", run="second")) as cell:
            cell.count(1, 8)
            assert cell.commit()
        with closing(Cell(ledger, 0, batch=1, cut="slots=2", run="second")) as cell:
            cell.count(1, 9)
            with pytest.raises(StateError, match=r"slots=2 0 was .* nothing of it was written aga"):
                cell.commit()
