"""The ``claims`` backend: partitions are claimed in a coordination log, one owner each."""

from __future__ import annotations

import logging
import socket
import threading
import uuid
from collections.abc import Hashable
from dataclasses import dataclass
from datetime import timedelta

from kafkamq.claims.cluster import Cluster
from kafkamq.claims.message import ClaimedMessage
from kafkamq.claims.rules.steps import End
from kafkamq.claims.topic import coordination_topic, heartbeat_s
from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import KafkaMQError, LeaseLostError
from kafkamq.queue.backend import ConsumerPlan
from kafkamq.queue.dead_letter_writer import DeadLetterOutbox
from kafkamq.queue.message import Message
from kafkamq.queue.names import group_of
from kafkamq.queue.rules.waiting import Waiting
from kafkamq.queue.topic_consumer import TopicConsumer
from kafkamq.queue.topic_message import TopicMessage
from kafkamq.transport.clock import monotonic_ms

_POLL_S = 0.2
_JOIN_S = 10.0
_GIVEN_BACK = frozenset(
    end.value for end in (End.PAUSED, End.BEHIND, End.STUCK, End.RELEASED, End.KEPT)
)
"""Ends of a claim under which verdicts still count for a while; when that ends they are told so."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Item:
    """A message of a claimed partition, with the deliveries it had."""

    claimed: ClaimedMessage
    count: int


_Held = TopicMessage[tuple[Hashable, _Item]]


class ClaimsConsumer(TopicConsumer[_Held]):
    """Order by partition, or none; what is done is in heartbeats of the coordination log.

    A message that is nacked waits in this process; the partition's position stays before it.
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
        self._is_serial = plan.ordering != "unordered"
        self._waiting: Waiting[_Item] = Waiting()
        self._tokens: dict[tuple[str, int], int] = {}  # of the claims that messages come from
        self._acked: dict[tuple[str, int], int] = {}  # the highest offset, by topic and partition
        self._forgotten: set[tuple[str, int]] = set()  # lost with verdicts that no log has
        self._cluster = Cluster(
            config.bootstrap_servers,
            coordination_topic=coordination_topic(config),
            heartbeat_interval=heartbeat_s(queue),
            kafka=config.kafka,
        )
        try:
            name = f"{socket.gethostname()}-{uuid.uuid4().hex[:12]}".replace("/", "-")
            member = self._cluster.member(name, group_id)
            self._claims = member.consumer(
                queue.topic,
                release_if_behind=False,
                queue=queue.max_in_flight,
                on_data_loss=queue.on_data_loss,
                on_lost=self._claim_ended,
            )
        except BaseException:
            self._cluster.close(1.0)
            raise
        self._thread = threading.Thread(target=self._feed, name="kafkamq-claims-feed", daemon=True)
        self._thread.start()

    # Messages come.

    def _feed(self) -> None:
        try:
            while not self._closing.is_set():
                claimed = self._claims.receive(_POLL_S)
                if claimed is not None:
                    self._add(claimed)
        except KafkaMQError as error:
            if not self._closing.is_set():
                self._fail(error)
        except BaseException as error:  # noqa: BLE001 - whatever it is
            self._fail(error)

    def _add(self, claimed: ClaimedMessage) -> None:
        place = (claimed.topic, claimed.partition)
        # Of one claim: what is under way when it ends must not move on the buffer of the next one.
        buffer = (*place, claimed.token) if self._is_serial else None
        with self._changed:
            if self._tokens.get(place) != claimed.token:
                self._lose_held(place)  # left of a claim that was given back
            self._tokens[place] = claimed.token
            self._waiting.add(buffer, _Item(claimed, 1))
            self._changed.notify()
            while len(self._waiting) >= self._queue.max_in_flight and not self._closing.is_set():
                self._changed.wait(_POLL_S)  # back-pressure: receives make room

    def _fill(self, n: int) -> None:
        now_ms = monotonic_ms()
        while len(self._ready) < n:
            taken = self._waiting.take(now_ms)
            if taken is None:
                return
            buffer, item = taken
            self._ready.append(
                TopicMessage(
                    self, item.claimed._record, delivery_count=item.count, place=(buffer, item)
                )
            )

    def receive_many(self, n: int, timeout: float | timedelta = 1.0) -> list[Message]:
        messages = super().receive_many(n, timeout)
        if messages:
            with self._changed:
                self._changed.notify_all()  # there is room
        return messages

    # Verdicts.

    def _done(self, message: _Held) -> None:
        buffer, item = message.place
        place = _place_of(item)
        try:
            with self._changed:  # first: the claim may end before the commit has returned
                self._acked[place] = max(item.claimed.offset, self._acked.get(place, -1))
            item.claimed.commit()
        finally:
            with self._changed:
                self._waiting.done(buffer)
                self._changed.notify_all()

    def _again(self, message: _Held, delay_ms: int) -> None:
        buffer, item = message.place
        claimed = item.claimed
        with self._changed:
            if self._tokens.get((claimed.topic, claimed.partition)) != claimed.token:
                return  # its claim has ended: it is its next owner's
            again = _Item(item.claimed, message.delivery_count + 1)
            self._waiting.retry(buffer, again, monotonic_ms() + delay_ms)
            self._changed.notify_all()

    def _claim_ended(self, topic: str, partition: int, reason: str) -> None:
        """A claim has ended; with the engine's lock held, so nothing here may wait for it."""
        _log.info(
            "a claim has ended",
            extra={"queue": self.queue_id, "partition": partition, "reason": reason},
        )
        place = (topic, partition)
        is_lost = reason not in _GIVEN_BACK
        with self._changed:
            token = self._tokens.pop(place, None)
            self._waiting.drop((*place, token))
            self._waiting.keep(lambda _, item: _place_of(item) != place)
            if is_lost:
                self._lose_held(place)
                acked = self._acked.pop(place, None)
                if acked is not None and acked >= self._claims.confirmed_position(*place):
                    self._forgotten.add(place)
            for message in list(self._ready):
                if _place_of(message.place[1]) == place and not self._closing.is_set():
                    self._lose(message)

    def _lose_held(self, place: tuple[str, int]) -> None:
        for message in list(self._held.values()):
            if _place_of(message.place[1]) == place and not self._closing.is_set():
                self._lose(message)

    # The end.

    def _confirm(self, timeout_s: float) -> None:
        self._check_failure()  # then nothing more is written
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
        self._thread.join(_JOIN_S)
        self._claims.close(timeout=timeout_s)
        self._cluster.close(timeout_s)


def _place_of(item: _Item) -> tuple[str, int]:
    return item.claimed.topic, item.claimed.partition
