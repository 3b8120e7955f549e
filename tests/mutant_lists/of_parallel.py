"""Mutants of the parallel consumer: what is handed out, what counts as done, what is committed."""

from __future__ import annotations

from tests.mutant_lists.mutant import Mutant

_DESK = "kafka/parallel/desk.py"
_SHARDS = "core/shards.py"
_DESK_TESTS = ("tests/unit/test_parallel_desk.py",)
_UNIT = ("tests/unit/test_shards_retries.py",)
_OFFSETS = "core/offsets.py"
_TRACKER = ("tests/unit/test_offset_tracker.py",)
_ORDER = ("tests/unit/test_shards.py", "tests/unit/test_shards_retries.py")
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
    Mutant(
        "parallel",
        "what is open is committed over",
        _OFFSETS,
        "return min(next(iter(self._open), self._next_offset), self._next_offset)",
        "return self._next_offset",
        _TRACKER,
    ),
    Mutant(
        "parallel",
        "each poll below the position drops the map",
        _OFFSETS,
        "if not self._has_polled and offsets[0] < self._next_offset:",
        "if offsets[0] < self._next_offset:",
        _TRACKER,
    ),
    Mutant(
        "parallel",
        "what a map says is done is done again",
        _OFFSETS,
        "if offset >= end or offset in known]",
        "if offset >= 0]",
        _TRACKER,
    ),
    Mutant(
        "parallel",
        "what is open above the map is in it",
        _OFFSETS,
        "holes[: bisect_right(holes, highest)]",
        "holes",
        _TRACKER,
    ),
    Mutant(
        "parallel",
        "a hole that has vanished holds the offset back",
        _OFFSETS,
        "                del self._open[hole]\n",
        "",
        _TRACKER,
    ),
    Mutant(
        "parallel",
        "a failed record is tried behind those that waited",
        _SHARDS,
        "shard.put_back([record for record, _ in failed] + untried)",
        "shard.put_back(untried + [record for record, _ in failed])",
        _ORDER,
    ),
    Mutant(
        "parallel",
        "a shard goes on before the last of its delays",
        _SHARDS,
        "self._delay(shard, max(due_ms for _, due_ms in failed))",
        "self._delay(shard, min(due_ms for _, due_ms in failed))",
        _ORDER,
    ),
    Mutant(
        "parallel",
        "what an old assignment does counts",
        _SHARDS,
        "        if lane.state is LaneState.CLOSED:\n            return\n"
        "        lane.tracker.complete(offsets)\n",
        "        lane.tracker.complete(offsets)\n",
        _ORDER,
    ),
    Mutant(
        "parallel",
        "partitions do not take turns",
        _SHARDS,
        "                line.append(lane)\n            else:",
        "                line.appendleft(lane)\n            else:",
        _ORDER,
    ),
    Mutant(
        "parallel",
        "records without a key are in no order",
        _SHARDS,
        "elif key is None and keyless is not None:",
        "elif key is None:\n                keyless = keyless if keyless is not None else []",
        _ORDER,
    ),
]
