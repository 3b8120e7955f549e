"""Commits offsets of a group, and reads what groups have committed.

One thread at a time gets into a client. A synchronous commit keeps it: while a group rebalances, it
stands behind the member's own request to join, which is answered when the slowest member has come.
So a member begins its commits, and hears of their answers inside later polls.

confluent-kafka (2.16) commits metadata with the NUL that ends its C string, and reads it up to a
NUL: where none was committed, as by Java's clients, some memory that follows is read as well, and
the admin client's answer is no other. So what decodes metadata must find its end in it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from kafkamq.config import ServiceConfig
from kafkamq.errors import StateError
from kafkamq.transport.clients import Consumer, open_consumer
from kafkamq.transport.errors import ErrorWatch, broker_error, is_fatal, is_retriable, kafka_error
from kafkamq.transport.follower import REQUEST_S, Follower, partitions_of, targets_of
from kafkamq.transport.settings import consumer_settings
from kafkamq.types import PartitionId

ANSWER_S = 60.0
"""librdkafka answers earlier, unless nobody polls."""

_TURN_S = 0.01
_MAX_BEGUN = 1000
_MAX_KEPT = 64
# A new consumer takes some 70 ms to find its coordinator.
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class OffsetCommit:
    """An offset of a group, and what is said about it; a negative one: nothing is committed."""

    topic: str
    partition: int
    offset: int
    metadata: str = ""

    @property
    def target(self) -> TopicPartition:
        more = (self.metadata,) if self.metadata else ()
        return TopicPartition(self.topic, self.partition, self.offset, *more)


class PendingCommit:
    """A commit that was begun. Who gives it up drops it: no later one gets its late answer.

    Attributes:
        error: Why Kafka has refused it, or one of its partitions; None: it has not, so far.
        is_current: Whether it still says what is so; it is asked last before it sets out.
    """

    def __init__(
        self, offsets: list[TopicPartition], is_current: Callable[[], bool] = lambda: True
    ) -> None:
        self.offsets = offsets
        self.is_current = is_current
        self.error: KafkaError | None = None
        self._answered = threading.Event()

    @property
    def is_answered(self) -> bool:
        return self._answered.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Return whether it is answered, for a thread that does not poll."""
        return self._answered.wait(timeout_s)

    def answer(self, error: KafkaError | None) -> None:
        if not self.is_answered:
            self.error = error
            self._answered.set()


class GroupOffsets(Follower):
    """What a group has committed, for a member, and for who is none; any thread may ask."""

    def __init__(
        self,
        config: ServiceConfig,
        group_id: str,
        doing: str = "",
        *,
        ignores: Callable[[KafkaError], bool] = is_retriable,
        **settings: object,
    ) -> None:
        """Take what a ``Follower`` takes; ``group_id`` is the group's."""
        self.begun: deque[PendingCommit] = deque(maxlen=_MAX_BEGUN)
        """Those whose answers the client has not told."""
        super().__init__(
            config,
            doing or f"working for group {group_id}",
            group_id=group_id,
            ignores=ignores,
            # It holds ``begun`` alone: ``self`` holds the client.
            on_commit=partial(_heard, self.begun),
            **settings,
        )

    def membership(self) -> bytes:
        """Say what fences a member's transactions once the group has gone on without it (R22)."""
        metadata: bytes = self.client.consumer_group_metadata()
        return metadata

    def committed(
        self, places: Iterable[PartitionId], *, timeout_s: float = REQUEST_S
    ) -> dict[PartitionId, int]:
        """Return what the group has committed; negative: nothing.

        Raises:
            BrokerError, DeadlineExceededError: No answer, or the group has moved on.
        """
        found = self.committed_with_metadata(places, timeout_s=timeout_s)
        return {(each.topic, each.partition): each.offset for each in found}

    def committed_with_metadata(
        self, places: Iterable[PartitionId], *, timeout_s: float = REQUEST_S
    ) -> list[OffsetCommit]:
        """Return offsets and metadata, behind which some memory may stand that was read with it."""
        try:
            return _committed(self.client, partitions_of(places), timeout_s)
        except KafkaException as error:
            raise broker_error(error, "finding what the group has committed") from error

    def commit(self, offsets: Mapping[PartitionId, int]) -> None:
        """Commit, and wait until Kafka has all of it."""
        doing = f"committing: {self._doing}"
        try:
            for refused in self.commit_each(offsets).values():
                raise broker_error(refused, doing)
        except KafkaException as error:
            raise broker_error(error, doing) from error

    def commit_each(self, offsets: Mapping[PartitionId, int]) -> dict[PartitionId, KafkaError]:
        """Commit, and wait for the answer: which partitions were refused, and why."""
        if not offsets:
            return {}
        answer = self.client.commit(offsets=targets_of(offsets), asynchronous=False)
        return {
            (each.topic, each.partition): each.error for each in answer if each.error is not None
        }

    def begin(self, offsets: Mapping[PartitionId, int]) -> PendingCommit:
        """Begin to commit, by the thread that polls; the answer comes inside a later poll."""
        return self.begin_these(PendingCommit(targets_of(offsets)))

    def begin_these(self, pending: PendingCommit) -> PendingCommit:
        self.begun.append(pending)
        try:
            self.client.commit(offsets=pending.offsets, asynchronous=True)
        except KafkaException as error:
            self.begun.remove(pending)
            pending.answer(kafka_error(error))
        return pending


def _heard(
    begun: deque[PendingCommit], error: KafkaError | None, partitions: Sequence[TopicPartition]
) -> None:
    """The client has one callback for all commits: the oldest of these offsets is answered."""
    told = _identity(partitions)
    for pending in begun:
        if _identity(pending.offsets) == told:
            begun.remove(pending)
            pending.answer(error or _first_error(partitions))
            return


def _identity(offsets: Iterable[TopicPartition]) -> frozenset[tuple[str, int, int]]:
    return frozenset((each.topic, each.partition, each.offset) for each in offsets)


def _first_error(partitions: Iterable[TopicPartition]) -> KafkaError | None:
    return next((each.error for each in partitions if each.error is not None), None)


def _committed(
    client: Consumer, asked: list[TopicPartition], timeout_s: float
) -> list[OffsetCommit]:
    found = client.committed(asked, timeout=timeout_s)
    error = _first_error(found)
    if error is not None:
        raise KafkaException(error)
    return [
        OffsetCommit(each.topic, each.partition, each.offset, _metadata(each)) for each in found
    ]


def _metadata(found: TopicPartition) -> str:
    try:
        return found.metadata or ""
    except UnicodeDecodeError as error:
        # What stands behind the metadata is read with it; its own bytes may be fine.
        return error.object.decode("utf-8", "replace")


def metadata_of(config: ServiceConfig, group_id: str) -> bytes:
    """``membership`` of a group that never has members; says no more than its name."""
    with closing(GroupOffsets(config, group_id)) as offsets:
        return offsets.membership()


class CommitTurns:
    """Commits of a member whose offsets another thread commits than the one that polls.

    While one thread polls all the time, no other one gets into the client. So a thread that commits
    leaves its offsets here and waits; the thread that polls begins the commit. Where no poll
    follows, as that thread waits for the commit, the other one makes it; inside of a rebalance,
    whose callback keeps the client, the polling one does.

    All but ``commit`` and ``member`` are for the thread that polls.

    Attributes:
        member: The member as of the last ``note_member``; empty: it was never one.
    """

    def __init__(self, group: GroupOffsets) -> None:
        self._group = group
        self.member = b""
        self._waiting: deque[PendingCommit] = deque()
        self._owner = 0
        self._is_inside = False
        # The owner does not poll until ``inside``.
        self._is_resting = False
        self._commits_here = threading.Lock()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Yield a poll, or the end of the client: callbacks come in it."""
        if self._is_resting:
            # A commit that waits for the client would wait forever.
            with self._commits_here:
                self._is_resting = False
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def commit(
        self, commits: Iterable[OffsetCommit], is_current: Callable[[], bool] = lambda: True
    ) -> None:
        """Commit and wait for the answer; in any other thread than the one that polls.

        Raises:
            KafkaException: The first error.
        """
        pending = PendingCommit([each.target for each in commits], is_current)
        self._waiting.append(pending)
        deadline_s = monotonic() + ANSWER_S
        while not pending.wait(_TURN_S):
            with self._commits_here:
                if self._is_resting and not pending.is_answered:
                    self._forget(pending)
                    self._make(pending)
            if monotonic() > deadline_s:
                self._forget(pending)
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        if pending.error is not None:
            raise KafkaException(pending.error)

    def _forget(self, pending: PendingCommit) -> None:
        with suppress(ValueError):
            # It was begun, and may be heard of yet.
            self._waiting.remove(pending)

    def serve(self) -> None:
        """Begin what waits; an answer comes inside a later poll."""
        self._owner = threading.get_ident()
        while self._waiting:
            with suppress(IndexError):
                pending = self._waiting.popleft()
                if not self._is_refused(pending):
                    self._group.begin_these(pending)

    def _is_refused(self, pending: PendingCommit) -> bool:
        """Return whether a partition or its log has gone: brokers take offsets of any member.

        Of a log that was replaced, records that nobody has read would count as done.
        """
        places = self._group.places
        ours = all((each.topic, each.partition) in places for each in pending.offsets)
        if ours and pending.is_current():
            return False
        pending.answer(KafkaError(KafkaError.UNKNOWN_MEMBER_ID))
        return True

    def tend(self) -> None:
        """While the polling thread waits for a commit, the one that commits does so itself."""
        if threading.get_ident() != self._owner:
            return
        if not self._is_inside:
            self._is_resting = True
            return
        # What was begun is committed once more: its answer cannot be heard.
        unanswered = [each for each in self._group.begun if not each.is_answered]
        while self._waiting:
            unanswered.append(self._waiting.popleft())
        for pending in unanswered:
            self._make(pending)

    def _make(self, pending: PendingCommit) -> None:
        if self._is_refused(pending):
            return
        try:
            answer = self._group.client.commit(offsets=pending.offsets, asynchronous=False)
            pending.answer(_first_error(answer))
        except KafkaException as error:
            pending.answer(kafka_error(error))

    def note_member(self) -> None:
        """Remember the member as it is now, for transactions; while it is none, as it was.

        Without a member, Kafka would take a transaction's offsets from anybody.
        """
        self._owner = threading.get_ident()
        name, membership = self._group.client.memberid() or "", self._group.membership()
        if name and name.encode() in membership:
            self.member = membership


class CommittedOffsets:
    """Consumers that never join, by group, for questions after many groups; thread-safe.

    Not the admin client: librdkafka's coordinator requests there end the *process* when the
    coordinator goes away or moves (an assertion, librdkafka pull request 5397; a null pointer, its
    issue 5040), which is when a tracker asks. A consumer's own look-up has neither fault.
    """

    def __init__(
        self, config: ServiceConfig, watch: ErrorWatch, *, kept: Collection[str] | None = None
    ) -> None:
        """``kept``: the groups whose consumers are kept for the next question; None: all."""
        self._config = config
        self._kept = kept
        self._watch = watch
        self._idle: dict[tuple[str, bool], Consumer] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def read(
        self, requests: Sequence[tuple[str, PartitionId]], *, stable: bool, timeout_s: float
    ) -> list[OffsetCommit]:
        """Return an answer for each (group, partition), in order; below 0: nothing is committed.

        Raises:
            BrokerError, DeadlineExceededError: One of the groups could not be asked in time.
        """
        of_group: dict[str, list[TopicPartition]] = {}
        for group, place in requests:
            of_group.setdefault(group, []).append(TopicPartition(*place))

        def ask(group: str) -> Iterator[OffsetCommit]:
            return iter(self._ask(group, stable, of_group[group], timeout_s))

        if len(of_group) == 1:
            answers = {group: ask(group) for group in of_group}
        else:
            with ThreadPoolExecutor(_MAX_THREADS) as threads:
                answers = dict(zip(of_group, threads.map(ask, of_group), strict=True))
        return [next(answers[group]) for group, _ in requests]

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            consumers, self._idle = list(self._idle.values()), {}
        for consumer in consumers:
            consumer.close()

    def _ask(
        self, group: str, stable: bool, partitions: list[TopicPartition], timeout_s: float
    ) -> list[OffsetCommit]:
        doing = f"reading committed offsets of {group}"
        consumer = self._take(group, stable)
        is_kept = False
        try:
            found = _committed(consumer, partitions, timeout_s)
            is_kept = self._keep(group, stable, consumer)
        except KafkaException as error:
            event = consumer.poll(0)
            self._watch.check(doing)
            refusal = None if event is None else event.error()
            if refusal is not None and is_fatal(refusal):
                # The refusal is of the coordinator's name: there will be no answer.
                raise broker_error(refusal, doing) from error
            raise broker_error(error, doing) from error
        finally:
            if not is_kept:
                consumer.close()
        return found

    def _take(self, group: str, stable: bool) -> Consumer:
        with self._lock:
            if self._is_closed:
                raise StateError("this Admin is closed")
            kept = self._idle.pop((group, stable), None)
        if kept is not None:
            return kept
        isolation = "read_committed" if stable else "read_uncommitted"
        settings = consumer_settings(self._config, group_id=group, isolation_level=isolation)
        return open_consumer(settings, self._watch)

    def _keep(self, group: str, stable: bool, consumer: Consumer) -> bool:
        with self._lock:
            if self._is_closed or (group, stable) in self._idle or len(self._idle) >= _MAX_KEPT:
                return False
            if self._kept is not None and group not in self._kept:
                return False
            self._idle[group, stable] = consumer
            return True
