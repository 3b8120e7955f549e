"""Mutants of the parallel consumer: what is handed out, what counts as done, what is committed."""

from __future__ import annotations

from tests.mutant_lists.mutant import Mutant

_DESK = "kafka/parallel/desk.py"
_SHARDS = "core/shards.py"
_DESK_TESTS = ("tests/unit/test_parallel_desk.py",)
_UNIT = ("tests/unit/test_shards_retries.py",)
_RETRIES = ("tests/unit/test_retries.py",)

OF_PARALLEL = [
    Mutant(
        "parallel",
        "the record that a worker is stuck in counts as done",
        _DESK,
        "run.records[: begun - 1]",
        "run.records[:begun]",
        _DESK_TESTS,
    ),
    Mutant(
        "parallel",
        "what failed counts as done when its worker is relieved",
        _DESK,
        "            wrong = {record.offset for record, _ in worker.failed or ()}\n",
        "            wrong: set[int] = set()\n",
        _DESK_TESTS,
    ),
    Mutant(
        "parallel",
        "results that are not published count",
        _DESK,
        "if begun > 1 and not run.is_released and not self.is_deferred:",
        "if begun > 1 and not run.is_released:",
        _DESK_TESTS,
    ),
    Mutant(
        "parallel",
        "a record that was given up is tried again",
        _DESK,
        "failed = [each for each in trouble.failed if is_open(each[0].offset)]",
        "failed = list(trouble.failed)",
        _DESK_TESTS,
    ),
    Mutant(
        "parallel",
        "partitions that go are still handed out",
        _DESK,
        "                self.scheduler.hold(lane)\n",
        "                self.scheduler.resume(lane)\n",
        _DESK_TESTS,
    ),
    Mutant(
        "parallel",
        "who waits behind a withdrawn record waits for its time",
        _SHARDS,
        "            if shard.state is ShardState.DELAYED and waiting[0].offset == offset:\n",
        "            if shard.state is ShardState.DELAYED and not kept:\n",
        _UNIT,
    ),
    Mutant(
        "parallel",
        "a reclaimed record is handed out by nobody",
        _SHARDS,
        "        self._make_ready(Shard(lane, None, False, records))\n",
        "",
        _DESK_TESTS,
    ),
    Mutant(
        "parallel",
        "one attempt more than allowed",
        "core/retries.py",
        "attempt >= max_attempts",
        "attempt > max_attempts",
        _RETRIES,
    ),
]
