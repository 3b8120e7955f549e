"""A consumer in memory as a member: rebalances, their callbacks, and commits."""

from __future__ import annotations

import logging
import math
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, Message, TopicPartition

from kafkamq.transport.memory.client import Client, encode_member, int_of
from kafkamq.transport.memory.cluster import Member
from kafkamq.transport.memory.state import Fault, failure, kafka_error
from kafkamq.transport.settings import is_new_protocol
from kafkamq.types import PartitionId

# The pause between looks for the end of an outage, which comes without a word.
_AGAIN_S = 0.25
_MISSING_S = 1.0
_log = logging.getLogger(__name__)


class Membership(Client):
    """The group's half of ``Consumer``; what its background thread does, ``work`` does here."""

    assign: Callable[[list[TopicPartition]], None]
    incremental_assign: Callable[[list[TopicPartition]], None]
    incremental_unassign: Callable[[list[TopicPartition]], None]
    _events: deque[Message]
    _readings: dict[PartitionId, Any]
    _paused: set[PartitionId]

    def __init__(self, settings: Mapping[str, Any], logger: object = None) -> None:
        super().__init__(settings, logger)
        if not settings.get("group.id"):
            raise ValueError("Failed to create consumer: group.id must be set")
        self._request_s = int_of(settings, 60_000, "socket.timeout.ms") / 1000
        self._on_commit: Any = settings.get("on_commit")
        self._answers: list[tuple[float, KafkaError | None, list[TopicPartition]]] = []
        self._group = str(settings["group.id"])
        self._is_classic = not is_new_protocol(settings)
        named = str(settings.get("partition.assignment.strategy", "range,roundrobin"))
        self.strategies = [each.strip() for each in named.split(",")]
        self._is_eager = self._is_classic and "cooperative-sticky" not in self.strategies
        self.max_poll_s = int_of(settings, 300_000, "max.poll.interval.ms") / 1000
        self._session_s = int_of(settings, 45_000, "session.timeout.ms") / 1000
        self._heartbeat_s = int_of(settings, 3000, "heartbeat.interval.ms") / 1000
        self._joined_counts: dict[str, int] = {}
        self._refresh_s = int_of(settings, 300_000, "topic.metadata.refresh.interval.ms") / 1000
        self._has_assigned = False
        self._wanted: list[str] = []
        self._member: Member | None = None
        # In the new protocol a client names itself, for good.
        self._member_id = "" if self._is_classic else uuid.uuid4().hex
        self._generation = -1
        self._is_joining = False
        self._must_rejoin = False
        self._owned: set[PartitionId] = set()
        self._steps: deque[tuple[str, list[PartitionId], Callable[[], None] | None]] = deque()
        self._callbacks: dict[str, Any] = {}
        self._began_s = self._polled_s = time.monotonic()
        self._refreshes_s = self._away_since_s = math.inf
        self._missing: set[str] = set()
        self._is_calling = False
        self._went_paused: set[PartitionId] = set()

    @property
    def session_s(self) -> float:
        """Return how long its heartbeats may be missing; in the new protocol the brokers say so."""
        if self._is_classic:
            return self._session_s
        return int(self.cluster.settings["group.consumer.session.timeout.ms"]) / 1000

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    # ---- the application's calls

    def subscribe(
        self, topics: list[str], on_assign: Any = None, on_revoke: Any = None, on_lost: Any = None
    ) -> None:
        with self.cluster.changed:
            self._check_open()
            for topic in topics:
                if topic.startswith("^"):
                    try:
                        re.compile(topic)
                    except re.error as error:
                        text = f"Failed to set subscription: {error}"
                        raise failure(KafkaError._INVALID_ARG, text) from None
            self._callbacks = {"assign": on_assign, "revoke": on_revoke, "lost": on_lost}
            self._wanted = list(topics)
            self._began_s = self._polled_s = time.monotonic()
            self._refreshes_s = 0.0
            self.cluster.groups.clients[self] = None
            if self._member is not None:
                self._rejoin()
            self.cluster.due(0.0)

    def unsubscribe(self) -> None:
        with self.cluster.changed:
            self._check_open()
            self._wanted = []
            if self._owned or self._steps:
                self._steps.append(("revoke", sorted(self._owned), self._leave))
            else:
                self._leave()
            self.cluster.changed.notify_all()

    def consumer_group_metadata(self) -> Any:
        self._check_open()
        return encode_member(self._group, self._generation, self._member_id)

    def memberid(self) -> str | None:
        self._check_open()
        return self._member_id or None

    def close(self) -> None:
        with self.cluster.changed:
            if self._is_closed:
                return
            is_told = bool(self._owned or self._steps) or not self._wanted
            if self._wanted:
                self._steps.append(("revoke", [], None))
                self._wanted = []
        while True:
            with self.cluster.changed:
                if not self._steps:
                    break
                step = self._next_step(is_closing=True)
            step()
        with self.cluster.changed:
            if is_told and self._member is not None and self not in self.cluster.faults.cut:
                # librdkafka (2.16) says nothing here, and the group waits for it.
                self._leave()
            self._is_closed = True
            self._readings.clear()
            self.cluster.groups.clients.pop(self, None)
            self.cluster.due(0.0)
            self.cluster.changed.notify_all()

    # ---- what polling does

    def _polled(self, now_s: float) -> None:
        self._polled_s = now_s

    def _next_callback(self) -> Callable[[], None] | None:
        return self._next_step() if self._steps and not self._events else None

    def _next_step(self, *, is_closing: bool = False) -> Callable[[], None]:
        kind, places, then = self._steps.popleft()
        if is_closing:
            while self._steps:
                kind, _, then = self._steps.popleft()
            kind = "lost" if kind == "lost" else "revoke"
            places = sorted(self._owned)
        elif then == self._leave:
            places = sorted(self._owned)
        return partial(self._run_step, kind, places, then)

    def _run_step(
        self, kind: str, places: list[PartitionId], then: Callable[[], None] | None
    ) -> None:
        """Call back, do what the application did not, and go on; ``changed`` is not held."""
        parts = [TopicPartition(*place, OFFSET_INVALID) for place in places]
        self._has_assigned, self._is_calling = False, True
        if kind == "assign" and not self._went_paused.isdisjoint(places):
            _log.debug("a partition comes back that was paused when it was revoked")
        elif kind != "assign":
            self._went_paused = self._paused.intersection(places)
        callback = self._callbacks.get(kind)
        if kind == "lost" and callback is None:
            callback = self._callbacks.get("revoke")
        try:
            if callback is not None and (places or kind == "assign"):
                callback(self, parts)
        finally:
            with self.cluster.changed:
                self._polled_s, self._is_calling = time.monotonic(), False
                self._finish_step(kind, places, parts)
                if then is not None:
                    then()
                elif self._must_rejoin and not self._steps:
                    self._rejoin()
                self.cluster.due(0.0)
                self.cluster.changed.notify_all()

    def _finish_step(
        self, kind: str, places: list[PartitionId], parts: list[TopicPartition]
    ) -> None:
        if kind == "assign":
            self._owned = set(places) if self._is_eager else self._owned | set(places)
            if not self._has_assigned:
                self.assign(parts) if self._is_eager else self.incremental_assign(parts)
            return
        self._owned.difference_update(places)
        if not self._has_assigned:
            left = [each for each in parts if (each.topic, each.partition) in self._readings]
            if self._is_eager:
                self.assign([])
            elif left:
                self.incremental_unassign(left)

    def _finish_joining(self, timeout_s: float, prefix: str) -> None:
        """Requests stand behind the one to join, which is answered when the slowest has come."""
        until_s = time.monotonic() + timeout_s
        while self._is_joining:
            now_s = self.cluster.tick()
            if now_s >= until_s:
                raise failure(KafkaError._TIMED_OUT, prefix + "Local: Timed out")
            self.cluster.wait(until_s)

    # ---- what the client's background thread does

    def work(self, now_s: float) -> None:
        """Heartbeats, joins, and the limit between two polls; the caller holds ``changed``."""
        if self._is_closed:
            return
        if self._member is not None and not self._is_calling and self._wanted:
            self._check_polls(now_s)
        if self.cluster.faults.separates(self):
            self._wait_for_coordinator(now_s)
            return
        self._away_since_s = math.inf
        if self._wanted and now_s >= self._refreshes_s:
            self._refresh(now_s)
        if math.isfinite(self._refreshes_s):
            self.cluster.due(self._refreshes_s)
        member = self._member
        is_busy = self._steps or self._is_joining or self._is_calling
        if member is None:
            if self._wanted and not is_busy:
                self._join()
        elif self._must_rejoin and not is_busy:
            self._rejoin()
        elif now_s >= member.hears_s:
            member.hears_s = math.inf
            self._hear(member)
        elif math.isfinite(member.hears_s):
            self.cluster.due(member.hears_s)

    def _wait_for_coordinator(self, now_s: float) -> None:
        """A member that has no answer for too long takes itself for lost."""
        self.cluster.due(now_s + _AGAIN_S)
        self._away_since_s = min(self._away_since_s, now_s)
        is_late = now_s - self._away_since_s >= self.session_s
        if is_late and self._is_classic and self._member is not None:
            self._lose()

    def _lose(self) -> None:
        self._forget_member()
        self._steps.clear()
        if self._owned:
            self._steps.append(("lost", sorted(self._owned), None))
        self.cluster.due(0.0)
        self.cluster.changed.notify_all()

    def is_member(self, member: Member) -> bool:
        return self._member is member

    def next_heartbeat_s(self) -> float:
        since_s = time.monotonic() - self._began_s
        interval_s = self._heartbeat_s
        if not self._is_classic:
            interval_s = int(self.cluster.settings["group.consumer.heartbeat.interval.ms"]) / 1000
        return self._began_s + (since_s // interval_s + 1) * interval_s

    def _hear(self, member: Member) -> None:
        if member.is_removed:
            self._lose()
        elif self._is_classic:
            self._rejoin()
        elif not self._steps and not self._is_calling:
            group = self.cluster.groups.group(self._group, is_classic=False)
            allowed = group.heartbeat(member, set(self._owned))
            self._generation = member.epoch
            self._take(allowed)
        else:
            # It hears again when the callbacks have run.
            member.hears_s = math.inf

    def _check_polls(self, now_s: float) -> None:
        late_s = now_s - self._polled_s - self.max_poll_s
        if late_s < 0:
            self.cluster.due(self._polled_s + self.max_poll_s)
            return
        if self._is_classic:
            # A member of the new protocol stays until it can be called back.
            self._leave()
        text = (
            f"Application maximum poll interval ({self.max_poll_s * 1000:.0f}ms) exceeded by"
            f" {late_s * 1000:.0f}ms"
        )
        error = kafka_error(KafkaError._MAX_POLL_EXCEEDED, text)
        self._announce(error, None)
        self._steps.clear()
        self._polled_s = math.inf
        self._steps.append(("lost", sorted(self._owned), self._leave))

    def _announce(self, error: KafkaError, topic: str | None) -> None:
        self._events.append(
            Message(
                topic=topic,
                partition=0,
                value=error.str().encode(),
                error=error,
                timestamp=(0, -1),
            )
        )

    def _refresh(self, now_s: float) -> None:
        """Look at the metadata of what is subscribed to; a change of it asks for a new round."""
        counts = {topic: self._learn(topic) for topic in self._topics()}
        missing = {
            topic for topic in self._wanted if not topic.startswith("^") and topic not in counts
        }
        for topic in sorted(missing - self._missing):
            text = f"Subscribed topic not available: {topic}: Broker: Unknown topic or partition"
            error = kafka_error(KafkaError.UNKNOWN_TOPIC_OR_PART, text)
            self._announce(error, topic)
        self._missing = missing
        interval_s = min(_MISSING_S, self._refresh_s) if missing else self._refresh_s
        self._refreshes_s = now_s + interval_s
        member = self._member
        if member is None or not self._is_classic:
            return
        if counts != self._joined_counts:
            # ``known`` may have changed by other requests.
            self._rejoin()

    def _topics(self) -> list[str]:
        found = []
        for topic in self.cluster.topics:
            for wanted in self._wanted:
                if topic == wanted or (wanted.startswith("^") and re.search(wanted, topic)):
                    found.append(topic)
                    break
        return found

    def count_of(self, topic: str, *, is_classic: bool) -> int:
        """Return how many partitions it knows; in the consumer protocol the brokers know."""
        actual = len(self.cluster.topics[topic].partitions)
        return min(actual, self.known.get(topic, actual)) if is_classic else actual

    # ---- joining and leaving

    def _rejoin(self) -> None:
        """Take part in a new round, once nothing is left to be called back."""
        if self._steps or self._is_joining or self._is_calling:
            self._must_rejoin = True
        elif not self._is_classic:
            self._join()
        elif self._is_eager and self._owned:
            self._steps.append(("revoke", sorted(self._owned), self._join))
            self.cluster.changed.notify_all()
        else:
            self._join()

    def _join(self) -> None:
        topics = self._topics()
        if not topics or not self._wanted:
            return
        self._must_rejoin = True
        if self.cluster.faults.separates(self):
            self.cluster.due(time.monotonic() + _AGAIN_S)
            return
        fault = self.cluster.faults.of("join", self)
        if fault is not None and (fault.error is not None or fault.is_lost):
            self.cluster.due(time.monotonic() + _AGAIN_S)
            return
        self._must_rejoin = False
        member = self._member or Member(self, self._member_id)
        self._member, self._member_id = member, member.id
        member.topics = topics
        for topic in topics:
            self.known.setdefault(topic, len(self.cluster.topics[topic].partitions))
        self._joined_counts = {topic: self.known[topic] for topic in topics}
        group = self.cluster.groups.group(self._group, is_classic=self._is_classic)
        if self._is_classic:
            self._is_joining = True
            group.join(member, set() if self._is_eager else set(self._owned))
        else:
            group.members[member.id] = member
            group.retarget()
            member.hears_s = 0.0
            self.cluster.due(0.0)

    def take_assignment(self, member: Member, strategy: str) -> None:
        """The round is complete; the coordinator says what this member gets."""
        if member is not self._member:
            # It has left, or was lost: a late answer is dropped.
            return
        self._is_joining = False
        self._generation = member.epoch
        self._is_eager = strategy != "cooperative-sticky"
        if self._is_eager:
            self._steps.append(("assign", sorted(member.assigned), None))
        else:
            self._take(member.assigned, then=self._rejoin)
        self.cluster.changed.notify_all()

    def _take(self, allowed: Iterable[PartitionId], then: Callable[[], None] | None = None) -> None:
        """Callbacks from what is owned to what is allowed."""
        gone = sorted(self._owned.difference(allowed))
        added = sorted(set(allowed) - self._owned)
        if gone:
            self._steps.append(("revoke", gone, None))
        if gone or added or self._is_classic:
            after = then if gone else None
            self._steps.append(("assign", added, after if self._is_classic else self._report))
        if gone or added:
            self.cluster.changed.notify_all()

    def _report(self) -> None:
        """The coordinator hears at once what is owned now."""
        if self._member is not None:
            self._member.hears_s = 0.0

    def _leave(self) -> None:
        member = self._member
        if member is not None and not self.cluster.faults.separates(self):
            self.cluster.groups.group(self._group, is_classic=self._is_classic).remove(member)
        generation = self._generation if self._is_classic else 0
        self._forget_member()
        self._generation = generation

    def _forget_member(self) -> None:
        self._member, self._generation = None, -1
        if self._is_classic:
            self._member_id = ""
        self._is_joining = self._must_rejoin = False

    # ---- commits

    def commit(
        self,
        message: Message | None = None,
        offsets: list[TopicPartition] | None = None,
        asynchronous: bool = True,
    ) -> Any:
        """Commit as confluent_kafka does; an asynchronous one happens at once, or never."""
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
            if error is not None:
                # This is said of each, also where one alone was refused.
                answer = [_refused(each, error) for each in wanted]
            self._answers.append((told_s, error, answer))
            self.cluster.due(told_s)

    def _next_answer(self, now_s: float) -> Callable[[], None] | None:
        """Return a call of ``on_commit`` that is due; not to be made while ``changed`` is held."""
        for told in self._answers:
            if told[0] <= now_s:
                self._answers.remove(told)
                return partial(self._on_commit, *told[1:])
        return None

    def _commit(self, wanted: Sequence[TopicPartition]) -> list[TopicPartition]:
        generation, member = self._generation, self._member_id
        self._finish_joining(self._request_s, "Commit failed: ")

        is_away = self.cluster.faults.separates(self)
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


class _Refused(TopicPartition):
    """It stands in the answer to a commit; a plain one's error cannot be set."""

    error: KafkaError | None = None


def _refused(wanted: TopicPartition, error: KafkaError) -> TopicPartition:
    refused = _Refused(wanted.topic, wanted.partition, wanted.offset)
    refused.error = error
    return refused


def committed_at(place: PartitionId, offset: int, metadata: str | None) -> TopicPartition:
    if metadata is None:
        return TopicPartition(*place, offset)
    return TopicPartition(*place, offset, metadata)
