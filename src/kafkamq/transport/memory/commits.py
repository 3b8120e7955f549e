"""A consumer in memory: what it commits, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from kafkamq.transport.memory.client import Client, int_of
from kafkamq.transport.memory.failures import failure, kafka_error
from kafkamq.transport.memory.faults import Fault
from kafkamq.transport.memory.log import Place


class _Refused(TopicPartition):
    """In the answer to a commit; a plain one's error cannot be set."""

    error: KafkaError | None = None


class Commits(Client):
    """The half of ``Consumer`` that commits."""

    session_s: Any  # all of these are ``Membership``'s and ``Consumer``'s
    _group: str
    _generation: int
    _member_id: str
    _is_joining: bool
    _finish_joining: Callable[[float, str], None]
    _readings: dict[Place, Any]

    def __init__(self, settings: Mapping[str, Any], logger: object = None) -> None:
        super().__init__(settings, logger)
        self._request_s = int_of(settings, 60_000, "socket.timeout.ms") / 1000
        self._on_commit: Any = settings.get("on_commit")
        self._answers: list[tuple[float, KafkaError | None, list[TopicPartition]]] = []

    def commit(
        self,
        message: Message | None = None,
        offsets: list[TopicPartition] | None = None,
        asynchronous: bool = True,
    ) -> Any:
        """As confluent_kafka's; an asynchronous one happens before it returns, or never."""
        with self.cluster.changed:
            self._check_open()
            if offsets is None:
                offsets = [
                    TopicPartition(*place, reading.position)
                    for place, reading in self._readings.items()
                ]
            wanted = [each for each in offsets if each.offset >= 0]
            if not wanted:
                raise failure(KafkaError._NO_OFFSET, "Commit failed: Local: No offset stored")
            if not asynchronous:
                return self._commit(wanted)
            self._begin_commit(wanted)
            return None

    def _begin_commit(self, wanted: list[TopicPartition]) -> None:
        """Nobody waits: ``on_commit`` hears the answer, inside a later poll."""
        now_s = self.cluster.tick()
        fault = self.cluster.faults.of("commit", self) or Fault()
        answer, error, told_s = wanted, fault.error, now_s + fault.latency_s
        if fault.is_lost or self._is_joining or self.cluster.faults.separates(self):
            error, told_s = kafka_error(KafkaError._TIMED_OUT), now_s + self._request_s
        elif error is None:
            try:
                answer = self._do_commit(wanted, self._generation, self._member_id)
                error = next((each.error for each in answer if each.error is not None), None)
            except KafkaException as failed:
                error = failed.args[0]
            if fault.is_answer_lost:
                error, told_s = kafka_error(KafkaError._TIMED_OUT), now_s + self._request_s
        if self._on_commit is not None:
            if error is not None:  # is said of each, also where one alone was refused
                answer = [_refused(each, error) for each in wanted]
            self._answers.append((told_s, error, answer))
            self.cluster.due(told_s)

    def _next_answer(self, now_s: float) -> Callable[[], None] | None:
        """A call of ``on_commit`` that is due; not to be made while ``changed`` is held."""
        for told in self._answers:
            if told[0] <= now_s:
                self._answers.remove(told)
                return partial(self._on_commit, *told[1:])
        return None

    def _commit(self, wanted: Sequence[TopicPartition]) -> list[TopicPartition]:
        generation, member = self._generation, self._member_id
        self._finish_joining(self._request_s, "Commit failed: ")

        is_away = self.cluster.faults.separates(self)  # the coordinator is waited for
        timeout_s = self.session_s if is_away else self._request_s
        answer = self._request(
            "commit",
            lambda: self._do_commit(wanted, generation, member),
            timeout_s,
            "Commit failed: ",
            down=KafkaError._WAIT_COORD,
        )
        self.cluster.groups.answered(self._group, answer)
        return answer

    def _do_commit(
        self, wanted: Sequence[TopicPartition], generation: int, member: str
    ) -> list[TopicPartition]:
        groups = self.cluster.groups
        error = groups.refusal(self._group, generation, member)
        if error is not None:
            raise failure(error.code(), f"Commit failed: {error.str()}")
        answer: list[TopicPartition] = []
        for each in wanted:
            place = each.topic, each.partition
            if self.cluster.partition(place) is None:
                error = kafka_error(KafkaError.UNKNOWN_TOPIC_OR_PART)
                answer.append(_refused(each, error))
            elif self.cluster.is_too_long(each.metadata):
                error = kafka_error(KafkaError.OFFSET_METADATA_TOO_LARGE)
                answer.append(_refused(each, error))
            else:
                groups.keep(self._group, place, (each.offset, each.metadata))
                answer.append(committed_at(place, each.offset, each.metadata))
        errors = [each.error for each in answer if each.error is not None]
        if len(errors) == len(answer):
            raise failure(errors[0].code(), f"Commit failed: {errors[0].str()}")
        return answer


def _refused(wanted: TopicPartition, error: KafkaError) -> TopicPartition:
    refused = _Refused(wanted.topic, wanted.partition, wanted.offset)
    refused.error = error
    return refused


def committed_at(place: Place, offset: int, metadata: str | None) -> TopicPartition:
    if metadata is None:
        return TopicPartition(*place, offset)
    return TopicPartition(*place, offset, metadata)
