"""A worker's parts, and all of it in memory; only the fatal error of a client is librdkafka's."""

from __future__ import annotations

import ctypes
import os
import re
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from confluent_kafka import Message as Record

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.markers.ack_writer import AckWriter
from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.rules.pipeline import Pipeline, Run
from kafkamq.markers.starts import Start, Starter, Step
from kafkamq.markers.state import ConsumerState
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.namespace import NamespaceFacts
from kafkamq.queue.rules.log_clock import BrokerClock
from kafkamq.queue.service import Service
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.memory.cluster import cluster_of, forget_cluster
from kafkamq.transport.producer import IdempotentProducer
from kafkamq.types import MarkerType, Outcome, expand

LOG_APPEND_TIME = 2
FACTS = NamespaceFacts(b"t" * 16, 8, 8, 604_800_000, 604_800_000, 1_000_000, 1_100_000)
_OUT_OF_ORDER = 45


class InMemory:
    """A cluster in memory, and a service on it."""

    def __init__(self, *, partitions: int = 1, marker_partitions: int = 1) -> None:
        self.address = f"memory://{uuid.uuid4().hex}"
        self.service = Service(self.address, "n")
        self.service.create_topics(partitions=partitions, marker_partitions=marker_partitions)
        self.cluster = cluster_of(self.address)
        self.faults = self.cluster.faults

    def ends(self, outcome: Outcome) -> list[tuple[int, int]]:
        """Messages with such a verdict in the log, by partition and offset."""
        return [
            (one.message_id.partition, one.message_id.offset)
            for partition in self.cluster.topics[self.service.config.marker_topic].partitions
            for record in filter(None, partition.records)
            for one in expand(decode_marker(record.value or b""))
            if one.type is MarkerType.END and one.outcome is outcome and one.message_id
        ]

    def close(self) -> None:
        self.service.close()
        forget_cluster(self.cluster.name)


class FixedNamespace:
    """Facts that never change, of a cluster that never answers."""

    def __init__(self, kafka: dict[str, str] | None = None, **facts: Any) -> None:
        self.config = ServiceConfig(bootstrap_servers="127.0.0.1:1", kafka=kafka or {})
        self.certain_until_s = 0.0
        self.broker_clock = BrokerClock()
        self._facts = replace(FACTS, **facts)

    def facts(self) -> NamespaceFacts:
        return self._facts

    def require(self, _: int) -> NamespaceFacts:
        return self._facts

    def ask_again(self) -> NamespaceFacts:
        return self._facts

    def refresh_if_old(self, _: float = 0.0) -> None:
        pass

    def close(self) -> None:
        pass


def record(
    offset: int,
    *,
    partition: int = 0,
    key: bytes = b"q",
    value: bytes = b"payload",
    leader_epoch: int = 0,  # -1: unknown
) -> Record:
    return Record(
        topic="messages",
        partition=partition,
        offset=offset,
        key=key,
        value=value,
        timestamp=(LOG_APPEND_TIME, 1000),
        leader_epoch=leader_epoch,
    )


class Parts:
    """What a consumer is made of, but its reader."""

    def __init__(self, namespace: FixedNamespace | None = None, **queue: Any) -> None:
        self.namespace: Any = namespace or FixedNamespace()
        self.state = ConsumerState(self.namespace, QueueConfig(queue_id="q", **queue))
        self.pipeline: Pipeline[MarkersMessage] = Pipeline()
        self.ack_writer = AckWriter(self.state, None)
        self.starter = Starter(self.state, self.pipeline, self.ack_writer)

    def poll(self, *records: Record) -> None:
        """These were polled from their partitions, in order: a run for each partition."""
        runs: dict[int, tuple[list[int], list[MarkersMessage]]] = {}
        for each in records:
            partition, offset = each.partition() or 0, each.offset() or 0
            message = MarkersMessage(self.ack_writer, each, offset)
            message.read()
            offsets, messages = runs.setdefault(partition, ([], []))
            offsets.append(offset)
            messages.append(message)
        now_ms = monotonic_ms()
        self.pipeline.polled(
            [Run(number, *run, now_ms, is_plain=False) for number, run in runs.items()],
            first_offsets={number: offsets[0] for number, (offsets, _) in runs.items()},
            next_offsets={number: offsets[-1] + 1 for number, (offsets, _) in runs.items()},
            count=len(records),
        )

    def start(self, count: int = 100) -> Step:
        """STARTs of so many are on their way, without a client."""
        step = self.starter.plan(count)
        assert step is not None
        step.records()
        self.starter.sent(step)
        return step

    def see(self) -> list[Start]:
        """Take the reports that were served; those of STARTs that failed."""
        failed = self.starter.see_reports()
        for run in self.pipeline.under_way():
            if not run.unreported:
                self.pipeline.in_log(run)
        return failed

    def commit(self) -> list[tuple[int, int]]:
        """What may be handed out behind a commit: partitions and offsets."""
        self.pipeline.committing(self.pipeline.committable())
        held = self.starter.finish(self.pipeline.committed())
        return [(lease.partition, each.offset) for lease, messages in held for each in messages]


def starts_of(step: Step) -> list[Start]:
    return [start for starts in step.starts.values() for start in starts]


def deliver(*starts: Start, log_ms: int = 5000, offset: int = -1) -> None:
    """They are in the log, by Kafka's reports."""
    for each in starts:
        more: dict[str, Any] = {"offset": offset} if offset >= 0 else {}
        each.reported(None, Record(timestamp=(LOG_APPEND_TIME, log_ms), **more))


def fail_for_good(writer: IdempotentProducer) -> None:
    """A fatal error in its client, as librdkafka's own tests make it."""
    maps = Path("/proc/self/maps").read_text()
    (path,) = set(re.findall(r"/\S*librdkafka\S*$", maps, re.MULTILINE))
    # With the GIL: it is not done with the client when other threads hear of the error and end it.
    library: Any = ctypes.PyDLL(path)
    raised, name = library.rd_kafka_test_fatal_error, library.rd_kafka_name
    raised.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    name.argtypes, name.restype = (ctypes.c_void_p,), ctypes.c_char_p
    # The client's handle is the first field behind the Python object's head.
    handle = ctypes.c_void_p.from_address(id(writer._client) + object.__basicsize__).value
    assert name(handle).startswith(str(writer._settings["client.id"]).encode() + b"#")
    raised(handle, _OUT_OF_ORDER, b"made by a test, pid %d" % os.getpid())
