"""Mutants of the parallel consumer: what is handed out, what counts as done, what is committed."""

from __future__ import annotations

from tests.mutant_lists.mutant import Mutant

_DESK = "kafka/parallel/desk.py"
_SHARDS = "core/shards.py"
_DESK_TESTS = ("tests/unit/test_parallel_desk.py",)
_UNIT = ("tests/unit/test_shards_retries.py",)
_POOLS = ("tests/unit/test_parallel_pools.py",)
_COMMITS = ("tests/unit/test_parallel_commits.py",)
_FLOW = ("tests/unit/test_shards_flow.py",)
_TRANSACTIONS = ("tests/unit/test_parallel_transactions.py",)
_RETRIES = ("tests/unit/test_retries.py",)

OF_PARALLEL = [
    Mutant(
        "parallel",
        "the record that a worker is stuck in counts as done",
        _DESK,
        "for each in run.records[:-1] if",
        "for each in run.records if",
        _DESK_TESTS,
    ),
    Mutant(
        "parallel",
        "what failed counts as done when its worker is relieved",
        _DESK,
        "                wrong = {record.offset for record, _ in worker.failed or ()}\n",
        "                wrong: set[int] = set()\n",
        _DESK_TESTS,
    ),
    Mutant(
        "parallel",
        "results that are not published count",
        _DESK,
        "                if not self.is_deferred:\n                    self.scheduler.complete",
        "                if run.records:\n                    self.scheduler.complete",
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
        "            self._make_ready(Shard(lane, None, False, records))\n",
        "            pass\n",
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
    Mutant(
        "parallel",
        "what was taken back of a key is lost",
        _SHARDS,
        "            run.shard.put_back(records)\n",
        "            pass\n",
        _POOLS,
    ),
    Mutant(
        "parallel",
        "a handler of lists is called with none",
        "kafka/parallel/threads.py",
        "        if not records:  # taken back in the meantime\n            return\n",
        "",
        _POOLS,
    ),
    Mutant(
        "parallel",
        "a coroutine of lists is called with none",
        "kafka/parallel/coroutines.py",
        "        if not records:  # taken back in the meantime\n            return\n",
        "",
        _POOLS,
    ),
    Mutant(
        "parallel",
        "a handler that awaits something cancelled ends its worker",
        "kafka/parallel/coroutines.py",
        "        if self._is_cancelled or count is None or count():\n            raise",
        "        if self._is_cancelled or count is None or count() >= 0:\n            raise",
        _POOLS,
    ),
    Mutant(
        "parallel",
        "a worker that is cancelled goes on",
        "kafka/parallel/coroutines.py",
        "        if self._is_cancelled or count is None or count():\n            raise",
        "        if self._is_cancelled or count is None:\n            raise",
        _POOLS,
    ),
    Mutant(
        "parallel",
        "a loop that is gone is not told of",
        "kafka/parallel/coroutines.py",
        "                self._ended.set()\n                self._settler.fail(",
        "                self._ended.set()\n                len(",
        _POOLS,
    ),
    Mutant(
        "parallel",
        "results are committed without their offsets",
        "kafka/parallel/transactions.py",
        "if not self._lanes <= {duty.lane for duty, _, _ in plan.parts}:",
        "if self._lanes is None:",
        _TRANSACTIONS,
    ),
    Mutant(
        "parallel",
        "results of an old assignment are sent",
        "kafka/parallel/transactions.py",
        "            if lane.state is not LaneState.CLOSED:\n",
        "            if lane is not None:\n",
        _TRANSACTIONS,
    ),
    Mutant(
        "parallel",
        "a result that Kafka refuses is sent for ever",
        "kafka/parallel/transactions.py",
        "known < blame[0]",
        "known < 0",
        _TRANSACTIONS,
    ),
    Mutant(
        "parallel",
        "who was in a batch with a large result is to blame",
        "kafka/parallel/transactions.py",
        "record, refusal = max(",
        "record, refusal = min(",
        _TRANSACTIONS,
    ),
    Mutant(
        "parallel",
        "blame outlasts what it was for",
        "kafka/parallel/transactions.py",
        "                    del self._blamed[place]\n",
        "                    pass\n",
        _TRANSACTIONS,
    ),
    Mutant(
        "parallel",
        "a cut map is logged with each commit",
        "kafka/parallel/commits.py",
        "            if not duty.is_cut:",
        "            if duty is not None:",
        _COMMITS,
    ),
    Mutant(
        "parallel",
        "a map that is too long is committed whole",
        "core/flow.py",
        "MapVerdict(chars <= self._limits.max_map_chars, ceiling)",
        "MapVerdict(chars > 0, ceiling)",
        (*_COMMITS, *_FLOW),
    ),
    Mutant(
        "parallel",
        "a stall that could not be parked is forgotten",
        "core/flow.py",
        '        """Nothing came of what was done: if it lasts as long again, tell it again."""\n'
        "        self._offset = None\n",
        '        """Nothing."""\n',
        _FLOW,
    ),
]
