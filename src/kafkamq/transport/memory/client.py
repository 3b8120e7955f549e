"""What consumers, producers and admin clients in memory share: requests, metadata, error events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from confluent_kafka import KafkaError
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its __all__ lacks them
    BrokerMetadata,
    ClusterMetadata,
    PartitionMetadata,
    TopicMetadata,
)

from kafkamq.transport.memory.cluster import cluster_of
from kafkamq.transport.memory.failures import failure, kafka_error
from kafkamq.transport.memory.faults import RETRIED, RETRY_S, Fault
from kafkamq.transport.memory.log import Place, Topic

BROKER_ID = 1
_FOREVER_S = 1e9
T = TypeVar("T")


def int_of(settings: Mapping[str, Any], default: int, *names: str) -> int:
    for name in names:
        if name in settings:
            return int(float(str(settings[name])))
    return default


class Client:
    """One client of a cluster in memory."""

    _closed_text = "Handle has been closed"

    def __init__(self, settings: Mapping[str, Any], logger: object = None) -> None:
        self.client_id = str(settings.get("client.id", "rdkafka"))
        self.cluster = cluster_of(str(settings["bootstrap.servers"]))
        self.known: dict[str, int] = {}
        self._is_closed = False
        self._error_cb: Callable[[KafkaError], None] | None = settings.get("error_cb")
        self._errors: deque[KafkaError] = deque()
        self._has_told_outage = False

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(self._closed_text)

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        self._check_open()
        prefix = "Failed to get metadata: "
        return self._request(
            "metadata", lambda: self._metadata(topic), timeout, prefix, down=KafkaError._TRANSPORT
        )

    def _metadata(self, topic: str | None) -> Any:
        topics = self.cluster.topics
        names = sorted(topics) if topic is None else [topic]
        answer: Any = ClusterMetadata()
        broker: Any = BrokerMetadata()
        broker.id, broker.host, broker.port = BROKER_ID, self.cluster.name, 9092
        answer.cluster_id = self.cluster.name
        answer.controller_id = answer.orig_broker_id = BROKER_ID
        answer.orig_broker_name = f"{self.cluster.name}:9092/{BROKER_ID}"
        answer.brokers = {BROKER_ID: broker}
        answer.topics = {name: _topic_metadata(name, self._told(name)) for name in names}
        for name in names:
            self._learn(name)
        return answer

    def _topic(self, name: str) -> Topic | None:
        """The topic, if this client may hear of it."""
        is_hidden = (self, name) in self.cluster.faults.hidden
        return None if is_hidden else self.cluster.topics.get(name)

    def _told(self, name: str) -> list[int] | None:
        """Its partitions as the broker says that is asked; None: it knows of no such topic."""
        topic, told = self._topic(name), self.cluster.faults.told
        count = 0 if topic is None else len(topic.partitions)
        if count and told is not None:
            count = told(name, count)
        return list(range(count)) or None

    def _learn(self, topic: str) -> int:
        """Hear of a topic; how many partitions it has, 0 without one."""
        found = self._topic(topic)
        if found is None:
            self.known.pop(topic, None)
            return 0
        self.known[topic] = len(found.partitions)
        return len(found.partitions)

    # ---- requests

    def _request(
        self,
        kind: str,
        effect: Callable[[], T],
        timeout: float | None,
        prefix: str,
        *,
        place: Place | None = None,
        retriable: bool = False,
        down: int = KafkaError._TIMED_OUT,
    ) -> T:
        """What the brokers do (``effect``) and answer; ``kind``, ``place``: for ``Faults.plan``."""
        cluster = self.cluster
        with cluster.changed:
            now_s = cluster.tick()
            faults = cluster.faults
            if faults.plan is None and not faults.is_down and not faults.cut and not faults.offline:
                return effect()
            deadline_s = now_s + (_FOREVER_S if timeout is None or timeout < 0 else timeout)
            fault = faults.of(kind, self, place) or Fault()
            if retriable and fault.error is not None and fault.error.code() in RETRIED:
                fault = Fault(latency_s=fault.latency_s + RETRY_S)
            arrives_s = now_s + fault.latency_s
            while now_s < arrives_s or faults.separates(self, place):
                code = down if faults.separates(self, place) else KafkaError._TIMED_OUT
                self._must_go_on(now_s, deadline_s, prefix, retriable, code)
                cluster.wait(min(deadline_s, arrives_s if now_s < arrives_s else deadline_s))
                now_s = cluster.tick()
            if fault.error is not None:
                raise failure(fault.error.code(), prefix + fault.error.str())
            answer = None if fault.is_lost else effect()
            while fault.is_lost or fault.is_answer_lost:
                self._must_go_on(now_s, deadline_s, prefix, retriable)
                cluster.wait(deadline_s)
                now_s = cluster.tick()
            return answer  # type: ignore[return-value]  # only a lost request has none

    def _must_go_on(
        self,
        now_s: float,
        deadline_s: float,
        prefix: str,
        retriable: bool,
        code: int = KafkaError._TIMED_OUT,
    ) -> None:
        if self.cluster.faults.separates(self):
            self._tell_outage()
        if now_s >= deadline_s:
            raise failure(code, prefix + kafka_error(code).str(), retriable=retriable)

    # ---- what comes unasked

    def _tell_outage(self) -> None:
        """``error_cb`` hears once that no broker answers."""
        if not self._has_told_outage:
            self._has_told_outage = True
            text = f"{self.cluster.name}:9092/{BROKER_ID}: Connect failed: Connection refused"
            self._errors.append(kafka_error(KafkaError._TRANSPORT, text))
            self._errors.append(kafka_error(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))

    def _look_around(self) -> None:
        """Notice outages and their ends; hold ``changed``."""
        faults = self.cluster.faults
        if faults.is_down or self in faults.cut:
            self._tell_outage()
        else:
            self._has_told_outage = False

    def _serve_errors(self) -> int:
        """Call ``error_cb``; not while ``changed`` is held."""
        count = 0
        while self._errors:
            error = self._errors.popleft()
            count += 1
            if self._error_cb is not None:
                self._error_cb(error)
        return count

    @contextmanager
    def _turns(self, timeout: float | None) -> Iterator[Callable[[], bool]]:
        """Hold ``changed``; gives a function that waits for changes, False when time is over."""
        cluster = self.cluster
        with cluster.changed:
            now_s = cluster.tick()
            until_s = now_s + (_FOREVER_S if timeout is None or timeout < 0 else timeout)

            def wait() -> bool:
                if time.monotonic() >= until_s:
                    return False
                cluster.wait(until_s)
                cluster.tick()
                return True

            yield wait


def _topic_metadata(name: str, numbers: Sequence[int] | None) -> TopicMetadata:
    answer = TopicMetadata()
    answer.topic = name
    if numbers is None:
        answer.error = kafka_error(KafkaError.UNKNOWN_TOPIC_OR_PART)
        return answer
    for number in numbers:
        each = PartitionMetadata()
        each.id, each.leader = number, BROKER_ID
        each.replicas, each.isrs = [BROKER_ID], [BROKER_ID]
        answer.partitions[number] = each
    return answer
