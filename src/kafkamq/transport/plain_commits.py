"""Commits of a group's member by confluent-kafka's own calls, made by the thread that polls.

While one thread polls all the time, confluent-kafka (2.16) lets no other one into the client. So
whoever commits leaves its offsets here and waits; the thread that polls begins the commit, and its
answer comes inside a later poll. Where no poll follows, as that thread waits for the commit, the
other one makes it; inside a rebalance, whose callback keeps the client, the polling one does.

Metadata is committed with the NUL that ends its C string, and read up to a NUL: where none was
committed, what follows in memory is read as well (``transport.exact_commits`` is without both).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from kafkamq.transport.errors import kafka_error
from kafkamq.transport.port import Consumer

ANSWER_S = 60.0
"""librdkafka answers earlier, unless nobody polls."""

_TURN_S = 0.01


@dataclass(frozen=True, slots=True)
class OffsetCommit:
    """An offset to commit, and what is to be said about it."""

    topic: str
    partition: int
    offset: int
    metadata: str = ""


class _Request:
    """A commit that somebody waits for."""

    def __init__(self, offsets: list[TopicPartition]) -> None:
        self.offsets = offsets
        self.answered = threading.Event()
        self.error: KafkaError | None = None

    def answer(self, error: KafkaError | None) -> None:
        if not self.answered.is_set():
            self.error = error
            self.answered.set()


class PlainCommits:
    """Of one member; all but ``commit`` and ``group`` are for the thread that polls."""

    def __init__(self) -> None:
        self._consumer: Consumer | None = None
        self._waiting: deque[_Request] = deque()
        self._begun: list[_Request] = []  # the client has not told their answer yet
        self._group = b""
        self._owner = 0
        self._is_inside = False  # in a call of the client that makes callbacks
        self._is_resting = False  # the owner polls no more until ``inside``
        self._commits_here = threading.Lock()  # while another thread than the owner commits

    def open(self, consumer: Consumer) -> None:
        """Its commits are this client's, whose callback of commits is ``heard``."""
        self._consumer = consumer

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A poll, or the end of the client: callbacks come in it."""
        if self._is_resting:
            with self._commits_here:  # a commit that waits for the client would wait forever
                self._is_resting = False
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def commit(self, commits: Sequence[OffsetCommit]) -> None:
        """Commit and wait for the answer; in any other thread than the one that polls."""
        request = _Request(plain(commits))
        self._waiting.append(request)
        deadline_s = monotonic() + ANSWER_S
        while not request.answered.wait(_TURN_S):
            with self._commits_here:
                if self._is_resting and not request.answered.is_set():
                    self._forget(request)
                    request.answer(self._made(request.offsets))
            if monotonic() > deadline_s:
                self._forget(request)
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        if request.error is not None:
            raise KafkaException(request.error)

    def _forget(self, request: _Request) -> None:
        with suppress(ValueError):  # it was begun, and may be heard of yet
            self._waiting.remove(request)

    def serve(self) -> None:
        """Begin what waits; an answer comes inside a later poll."""
        self._owner = threading.get_ident()
        while self._waiting:
            try:
                request = self._waiting.popleft()
            except IndexError:  # given up meanwhile
                return
            self._begun.append(request)
            try:
                self._client.commit(offsets=request.offsets, asynchronous=True)
            except KafkaException as error:
                self._begun.remove(request)
                request.answer(kafka_error(error))

    def heard(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        told = _places(partitions)
        for request in self._begun:
            if _places(request.offsets) == told:
                self._begun.remove(request)
                request.answer(error or _first_error(partitions))
                return

    def tend(self) -> None:
        """While the polling thread waits for a commit, whoever commits does so by itself."""
        if threading.get_ident() != self._owner:
            return
        if not self._is_inside:
            self._is_resting = True
            return
        # What was begun is committed once more: its answer cannot be heard.
        open_requests = [each for each in self._begun if not each.answered.is_set()]
        while self._waiting:
            open_requests.append(self._waiting.popleft())
        for request in open_requests:
            request.answer(self._made(request.offsets))

    def _made(self, offsets: list[TopicPartition]) -> KafkaError | None:
        try:
            return _first_error(self._client.commit(offsets=offsets, asynchronous=False) or ())
        except KafkaException as error:
            return kafka_error(error)

    def note_group(self) -> None:
        """Remember the member as it is now, for transactions; while it is none, as it was.

        Without a member, Kafka would take a transaction's offsets from anybody.
        """
        self._owner = threading.get_ident()
        member = self._client.memberid() or ""
        group: bytes = self._client.consumer_group_metadata()
        if member and member.encode() in group:
            self._group = group

    def group(self) -> bytes:
        """The member as of the last ``note_group``; empty: it was never one."""
        return self._group

    def committed(
        self, partitions: Sequence[tuple[str, int]], timeout_s: float
    ) -> list[OffsetCommit]:
        """What the group has committed, with metadata up to a NUL; by the polling thread."""
        asked = [TopicPartition(topic, number) for topic, number in partitions]
        result = []
        for each in self._client.committed(asked, timeout=timeout_s):
            if each.error is not None:
                raise KafkaException(each.error)
            try:
                metadata = each.metadata or ""
            except UnicodeDecodeError:  # somebody else's memory
                metadata = "\ufffd"
            result.append(OffsetCommit(each.topic, each.partition, each.offset, metadata))
        return result

    @property
    def _client(self) -> Consumer:
        assert self._consumer is not None
        return self._consumer


def plain(commits: Iterable[OffsetCommit]) -> list[TopicPartition]:
    return [
        TopicPartition(each.topic, each.partition, each.offset, each.metadata)
        if each.metadata
        else TopicPartition(each.topic, each.partition, each.offset)
        for each in commits
    ]


def _places(offsets: Iterable[TopicPartition]) -> frozenset[tuple[str, int, int]]:
    return frozenset((each.topic, each.partition, each.offset) for each in offsets)


def _first_error(partitions: Iterable[TopicPartition]) -> KafkaError | None:
    for each in partitions:
        if each.error is not None:
            return each.error
    return None
