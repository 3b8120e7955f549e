"""Sends to a ``markers`` queue, now or later: a delayed message is a SCHEDULE until it is due."""

from __future__ import annotations

import random
from contextlib import closing

from kafkamq.config import QueueConfig
from kafkamq.errors import ConfigError, StateError, WireError
from kafkamq.markers.wire.marker_writer import encode_end, encode_schedule
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.producer import Delivery, Destination, Producer, Sender
from kafkamq.queue.wire.headers import message_headers, stamped
from kafkamq.queue.wire.keys import join_key, split_key
from kafkamq.transport.admin import Admin
from kafkamq.transport.log_reader import RecordReader
from kafkamq.types import Headers, Marker, MarkerType, MessageId, Outcome, ScheduleToken

MAX_DELAY_MS = 10 * 365 * 86_400_000
_CANCEL_TIMEOUT_S = 30.0


class MarkersProducer(Producer):
    """Sends to the topic that a namespace's queues share: keys begin with the queue's id."""

    _unkeyed: bytes

    def __init__(self, sender: Sender, queue: QueueConfig) -> None:
        super().__init__(sender, queue)
        self._unkeyed = join_key(queue.queue_id)

    def cancel(self, token: ScheduleToken) -> None:
        if not isinstance(token, ScheduleToken):
            raise ConfigError(
                f"token is a {type(token).__name__}: give the schedule of a confirmed, delayed "
                "send (producer.send(..., delay=...).result().schedule)"
            )
        self._require_place(token)
        marker, due_ms = self._read_schedule(token)
        identity = MessageId(token.partition, token.offset)
        topic = self._namespace.config.marker_topic
        destination = Destination(self._sender, token.queue_id, topic, is_counted=False)
        delivery = Delivery(destination, "")
        key = b"" if marker is None else marker.key
        value = encode_end(identity, Outcome.ACK, of_schedule=True)
        self._sender.produce(topic, value, key, token.partition, None, delivery._report)
        sent = delivery.result(_CANCEL_TIMEOUT_S)
        # The log's clock at the END against the deadline (R2): later, and trackers ignore it.
        if marker is not None and sent.timestamp_ms > due_ms:
            raise StateError(
                f"the message was due {sent.timestamp_ms - due_ms} ms before its cancellation: "
                "it enters the queue, or has done so"
            )

    def _key_of(self, key: bytes | str) -> bytes:
        return join_key(self._unkeyed, key)

    def _schedule(
        self, payload: bytes | None, key: bytes | None, headers: Headers, id: str, delay_ms: int
    ) -> Delivery:
        if delay_ms > MAX_DELAY_MS:
            raise ConfigError(f"delay is {delay_ms / 1000:g} s: ten years at most")
        facts = self._namespace.facts()
        topic = self._namespace.config.marker_topic
        try:
            value = encode_schedule(
                key or b"", payload, redeliver_after_ms=delay_ms, headers=headers
            )
        except WireError as error:
            raise ConfigError(
                f"the delayed message cannot be written: {error}; send a reference to the data"
                " instead"
            ) from error
        if len(value) > facts.max_marker_bytes:
            raise ConfigError(
                f"the delayed message has {len(value)} bytes as a marker: {topic} takes "
                f"{facts.max_marker_bytes} at most (max.message.bytes)"
            )
        partition = int(random.random() * facts.marker_partitions)  # R26
        destination = Destination(self._sender, self.queue_id, topic, is_delayed=True)
        delivery = Delivery(destination, id)
        self._sender.produce(topic, value, key, partition, None, delivery._report)
        return delivery

    def _require_place(self, token: ScheduleToken) -> None:
        """The token names a place that the log has, or has had."""
        config = self._namespace.config
        with Admin(config, timeout_s=_CANCEL_TIMEOUT_S) as admin:
            _, end = admin.log_ends(config.marker_topic).get(token.partition, (0, 0))
        if not 0 <= token.offset < end:
            raise self._no_schedule(token)

    def _no_schedule(self, token: ScheduleToken) -> StateError:
        place = f"{self._namespace.config.marker_topic}[{token.partition}]@{token.offset}"
        return StateError(
            f"{place} holds no delayed message of queue {self.queue_id!r}; use the token of the "
            "confirmed send"
        )

    def _read_schedule(self, token: ScheduleToken) -> tuple[Marker | None, int]:
        """Return the SCHEDULE and when it is due, by the broker; None: retention has removed it."""
        config = self._namespace.config
        topic, partition, offset = config.marker_topic, token.partition, token.offset
        with closing(RecordReader(config, topic)) as reader:
            record = reader.read(partition, offset, timeout_s=_CANCEL_TIMEOUT_S)
        if record is None:
            # It was carried forward since (R19): what is known of it is gone.
            return None, 0
        try:
            marker = decode_marker(record.value(), topic=topic, partition=partition, offset=offset)
        except WireError:
            marker = None
        wanted = self.queue_id.encode()
        if (
            marker is None
            or marker.type is not MarkerType.SCHEDULE
            or marker.carried_forward
            or split_key(marker.key)[0] != wanted
        ):
            raise self._no_schedule(token)
        return marker, record.timestamp()[1] + marker.redeliver_after_ms


class AnyTopicProducer(Producer):
    """Sends to a queue that is a topic of its own (R38): keys and headers are the user's."""

    _is_stamped = True

    def _headers_of(self, own: Headers, id: str, ttl_ms: int | None) -> Headers:
        facts = self._namespace.facts()
        if ttl_ms is not None and not facts.is_broker_time:
            raise ConfigError(
                f"ttl: topic {self._topic} has its senders' times (message.timestamp.type is "
                "CreateTime), and a TTL counts from the broker's; set it to LogAppendTime"
            )
        return stamped(own, facts.stamp, message_headers(id=id, ttl_ms=ttl_ms))
