"""STARTs of batches that fall due: each message is judged alone, the ENDs are batches (R32).

On Kafka in memory, by the settler that ships; the plan is a fold of the markers that are there.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from harness.markers import encode_start
from tests.sure_producer import Row, write_records
from tests.waiting import wait_until, within

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import FencedError, KafkaMQError
from kafkamq.markers.rules.batching import gather
from kafkamq.markers.rules.delivery import each_message
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.tracker import settlement
from kafkamq.markers.tracker.ledger import Ledger, LedgerKey, is_later_start
from kafkamq.markers.tracker.settlement import ActionSettler, SettlementError, SettleReport
from kafkamq.markers.wire.marker_writer import (
    StartEncoder,
    encode_batch_start,
    encode_end,
    encode_tick,
)
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.topics import create_topics
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.queue.wire.keys import key_partition
from kafkamq.transport.admin import uuid_bytes
from kafkamq.transport.clients import open_producer
from kafkamq.transport.errors import OutcomeUnknownError
from kafkamq.transport.log_reader import Patience
from kafkamq.transport.memory.cluster import MemoryKafka, cluster_of, forget_cluster
from kafkamq.transport.memory.state import UNKNOWN, Fault, LogRecord
from kafkamq.transport.settings import producer_settings, transactional_settings
from kafkamq.types import Headers, Marker, MarkerType, MessageId, Outcome, PartitionId, expand

CONFIG = ServiceConfig(bootstrap_servers="memory://settling-batches")
PARTITIONS = 2
LATER_MS = 10_000
TRACED = tuple(
    f"/{name}.py"
    for name in (
        "tracker/settlement",
        "tracker/rewriting",
        "tracker/reading",
        "tracker/ledger",
        "transport/transactions",
    )
)


class _KilledError(BaseException):
    """The process ends here."""


class Logs:
    """A namespace: what workers write there, and what a tracker made of it."""

    def __init__(self, cluster: MemoryKafka) -> None:
        self.cluster = cluster
        self.skew_ms = 0
        self.left: list[Callable[[], None]] = []  # how to end what was killed
        self.patience: Patience | None = None
        real = cluster.now_ms
        cluster.now_ms = lambda: real() + self.skew_ms

    def write(self, topic: str, records: list[Row]) -> None:
        producer = open_producer(producer_settings(CONFIG))
        write_records(producer, topic, records)
        producer.close()

    def send(self, count: int, *, key: bytes = b"q", headers: Headers = ()) -> list[MessageId]:
        """So many messages, in turn in the partitions."""
        topic = self.cluster.topics[CONFIG.message_topic]
        ids = []
        ends = [len(partition.records) for partition in topic.partitions]
        for number in range(count):
            partition = number % PARTITIONS
            one = MessageId(partition, ends[partition], uuid_bytes(topic.topic_id), 1)
            ends[partition] += 1
            ids.append(one)
        records = [(b"%d.%d" % place(one), key, one.partition, headers) for one in ids]
        self.write(CONFIG.message_topic, records)
        return ids

    def start(self, ids: list[MessageId], *, key: bytes = b"q", max_deliveries: int = 5) -> None:
        """One START of all of them."""
        encoder = StartEncoder(
            consumer_id="c", redeliver_after_ms=1000, max_deliveries=max_deliveries, max_lease_ms=0
        )
        self.mark(encode_batch_start(encoder, gather(ids)[0][0], key))

    def mark(self, *markers: bytes) -> None:
        self.write(CONFIG.marker_topic, [(marker, None, 0, ()) for marker in markers])

    def pass_time(self) -> None:
        """All leases end, and the grace behind the gap (R3)."""
        for _ in range(2):
            self.skew_ms += LATER_MS
            self.mark(encode_tick("engine", 1))

    def records(self, topic: str) -> list[tuple[int, int, LogRecord]]:
        return [
            (number, offset, record)
            for number, partition in enumerate(self.cluster.topics[topic].partitions)
            for offset, record in partition.read(partition.start, 1 << 60, is_committed=True)[0]
        ]

    def markers(self) -> list[Marker]:
        return [decode_marker(record.value) for _, _, record in self.records(CONFIG.marker_topic)]

    def ends(self, outcome: Outcome) -> list[MessageId]:
        """One for each message of each such END."""
        return [
            one.message_id
            for marker in self.markers()
            if marker.type is MarkerType.END and marker.outcome is outcome
            for one in expand(marker)
            if one.message_id is not None
        ]

    def copies(self) -> Counter[tuple[int, int]]:
        """How many copies there are of each message."""
        origins = [
            read_message_headers(record.headers or ()).origin
            for _, _, record in self.records(CONFIG.message_topic)
        ]
        return Counter((one.partition, one.offset) for one in origins if one is not None)

    def letters(self) -> list[tuple[bytes | None, bytes | None, dict[str, bytes | None]]]:
        return [
            (record.key, record.value, dict(record.headers or ()))
            for _, _, record in self.records(CONFIG.dead_letter_topic)
        ]

    def fold(self) -> RedeliveryTracker:
        """A tracker that has read all."""
        tracker = RedeliveryTracker()
        for _, offset, record in self.records(CONFIG.marker_topic):
            tracker.apply(offset, record.timestamp_ms, decode_marker(record.value))
        return tracker

    def settle(
        self,
        epoch: int = 1,
        *,
        max_rows: int = 50_000,
        max_bytes: int = 1 << 24,
        timeout_s: float = 60.0,
    ) -> Any:
        """All that is due, by an engine that starts now."""
        ledger = Ledger(CONFIG, LedgerKey.of_markers(CONFIG, 0), engine="test", epoch=epoch)
        bounds = TrackerConfig(max_offsets_per_commit=max_rows, max_transaction_bytes=max_bytes)
        settler = ActionSettler(CONFIG, bounds, self.patience)
        try:
            ledger.open()
            tracker = self.fold()  # behind the start, which may have committed (R17)
            report = settler.settle(
                ledger,
                tracker.plan(),
                position=tracker.committable_offset(),
                batch=0,
                reopen=False,
                timeout_s=timeout_s,
            )
            settler.close()
            ledger.close()
        except _KilledError:
            # It ends nothing in order, also when it strikes while that ends.
            self.left = [settler.close, ledger.close]
            raise
        except BaseException:
            settler.close()
            ledger.close()
            raise
        return report


def place(one: MessageId) -> tuple[int, int]:
    return one.partition, one.offset


@pytest.fixture
def logs() -> Iterator[Logs]:
    create_topics(CONFIG, partitions=PARTITIONS, marker_partitions=1)
    yield Logs(cluster_of(CONFIG.bootstrap_servers))
    forget_cluster("settling-batches")


def test_a_batch_is_copied_and_ends_as_a_batch(logs: Logs) -> None:
    ids = logs.send(9, key=b"q\0user", headers=(("a", b"1"), ("a", None), ("kafkamq-id", b"x")))
    logs.start(ids)
    logs.pass_time()
    report: SettleReport = logs.settle()
    assert (report.copies, report.transactions) == (9, 1)
    assert logs.copies() == Counter(map(place, ids))
    for _, _, record in logs.records(CONFIG.message_topic)[-9:]:
        headers = read_message_headers(record.headers or ())
        if headers.origin is None:
            continue
        place_of = b"%d.%d" % (headers.origin.partition, headers.origin.offset)
        assert (record.key, record.value) == (b"q\0user", place_of)
        assert (headers.delivery_count, headers.id) == (2, "x")
        assert headers.user == (("a", b"1"), ("a", None))
    assert sorted(map(place, logs.ends(Outcome.REDELIVERED))) == sorted(map(place, ids))
    assert len(logs.markers()) == 4, "START, two TICKs and one END"


def test_each_message_is_judged_by_itself(logs: Logs) -> None:
    """R14: the START's limits, and the message's own count and life time."""
    fresh = logs.send(2)
    worn = logs.send(2, headers=(("kafkamq-delivery-count", b"3"),))
    old = logs.send(2, headers=(("kafkamq-ttl-ms", b"2000"),))
    logs.start([*fresh, *worn, *old], max_deliveries=3)
    logs.pass_time()
    report = logs.settle()
    assert (report.copies, report.dead_letters) == (2, 4)
    assert logs.copies() == Counter(map(place, fresh))
    reasons = [headers["kafkamq-reason"] for _, _, headers in logs.letters()]
    assert Counter(reasons) == {b"max-deliveries": 2, b"expired": 2}
    assert Counter(map(place, logs.ends(Outcome.DEAD_LETTERED))) == Counter(map(place, worn + old))
    assert len(logs.markers()) == 5, "START, two TICKs, an END for each outcome"


def test_what_workers_have_ended_of_a_batch_is_not_copied(logs: Logs) -> None:
    ids = logs.send(8)
    logs.start(ids)
    logs.mark(encode_end(ids[3], Outcome.ACK), encode_end(ids[4], Outcome.REJECT, reason="bad"))
    logs.pass_time()
    logs.settle()
    assert logs.copies() == Counter(place(one) for one in ids if one not in (ids[3], ids[4]))
    ((_, value, headers),) = logs.letters()
    assert value == b"%d.%d" % place(ids[4])
    assert (headers["kafkamq-reason"], headers["kafkamq-error"]) == (b"rejected", b"bad")
    (end,) = [one for one in logs.markers() if one.outcome is Outcome.DEAD_LETTERED]
    assert end.reason == "bad"


def test_what_is_gone_is_a_dead_letter_that_names_its_queue(logs: Logs) -> None:
    ids = logs.send(8)
    logs.start(ids)
    logs.start([replace(ids[0], offset=3, leader_epoch=7)])  # of before a truncation
    logs.start([replace(ids[0], topic_id=b"another topic!!!")], key=b"")  # of several queues
    logs.cluster.delete_records(CONFIG.message_topic, 0, 2)
    logs.patience = Patience(-1.0)
    logs.pass_time()
    report = logs.settle()
    assert (report.copies, report.payload_lost) == (6, 4)
    letters = logs.letters()
    assert {headers["kafkamq-reason"] for _, _, headers in letters} == {b"payload-lost"}
    assert sorted(headers["kafkamq-queue-id"] or b"" for _, _, headers in letters) == [
        b"", b"q", b"q", b"q",
    ]  # fmt: skip
    assert all(value is None for _, value, _ in letters)
    assert len(set(logs.ends(Outcome.DEAD_LETTERED))) == 4


def test_a_transaction_ends_anywhere_in_a_batch(logs: Logs) -> None:
    """R16: and each has the ENDs of its own messages."""
    ids = logs.send(10)
    logs.start(ids)
    logs.pass_time()
    assert logs.settle(max_rows=3).transactions == 4
    assert logs.copies() == Counter(map(place, ids))
    ends = [one for one in logs.markers() if one.outcome is Outcome.REDELIVERED]
    assert [len(list(expand(one))) for one in ends] == [3, 3, 3, 1]
    assert Counter(logs.ends(Outcome.REDELIVERED)) == Counter(ids)


def test_r15_where_the_position_is_refused_nothing_is_written(logs: Logs) -> None:
    """R15: copies, ENDs and position are one transaction, so a start finds all of them or none."""
    ids = logs.send(4)
    logs.start(ids)
    logs.pass_time()
    seen: list[Counter[tuple[int, int]]] = []

    def plan(kind: str, *_: object) -> Fault | None:
        if kind != "send_offsets":
            return None
        seen.append(logs.copies())
        return Fault(error=UNKNOWN) if len(seen) == 1 else None

    logs.cluster.faults.plan = plan
    logs.settle()
    assert seen == [Counter(), Counter()]
    assert logs.copies() == Counter(map(place, ids))
    assert Counter(logs.ends(Outcome.REDELIVERED)) == Counter(ids)


def test_a_transaction_is_full_anywhere_in_a_batch(logs: Logs) -> None:
    """R16: by its bytes, too, and whatever becomes of the message that fills it."""
    worn_out: Headers = (("kafkamq-delivery-count", b"5"),)
    for own in ((), (), worn_out, ()):
        ids = logs.send(6, headers=(*own, ("h", b"x" * 300)))
    ids = [replace(ids[0], partition=n, offset=offset) for n in (0, 1) for offset in range(12)]
    logs.start(ids)
    logs.pass_time()
    report = logs.settle(max_bytes=2500)
    assert (report.copies, report.dead_letters) == (18, 6)
    ends = [one for one in logs.markers() if one.outcome is Outcome.REDELIVERED]
    assert max(len(list(expand(one))) for one in ends) == 3, "a window has more, at first"
    assert 8 <= report.transactions <= 12
    worn = [one for one in ids if 6 <= one.offset < 9]
    assert Counter(logs.ends(Outcome.DEAD_LETTERED)) == Counter(worn)
    assert logs.copies() == Counter(place(one) for one in ids if one not in worn)
    assert len(logs.ends(Outcome.REDELIVERED)) == 18


def test_a_retry_goes_on_inside_of_a_batch(logs: Logs) -> None:
    """R16: in whatever order it has the actions."""
    ids = logs.send(10)
    logs.start(ids)
    logs.pass_time()
    plan = each_message(logs.fold().plan())
    ledger = Ledger(CONFIG, LedgerKey.of_markers(CONFIG, 0), engine="test", epoch=1)
    settler = ActionSettler(CONFIG, TrackerConfig(max_offsets_per_commit=3))
    ledger.open()
    begun = settler.settle(ledger, plan, position=0, batch=0, timeout_s=0.01)
    assert (begun.copies, len(each_message(begun.left))) == (3, 7)
    rest = settler.settle(ledger, plan[::-1], position=0, batch=0)
    assert (rest.copies, rest.skipped) == (7, 3)
    assert logs.copies() == Counter(map(place, ids))
    settler.close()
    ledger.close()


def test_messages_that_are_too_large_are_not_held_against_their_batch(logs: Logs) -> None:
    """R11: each is a dead letter that names its payload's place, the others are copied."""
    ids = logs.send(4)
    topic = logs.cluster.topics[CONFIG.message_topic]
    large = logs.send(3, headers=(("h", b"x" * 3000),))
    logs.start([*ids[:2], *large[:2]])
    logs.start([*ids[2:], *large[2:]])
    logs.pass_time()
    ledger = Ledger(CONFIG, LedgerKey.of_markers(CONFIG, 0), engine="test", epoch=1)
    settler = ActionSettler(CONFIG, TrackerConfig())
    settler.prepare()
    topic.settings["max.message.bytes"] = "2000"  # it asked before: the broker has to refuse
    ledger.open()
    report = settler.settle(ledger, logs.fold().plan(), position=0, batch=0)
    settler.close()
    ledger.close()
    assert (report.copies, report.dead_letters) == (4, 3)
    assert all(headers["kafkamq-payload-at"] is not None for _, _, headers in logs.letters())
    assert Counter(logs.ends(Outcome.DEAD_LETTERED)) == Counter(large)
    assert logs.copies() == Counter(map(place, ids))


TO_FIRST, TO_SECOND = (
    next(key for n in range(99) if key_partition(key := b"q\0%d" % n, PARTITIONS) == number)
    for number in range(PARTITIONS)
)
"""Keys of messages whose copies go to partition 0, and to partition 1."""


def awaited(report: SettleReport) -> list[MessageId]:
    return [one.message_id for one in each_message(report.awaited)]


@pytest.mark.parametrize("what", ["partition", "end", "topic id"])
def test_what_cannot_be_read_holds_up_nothing_else_and_is_not_lost(logs: Logs, what: str) -> None:
    """R18: a log without a leader, or that another one knows less of; or a topic made anew."""
    ids = logs.send(8, key=TO_FIRST)
    unknown = [replace(ids[0], topic_id=b"another topic!!!", offset=offset) for offset in (0, 5)]
    logs.start(ids)
    logs.patience = Patience(30.0)
    records = logs.cluster.topics[CONFIG.message_topic].partitions[1].records
    hidden: list[MessageId] = []
    if what == "partition":
        logs.cluster.faults.offline.add((CONFIG.message_topic, 1))
        hidden = [one for one in ids if one.partition == 1]
    elif what == "end":
        tail = records.pop()
        hidden = [ids[-1]]
    else:
        logs.start(unknown)
        hidden = unknown
    logs.pass_time()
    report = logs.settle(timeout_s=0.6)
    assert awaited(report) == hidden
    assert logs.copies() == Counter(place(one) for one in ids if one not in hidden)
    assert report.copies == len(set(ids) - set(hidden))
    if what == "partition":
        logs.cluster.faults.offline.clear()
    elif what == "end":
        records.append(tail)
    else:
        logs.patience = Patience(-1.0)
    logs.settle(2)
    assert logs.copies() == Counter(map(place, ids))
    assert len(logs.letters()) == (2 if what == "topic id" else 0)


def test_what_cannot_be_written_holds_up_nothing_else(logs: Logs) -> None:
    """R32: copies go where there is a leader; where their key allows it, they are awaited."""

    def send_to_first(count: int, key: bytes) -> list[MessageId]:
        return [one for one in logs.send(2 * count, key=key) if one.partition == 0]

    free = [*send_to_first(20, b"q"), *send_to_first(4, TO_FIRST)]
    bound = send_to_first(4, TO_SECOND)
    for single in free[:10]:
        logs.start([single])
    logs.start([*bound[:3], *free[10:]])
    one = encode_start(bound[3], TO_SECOND, b"x", redeliver_after_ms=1000, consumer_id="c")
    logs.mark(one)
    logs.pass_time()
    logs.cluster.faults.offline.add((CONFIG.message_topic, 1))
    report = logs.settle(timeout_s=0.6)
    assert awaited(report) == bound
    assert logs.copies() == Counter(map(place, free))
    logs.cluster.faults.offline.clear()
    logs.settle(2)
    assert logs.copies() == Counter(map(place, free + bound))


def test_what_waited_for_a_leader_goes_as_soon_as_there_is_one(logs: Logs) -> None:
    """Also where nothing has to be read, so that no read asks who leads."""
    (one, _) = logs.send(2, key=TO_SECOND)
    start = encode_start(one, TO_SECOND, b"x", redeliver_after_ms=1000, consumer_id="c")
    logs.mark(start)
    logs.pass_time()
    ledger = Ledger(CONFIG, LedgerKey.of_markers(CONFIG, 0), engine="test", epoch=1)
    settler = ActionSettler(CONFIG, TrackerConfig())
    ledger.open()
    plan, offline = logs.fold().plan(), logs.cluster.faults.offline
    offline.add((CONFIG.message_topic, 1))
    assert awaited(settler.settle(ledger, plan, position=0, batch=0)) == [one]
    offline.clear()
    assert settler.settle(ledger, plan, position=0, batch=1).copies == 1
    settler.close()
    ledger.close()


def test_invented_topics_are_asked_for_together(logs: Logs) -> None:
    """R37: each alone would hold up what is behind them by a question, at each look."""
    for number in range(50):
        one = MessageId(0, number, b"t" * 16, 1)
        topic = f"invented-{number}"
        logs.mark(
            encode_start(
                one, b"q", b"x", redeliver_after_ms=1000, consumer_id="c", message_topic=topic
            )
        )
    ids = logs.send(2)
    logs.start(ids)
    logs.patience = Patience(30.0)
    logs.pass_time()
    asked = Counter[str]()

    def plan(kind: str, *_: object) -> None:
        asked[kind] += 1

    logs.cluster.faults.plan = plan
    report = logs.settle()
    assert (len(report.awaited), report.copies) == (50, 2)
    assert asked["admin"] < 20


def test_dead_letters_wait_for_no_leader(logs: Logs) -> None:
    """Neither of their own topic's partitions, nor of where a copy would have gone."""
    worn = (("kafkamq-delivery-count", b"5"),)
    ids = [one for one in logs.send(8, key=TO_SECOND, headers=worn) if one.partition == 0]
    logs.start(ids)
    logs.pass_time()
    letters = len(logs.cluster.topics[CONFIG.dead_letter_topic].partitions)
    bound = CONFIG.dead_letter_topic, key_partition(TO_SECOND, letters)
    logs.cluster.faults.offline |= {bound, (CONFIG.message_topic, 1)}
    assert logs.settle().dead_letters == len(ids) == 4
    assert not {number for number, _, _ in logs.records(CONFIG.dead_letter_topic)} & {bound[1]}


def fail_copies(logs: Logs, *fates: Fault | None, last: Fault | None = None) -> None:
    """What becomes of the next copies, and of all that come then."""
    left = iter(fates)

    def plan(kind: str, _: object, where: PartitionId | None) -> Fault | None:
        is_copy = kind == "produce" and where is not None and where[0] == CONFIG.message_topic
        return next(left, last) if is_copy else None

    logs.cluster.faults.plan = plan


def test_what_is_awaited_is_named_once_when_a_transaction_is_aborted(logs: Logs) -> None:
    """Its rows are done with the next transaction, or not at all."""
    ids = logs.send(3)
    hidden = [replace(ids[0], partition=9, offset=offset) for offset in range(3)]
    for one in (hidden[0], hidden[1], ids[0], hidden[2], ids[1], ids[2]):
        logs.start([one])
    logs.patience = Patience(30.0)
    logs.pass_time()
    fail_copies(logs, Fault(error=UNKNOWN), None, Fault(error=UNKNOWN))
    report = logs.settle(max_rows=2)
    assert awaited(report) == hidden
    assert logs.copies() == Counter(map(place, ids))


def test_what_is_awaited_is_named_once_when_the_time_is_over_behind_it(logs: Logs) -> None:
    """The ledger knows that these rows are done: who repeats the batch goes on behind them."""
    ids = logs.send(3)
    hidden = [replace(ids[0], partition=9, offset=offset) for offset in range(2)]
    for one in (*hidden, *ids):
        logs.start([one])
    logs.patience = Patience(30.0)
    logs.pass_time()
    report = logs.settle(max_rows=2, timeout_s=1.0)
    assert awaited(report) == hidden
    assert [one.message_id for one in each_message(report.left)] == ids
    report = logs.settle(max_rows=2)
    assert (report.skipped, awaited(report)) == (2, [])
    assert logs.copies() == Counter(map(place, ids))


def test_what_is_awaited_is_asked_again_when_a_settlement_fails(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None)
    monkeypatch.setattr(settlement, "time", clock)
    ids = logs.send(2)
    hidden = replace(ids[0], partition=9)
    for one in (ids[0], hidden, ids[1]):
        logs.start([one])
    logs.patience = Patience(30.0)
    logs.pass_time()
    fail_copies(logs, None, last=Fault(error=UNKNOWN))
    with pytest.raises(SettlementError) as caught:
        logs.settle(max_rows=2)
    assert [one.message_id for one in each_message(caught.value.actions)] == [hidden, ids[1]]


def killed(logs: Logs, at: int) -> bool:
    """Settle, and be killed at the line event of that number; False: there are fewer."""
    left = at

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        name = frame.f_code.co_filename
        if not name.endswith(TRACED):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise _KilledError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        logs.settle(max_rows=3)
    except _KilledError:
        return True
    finally:
        sys.settrace(before)
    return False


def settle_behind(logs: Logs, *, began: int = 1) -> int:
    """Settle as an owner does behind one that was killed; return how often it began.

    What that one had asked for may arrive behind our own start, and end our client. As no ledger
    holds a later start, that is no reason to stop (R22).
    """
    try:
        logs.settle(2)
    except (FencedError, OutcomeUnknownError) as error:
        if is_later_start(error) or began == 3:
            raise
        return settle_behind(logs, began=began + 1)
    return began


def run_killed(at: int) -> bool:
    """Killed once at that line; whoever comes then does the rest, and nothing twice."""
    create_topics(CONFIG, partitions=PARTITIONS, marker_partitions=1)
    try:
        logs = Logs(cluster_of(CONFIG.bootstrap_servers))
        ids = logs.send(6)
        worn = logs.send(2, headers=(("kafkamq-delivery-count", b"5"),))
        logs.start([*ids, *worn])
        logs.pass_time()
        was_hit = killed(logs, at)
        ends, logs.left = logs.left, []
        settle_behind(logs)
        assert logs.copies() == Counter(map(place, ids)), at
        assert Counter(logs.ends(Outcome.REDELIVERED)) == Counter(ids), at
        assert Counter(logs.ends(Outcome.DEAD_LETTERED)) == Counter(worn), at
        assert len(logs.letters()) == 2, at
        for end in ends:
            with suppress(KafkaMQError):
                end()
        return was_hit
    finally:
        forget_cluster("settling-batches")


def test_a_start_that_was_killed_fences_the_next_one_for_a_moment(logs: Logs) -> None:
    """Its request for the id is on its way as it dies, and arrives behind the next one's."""
    ids = logs.send(3)
    logs.start(ids)
    logs.pass_time()
    cluster, killed, inits = logs.cluster, [], Counter[str]()
    initialise = cluster.transactions.init

    def count(name: str, timeout_ms: int) -> int:
        inits[name] += 1
        return initialise(name, timeout_ms)

    def plan(kind: str, client: object, _: object) -> None:
        if kind == "init_transactions" and not killed:
            killed.append(client)
            cluster.faults.cut.add(client)
        elif kind == "produce" and client is not killed[0] and inits.total() == 1:
            cluster.faults.cut.clear()
            while inits.total() == 1:
                cluster.wait(cluster.tick() + 1.0)

    cluster.transactions.init = count
    cluster.faults.plan = plan
    name = LedgerKey.of_markers(CONFIG, 0).transactional_id
    dying = open_producer(transactional_settings(CONFIG, transactional_id=name))
    asking = threading.Thread(target=dying.init_transactions, daemon=True)
    asking.start()
    wait_until(lambda: killed)
    assert settle_behind(logs) == 2
    assert logs.copies() == Counter(map(place, ids))
    asking.join(within(10))


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_a_tracker_killed_at_any_line_of_a_settlement_repeats_and_loses_nothing() -> None:
    at = 0
    while run_killed(at):
        at += 1
    assert at > 500


def test_a_tracker_killed_in_a_settlement_repeats_and_loses_nothing() -> None:
    """At one line of a hundred, by chance."""
    rng = random.Random(17)
    at = rng.randint(0, 99)
    while run_killed(at):
        at += rng.randint(1, 199)
    assert at > 500
