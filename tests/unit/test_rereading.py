"""Messages by reference are read in sweeps, bounded, and only if they still are the same (R18)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, Uuid
from harness.markers import encode_start
from tests.sure_producer import Row, write_records
from tests.waiting import within

from kafkamq.config import ServiceConfig
from kafkamq.markers.rules.delivery import Carry, DueCause, Settle
from kafkamq.markers.tracker.reading import Found, FoundAction, Rereader
from kafkamq.markers.wire.marker_writer import encode_end
from kafkamq.queue.topics import create_topics
from kafkamq.transport import log_reader
from kafkamq.transport.admin import uuid_bytes
from kafkamq.transport.clients import open_producer
from kafkamq.transport.follower import Follower
from kafkamq.transport.log_reader import Patience, RecordReader
from kafkamq.transport.memory.cluster import MemoryKafka, cluster_of, forget_cluster
from kafkamq.transport.memory.state import Fault
from kafkamq.transport.record import Record
from kafkamq.transport.settings import producer_settings
from kafkamq.types import MessageId, Outcome, PartitionId

CONFIG = ServiceConfig(bootstrap_servers="memory://rereading")
PARTITIONS = 2
WAIT_S = within(20.0)


@pytest.fixture
def cluster() -> Iterator[MemoryKafka]:
    create_topics(CONFIG, partitions=PARTITIONS, marker_partitions=1)
    yield cluster_of(CONFIG.bootstrap_servers)
    forget_cluster("rereading")


@pytest.fixture
def rereader() -> Iterator[Rereader]:
    rereader = Rereader(CONFIG)
    yield rereader
    rereader.close()


def write(cluster: MemoryKafka, count: int, size: int = 10) -> list[Settle]:
    """So many messages in turn in the partitions, their STARTs by reference, and these due."""
    known = uuid_bytes(cluster.topics[CONFIG.message_topic].topic_id)
    messages: list[Row] = []
    markers: list[Row] = []
    rows = []
    for number in range(count):
        partition = number % PARTITIONS
        message_id = MessageId(partition, number // PARTITIONS, known, 1)
        payload = b"%d" % number + b"." * size
        messages.append((payload, b"q", partition, ()))
        start = encode_start(
            message_id, b"q", None, redeliver_after_ms=1, consumer_id="c", by_reference=True
        )
        markers.append((start, b"k", 0, ()))
        rows.append(Settle(number, message_id, False, DueCause.LEASE_ENDED, 0, 2, 1, -1))
    producer = open_producer(producer_settings(CONFIG))
    write_records(producer, CONFIG.message_topic, messages)
    write_records(producer, CONFIG.marker_topic, markers)
    producer.close()
    return rows


def window(
    rereader: Rereader, rows: Sequence[Settle | Carry], timeout_s: float = WAIT_S
) -> list[FoundAction]:
    deadline_s = time.monotonic() + timeout_s
    return rereader.window(0, rows, deadline_s=deadline_s, max_bytes=10_000)


def read(rereader: Rereader, rows: list[Settle], timeout_s: float = WAIT_S) -> list[Found | None]:
    """Window by window; None: it is awaited."""
    found: list[Found | None] = []
    while len(found) < len(rows):
        for each in window(rereader, rows[len(found) :], timeout_s):
            found += [each.message(number) for number in range(each.known)]
            found += [None] * (each.size - each.known)
    return found


def numbers(found: list[Found | None]) -> list[int | str | None]:
    """Of the messages; None: lost."""
    return ["awaited" if one is None else number_of(one) for one in found]


def number_of(found: Found) -> int | None:
    return None if found.is_lost else int((found.value or b"").split(b".")[0])


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Sizes of the messages that each sweep gave; the markers' are streams of one partition."""
    seen: list[list[int]] = []
    sweep = RecordReader.sweep

    def recorded(
        self: RecordReader, wanted: Mapping[int, Sequence[int]], **bounds: Any
    ) -> Iterator[tuple[int, dict[int, Record | None]]]:
        sizes: list[int] = []
        for partition, found in sweep(self, wanted, **bounds):
            for record in found.values() if bounds.get("left") is not None else ():
                if record is not None:
                    if not sizes:
                        seen.append(sizes)
                    sizes.append(len(record.value() or b""))
            yield partition, found

    monkeypatch.setattr(RecordReader, "sweep", recorded)
    return seen


def test_all_partitions_are_read_at_once(
    cluster: MemoryKafka, rereader: Rereader, sweeps: list[list[int]]
) -> None:
    rows = write(cluster, 100)
    found = read(rereader, rows)
    assert numbers(found) == list(range(100))
    assert [one.start.key for one in found if one and one.start] == [b"q"] * 100
    assert [len(each) for each in sweeps] == [100]


@pytest.fixture
def few_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many are held beyond the bound."""
    monkeypatch.setattr(log_reader, "MAX_READ", 4)


@pytest.mark.usefixtures("few_a_poll")
def test_what_is_held_at_once_is_bounded(
    cluster: MemoryKafka, rereader: Rereader, sweeps: list[list[int]]
) -> None:
    rows: Sequence[Settle] = write(cluster, 60, size=1000)
    done: list[int | str | None] = []
    while rows:
        found = window(rereader, rows)
        payloads = [each.message(0).value or b"" for each in found]
        assert sum(map(len, payloads)) < 15_000
        done += [int(payload.split(b".")[0]) for payload in payloads]
        rows = rows[len(found) :]
    assert done == list(range(60))
    assert sum(map(sum, sweeps)) < 3 * 61_000, "few are read twice"


@pytest.mark.usefixtures("few_a_poll")
def test_headers_count_as_what_is_held(cluster: MemoryKafka, rereader: Rereader) -> None:
    """Of somebody who writes no payloads, and headers by the thousand."""
    rows = write(cluster, 20)
    for partition in cluster.topics[CONFIG.message_topic].partitions:
        for record in partition.records:
            assert record is not None
            record.headers = [("name", b"x")] * 300
    assert 0 < len(window(rereader, rows)) < 15


def test_one_that_is_larger_than_the_bound_comes_alone(
    cluster: MemoryKafka, rereader: Rereader
) -> None:
    rows = write(cluster, 5, size=20_000)
    assert numbers(read(rereader, rows)) == list(range(5))


@pytest.mark.usefixtures("few_a_poll")
def test_messages_of_one_hold_that_are_too_large_together_come_a_few_at_a_time(
    cluster: MemoryKafka, rereader: Rereader
) -> None:
    rows = write(cluster, 16, size=4000)
    hold = replace(rows[0], bits=(1 << 8) - 1)
    (found,) = window(rereader, [hold])
    assert 1 <= found.known == found.size < 8
    assert number_of(found.message(0)) == 0


def write_nacked(sizes: Sequence[int], reasons: Sequence[int]) -> list[Settle]:
    """STARTs with payloads of these sizes, and behind all of them the reasons of some."""
    ids = [MessageId(0, number, b"t" * 16, 1) for number in range(len(sizes))]
    markers: list[Row] = []
    for message_id, size in zip(ids, sizes, strict=True):
        start = encode_start(message_id, b"q", b"." * size, redeliver_after_ms=1, consumer_id="c")
        markers.append((start, b"k", 0, ()))
    rows = [Settle(at, ids[at], False, DueCause.LEASE_ENDED, 0, 2, 1, -1) for at in range(len(ids))]
    for at in reasons:
        rows[at] = replace(rows[at], cause=DueCause.NACKED, verdict_offset=len(markers))
        nack = encode_end(ids[at], Outcome.NACK, reason="later", redeliver_after_ms=1)
        markers.append((nack, b"k", 0, ()))
    producer = open_producer(producer_settings(CONFIG))
    write_records(producer, CONFIG.marker_topic, markers)
    producer.close()
    return rows


def test_markers_are_held_for_the_next_window_within_the_bound(
    cluster: MemoryKafka, rereader: Rereader, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, stream = list[int](), RecordReader.stream

    def recorded(*args: Any, **bounds: Any) -> Iterator[tuple[int, Record | None]]:
        for offset, record in stream(*args, **bounds):
            read.append(offset)
            yield offset, record

    monkeypatch.setattr(RecordReader, "stream", recorded)
    rows = write_nacked([9000, 9000, 2000, 2000, 20_000], reasons=[2, 4])
    for first, behind in ((0, 1), (1, 3), (2, 3), (3, 5), (4, 5)):
        (found,) = window(rereader, rows[first:behind])
        assert found.row == rows[first]
        assert found.error == ("later" if first in (2, 4) else "")
    assert read == [0, 1, 2, 5, 3, 4, 4, 6], "only the last one was too large to be held"


def test_starts_that_are_too_large_together_come_as_many_as_a_quarter_of_them(
    cluster: MemoryKafka, rereader: Rereader
) -> None:
    rows = write_nacked([2000] * 8, reasons=range(8))
    assert [len(window(rereader, rows[first:])) for first in (0, 2)] == [2, 1]


class CountedOffset(int):
    """An offset that counts how often offsets are looked at."""

    looks = 0

    def __hash__(self) -> int:
        CountedOffset.looks += 1
        return int.__hash__(self)


def test_each_marker_that_was_read_is_looked_at_a_few_times(
    cluster: MemoryKafka, rereader: Rereader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a window is full, and some of its rows were read: not again for each of these."""
    rows = write(cluster, 1000)
    stream = RecordReader.stream

    def counted(*args: Any, **bounds: Any) -> Iterator[tuple[int, Record | None]]:
        return ((CountedOffset(offset), record) for offset, record in stream(*args, **bounds))

    monkeypatch.setattr(RecordReader, "stream", counted)
    CountedOffset.looks = 0
    found = window(rereader, rows)
    assert 100 < len(found) < len(rows)
    assert CountedOffset.looks < 10 * len(rows)


def test_what_is_gone_or_another_message_is_lost(cluster: MemoryKafka) -> None:
    rows = write(cluster, 8)
    cluster.delete_records(CONFIG.message_topic, 0, 2)  # messages 0 and 2
    for at, changes in (
        (3, {"leader_epoch": 2}),
        (4, {"topic_id": b"another topic!!!"}),
        (5, {"partition": 9}),
        (6, {"offset": 77}),
    ):
        rows[at].message_id = replace(rows[at].message_id, **changes)
    lost = {0, 2, 3, 4, 5, 6}
    rereader = Rereader(CONFIG, Patience(-1.0))
    found = numbers(read(rereader, rows))
    assert found == [None if number in lost else number for number in range(8)]
    rereader.close()


def hide(cluster: MemoryKafka, what: str) -> Callable[[], None]:
    """What a broker tells that lags behind; returns how to make it know all."""
    topic = cluster.topics[CONFIG.message_topic]
    if what == "end":
        records = topic.partitions[1].records
        tail = records[-2:]
        del records[-2:]
        return lambda: records.extend(tail)
    if what == "partition":
        cluster.faults.told = lambda _, count: count - 1
        return lambda: setattr(cluster.faults, "told", None)
    known, topic.topic_id = topic.topic_id, Uuid(1, 2)
    return lambda: setattr(topic, "topic_id", known)


@pytest.mark.parametrize("what", ["end", "partition", "id"])
def test_what_a_lagging_broker_does_not_know_is_awaited(
    cluster: MemoryKafka, rereader: Rereader, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """R18: for a minute nothing is taken for lost; then it is, and the next one like it at once."""
    began_s = time.monotonic()
    passed = SimpleNamespace(monotonic=lambda: began_s)
    monkeypatch.setattr(log_reader, "time", passed)
    rows = write(cluster, 8)
    show = hide(cluster, what)
    hidden = {"end": {5, 7}, "partition": {1, 3, 5, 7}, "id": set(range(8))}[what]
    awaited = ["awaited" if number in hidden else number for number in range(8)]
    for after_s in (0, 50):
        passed.monotonic = lambda now_s=began_s + after_s: now_s
        assert numbers(read(rereader, rows)) == awaited
    show()
    rereader.messages.topic(CONFIG.message_topic, max_age_s=0.0)
    assert numbers(read(rereader, rows)) == list(range(8))
    hide(cluster, what)
    rereader.messages.topic(CONFIG.message_topic, max_age_s=0.0)
    lost = [None if number in hidden else number for number in range(8)]
    for after_s in (200, 240, 261, 261):
        passed.monotonic = lambda now_s=began_s + after_s: now_s
        assert numbers(read(rereader, rows)) == (awaited if after_s < 261 else lost)


def test_what_a_lagging_broker_does_not_know_is_looked_for_at_once(
    cluster: MemoryKafka, rereader: Rereader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R18: a minute for a plan, be it a partition or a log's end, or one after the other."""
    began_s = time.monotonic()
    passed = SimpleNamespace(monotonic=lambda: began_s)
    monkeypatch.setattr(log_reader, "time", passed)
    rows = write(cluster, 8)
    topic = cluster.topics[CONFIG.message_topic]
    show = hide(cluster, "partition")
    first, second = (each.records for each in topic.partitions[:2])
    del first[-2:]
    awaited = [0, "awaited", 2, *["awaited"] * 5]
    assert numbers(read(rereader, rows)) == awaited
    second.clear()
    show()
    rereader.messages.topic(CONFIG.message_topic, max_age_s=0.0)
    for after_s in (50, 61):
        passed.monotonic = lambda now_s=began_s + after_s: now_s
        if after_s == 50:
            assert numbers(read(rereader, rows)) == awaited
    assert numbers(read(rereader, rows)) == [0, None, 2, None, None, None, None, None]


def test_a_partition_that_does_not_answer_holds_up_no_other_one(
    cluster: MemoryKafka, rereader: Rereader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R18: it is left alone for a while, and never taken for gone."""
    moments, asked = [0.0], [0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + moments[0])
    monkeypatch.setattr(log_reader, "time", clock)

    def plan(kind: str, _: object, place: PartitionId | None) -> Fault | None:
        if (kind, place) != ("fetch", (CONFIG.message_topic, 1)):
            return None
        asked[0] += 1
        return Fault(latency_s=1e6)

    rows = write(cluster, 6)
    cluster.faults.plan = plan
    for after_s, looks in ((0.0, 1), (2.0, 1), (2.0, 1), (1000.0, 2)):
        moments[0] += after_s
        assert numbers(read(rereader, rows)) == [0, "awaited", 2, "awaited", 4, "awaited"]
        assert asked == [looks]
    cluster.faults.plan = None
    moments[0] += 1000.0
    assert numbers(read(rereader, rows)) == list(range(6))


@pytest.mark.parametrize("what", ["end", "partition", "id"])
def test_what_was_found_is_not_lost_as_soon_as_a_broker_lags_behind_again(
    cluster: MemoryKafka, rereader: Rereader, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """R18: as in a rolling restart; the minute begins anew."""
    moments = [0.0]
    clock = SimpleNamespace(monotonic=lambda: moments[0])
    monkeypatch.setattr(log_reader, "time", clock)
    rows = write(cluster, 8)
    for after_s in (0.0, 59.0, 3.0):
        moments[0] += after_s
        show = hide(cluster, what)
        rereader.messages.ask_again()
        assert "awaited" in numbers(read(rereader, rows))
        show()
        rereader.messages.ask_again()
        assert numbers(read(rereader, rows)) == list(range(8))


def test_a_partition_without_a_leader_is_not_waited_for(
    cluster: MemoryKafka, rereader: Rereader
) -> None:
    rows = write(cluster, 6)
    cluster.faults.offline.add((CONFIG.message_topic, 1))
    assert numbers(read(rereader, rows)) == [0, "awaited", 2, "awaited", 4, "awaited"]
    cluster.faults.offline.clear()
    rereader.messages.ask_again()
    assert numbers(read(rereader, rows)) == list(range(6))


def test_what_the_log_has_again_when_its_end_is_asked_for_is_read(
    cluster: MemoryKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that was behind gave no record; the next one has it, and more."""
    reader = RecordReader(CONFIG, CONFIG.message_topic)
    ask = Follower.bounds

    def bounds(follower: Follower, place: PartitionId, **more: float) -> tuple[int, int]:
        if ask(follower, place, **more)[1] < 6:
            write(cluster, 2 * PARTITIONS)
        return ask(follower, place, **more)

    write(cluster, 4 * PARTITIONS)
    monkeypatch.setattr(Follower, "bounds", bounds)
    found = dict(reader.stream(0, [5], timeout_s=WAIT_S))
    reader.close()
    record = found[5]
    assert record is not None
    assert record.offset() == 5


def test_a_topic_that_was_recreated_is_noticed(cluster: MemoryKafka) -> None:
    """Its messages stand where the old ones stood, in a first epoch as these were."""
    rereader = Rereader(CONFIG, Patience(-1.0))
    rows = write(cluster, 4)
    assert rereader.messages.topic(CONFIG.message_topic)  # and this answer is young enough
    settings = cluster.topics[CONFIG.message_topic].settings
    cluster.delete_topic(CONFIG.message_topic)
    cluster.create_topic(CONFIG.message_topic, PARTITIONS, settings)
    write(cluster, 4)
    assert numbers(read(rereader, rows)) == ["awaited"] * 4
    assert numbers(read(rereader, rows)) == [None] * 4
    rereader.close()


def test_a_topic_of_a_queue_that_cannot_be_asked_for_holds_up_nothing(
    cluster: MemoryKafka, rereader: Rereader
) -> None:
    """R37: who writes STARTs chooses its name."""
    rows = write(cluster, 2)
    start = encode_start(
        rows[0].message_id, b"q", None, redeliver_after_ms=1, consumer_id="c", by_reference=True,
        message_topic="other",
    )  # fmt: skip
    producer = open_producer(producer_settings(CONFIG))
    write_records(producer, CONFIG.marker_topic, [(start, b"k", 0, ())])
    producer.close()
    other = replace(rows[0], start_offset=2)
    assert numbers(read(rereader, [*rows, other])) == [0, 1, "awaited"], "nobody knows it yet"
    fresh, refusal = (
        Rereader(CONFIG),
        Fault(error=KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)),
    )
    cluster.faults.plan = lambda kind, *_: refusal if kind == "admin" else None
    assert numbers(read(fresh, [other])) == ["awaited"]
    fresh.close()
