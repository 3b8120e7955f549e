"""Records and a worker for the tests of the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.parallel.rules.shards import NullKeys, Ordering, PartitionState, Run, Scheduler


@dataclass(slots=True)
class Sample:
    """A record as the scheduler sees it."""

    offset: int
    key: bytes | None = None


def samples(keys: Sequence[str | None], first: int = 0) -> list[Sample]:
    """Records with these keys at consecutive offsets."""
    return [
        Sample(first + index, None if key is None else key.encode())
        for index, key in enumerate(keys)
    ]


def scheduler(
    ordering: Ordering = Ordering.KEY,
    *,
    max_run: int = 64,
    null_keys: NullKeys = NullKeys.SERIAL,
) -> Scheduler[Sample]:
    return Scheduler(ordering=ordering, max_run=max_run, null_keys=null_keys)


def partition_with(
    target: Scheduler[Sample], keys: Sequence[str | None], partition: int = 0
) -> PartitionState[Sample]:
    partition = target.assign(partition, OffsetTracker(0))
    assert target.add(partition, samples(keys)) == len(keys)
    return partition


def offsets(runs: Iterable[Run[Sample]]) -> list[list[int]]:
    return [[record.offset for record in run.records] for run in runs]


def all_offsets(runs: Iterable[Run[Sample]]) -> list[int]:
    return sorted(record.offset for run in runs for record in run.records)


def fail(target: Scheduler[Sample], run: Run[Sample], due_ms: int) -> None:
    """The first record of the run failed, the others were not tried."""
    target.release(run, processed=1, failed=[(run.records[0], due_ms)])
