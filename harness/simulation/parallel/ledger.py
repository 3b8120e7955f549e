"""What handlers did and what the logs say, judged while it happens and at the end.

The order of keys is judged by process, whatever becomes of its partitions meanwhile.

A record is known by the number in its value, so that it stays the same one in dead letters and
results. It is *done* when its handler has ended well (with results: when the result is committed to
the log), when its dead letter is in the log, or when it was given up and is to be skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.simulation.cluster import SimulatedKafka
from harness.simulation.parallel.draw import ParallelLimits, Use
from kafkamq.errors import WireError
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.wire.offsets import decode

if TYPE_CHECKING:
    from kafkamq.transport.memory.state import LogRecord, Partition

TOPIC, RESULTS, DEAD, GROUP = "work", "results", "dead", "group"
_MAX_PROBLEMS = 20
_Shard = tuple[object, ...]
_Waiting = dict[int, int]  # offsets that failed, with numbers: of one order in one assignment
_LINES = {
    "parallel: a record is tried again": "a record failed and is tried again",
    "parallel: a dead letter": "a record is given up; it is a dead letter",
    "parallel: a dead letter was refused at first": "%s was refused; it is tried again",
    "parallel: skipped": "a record is given up and skipped",
    "parallel: a commit is made again": "a commit failed and is made again",
    "parallel: no answer to the last commit": "a last commit has no answer",
    "parallel: the last commit failed": "the last commit failed",
    "parallel: no answer to a commit of what goes": "no answer to the commit of revoked partitions",
    "parallel: maps are refused": "the broker takes shorter commit metadata",
    "parallel: revoked": "partitions were revoked",
    "parallel: lost": "partitions were lost",
    "parallel: records were lost and are skipped": "records were lost and are skipped",
    "parallel: where to read is not known yet": "where to read is not known yet",
    "parallel: a transaction is aborted": "a transaction is aborted",
    "parallel: a record stalls": "a record holds the committed offset back",
}
_OF_LEDGERS = (
    "a commit with a map",
    "a partition went with a handler at work",
    "a log was truncated under its readers",
    "a log's start went before its records were read",
    "a restart with a map",
)
PARALLEL_STATES = frozenset([*_LINES, *_OF_LEDGERS])


def number_of(value: bytes | None) -> int:
    """Return the record's, in its value, its result or its dead letter."""
    return int((value or b"").split(b" ")[1])


@dataclass(slots=True, eq=False)
class Call:
    """One call of a handler."""

    assignment: int
    records: Sequence[ParallelRecord]
    holds: list[tuple[str, _Shard]] = field(default_factory=list)  # what its process has at work
    waiting: list[_Waiting | None] = field(default_factory=list)  # None: in no order


class Ledger:
    """What one run did; everything here is one step for the simulated threads."""

    def __init__(self, kafka: SimulatedKafka, limits: ParallelLimits) -> None:
        self.problems: list[str] = []
        self.large: set[int] = set()  # whose results Kafka refuses
        self.done_well: Counter[int] = Counter()
        self.ends: Counter[int] = Counter()  # of handlers, well, by number
        self.skipped: set[int] = set()
        self.given_up: dict[int, set[int]] = {}  # by number: assignments
        self.dead_letters: Counter[int] = Counter()
        self.results: Counter[int] = Counter()
        self.reached: Counter[str] = Counter()
        self._kafka = kafka
        self._limits = limits
        self._assignments: dict[tuple[str, int], int] = {}  # by process and partition
        self._assigned: Counter[int] = Counter()  # by partition: how often
        self._count = 0
        self._waiting: dict[tuple[int, _Shard], _Waiting] = {}
        # By process, whatever becomes of its partitions: orders, or records that are in none.
        self._at_work: dict[tuple[str, _Shard], Call] = {}
        self._undecided: list[LogRecord] = []  # results in open transactions
        self._read_to = 0
        self._all_done: dict[int, int] = {}  # by partition: below, all was done when last seen

    # ---- what is so

    def log(self, partition: int) -> Partition:
        """Return a partition that is worked on."""
        return self._kafka.cluster.topics[TOPIC].partitions[partition]

    @property
    def partitions(self) -> range:
        """Return all of them."""
        return range(len(self._kafka.cluster.topics[TOPIC].partitions))

    def is_done(self, number: int) -> bool:
        """Return whether nothing is left to do for a record."""
        if number in self.skipped or self.dead_letters[number]:
            return True
        if number in self.large and self._limits.on_exhausted == "skip" and self.ends[number]:
            return True  # Kafka refused its result
        well = self.results if self._limits.use is Use.PRODUCE else self.done_well
        return well[number] > 0

    def numbers(self, partition: int, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield offsets of records in a log, and their numbers."""
        log = self.log(partition)
        for offset in range(max(start, log.start), min(end, log.end)):
            record = log.records[offset - log.start]
            if record is not None:
                yield offset, number_of(record.value)

    def open_numbers(self) -> list[int]:
        """Return what stands in the logs and is not done."""
        self._read()
        return [
            number
            for partition in self.partitions
            for _, number in self.numbers(partition, 0, self.log(partition).end)
            if not self.is_done(number)
        ]

    def _read(self) -> None:
        self.dead_letters.update(number_of(each.value) for each in self._kafka.news(DEAD))
        log = self._kafka.cluster.topics[RESULTS].partitions[0]
        self._undecided += [each for each in log.records[self._read_to :] if each is not None]
        self._read_to = len(log.records)
        undecided, self._undecided = self._undecided, []
        for record in undecided:
            transaction = record.transaction
            if transaction is not None and transaction.is_open:
                self._undecided.append(record)
            elif transaction is None or not transaction.is_aborted:
                self.results[number_of(record.value)] += 1

    def truncated(self, partition: int) -> None:
        """Its log is another one."""
        self._all_done.pop(partition, None)

    # ---- assignments

    def assigned(self, process: str, partitions: Sequence[tuple[str, int]]) -> None:
        """A process was told that these came."""
        for _, partition in partitions:
            self._count += 1
            self._assignments[process, partition] = self._count
            self._assigned[partition] += 1
            known = self._kafka.cluster.groups.committed(GROUP, (TOPIC, partition))
            self.reached["a restart with a map"] += bool(known is not None and known[1])

    def revoked(self, process: str, partitions: Sequence[tuple[str, int]]) -> None:
        """A process was told that these went."""
        for _, partition in partitions:
            assignment = self._assignments.pop((process, partition), 0)
            for call in set(self._at_work.values()):
                if call.assignment == assignment:
                    self.reached["a partition went with a handler at work"] += 1

    # ---- handlers

    def begin(self, process: str, records: Sequence[ParallelRecord]) -> Call:
        """A handler is called."""
        self._read()
        assignment = self._assignments.get((process, records[0].partition), 0)
        call = Call(assignment, records)
        for index, record in enumerate(records):
            assignment = self._assignments.get((process, record.partition), 0)
            if not assignment:
                self._wrong(f"{record!r} is handled where its partition has gone: {process}")
            shard = self._shard(record)
            held = process, ("record", number_of(record.value)) if shard is None else shard
            other = self._at_work.setdefault(held, call)
            if other is not call:
                self._wrong(f"{record!r} is handled beside {other.records[0]!r} of its order")
            call.holds.append(held)
            waiting = None
            if shard is not None:
                waiting = self._waiting.setdefault((assignment, shard), {})
                self._judge_begin(record, shard, waiting, records[:index])
                waiting.pop(record.offset, None)
            call.waiting.append(waiting)
        return call

    def _judge_begin(
        self,
        record: ParallelRecord,
        shard: _Shard,
        waiting: _Waiting,
        before: Sequence[ParallelRecord],
    ) -> None:
        for offset, number in list(waiting.items()):
            if self.dead_letters[number]:
                del waiting[offset]  # a dead letter meanwhile
            elif offset < record.offset:
                self._wrong(f"{record!r} is handled though {offset} failed and waits")
        together = {number_of(each.value) for each in before}
        first = self._all_done.get(record.partition, 0)
        for offset, number in self.numbers(record.partition, first, record.offset):
            if number in together or self.ends[number] or self.is_done(number):
                continue
            other = self.log(record.partition).records[offset - self.log(record.partition).start]
            assert other is not None, "as numbers() says"
            if self._shard_of(record.partition, other.key) == shard:
                self._wrong(f"{record!r} is handled though {offset} of its order is not done")

    def end(self, call: Call, *, failed: bool = False, gives_up: bool = False) -> None:
        """A handler has ended: well, or it wants another attempt, or none."""
        for held in call.holds:
            if self._at_work.get(held) is call:
                del self._at_work[held]
        for record, waiting in zip(call.records, call.waiting, strict=True):
            number = number_of(record.value)
            if not failed:
                self.ends[number] += 1
                if self._limits.use is not Use.STREAM:
                    self.done_well[number] += 1
                continue
            most = self._limits.max_attempts
            if gives_up or (most is not None and record.attempt >= most):
                self._gives_up(call, record)
            if waiting is not None and not self.is_done(number):
                waiting[record.offset] = number

    def _gives_up(self, call: Call, record: ParallelRecord) -> None:
        number = number_of(record.value)
        self.given_up.setdefault(number, set()).add(call.assignment)
        if self._limits.on_exhausted == "skip":
            self.skipped.add(number)

    def finished(self, record: ParallelRecord) -> None:
        """Note that the next result of a stream was asked for."""
        self.done_well[number_of(record.value)] += 1

    def _shard(self, record: ParallelRecord) -> _Shard | None:
        return self._shard_of(record.partition, record.key)

    def _shard_of(self, partition: int, key: bytes | None) -> _Shard | None:
        ordering = self._limits.ordering
        if ordering == "partition":
            return (partition,)
        is_free = key is None and self._limits.null_keys == "parallel"
        return None if ordering == "unordered" or is_free else (partition, key)

    # ---- commits

    def committed(self, partition: int, offset: int, metadata: str) -> int:
        """Kafka keeps a commit: all that it calls done must be; returns where its map ends."""
        self._read()
        first = self._all_done.get(partition, 0)
        for at, number in self.numbers(partition, first, offset):
            if not self.is_done(number):
                self._wrong(f"{offset} is committed in {TOPIC}[{partition}], {at} is not done")
                return offset
        self._all_done[partition] = min(offset, self.log(partition).end)
        if not metadata:
            return offset
        self.reached["a commit with a map"] += 1
        try:
            found = decode(offset, metadata)
        except WireError as error:
            self._wrong(f"the map of {TOPIC}[{partition}] at {offset} cannot be read: {error}")
            return offset
        incomplete = set(found.incompletes)
        for at, number in self.numbers(partition, offset, found.highest_seen + 1):
            if at not in incomplete and not self.is_done(number):
                self._wrong(f"the map of {TOPIC}[{partition}] at {offset} has {at}: not done")
        return max(offset, found.highest_seen + 1)

    # ---- the end

    def judge(self, *, is_calm: bool, is_certain: bool) -> None:
        """All that can be said when nothing happens any more.

        Args:
            is_calm: Nothing has gone wrong: nothing was to be done twice.
            is_certain: Every write to the logs was confirmed or did not happen.
        """
        missing = self.open_numbers()
        if missing:
            self._wrong(f"{len(missing)} records are not done: {missing[:10]}")
        for number, count in self.dead_letters.items():
            assignments = len(self.given_up.get(number, ()))
            if self._limits.parks_stalled:  # those of a stalled order, called or not, in each
                assignments = max(self._assigned.values())
            if not assignments and number not in self.large:
                self._wrong(f"record {number} is a dead letter, and nobody gave it up")
            elif is_certain and count > max(1, assignments) and number not in self.large:
                self._wrong(
                    f"record {number} has {count} dead letters of {assignments} assignments"
                )
        if is_calm:
            twice = sorted(number for number, count in self.done_well.items() if count > 1)
            if twice and self._limits.use is not Use.PRODUCE:
                self._wrong(f"handled twice, and nothing went wrong: {twice[:10]}")
            more = sorted(number for number, count in self.dead_letters.items() if count > 1)
            if more:
                self._wrong(f"two dead letters, and nothing went wrong: {more[:10]}")
        if self._limits.is_transactional:
            more = sorted(number for number, count in self.results.items() if count > 1)
            if more:
                self._wrong(f"two results in transactions: {more[:10]}")
        if self._limits.use is Use.PRODUCE:
            self._judge_results()

    def _judge_results(self) -> None:
        """Check that of each two records in one order the later one's last result is behind the
        earlier's.
        """
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for at, record in enumerate(self._kafka.all_records(RESULTS)):  # of one partition
            number = number_of(record.value)
            first.setdefault(number, at)
            last[number] = at
        for partition in self.partitions:
            before: dict[_Shard, int] = {}  # the latest first result
            log = self.log(partition)
            for offset, number in self.numbers(partition, 0, log.end):
                source = log.records[offset - log.start]
                shard = None if source is None else self._shard_of(partition, source.key)
                if shard is None or number not in last:
                    continue
                if last[number] < before.get(shard, -1):
                    self._wrong(f"the result of {number} stands before one that came earlier")
                before[shard] = max(before.get(shard, -1), first[number])

    def _wrong(self, text: str) -> None:
        if len(self.problems) < _MAX_PROBLEMS and text not in self.problems:
            self.problems.append(text)


def of_parallel_line(message: str) -> list[str]:
    """Return the states that a line of log tells of."""
    return [state for state, begin in _LINES.items() if message.startswith(begin)]
