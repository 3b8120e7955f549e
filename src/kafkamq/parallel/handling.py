"""How handlers are called: what threads and coroutines have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from kafkamq.errors import ConfigError
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.results import Publisher
from kafkamq.parallel.rules.lanes import Run
from kafkamq.parallel.settling import Settler
from kafkamq.parallel.verdicts import is_verdict
from kafkamq.parallel.work_queue import Desk, Worker

__all__ = ["UNTRIED", "Handling", "end_batch", "outcomes_of", "take_batch"]


class _Untried:
    """The outcome of a record that was not tried, as one before it in order failed."""


UNTRIED = _Untried()


@dataclass(frozen=True, kw_only=True)
class Handling:
    """What workers are given.

    Attributes:
        handler: The user's function.
        takes_lists: It gets lists of records.
        publisher: What becomes of results; None: they are of no interest.
        takes_all: The publisher wants to know of None as well.
    """

    desk: Desk
    settler: Settler
    handler: Callable[..., object]
    takes_lists: bool = False
    publisher: Publisher | None = None
    takes_all: bool = False

    def is_result(self, outcome: object) -> bool:
        """Whether that is for the publisher."""
        if self.publisher is None or is_verdict(outcome):
            return False
        return outcome is not None or self.takes_all


def take_batch(worker: Worker) -> tuple[list[Run[ParallelRecord]], list[ParallelRecord]]:
    """All that the worker has taken, as one list; nobody relieves it of that any more."""
    runs = list(worker.pending)
    return runs, [record for run in runs for record in run.records]


def outcomes_of(result: object, count: int) -> Sequence[object]:
    """The outcome of each of ``count`` records of a list."""
    if result is None or is_verdict(result):
        return [result] * count
    if isinstance(result, Sequence) and not isinstance(result, str | bytes):
        if len(result) == count:
            return result
        error = ConfigError(f"the handler got {count} records and returned {len(result)} verdicts")
        return [error] * count
    error = ConfigError(
        f"the handler returned {type(result).__name__}: a list handler returns None, a verdict for"
        " all, or a list with one for each record"
    )
    return [error] * count


def end_batch(
    desk: Desk,
    worker: Worker,
    runs: Sequence[Run[ParallelRecord]],
    due: Mapping[int, int],
    untried: Set[int],
) -> None:
    """Let go of the runs of a list: by their ids, when records that failed are due, and others."""
    for run in runs:
        failed = [(each, due[id(each)]) for each in run.records if id(each) in due]
        tried = [each for each in run.records if id(each) not in untried]
        processed = None if len(tried) == len(run.records) else len(tried)
        desk.let_go_of_tried(worker, run, failed, processed=processed)
