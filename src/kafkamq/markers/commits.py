"""Offset commits that nobody waits for: each has a number, and learns its own answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kafkamq.transport.errors import KafkaError, KafkaException, kafka_error
from kafkamq.transport.port import Consumer as KafkaConsumer
from kafkamq.transport.record import Place, TopicPartition


class PendingCommit:
    """A commit that has set out; who drops it gives it up.

    Attributes:
        is_answered: Set inside of a later poll of the client.
        error: Of the whole, or of the first partition that was refused.
    """

    __slots__ = ("error", "is_answered", "offsets")

    def __init__(self, offsets: Mapping[Place, int]) -> None:
        self.offsets = dict(offsets)
        self.is_answered = False
        self.error: KafkaError | None = None


class Commits:
    """The commits of one client, whose ``on_commit`` it is; the thread that polls owns it.

    It does not know the client, which knows it: a ring of both would keep the client alive.
    """

    def __init__(self) -> None:
        self._pending: list[PendingCommit] = []

    def begin(self, client: KafkaConsumer, offsets: Mapping[Place, int]) -> PendingCommit:
        """Send a commit; what the client refuses at once is its answer."""
        commit = PendingCommit(offsets)
        self._pending.append(commit)
        wanted = [TopicPartition(*place, offset) for place, offset in offsets.items()]
        try:
            client.commit(offsets=wanted, asynchronous=True)
        except KafkaException as error:
            self._pending.remove(commit)
            commit.is_answered, commit.error = True, kafka_error(error)
        return commit

    def __call__(self, error: KafkaError | None, answers: Sequence[TopicPartition]) -> None:
        """The client's answer, to the oldest commit of exactly these offsets."""
        places = {(each.topic, each.partition): each.offset for each in answers}
        for commit in self._pending:
            if commit.offsets == places:
                self._pending.remove(commit)
                refused = (each.error for each in answers if each.error is not None)
                commit.error = error or next(refused, None)
                commit.is_answered = True
                return
