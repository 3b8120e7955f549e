"""What a worker has polled and not committed, and which offsets it may commit (R5); pure.

Each partition of the messages is a queue of *runs*: consecutive messages of our own queue. A run is
POLLED until its STARTs are written, SENT until all of them are reported, and IN_LOG until the
offset behind it is committed. A commit covers the longest prefix of a partition that is IN_LOG; so
what waits for one START holds back its own partition, and no other one.

Messages of other queues share the topic, so a partition's committable offset is the first message
of our own queue that has no START, or else everything polled: theirs are committed along.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from kafkamq.markers.rules.batching import chunk_end
from kafkamq.markers.rules.leases import Lease

MAX_AGE_MS = 20_000
"""No START for what was polled longer ago than this (R5)."""

_TOGETHER_MS = 1000
"""What was polled within this is one run."""

_UNKNOWN = -1

Message = TypeVar("Message")


class RunState(Enum):
    """How far a run has come; behind the commit of its offset it is not in the pipeline."""

    POLLED = 0
    SENT = 1
    IN_LOG = 2
    # It is polled again, or another member has its partition.
    GIVEN_UP = 3


# Looking a member up in its class takes as long as the rest of a line.
_POLLED, _SENT, _IN_LOG, _GIVEN_UP = RunState


@dataclass(slots=True, eq=False)
class Run(Generic[Message]):
    """Messages of our own queue in one partition, polled at once.

    Attributes:
        pieces: Leases that its STARTs begin, with the messages of each.
        unreported: STARTs that name it and are not known to be in the log.
        sent_ms: When its STARTs were written; monotonic.
        is_adrift: Its partition was revoked while its offset was being committed.
    """

    partition: int
    offsets: Sequence[int]
    messages: Sequence[Message]
    polled_ms: int
    is_plain: bool = True
    state: RunState = _POLLED
    pieces: list[tuple[Lease, Sequence[Message]]] = field(default_factory=list)
    unreported: int = 0
    sent_ms: int = 0
    is_adrift: bool = False

    def cut(self, begin: int, end: int) -> Run[Message]:
        messages, offsets = self.messages[begin:end], self.offsets[begin:end]
        return Run(self.partition, offsets, messages, self.polled_ms, self.is_plain)

    def leases(self) -> Iterator[Lease]:
        return (lease for lease, _ in self.pieces)


@dataclass(slots=True)
class Covered(Generic[Message]):
    """What one commit is about.

    Attributes:
        offsets: To be committed, by partition.
        runs: Those in front of these offsets, in the order in which they were STARTed.
        count: Polled records that they stand for, those of other queues included.
    """

    offsets: dict[int, int]
    runs: list[Run[Message]]
    count: int


class Pipeline(Generic[Message]):
    """The runs of one consumer, over all its partitions."""

    def __init__(self) -> None:
        self._polled: deque[Run[Message]] = deque()
        self._count = 0
        self._sent: dict[int, deque[Run[Message]]] = {}
        self._next: dict[int, int] = {}
        self._committed: dict[int, int] = {}
        self._waiting: dict[int, set[str]] = {}
        self._begun: dict[int, int] = {}
        self._covered: Covered[Message] | None = None
        # Records, those of other queues included, that were polled since the last commit.
        self.uncommitted_count = 0

    # Views.

    def __len__(self) -> int:
        return self._count

    @property
    def startable_count(self) -> int:
        if not self._waiting:
            return self._count
        return sum(len(run.offsets) for run in self.upcoming())

    @property
    def waiting(self) -> Collection[int]:
        return self._waiting.keys()

    @property
    def has_prefix(self) -> bool:
        return any(runs and runs[0].state is _IN_LOG for runs in self._sent.values())

    @property
    def is_set_back(self) -> bool:
        """Return whether a partition is to be committed again, though nothing of it is new."""
        return _UNKNOWN in self._committed.values()

    @property
    def is_open(self) -> bool:
        return any(self._sent.values())

    @property
    def covered(self) -> Covered[Message]:
        """Return what the commit that is under way is about."""
        assert self._covered is not None, "a commit has set out"
        return self._covered

    def under_way(self) -> Iterator[Run[Message]]:
        """Runs that are SENT or IN_LOG; those of a partition in their order."""
        return (run for runs in self._sent.values() for run in runs)

    def partitions(self) -> tuple[int, ...]:
        return tuple(self._next)

    def positions(self) -> Mapping[int, int]:
        return self._next

    # Facts about the partitions.

    def polled(
        self,
        own: Sequence[Run[Message]],
        *,
        first_offsets: dict[int, int],
        next_offsets: dict[int, int],
        count: int,
    ) -> None:
        """Some records were polled.

        Args:
            own: Messages of our queue, in their order; no run is empty.
            first_offsets: Smallest offset of the records per partition.
            next_offsets: Largest offset + 1 of the records per partition.
            count: Records, those of other queues included.
        """
        for partition, offset in first_offsets.items():
            self._committed.setdefault(partition, offset)
            self._begun.setdefault(partition, offset)
        self._next.update(next_offsets)
        self.uncommitted_count += count
        for run in own:
            self._add(run)

    def _add(self, run: Run[Message]) -> None:
        """What is polled in small pieces is STARTed in larger ones."""
        self._count += len(run.offsets)
        last = self._polled[-1] if self._polled else None
        if (
            last is None
            or last.partition != run.partition
            or run.polled_ms - last.polled_ms > _TOGETHER_MS
        ):
            self._polled.append(run)
            return
        self._polled[-1] = Run(
            run.partition,
            [*last.offsets, *run.offsets],
            [*last.messages, *run.messages],
            last.polled_ms,
            last.is_plain and run.is_plain,
        )

    def placed(self, partition: int, offset: int) -> None:
        """The consumer was told to read the partition from here, and this is committed."""
        self._drop_polled(partition)
        self._committed[partition] = self._next[partition] = offset
        self._begun.setdefault(partition, offset)

    def skipped_to(self, partition: int, offset: int) -> None:
        """Reading goes on further ahead, because records are gone; what was polled stays."""
        self._committed.setdefault(partition, offset)
        self._next[partition] = offset

    def revoked(self, partitions: Iterable[int]) -> list[Run[Message]]:
        """Partitions are gone, and what was polled of them; returns the runs that are given up.

        Those of a commit that is under way are not: its answer decides.
        """
        gone: list[Run[Message]] = []
        covered = self._covered
        for partition in partitions:
            self._drop_polled(partition)
            gone += self._sent.pop(partition, ())
            for known in (self._waiting, self._next, self._committed, self._begun):
                known.pop(partition, None)
            if covered is not None:
                # It may come back with another's position.
                covered.offsets.pop(partition, None)
        if covered is not None:
            for run in covered.runs:
                run.is_adrift = run.is_adrift or run in gone
            gone = [run for run in gone if not run.is_adrift]
        for run in gone:
            run.state = _GIVEN_UP
        return gone

    # From POLLED to SENT.

    def wait(self, partition: int, why: str) -> None:
        """Nothing more of it is STARTed until ``go_on`` for the same reason."""
        self._waiting.setdefault(partition, set()).add(why)

    def go_on(self, partition: int, why: str) -> None:
        """Its messages may be STARTed again, unless there is another reason."""
        reasons = self._waiting.get(partition, set())
        reasons.discard(why)
        if not reasons:
            self._waiting.pop(partition, None)

    def upcoming(self) -> Iterator[Run[Message]]:
        """Runs that may be STARTed now, in their order; they are still there."""
        waiting = self._waiting
        return (run for run in self._polled if run.partition not in waiting)

    def take_many(self, count: int) -> list[Run[Message]]:
        """Runs of so many messages, each in one chunk (R26), which are SENT from here on."""
        taken: list[Run[Message]] = []
        passed: list[Run[Message]] = []
        while count and self._polled:
            run = self._polled.popleft()
            if run.partition in self._waiting:
                passed.append(run)
                continue
            size, end_offset = len(run.offsets), chunk_end(run.offsets[0])
            if size > count or run.offsets[-1] >= end_offset:
                end = min(count, bisect_left(run.offsets, end_offset))
                self._polled.appendleft(run.cut(end, size))
                run, size = run.cut(0, end), end
            taken.append(run)
            self._count -= size
            count -= size
        self._polled.extendleft(reversed(passed))
        for run in taken:
            run.state = _SENT
            self._sent.setdefault(run.partition, deque()).append(run)
        return taken

    def is_stale(self, monotonic_ms: int) -> bool:
        """Say whether what is next was polled too long ago to be STARTed (R5): fetch it again."""
        head = next(iter(self.upcoming()), None)
        return head is not None and monotonic_ms - head.polled_ms > MAX_AGE_MS

    def drop_polled(self) -> dict[int, int]:
        """Forget what is POLLED; returns where to seek to."""
        firsts: dict[int, int] = {}
        for run in self._polled:
            firsts.setdefault(run.partition, run.offsets[0])
        self._polled.clear()
        self._count = 0
        self._next.update(firsts)
        return firsts

    # From SENT to the commit.

    @staticmethod
    def in_log(run: Run[Message]) -> None:
        run.state = _IN_LOG

    def committable(self) -> Covered[Message]:
        """Return what may be committed and is not, and the runs in front of it."""
        offsets: dict[int, int] = {}
        runs: list[Run[Message]] = []
        # By partition: the first own offset without a START.
        waiting: dict[int, int] = {}
        for run in self._polled:
            waiting.setdefault(run.partition, run.offsets[0])
        for partition, next_offset in self._next.items():
            offset = waiting.get(partition, next_offset)
            for run in self._sent.get(partition, ()):
                if run.state is not _IN_LOG:
                    offset = run.offsets[0]
                    break
                runs.append(run)
            if offset != self._committed.get(partition):
                offsets[partition] = offset
        return Covered(offsets, runs, self.uncommitted_count)

    def committing(self, covered: Covered[Message]) -> None:
        """A commit of what ``committable`` said has set out; one at a time."""
        self._covered = covered

    def committed(self) -> list[Run[Message]]:
        """Note that the commit succeeded; return the runs whose messages may be handed out."""
        covered, self._covered = self._covered, None
        assert covered is not None, "a commit has set out"
        done = set(covered.runs)
        self._committed.update(covered.offsets)
        for sent in self._sent.values():
            while sent and sent[0] in done:
                sent.popleft()
        self.uncommitted_count = max(0, self.uncommitted_count - covered.count)
        return covered.runs

    def commit_failed(self) -> tuple[list[Run[Message]], dict[int, int]]:
        """Return what is given up as a commit may have failed, and where to seek to (R5)."""
        covered, self._covered = self._covered, None
        gone: list[Run[Message]] = []
        positions: dict[int, int] = {}
        for run in covered.runs if covered is not None else ():
            if run.state is _GIVEN_UP:
                continue
            more, position = self.give_up(run)
            if more:
                gone += more
                positions[run.partition] = position
            else:
                run.state = _GIVEN_UP
                gone.append(run)
        return gone, positions

    def is_polled_again(self, run: Run[Message]) -> bool | None:
        """Say whether a run that is adrift has come again with its partition; None: nothing has."""
        begun = self._begun.get(run.partition)
        return None if begun is None else begun <= run.offsets[-1]

    def commit_again(self, partitions: Iterable[int]) -> None:
        """What is committed of these may be an older position: they are to be committed again."""
        for partition in self._committed.keys() & set(partitions):
            self._committed[partition] = _UNKNOWN

    def nothing_to_commit(self) -> None:
        """All that was polled since the last commit is committed already."""
        self.uncommitted_count = 0

    def give_up(self, run: Run[Message]) -> tuple[list[Run[Message]], int]:
        """Read again from this run on: what is given up with it, and where to seek to."""
        sent = self._sent.get(run.partition)
        if not sent or run not in sent:
            return [], -1
        gone: list[Run[Message]] = []
        while sent[-1] is not run:
            gone.append(sent.pop())
        gone.append(sent.pop())
        for each in gone:
            each.state = _GIVEN_UP
        self._drop_polled(run.partition)
        self._next[run.partition] = run.offsets[0]
        return gone[::-1], run.offsets[0]

    def _drop_polled(self, partition: int) -> None:
        self._polled = deque(run for run in self._polled if run.partition != partition)
        self._count = sum(len(run.offsets) for run in self._polled)

    def check(self) -> None:
        last: dict[int, int] = {}
        for run in [*self.under_way(), *self._polled]:
            assert len(run.offsets) == len(run.messages) > 0
            offsets = [last.get(run.partition, -1), *run.offsets]
            assert offsets == sorted(set(offsets)), "the runs of a partition are in order"
            last[run.partition] = run.offsets[-1]
        for partition, offset in last.items():
            assert offset < self._next[partition]
        assert self._count == sum(len(run.offsets) for run in self._polled)
