"""Queues measured on a real broker: hand-out against the bare protocol, sends, waits, redelivery.

Run: python benchmarks/queue.py [--json] [--messages N] [--rounds N] [--bootstrap-servers HOST:PORT]

It starts a broker of its own unless one is named. Rounds of ours and of the peer alternate, and the
figures are medians; the garbage collector is set as docs/operations.md advises, for both. With
``--json`` the last line is one JSON list of rows
``{"row", "ours", "peer", "ratio", "unit", "goal", "ok"}``.
"""

from __future__ import annotations

# ruff: noqa: E402
import sys
from pathlib import Path

# This file's folder is on the path first, where it would hide the standard library's `queue`.
sys.path[:] = [each for each in sys.path if Path(each).resolve() != Path(__file__).resolve().parent]
sys.path.append(str(Path(__file__).resolve().parents[1]))

import argparse
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from benchmarks import lease_rows, sparse_rows, tracker_rows
from benchmarks.broker import broker_at
from benchmarks.rows import Row, finish, scaled, show
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka import Producer as KafkaProducer
from confluent_kafka.admin import AdminClient
from harness.markers import encode_start

from kafkamq.config import ServiceConfig
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.markers.wire.marker_writer import encode_end
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.service import Service
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.runtime.memory import calm_collector
from kafkamq.types import MarkerType, MessageId, Outcome, OutgoingMessage, expand

PAYLOAD = b"x" * 100
BATCH = 1000
PARTITIONS = 4
OTHERS = scaled(400_000)
MANY = scaled(1000, least=PARTITIONS)  # marker partitions


class Bench:
    """The broker, and topics that rounds share."""

    def __init__(self, servers: str, messages: int, rounds: int, *, sparse_due: int) -> None:
        self.servers = servers
        self.sparse_due = sparse_due
        self.messages = messages
        self.rounds = rounds

    @contextmanager
    def service(
        self, topics: Service | None = None, *, marker_partitions: int = PARTITIONS
    ) -> Iterator[Service]:
        """A fresh namespace; with ``topics``, fresh groups over that one's topics."""
        names = {}
        if topics is not None:
            config = topics.config
            names = {"message_topic": config.message_topic, "marker_topic": config.marker_topic}
        with Service(self.servers, f"bench-{uuid.uuid4().hex[:8]}", **names) as service:
            service.create_topics(partitions=PARTITIONS, marker_partitions=marker_partitions)
            yield service

    def consumer(self, topic: str) -> KafkaConsumer:
        """A bare consumer, tuned as ours."""
        consumer = KafkaConsumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": f"bare-{uuid.uuid4().hex}",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "fetch.queue.backoff.ms": 3,
                "queued.min.messages": 20_000,
            }
        )
        consumer.subscribe([topic])
        return consumer

    def fill(self, service: Service, queue_id: str, count: int) -> None:
        """Messages as our producer writes them, as fast as one can."""
        producer = service.queue(queue_id).producer()
        for _ in range(count):
            producer.send(PAYLOAD)
        producer.flush(120)

    # Hand-out.

    def hand_out(self) -> Row:
        """START + commit + END per message, in batches of 1000, against the bare protocol."""
        ours, bare = [], []
        with self.service() as service:
            self.fill(service, "work", self.messages)
            self._bare(service, self.messages // 4)  # warm the broker
            for _ in range(self.rounds):
                bare.append(self._bare(service, self.messages))
                ours.append(self._ours(service))
        return _ratio_row("receive_many(1000) + ack, 100 B", ours, bare, goal=0.4)

    def _bare(self, service: Service, count: int) -> float:
        """A loop of raw client calls with ready-made markers; messages per second."""
        topic = service.config.marker_topic
        identity = MessageId(1, 1_000_000, b"t" * 16, 1)
        start = encode_start(
            identity,
            b"work",
            PAYLOAD,
            redeliver_after_ms=10_000,
            consumer_id="c" * 24,
            max_deliveries=5,
            max_lease_ms=43_200_000,
        )
        end = encode_end(identity, Outcome.ACK, consumer_id="c" * 24)
        consumer = self.consumer(service.config.message_topic)
        producer = KafkaProducer(
            {
                "bootstrap.servers": self.servers,
                "enable.idempotence": True,
                "acks": "all",
                "linger.ms": 5,  # the best of 0, 1 and 5 for this loop
                "queue.buffering.max.messages": 1_000_000,
            }
        )
        share = BATCH // PARTITIONS  # produce_batch knows one partition per call
        starts = [{"value": start, "key": b"1:244"} for _ in range(share)]
        ends = [{"value": end, "key": b"1:244"} for _ in range(share)]
        handled = 0
        first = consumer.consume(1, 30.0)
        begin = time.perf_counter()
        while handled < count - 1:
            records = consumer.consume(min(BATCH, count - 1 - handled), 1.0)
            each = -(-len(records) // PARTITIONS)
            for number in range(PARTITIONS):
                producer.produce_batch(topic, starts[:each], number)
            producer.flush()
            consumer.commit(asynchronous=False)
            for number in range(PARTITIONS):
                producer.produce_batch(topic, ends[:each], number)
            handled += len(records)
        producer.flush()
        took = time.perf_counter() - begin
        assert len(first) == 1
        consumer.close()
        return handled / took

    def exactly_once(self) -> Row:
        """The same from an ``exactly_once`` queue: a transaction per batch."""
        with self.service() as topics:
            self.fill(topics, "work", self.messages)
            self._ours(topics, exactly_once=True)
            rates = [self._ours(topics, exactly_once=True) for _ in range(self.rounds)]
        rate = statistics.median(rates)
        name = "exactly_once: receive_many(1000) + ack, 100 B"
        return Row(name, rate, None, None, "messages/s", 20_000, rate >= 20_000)

    def _ours(self, topics: Service, *, exactly_once: bool = False) -> float:
        with self.service(topics) as service:
            consumer = service.queue(
                "work", exactly_once=exactly_once, max_in_flight=2 * BATCH
            ).consumer()
            for message in _wait(consumer, BATCH):
                message.ack()
            handled = 0
            begin = time.perf_counter()
            while handled < self.messages - BATCH:
                messages = consumer.receive_many(BATCH)
                for message in messages:
                    message.ack()
                handled += len(messages)
            consumer.flush()
            return handled / (time.perf_counter() - begin)

    def one_by_one(self) -> Row:
        """``receive`` and ``ack``, one message at a time."""
        rates = []
        with self.service() as topics:
            self.fill(topics, "work", self.messages)
            for _ in range(self.rounds):
                with self.service(topics) as service:
                    consumer = service.queue("work").consumer()
                    _wait(consumer, 1)[0].ack()
                    handled = 0
                    begin = time.perf_counter()
                    while handled < self.messages - 1:
                        message = consumer.receive()
                        if message is not None:
                            message.ack()
                            handled += 1
                    consumer.flush()
                    rates.append(handled / (time.perf_counter() - begin))
        return Row(
            "receive + ack, one by one, 100 B",
            statistics.median(rates),
            None,
            None,
            "messages/s",
            None,
            True,
        )

    # Sending.

    def send(self) -> list[Row]:
        """``send`` and ``send_many`` against raw ``produce`` calls of the same records."""
        one, many, bare = [], [], []
        with self.service() as service:
            for _ in range(self.rounds):
                bare.append(self._produce(service))
                begin = time.perf_counter()
                self.fill(service, "work", self.messages)
                one.append(self.messages / (time.perf_counter() - begin))
                many.append(self._send_many(service))
        return [
            _ratio_row("send, 100 B", one, bare, goal=0.6),
            _ratio_row("send_many(1000), 100 B", many, bare, goal=0.8),
        ]

    def _send_many(self, service: Service) -> float:
        messages = [OutgoingMessage(payload=PAYLOAD)] * self.messages
        producer = service.queue("work").producer()
        begin = time.perf_counter()
        for at in range(0, len(messages), BATCH):
            producer.send_many(messages[at : at + BATCH])
        producer.flush(120)
        return self.messages / (time.perf_counter() - begin)

    def _produce(self, service: Service) -> float:
        producer = KafkaProducer(
            {
                "bootstrap.servers": self.servers,
                "enable.idempotence": True,
                "linger.ms": 1,
                "compression.type": "lz4",
            }
        )
        headers = [[("kafkamq-id", str(uuid.uuid4()).encode())] for _ in range(self.messages)]
        topic = service.config.message_topic
        begin = time.perf_counter()
        for number in range(self.messages):
            while True:
                try:
                    own = headers[number]
                    producer.produce(topic, PAYLOAD, b"work", number % PARTITIONS, headers=own)
                    break
                except BufferError:
                    producer.poll(0.01)
        producer.flush()
        return self.messages / (time.perf_counter() - begin)

    def behind_others(self) -> Row:
        """Seconds until the first message of a queue behind many of another one."""
        waits = []
        with self.service() as topics:
            self.fill(topics, "other", OTHERS)
            self.fill(topics, "mine", 1)
            for _ in range(self.rounds):
                with self.service(topics) as service:
                    begin = time.perf_counter()
                    consumer = service.queue("mine").consumer()
                    _wait(consumer, 1)[0].ack()
                    waits.append(time.perf_counter() - begin)
        took = statistics.median(waits)
        return Row(
            f"first message behind {OTHERS:,} of another queue",
            took,
            None,
            None,
            "s",
            1.0,
            took <= 1.0,
        )

    # Redelivery.

    def redelivery(self) -> Row:
        """Seconds from START + T to the copy, by the logs, under a steady load of markers: p99."""
        count, timeout_s, rate = scaled(2000), 2.0, 10_000
        with self.service() as service:
            self.fill(service, "work", count)
            is_over = threading.Event()
            load = threading.Thread(
                target=tracker_rows.write_pairs,
                args=(service.config, 60 * rate, PARTITIONS),  # for two minutes at most
                kwargs={"rate": rate, "is_over": is_over},
                daemon=True,  # without a broker it waits forever
            )
            with tracker_rows.TrackerProcess.running(service.config) as tracker:
                tracker_rows.wait_until(
                    lambda: tracker.total("kafkamq_tracker_live") == PARTITIONS, timeout_s=60
                )
                load.start()
                queue = service.queue("work", redelivery_timeout=timeout_s, max_in_flight=count)
                worker = queue.consumer()
                worker.keeper.stop()  # no KEEPALIVE: as if it died with each batch
                held = 0
                while held < count:
                    held += len(worker.receive_many(BATCH))
                late = _lateness(self, service.config, count, timeout_s)
                assert load.is_alive(), "the load has ended before the last copy"
                is_over.set()
                load.join()
        p99 = late[int(len(late) * 0.99)]
        return Row(
            f"local redelivery after its deadline, p99, at {rate:,} markers/s",
            p99,
            None,
            None,
            "s",
            0.25,
            p99 <= 0.25,
        )

    # The local tracker.

    def fold(self) -> Row:
        """Markers per second: a log of STARTs and ENDs, from its beginning to its end."""
        pairs = 2 * self.messages
        with self.service() as service:
            tracker_rows.write_pairs(service.config, pairs, PARTITIONS)
        rates = [self._fold(service.config, 2 * pairs) for _ in range(self.rounds)]
        rate = statistics.median(rates)
        return Row(
            "local tracker, markers folded", rate, None, None, "markers/s", 200_000, rate >= 200_000
        )

    def _fold(self, config: ServiceConfig, markers: int) -> float:
        admin = AdminClient({"bootstrap.servers": self.servers})
        groups = [f"kafkamq.{config.marker_topic}.{number}" for number in range(PARTITIONS)]
        for future in admin.delete_consumer_groups(groups).values():
            with suppress(KafkaException):  # there are none before the first round
                future.result()
        tracker = LocalTracker(config)
        began = 0.0
        try:
            while True:
                tracker.run_once()
                folded = sum(part.core.next_offset for part in tracker._partitions.values())
                if not began and folded:
                    began, already = time.perf_counter(), folded
                if folded >= markers:
                    return (folded - already) / (time.perf_counter() - began)
        finally:
            tracker.close()

    def held(self) -> Row:
        """What 100,000 held messages cost their worker's heart."""
        return lease_rows.held(self.rounds)

    def keepalives(self) -> Row:
        """KEEPALIVEs per partition and T/3 of a worker that holds 100,000 messages."""
        held, timeout_s = scaled(100_000), 9.0
        with self.service() as service:
            self.fill(service, "work", held)
            queue = service.queue("work", redelivery_timeout=timeout_s, max_in_flight=held)
            worker = queue.consumer()
            messages = []
            while len(messages) < held:
                messages += worker.receive_many(10_000)
                worker._state.leases._new_partitions.clear()  # as if 60 s had passed (R7)
            time.sleep(0.5)
            before = tracker_rows.count(service.config, service.config.marker_topic)
            time.sleep(timeout_s)
            after = tracker_rows.count(service.config, service.config.marker_topic)
            lost = held - worker.in_flight
        each = (after - before) / PARTITIONS / 3
        name = f"KEEPALIVEs per partition and T/3, {held:,} held"
        return Row(name, each, None, None, "records", 1, each <= 1.34 and not lost)

    def many(self) -> list[Row]:
        """1,000 marker partitions on one broker: how soon a tracker works, and its connections."""
        with self.service(marker_partitions=MANY) as service:
            return tracker_rows.start_many(service.config, MANY)

    def sparse(self) -> list[Row]:
        """Due messages that lie far apart: the local tracker beside the seeks alone."""
        return sparse_rows.sparse(lambda: self.service(marker_partitions=1), self.sparse_due)

    def million(self) -> list[Row]:
        """A million messages in flight: memory, and a restart; due at once: ``batches.py``."""
        count, timeout_ms = scaled(1_000_000), 60_000
        with self.service() as service:
            config = service.config
            with tracker_rows.TrackerProcess.running(config) as tracker:
                live = lambda: tracker.total("kafkamq_tracker_live") == PARTITIONS  # noqa: E731
                tracker_rows.wait_until(live, timeout_s=60)
                empty_mb = tracker.resident_mb()
                began = time.perf_counter()
                tracker_rows.write_starts(config, count, PARTITIONS, timeout_ms=timeout_ms)
                last_s = time.perf_counter()
                held = lambda: tracker.total("kafkamq_tracker_in_progress") == count  # noqa: E731
                tracker_rows.wait_until(held, timeout_s=60)
                state_mb = tracker.resident_mb() - empty_mb
            with tracker_rows.TrackerProcess.running(config) as tracker:
                ready = lambda: live() and held()  # noqa: E731
                restart_s = tracker_rows.wait_until(ready, timeout_s=90)
        print(f"{count:,} STARTs took {last_s - began:.1f} s to write", file=sys.stderr)
        return [
            Row(f"{count:,} in flight: state", state_mb, None, None, "MB", 60, state_mb <= 60),
            Row(f"{count:,} in flight: restart", restart_s, None, None, "s", 60, restart_s <= 60),
        ]


def _wait(consumer: Consumer, n: int) -> list:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        messages = consumer.receive_many(n)
        if messages:
            return messages
    raise TimeoutError("no message came")


def _lateness(bench: Bench, config: ServiceConfig, count: int, timeout_s: float) -> list[float]:
    """Sorted seconds from the deadline of a START to the append of its copy."""
    starts: dict[tuple[int, int], int] = {}
    for record in _records(bench, config.marker_topic, PARTITIONS, lambda: len(starts) >= count):
        for marker in expand(decode_marker(record.value())):  # one START may name many (R27)
            found = marker.message_id
            if found is None or found.topic_id == tracker_rows.LOAD_TOPIC_ID:
                continue
            if marker.type is MarkerType.START:
                starts.setdefault((found.partition, found.offset), record.timestamp()[1])
    late: list[float] = []
    for record in _records(bench, config.message_topic, PARTITIONS, lambda: len(late) >= count):
        origin = read_message_headers(record.headers()).origin
        if origin is not None:
            began = starts[origin.partition, origin.offset]
            late.append((record.timestamp()[1] - began) / 1000 - timeout_s)
    return sorted(late)


def _records(bench: Bench, topic: str, partitions: int, is_done: Callable[[], bool]) -> Iterator:
    consumer = KafkaConsumer(
        {
            "bootstrap.servers": bench.servers,
            "group.id": "bench",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
    deadline = time.monotonic() + 60
    try:
        while not is_done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{topic} does not hold what it should")
            for record in consumer.consume(1000, 0.2):
                if record.error() is None:
                    yield record
    finally:
        consumer.close()


def _ratio_row(name: str, ours: list[float], peer: list[float], *, goal: float | None) -> Row:
    mine, other = statistics.median(ours), statistics.median(peer)
    ratio = mine / other
    return Row(name, mine, other, ratio, "messages/s", goal, goal is None or ratio >= goal)


def main() -> int:
    """Run all rows, or those whose names contain ``--only``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON list, last")
    parser.add_argument("--messages", type=int, default=scaled(200_000), help="per round")
    parser.add_argument(
        "--sparse-due", type=int, default=scaled(10_000), help="50,000: one whole plan"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bootstrap-servers", default="", help="use this cluster")
    parser.add_argument("--only", default="", help="run the benches whose names contain this")
    args = parser.parse_args()
    calm_collector()
    with broker_at(args.bootstrap_servers) as servers:
        bench = Bench(servers, args.messages, args.rounds, sparse_due=args.sparse_due)
        rows = []
        for run in (
            bench.hand_out,
            bench.one_by_one,
            bench.send,
            bench.behind_others,
            bench.redelivery,
            bench.exactly_once,
            bench.fold,
            bench.held,
            bench.keepalives,
            bench.many,
            bench.sparse,
            tracker_rows.density,
            bench.million,
        ):
            if args.only in run.__name__:
                found = run()
                found = found if isinstance(found, list) else [found]
                show(*found)
                rows += found
    return finish(rows, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
