"""Reads what groups have committed, by consumers that never join them.

Not by the admin client: librdkafka's coordinator requests there end the *process* when the
coordinator goes away or moves (an assertion, librdkafka pull request 5397; a null pointer, its
issue 5040), which is when a tracker asks. A consumer's own look-up has neither fault.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from confluent_kafka import KafkaException, TopicPartition

from kafkamq.config import ServiceConfig
from kafkamq.errors import StateError
from kafkamq.transport.clients import open_consumer
from kafkamq.transport.errors import ErrorWatch, broker_error, is_fatal
from kafkamq.transport.port import Consumer
from kafkamq.transport.record import Place
from kafkamq.transport.settings import consumer_settings

MAX_KEPT = 64  # idle consumers; each has a few threads
MAX_THREADS = 8  # a new consumer takes some 70 ms to find its coordinator

_Key = tuple[str, bool]


class CommittedOffsets:
    """Consumers by group, kept for the next question if in ``kept``, or None; thread-safe."""

    def __init__(
        self, config: ServiceConfig, watch: ErrorWatch, *, kept: Collection[str] | None = None
    ) -> None:
        self._config = config
        self._kept = kept
        self._watch = watch
        self._idle: dict[_Key, Consumer] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def read(
        self, requests: Sequence[tuple[str, Place]], *, stable: bool, timeout_s: float
    ) -> list[TopicPartition]:
        """One answer per (group, partition), in that order; an offset below 0: nothing committed.

        Raises:
            BrokerError, DeadlineExceededError: One of the groups could not be asked in time.
        """
        of_group: dict[str, list[TopicPartition]] = {}
        for group, place in requests:
            of_group.setdefault(group, []).append(TopicPartition(*place))

        def ask(group: str) -> list[TopicPartition]:
            return self._ask((group, stable), of_group[group], timeout_s)

        if len(of_group) == 1:
            answers = {group: iter(ask(group)) for group in of_group}
        else:
            with ThreadPoolExecutor(MAX_THREADS) as threads:
                found = threads.map(ask, of_group)
                answers = dict(zip(of_group, map(iter, found), strict=True))
        return [next(answers[group]) for group, _ in requests]

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            consumers, self._idle = list(self._idle.values()), {}
        for consumer in consumers:
            consumer.close()

    def _ask(
        self, key: _Key, partitions: list[TopicPartition], timeout_s: float
    ) -> list[TopicPartition]:
        doing = f"reading committed offsets of {key[0]}"
        consumer = self._take(key)
        try:
            found = consumer.committed(partitions, timeout=timeout_s)
        except KafkaException as error:
            event = consumer.poll(0)  # serves the error callback
            consumer.close()  # the next try begins with a new one
            self._watch.check(doing)
            refusal = None if event is None else event.error()
            if refusal is not None and is_fatal(refusal):  # of the coordinator's name; no answer
                raise broker_error(refusal, doing) from error
            raise broker_error(error, doing) from error
        except BaseException:
            consumer.close()
            raise
        self._keep(key, consumer)
        for partition in found:
            if partition.error is not None:
                raise broker_error(partition.error, doing)
        return found

    def _take(self, key: _Key) -> Consumer:
        group, stable = key
        with self._lock:
            if self._is_closed:
                raise StateError("this Admin is closed")
            kept = self._idle.pop(key, None)
        if kept is not None:
            return kept
        isolation = "read_committed" if stable else "read_uncommitted"
        settings = consumer_settings(self._config, group_id=group, **{"isolation.level": isolation})
        return open_consumer(settings, self._watch)

    def _keep(self, key: _Key, consumer: Consumer) -> None:
        with self._lock:
            has_room = len(self._idle) < MAX_KEPT and (self._kept is None or key[0] in self._kept)
            if has_room and not self._is_closed and key not in self._idle:
                self._idle[key] = consumer
                return
        consumer.close()
