"""The local tracker on a real broker: what becomes of a message, read from the topics alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from tests.integration.tracker_logs import Logs
from tests.waiting import deadline_after, wait_until, within

from kafkamq.config import TrackerConfig
from kafkamq.markers.tracker import settlement
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.markers.wire.marker_writer import encode_keepalive
from kafkamq.transport.admin import Admin
from kafkamq.transport.log_reader import Patience
from kafkamq.types import Marker, MarkerType, MessageId, Outcome

FAST = TrackerConfig(position_interval_ms=200)


@pytest.fixture
def logs(bootstrap: str, namespace: str) -> Logs:
    return Logs(bootstrap, namespace)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What brokers do not know is looked for for a second, not a minute (R18)."""
    monkeypatch.setattr(settlement, "Patience", lambda: Patience(1.0))


@pytest.fixture
def tracked(logs: Logs) -> Iterator[Logs]:
    with LocalTracker(logs.config, FAST).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
        yield logs


def settle_down(logs: Logs, tracked_ids: set[MessageId]) -> None:
    """Wait until every one of these messages has an END of whatever kind."""
    outcomes = (Outcome.ACK, Outcome.REDELIVERED, Outcome.DEAD_LETTERED)
    wait_until(lambda: tracked_ids <= set(logs.ends(*outcomes)))


def test_silence_gives_one_copy_and_its_end_in_one_transaction(tracked: Logs) -> None:
    headers = (("h", b"1"), ("h", None), ("kafkamq-id", b"abc"))
    (id_,) = tracked.send(key=b"queue\0user", value=b"x", headers=headers)
    tracked.start(id_, key=b"queue\0user", value=b"x", headers=headers)
    settle_down(tracked, {id_})
    (copy,) = tracked.copies()
    assert (copy.key, copy.value, copy.delivery_count) == (b"queue\0user", b"x", 2)
    assert copy.user == (("h", b"1"), ("h", None))
    assert copy.origin is not None
    assert (copy.origin.partition, copy.origin.offset) == (id_.partition, id_.offset)
    assert copy.origin.timestamp_ms == tracked.sent[id_]
    assert tracked.ends(Outcome.REDELIVERED) == [id_]
    assert not tracked.dead_letters()


def test_a_null_payload_stays_null(tracked: Logs) -> None:
    (id_,) = tracked.send(value=None)
    tracked.start(id_, value=None)
    settle_down(tracked, {id_})
    assert [copy.value for copy in tracked.copies()] == [None]


def test_acked_in_time_gives_nothing(tracked: Logs) -> None:
    acked, silent = tracked.send(2)
    tracked.start(acked, silent, timeout_ms=2000)
    tracked.end(acked)
    settle_down(tracked, {acked, silent})
    assert tracked.copied() == [(silent.partition, silent.offset)]


@pytest.mark.slow
def test_keepalive_holds_a_message(tracked: Logs) -> None:
    held, silent = tracked.send(2)
    lease_s = within(2.0)
    lease_ms = round(1000 * lease_s)
    tracked.start(held, timeout_ms=lease_ms, consumer="alive")
    tracked.start(silent, timeout_ms=lease_ms, consumer="dead")
    end_s = time.monotonic() + 2.5 * lease_s
    while time.monotonic() < end_s or not tracked.copied():
        tracked.keepalive(held, consumer="alive", timeout_ms=lease_ms)
        time.sleep(0.3)
    assert tracked.copied() == [(silent.partition, silent.offset)]
    tracked.end(held, consumer="alive")
    settle_down(tracked, {held})
    assert len(tracked.copied()) == 1


def test_reject_is_a_dead_letter_with_its_reason(tracked: Logs) -> None:
    (id_,) = tracked.send(key=b"queue", value=b"bad", headers=(("h", b"v"),))
    tracked.start(id_, timeout_ms=60_000, value=b"bad", headers=(("h", b"v"),), count=3)
    tracked.end(id_, outcome=Outcome.REJECT, reason="no such customer")
    settle_down(tracked, {id_})
    ((letter, headers),) = tracked.dead_letters()
    assert (letter.key(), letter.value()) == (b"queue", b"bad")
    assert headers["kafkamq-reason"] == b"rejected"
    assert headers["kafkamq-error"] == b"no such customer"
    assert headers["kafkamq-delivery-count"] == b"3"
    assert headers["kafkamq-queue-id"] == b"queue"
    assert headers["h"] == b"v"
    assert headers["kafkamq-origin"] == (
        f"{tracked.config.message_topic}/0/{id_.offset}/{tracked.sent[id_]}".encode()
    )
    assert tracked.ends(Outcome.DEAD_LETTERED) == [id_]
    assert not tracked.copies()


@pytest.mark.parametrize(("own_limit", "count"), [(3, 3), (0, 5)])
def test_max_deliveries_end_in_the_dead_letters(tracked: Logs, own_limit: int, count: int) -> None:
    (id_,) = tracked.send()
    tracked.start(id_, timeout_ms=300, count=count, max_deliveries=own_limit)
    settle_down(tracked, {id_})
    ((_, headers),) = tracked.dead_letters()
    assert headers["kafkamq-reason"] == b"max-deliveries"
    assert not tracked.copies()


def test_max_lease_ends_what_is_kept_alive(tracked: Logs) -> None:
    (id_,) = tracked.send()
    tracked.start(id_, timeout_ms=1000, max_lease_ms=2000)
    end_s = deadline_after(60)
    while not tracked.copies():
        assert time.monotonic() < end_s
        tracked.keepalive(id_, timeout_ms=1000)
        time.sleep(0.3)
    (copy,) = tracked.copies()
    assert copy.delivery_count == 2


def test_release_comes_back_at_once_and_does_not_count(tracked: Logs) -> None:
    (id_,) = tracked.send()
    tracked.start(id_, timeout_ms=60_000, count=4)
    tracked.end(id_, outcome=Outcome.RELEASE)
    settle_down(tracked, {id_})
    assert [copy.delivery_count for copy in tracked.copies()] == [4]


def test_nack_comes_back_after_its_delay(tracked: Logs) -> None:
    (id_,) = tracked.send()
    tracked.start(id_, timeout_ms=60_000)
    tracked.end(id_, outcome=Outcome.NACK, delay_ms=1500)
    settle_down(tracked, {id_})
    (copy,) = tracked.copies()
    (nack,) = [
        message.timestamp()[1]
        for message, marker in tracked.markers()
        if marker.outcome is Outcome.NACK
    ]
    assert copy.delivery_count == 2
    assert copy.timestamp_ms - nack > 1500  # both are times of the broker


def test_expired_messages_are_dead_letters(tracked: Logs) -> None:
    (id_,) = tracked.send()
    tracked.start(id_, timeout_ms=1500, expires_at_ms=tracked.sent[id_] + 1000)
    settle_down(tracked, {id_})
    ((_, headers),) = tracked.dead_letters()
    assert headers["kafkamq-reason"] == b"expired"


def test_a_schedule_fires_once_and_a_cancelled_one_never(tracked: Logs) -> None:
    cancelled = tracked.schedule(2500, value=b"cancelled")
    fires = tracked.schedule(2500, value=b"fires", headers=(("kafkamq-id", b"n"), ("h", b"v")))
    tracked.end_schedule(cancelled)
    wait_until(lambda: tracked.ends(Outcome.REDELIVERED) == [fires])
    later = tracked.schedule(600, value=b"later")
    wait_until(lambda: set(tracked.ends(Outcome.REDELIVERED)) == {fires, later})
    records = tracked.read(tracked.config.message_topic)
    assert sorted(message.value() for message in records) == [b"fires", b"later"]
    headers = [dict(m.headers() or ()) for m in records if m.value() == b"fires"]
    # Its copy is the first delivery: it has neither a count nor an origin.
    assert headers == [{"kafkamq-id": b"n", "h": b"v"}]


def test_a_long_schedule_is_carried_and_still_fires_once(bootstrap: str, namespace: str) -> None:
    """R19: it is appended again whenever a quarter of the markers' retention has passed."""
    logs = Logs(bootstrap, namespace, marker_retention_ms=6000, max_lease_ms=1000)
    config = TrackerConfig(max_lease_ms=1000, position_interval_ms=200)
    with LocalTracker(logs.config, config).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
        first = logs.schedule(5000)
        cancelled = logs.schedule(5000)
        wait_until(
            lambda: (
                {m.message_id for _, m in logs.markers() if m.carried_forward} == {first, cancelled}
            )
        )
        logs.end_schedule(cancelled)  # by the place of its first record
        wait_until(lambda: logs.ends(Outcome.REDELIVERED) == [first])
    carried = [marker for _, marker in logs.markers() if marker.carried_forward]
    assert {marker.message_id for marker in carried} == {first, cancelled}
    assert all(marker.value == b"later" for marker in carried)
    (fired,) = [message.timestamp()[1] for message in logs.read(logs.config.message_topic)]
    (sent,) = [
        m.timestamp()[1]
        for m, _ in logs.markers()
        if m.offset() == first.offset and m.partition() == first.partition
    ]
    assert fired - sent > 5000


def test_payload_by_reference(tracked: Logs) -> None:
    (id_,) = tracked.send(value=b"large" * 100)
    tracked.start(id_, timeout_ms=300, value=None, by_reference=True)
    settle_down(tracked, {id_})
    assert [copy.value for copy in tracked.copies()] == [b"large" * 100]


@pytest.mark.usefixtures("impatient")
def test_payload_by_reference_of_another_message_is_lost(tracked: Logs) -> None:
    (id_,) = tracked.send(value=b"of somebody else")
    tracked.sent[id_] -= 1  # the topic was recreated: same place, other message (R13)
    never = MessageId(1, 77)  # beyond the log's end
    nowhere = MessageId(99, 0)  # a partition that does not exist
    tracked.start(id_, never, nowhere, timeout_ms=300, value=None, by_reference=True)
    settle_down(tracked, {id_, never, nowhere})
    letters = tracked.dead_letters()
    assert [headers["kafkamq-reason"] for _, headers in letters] == [b"payload-lost"] * 3
    assert [letter.value() for letter, _ in letters] == [None] * 3
    assert not tracked.copies()


def test_copies_keep_the_partition_of_their_user_key(tracked: Logs) -> None:
    ids = tracked.send(20, key=b"queue\0customer-1")
    tracked.start(*ids, timeout_ms=300, key=b"queue\0customer-1")
    settle_down(tracked, set(ids))
    partitions = {
        message.partition()
        for message in tracked.read(tracked.config.message_topic)
        if any(name == "kafkamq-origin" for name, _ in message.headers() or ())
    }
    assert len(partitions) == 1
    assert len(tracked.copies()) == 20


def test_a_message_that_is_held_through_a_restart_comes_back_once(logs: Logs) -> None:
    acked, silent = logs.send(2)
    with LocalTracker(logs.config, FAST).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
        logs.start(acked, silent, timeout_ms=5000)
    logs.end(acked)
    with LocalTracker(logs.config, FAST).in_thread():
        settle_down(logs, {acked, silent})
    with LocalTracker(logs.config, FAST).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
    assert logs.copied() == [(silent.partition, silent.offset)]
    assert logs.ends(Outcome.REDELIVERED) == [silent]


def test_nothing_fires_before_all_that_a_predecessor_wrote_is_read(logs: Logs) -> None:
    """R17: its END lies so far behind the START that they are read in different batches."""
    (id_,) = logs.send()
    logs.start(id_, timeout_ms=200)
    time.sleep(0.5)  # the next record shows that the lease has ended
    many = [encode_keepalive(None, consumer_id="nobody", redeliver_after_ms=1)] * 20_000
    logs.markers_of([id_] * len(many), many)
    logs.end(id_, outcome=Outcome.REDELIVERED)
    with LocalTracker(logs.config, FAST).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
        (after,) = logs.send()
        logs.start(after, timeout_ms=200)
        settle_down(logs, {after})
    assert logs.copied() == [(after.partition, after.offset)]


def test_a_quiet_namespace_gets_no_ticks(tracked: Logs) -> None:
    (id_,) = tracked.send()
    tracked.start(id_, timeout_ms=300)
    settle_down(tracked, {id_})

    def ticks() -> int:
        return sum(marker.type is MarkerType.TICK for _, marker in tracked.markers())

    def is_quiet() -> bool:
        before = ticks()
        time.sleep(2.0)
        return ticks() == before

    wait_until(is_quiet)  # once the END is read and whatever was on its way has arrived


def named(logs: Logs, ids: list[MessageId]) -> list[MessageId]:
    """Name messages as workers do in batches: with the topic's id and the leader's epoch."""
    with Admin(logs.config) as admin:
        topic_id = admin.topic_id(logs.config.message_topic)
    return [replace(one, topic_id=topic_id, leader_epoch=1) for one in ids]


def test_a_batch_falls_due_and_each_message_is_judged_alone(tracked: Logs) -> None:
    """R29, R32: key, headers, payload, count and life time are the message's own."""
    headers = (("h", b"1"), ("h", None), ("kafkamq-id", b"abc"))
    silent = tracked.send(200, key=b"queue\0user", value=b"x", headers=headers)
    silent += tracked.send(200, partition=1)
    worn = tracked.send(3, headers=(("kafkamq-delivery-count", b"3"),))
    old = tracked.send(3, headers=(("kafkamq-ttl-ms", b"1"),))
    acked = tracked.send(5, partition=1)
    silent, worn, old, acked = (named(tracked, ids) for ids in (silent, worn, old, acked))
    every = [*silent, *worn, *old, *acked]
    tracked.start_batch(*every, timeout_ms=3000, max_deliveries=3)
    tracked.batch(*acked, marker=Marker(MarkerType.END, consumer_id="worker"))
    settle_down(tracked, set(every))
    copies = tracked.copies()
    assert Counter((c.origin.partition, c.origin.offset) for c in copies if c.origin) == Counter(
        (one.partition, one.offset) for one in silent
    )
    assert {copy.delivery_count for copy in copies} == {2}
    assert Counter((c.key, c.value, c.user) for c in copies) == {
        (b"queue\0user", b"x", (("h", b"1"), ("h", None))): 200,
        (b"queue", b"payload", ()): 200,
    }
    reasons = Counter(headers["kafkamq-reason"] for _, headers in tracked.dead_letters())
    assert reasons == {b"max-deliveries": 3, b"expired": 3}
    assert Counter(tracked.ends(Outcome.REDELIVERED)) == Counter(silent)
    ends = [one for _, one in tracked.markers() if one.outcome is Outcome.REDELIVERED]
    assert len(ends) < 20, "one for each transaction"


@pytest.mark.usefixtures("impatient")
def test_a_batch_whose_messages_are_gone_or_of_another_topic(logs: Logs) -> None:
    """Each is a dead letter that names its queue; what is there is copied."""
    gone, there = named(logs, logs.send(3)), named(logs, logs.send(3, value=b"there"))
    other = [replace(one, topic_id=b"another topic!!!") for one in there]
    stale = [replace(one, leader_epoch=9) for one in there]
    beyond = [replace(there[0], offset=77)]
    admin = AdminClient({"bootstrap.servers": logs.bootstrap})
    place = TopicPartition(logs.config.message_topic, 0, 3)
    admin.delete_records([place])[place].result(within(30))
    for ids in (gone, there, other, stale, beyond):
        logs.start_batch(*ids, timeout_ms=300)
    lost = {*gone, *other, *stale, *beyond}
    with LocalTracker(logs.config, FAST).in_thread():
        settle_down(logs, {*lost, *there})
    letters = [headers for _, headers in logs.dead_letters()]
    assert {headers["kafkamq-reason"] for headers in letters} == {b"payload-lost"}
    assert {headers["kafkamq-queue-id"] for headers in letters} == {b"queue"}
    assert Counter(logs.ends(Outcome.DEAD_LETTERED)) == Counter(lost)
    assert Counter(logs.ends(Outcome.REDELIVERED)) == Counter(there)
    assert [copy.value for copy in logs.copies()] == [b"there"] * 3
