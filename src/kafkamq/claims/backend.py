"""The backend ``claims``: a coordination log says who owns a partition, and what is done."""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta

from kafkamq.claims.cluster import Cluster
from kafkamq.claims.consumer import ClaimedMessage
from kafkamq.claims.log_engine import coordination_topic, heartbeat_s, init_topic
from kafkamq.claims.rules.steps import End
from kafkamq.config import QueueConfig, ServiceConfig, wait_seconds
from kafkamq.errors import LeaseLostError
from kafkamq.queue.backend import ConsumerPlan, TopicBackend
from kafkamq.queue.dead_letter_writer import DeadLetterOutbox
from kafkamq.queue.message import Message
from kafkamq.queue.names import group_of
from kafkamq.queue.rules.waiting import Waiting
from kafkamq.queue.topic_consumer import TopicConsumer, TopicMessage
from kafkamq.transport.clock import monotonic_ms

_SLICE_S = 0.05
_IDLE_S = 0.25
_BETWEEN_S = 0.005
_JOIN_S = 2.0
_GIVEN_BACK = frozenset(
    end.value for end in (End.PAUSED, End.BEHIND, End.STUCK, End.SHARED, End.RELEASED, End.KEPT)
)
"""Ends of a claim under which verdicts still count for a while; when that ends they are told so."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Partition:
    """One claim of a partition: what was handed out under it."""

    # Messages that are not done: handed out, or waiting for a retry or a dead letter.
    open_count: int = 0
    acked: int = -1
    is_over: bool = False


_Held = TopicMessage[tuple[_Partition, ClaimedMessage]]


class ClaimsConsumer(TopicConsumer[_Held]):
    """Order by partition, or none; what is done is in heartbeats of the coordination log.

    A message that is nacked waits in this process; the partition's position stays before it. Who
    receives also reads. What was read waits in a buffer for each partition, and is taken from there
    when it is handed out: one message at a time in order, else ``max_in_flight`` that are not done.
    """

    def __init__(
        self,
        config: ServiceConfig,
        queue: QueueConfig,
        dead_letters: DeadLetterOutbox,
        plan: ConsumerPlan,
    ) -> None:
        super().__init__(queue, dead_letters, plan.on_lease_lost)
        # The coordination log's records are separated by slashes.
        group_id = queue.group_id or group_of(config, queue.queue_id).replace("/", ".")
        self._credit = 1 if plan.ordering != "unordered" else queue.max_in_flight
        self._retries: Waiting[_Held] = Waiting()
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._forgotten: set[tuple[str, int]] = set()
        self._reading = threading.Lock()
        self._cluster = Cluster(
            config.bootstrap_servers,
            coordination_topic=coordination_topic(config),
            heartbeat_interval=heartbeat_s(queue),
            kafka=config.kafka,
        )
        # One lock for the claims and for what is handed out under them.
        self._changed = self._cluster.engine.changed
        try:
            name = f"{socket.gethostname()}-{uuid.uuid4().hex[:12]}".replace("/", "-")
            member = self._cluster.member(name, group_id)
            self._claims = member.consumer(
                queue.topic,
                release_if_behind=False,
                queue=queue.max_in_flight,
                on_data_loss=queue.on_data_loss,
                on_claim=self._claimed,
                on_lost=self._claim_ended,
            )
        except BaseException:
            self._cluster.close(1.0)
            raise

    # Messages come.

    def receive_many(self, n: int, timeout: float | timedelta = 1.0) -> list[Message]:
        self._check_count(n)
        self._check()
        self._hurry.clear()
        deadline_s = time.monotonic() + wait_seconds(timeout, may_be_endless=True)
        wait_s = 0.0
        while True:
            with self._reading:
                if not self._closing.is_set():
                    self._claims.read(wait_s)
            with self._changed:
                self._check_failure()
                now_ms = monotonic_ms()
                messages = self._take(n)
                left_s = deadline_s - time.monotonic()
                if messages or left_s <= 0 or self._closing.is_set() or self._hurry.is_set():
                    return messages
                wait_s = self._wait_here(left_s, now_ms)

    def _wait_here(self, left_s: float, now_ms: int) -> float:
        """Wait for what happens in this process; returns how long to wait for Kafka."""
        due_ms = self._retries.next_due_ms()
        if due_ms is not None and due_ms > now_ms:
            left_s = min(left_s, (due_ms - now_ms) / 1000)
        if self._claims.is_full or self.in_flight >= self._queue.max_in_flight:
            # Nothing that is read can be handed out before a verdict, or a retry's time.
            self._changed.wait(min(left_s, _IDLE_S))
            return 0.0
        if self._claims.has_read:
            # A verdict lets more of one partition follow, Kafka may have some of another one.
            self._changed.wait(min(left_s, _BETWEEN_S))
            return 0.0
        return min(left_s, _SLICE_S)

    def _fill(self, n: int) -> None:
        now_ms = monotonic_ms()
        while len(self._ready) < n:
            retry = self._retries.take(now_ms)
            if retry is not None:
                self._ready.append(retry[1])
                continue
            found = self._claims.take_read(n - len(self._ready), self._credit_of)
            if not found:
                return
            partition = self._partitions[found[0].topic, found[0].partition]
            partition.open_count += len(found)
            self._ready += [
                TopicMessage(self, each._record, place=(partition, each)) for each in found
            ]

    def _credit_of(self, place: tuple[str, int]) -> int:
        partition = self._partitions.get(place)
        return 0 if partition is None else self._credit - partition.open_count

    def _may_hand_out(self, message: _Held) -> bool:
        """What waits for a retry, too, is the next owner's when the lease has ended."""
        partition, claimed = message.place
        return not partition.is_over and self._claims.is_held(
            claimed.topic, claimed.partition, claimed.token
        )

    # Verdicts.

    def _done(self, message: _Held) -> None:
        partition, claimed = message.place
        with self._changed:
            partition.open_count -= 1
            partition.acked = max(claimed.offset, partition.acked)
            self._changed.notify_all()
            claimed.commit()

    def _is_ours(self, message: _Held) -> bool:
        partition, claimed = message.place
        place = claimed.topic, claimed.partition
        # One that is given back is still there, until the log has its release.
        is_there = self._claims.confirmed_position(*place) >= 0
        return is_there and self._partitions.get(place) is partition

    def _again(self, message: _Held, delay_ms: int) -> None:
        partition, claimed = message.place
        with self._changed:
            if partition.is_over:
                self._claims.forget(claimed)
                return
            again: _Held = TopicMessage(
                self,
                claimed._record,
                delivery_count=message.delivery_count + 1,
                place=message.place,
            )
            self._retries.retry(None, again, monotonic_ms() + delay_ms)
            self._changed.notify_all()

    # What the claims tell; with their lock held, which is this consumer's.

    def _claimed(self, topic: str, partition: int, token: int) -> None:
        del token
        self._lose_held((topic, partition))
        self._partitions[topic, partition] = _Partition()

    def _claim_ended(self, topic: str, partition: int, reason: str) -> None:
        _log.info(
            "a claim has ended",
            extra={"queue": self.queue_id, "partition": partition, "reason": reason},
        )
        place = (topic, partition)
        ended = self._partitions.get(place)
        if ended is None:
            return
        ended.is_over = True
        for message in (*self._retries.items(), *self._ready):
            if message.place[0] is ended:
                self._claims.forget(message.place[1])
        self._retries.keep(lambda _, message: message.place[0] is not ended)
        if reason not in _GIVEN_BACK:
            del self._partitions[place]
            self._lose_held(place)
            if ended.acked >= max(0, self._claims.confirmed_position(*place)):
                self._forgotten.add(place)
        for message in self._ready:
            if message.place[0] is ended and not self._closing.is_set():
                self._lose(message)
        self._dead_letters.prune()

    def _lose_held(self, place: tuple[str, int]) -> None:
        for message in list(self._held.values()):
            claimed = message.place[1]
            if (claimed.topic, claimed.partition) == place and not self._closing.is_set():
                self._lose(message)

    # The end.

    def _check_failure(self) -> None:
        super()._check_failure()
        if not self._claims.is_closed:
            self._claims.check()

    def _confirm(self, timeout_s: float) -> None:
        self._check_failure()
        self._claims.flush(timeout_s)
        with self._changed:
            forgotten, self._forgotten = self._forgotten, set()
        if forgotten:
            places = ", ".join(f"{topic}[{number}]" for topic, number in sorted(forgotten))
            raise LeaseLostError(
                f"the claims of {places} ended before all verdicts under them were written: these"
                " messages come again"
            )

    def _end(self, timeout_s: float) -> None:
        with self._changed:
            self._ready.clear()
            self._changed.notify_all()
        self._claims.stop()
        # A receive of another thread ends now; one of this thread, if a signal's handler closes,
        # only when this returns.
        is_free = self._reading.acquire(timeout=_JOIN_S)
        try:
            self._claims.close(timeout=timeout_s)
            self._cluster.close(timeout_s)
        finally:
            if is_free:
                self._reading.release()


class _ClaimsBackend(TopicBackend):
    def create_topics(
        self, config: ServiceConfig, queue: QueueConfig, *, partitions: int, replication_factor: int
    ) -> None:
        super().create_topics(
            config, queue, partitions=partitions, replication_factor=replication_factor
        )
        init_topic(
            config.bootstrap_servers,
            coordination_topic(config),
            partitions=1,
            replication_factor=replication_factor,
            heartbeat_interval=heartbeat_s(queue),
            kafka=config.kafka,
        )


backend = _ClaimsBackend(ClaimsConsumer)
