"""Which partitions a member tries next; what an observer of the log finds; what records did."""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.claim_fold import GROUP, TOPIC
from tests.waiting import wait_until, within

from kafkamq.claims import Admin, Cluster, RangeClaims, init_topic
from kafkamq.claims.audit import ClaimAudit, ClaimEventKind, ClaimHistory
from kafkamq.claims.engine import ClaimSession, Engine, OffsetService
from kafkamq.claims.holding import ClaimOptions, Holding
from kafkamq.claims.rules.claimant import Claimant
from kafkamq.claims.rules.log import ClaimLog
from kafkamq.claims.rules.policy import ClaimMode, ClaimPolicy, Prospect
from kafkamq.claims.rules.steps import ClaimantConfig, End, Fetch, Stop
from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.transport.clients import open_producer
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.memory.cluster import cluster_of, forget_cluster
from kafkamq.types import MarshalRecord, MarshalType


def policy(mode: ClaimMode, max_claims: int = 0) -> ClaimPolicy:
    return ClaimPolicy(mode, max_claims=max_claims, pause_ms=3000, rest_ms=60_000)


def free(count: int, topic: str = "t", **more: bool) -> list[Prospect]:
    return [Prospect(topic, number, is_claimable=True, **more) for number in range(count)]


def held(*numbers: int, topic: str = "t") -> list[Prospect]:
    return [Prospect(topic, number, is_ours=True, is_held=True) for number in numbers]


def numbers(chosen: list[Prospect]) -> list[int]:
    return [each.partition for each in chosen]


def test_greedy_takes_all_that_is_free() -> None:
    taken = [Prospect("t", 9)]
    assert numbers(policy(ClaimMode.GREEDY).choose(free(4) + taken, 0)) == [0, 1, 2, 3]


def test_limits_count_what_is_held_and_tried_and_come_before_restarts() -> None:
    """G1, G5."""
    greedy = policy(ClaimMode.GREEDY, 3)
    back = [Prospect("t", 7, is_reclaimable=True), Prospect("t", 8, is_reclaimable=True)]
    assert numbers(greedy.choose(free(4) + back, 0)) == [7, 8, 0]
    tried = [Prospect("t", 5, is_ours=True), *held(6)]
    assert numbers(greedy.choose(free(4) + back + tried, 0)) == [7]
    assert greedy.choose(free(4) + held(6, 7, 8), 0) == []


OTHER, THIRD = ("other", "2"), ("third", "3")


def of(owner: tuple[str, str], *numbers: int) -> list[Prospect]:
    return [Prospect("t", number, owner=owner) for number in numbers]


def test_balanced_asks_who_holds_most_and_two_more() -> None:
    """G7; once in half a rest, unless it holds more since."""
    balanced = policy(ClaimMode.BALANCED)
    others = of(OTHER, 0, 1) + of(THIRD, 2, 3, 4)
    asked = balanced.ask(others, 0)
    assert asked is not None
    assert asked.owner == THIRD
    assert balanced.ask(others, 29_999) is None
    assert balanced.ask(others, 30_000) is not None
    assert balanced.ask(others[:4] + held(4), 30_001) is None
    assert balanced.ask(others + held(5), 30_001) is not None
    assert balanced.ask(others + held(5, 6), 90_000) is None


def test_who_never_gives_is_asked_only_so_often() -> None:
    """G7."""
    balanced = policy(ClaimMode.BALANCED)
    others = of(OTHER, 0, 1, 2, 3, 4) + of(THIRD, 5, 6, 7)
    asked = [balanced.ask(others, round_ * 30_000) for round_ in range(4)]
    assert [each.owner for each in asked if each] == [OTHER, THIRD, OTHER, THIRD]


def test_nothing_is_asked_for_beside_what_is_free_nor_beyond_the_limit() -> None:
    """G7."""
    others = of(OTHER, 0, 1, 2)
    assert policy(ClaimMode.BALANCED).ask(free(1) + others, 0) is None
    assert policy(ClaimMode.BALANCED, 1).ask(held(8) + of(OTHER, 0, 1, 2), 0) is None
    assert policy(ClaimMode.GREEDY).ask(others, 0) is None
    assert policy(ClaimMode.TOPIC).ask(others, 0) is None


def test_who_was_too_slow_does_not_ask_for_a_while() -> None:
    """G7; else it would be given back what it gave up."""
    balanced = policy(ClaimMode.BALANCED)
    balanced.on_end("t", 0, End.BEHIND, 0, was_held=True)
    assert balanced.ask(of(OTHER, 0, 1, 2), 599_999) is None
    assert balanced.ask(of(OTHER, 0, 1, 2), 600_000) is not None


def test_balanced_gives_who_asks_and_holds_two_less_one_at_a_time() -> None:
    """G7."""
    asked = Prospect("t", 7, is_ours=True, is_held=True, asker=OTHER)
    balanced = policy(ClaimMode.BALANCED)
    assert balanced.gives([*held(1), asked])
    assert balanced.gives([*held(1, 2), asked, *of(OTHER, 3)])
    assert not balanced.gives([*held(1), asked, *of(OTHER, 3)])
    assert not balanced.gives([*held(1, 2, 3)])
    on_its_way = Prospect("t", 4, is_ours=True)
    assert not balanced.gives([*held(1, 2, 3), asked, on_its_way])
    assert not policy(ClaimMode.GREEDY).gives([*held(1), asked])
    balanced.on_end("t", 7, End.SHARED, 0, was_held=True)
    assert balanced.choose([Prospect("t", 7, is_claimable=True)], 59_999) == []


def test_only_of_the_topic_that_was_asked_for_one_is_given() -> None:
    """G7; else who claims that topic alone never gets one."""
    asked = Prospect("b", 7, is_ours=True, is_held=True, asker=OTHER)
    balanced = policy(ClaimMode.BALANCED)
    assert balanced.gives([*held(1, 2), *held(8, topic="b"), asked]) == {"b"}


def test_who_claims_one_topic_gets_its_share_of_a_member_that_claims_two() -> None:
    """G7; what has least under way is of the other topic."""
    name = uuid.uuid4().hex
    servers = f"memory://{name}"
    for topic in ("a", "b"):
        cluster_of(servers).create_topic(topic, 3)
    init_topic(servers, heartbeat_interval=1)
    producer = open_producer({"bootstrap.servers": servers})
    for partition in range(3):
        producer.produce("a", b"", partition=partition)
    producer.flush(within(30))
    options: dict[str, Any] = {"claims": "balanced", "release_if_behind": False}
    with (
        Cluster(servers, heartbeat_interval=1) as cluster,
        cluster.member("both", "group").consumer(["a", "b"], **options) as both,
    ):
        both.wait_for_claims(6, within(30))
        messages = [both.receive(within(30)) for _ in range(3)]
        with cluster.member("one", "group").consumer("a", **options) as one:
            wait_until(lambda: len(both.claims) == 5)
            assert sorted(topic for topic, _ in both.claims) == ["a", "a", "b", "b", "b"]
            given_ms = monotonic_ms()
            wait_until(lambda: monotonic_ms() > given_ms + 2500)  # handlers may be slow
            for message in messages:
                assert message is not None
                message.commit()
            one.wait_for_claims(1, within(30))
    forget_cluster(name)


def test_closing_during_an_outage_tells_of_each_fenced_partition() -> None:
    name = uuid.uuid4().hex
    servers = f"memory://{name}"
    cluster_of(servers).create_topic("a", 2)
    init_topic(servers, heartbeat_interval=60)
    lost: list[int] = []
    cluster = Cluster(servers, heartbeat_interval=60)
    consumer = cluster.member("one", "group").consumer(
        "a", fenced=True, claims="greedy", on_lost=lambda _, partition, __: lost.append(partition)
    )
    consumer.wait_for_claims(2, within(30))
    cluster_of(servers).faults.is_down = True
    cluster.close(timeout=1.0)
    assert {*lost} == {0, 1}
    cluster_of(servers).faults.is_down = False
    forget_cluster(name)


def test_a_fence_that_ends_with_the_interpreter_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No thread starts then."""
    name = uuid.uuid4().hex
    cluster_of(f"memory://{name}")
    config = ServiceConfig(bootstrap_servers=f"memory://{name}")
    service = OffsetService(cast("Engine", SimpleNamespace(config=config, admin=None)), "group")
    fence = service.fence("a", 0)
    service.close(within(10))
    asked: list[threading.Thread] = []

    def refuse(thread: threading.Thread) -> None:
        asked.append(thread)
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    service.end(fence)
    monkeypatch.undo()
    assert len(asked) == 1
    forget_cluster(name)


def test_balanced_doubles_until_another_was_first() -> None:
    """G3."""
    balanced = policy(ClaimMode.BALANCED)
    assert len(balanced.choose(free(64), 0, random_unit=0.5)) == 1
    assert balanced.choose(free(64), 1499) == []
    assert len(balanced.choose(free(63), 1500)) == 2
    assert len(balanced.choose(free(61), 3000)) == 4
    balanced.on_end("t", 3, End.REFUSED, 4000, was_held=False)
    assert len(balanced.choose(free(57), 4500)) == 1
    back = [Prospect("t", 90, is_reclaimable=True)]
    assert numbers(balanced.choose(free(50) + back, 4501)) == [90]  # without a pause


def test_what_was_too_slow_rests() -> None:
    """G6."""
    greedy = policy(ClaimMode.GREEDY)
    greedy.on_end("t", 0, End.BEHIND, 1000, was_held=True)
    greedy.on_end("t", 1, End.RELEASED, 1000, was_held=True)
    assert numbers(greedy.choose(free(2), 60_999)) == [1]
    assert numbers(greedy.choose(free(2), 61_000)) == [0, 1]


def test_whole_topics_begin_with_their_key() -> None:
    """G4, G5."""
    topic = policy(ClaimMode.TOPIC, 1)
    both = free(3, "a") + free(3, "b")
    (key,) = topic.choose(both, 0)
    assert (key.topic, key.partition) == ("a", 0)
    tried = [Prospect("a", 0, is_ours=True), *free(3, "a")[1:], *free(3, "b")]
    assert topic.choose(tried, 0) == []  # not before the key is held
    partial = [*held(0, topic="a"), *free(3, "a")[1:], *free(3, "b")]
    assert [(each.topic, each.partition) for each in topic.choose(partial, 0)] == [
        ("a", 1),
        ("a", 2),
    ]
    topic.on_end("a", 1, End.TAKEN, 0, was_held=True)
    topic.on_end("b", 1, End.RELEASED, 0, was_held=True)
    assert topic.take_broken_topics() == {"a"}
    assert topic.take_broken_topics() == set()


# ---- the observer


class Log:
    def __init__(self) -> None:
        self.audit = ClaimAudit(60)
        self.history = ClaimHistory(60)
        self.offset = 0

    def add(
        self,
        at_s: float,
        type: MarshalType,
        client: str,
        position: int = 0,
        *,
        instance: str = "i",
        **more: int,
    ) -> ClaimEventKind:
        topic = "" if type is MarshalType.RELEASE_GROUP else TOPIC
        record = MarshalRecord(
            type, int(at_s) + more.pop("skew", 0), instance, client, GROUP, topic,
            offset=position, **more,
        )  # fmt: skip
        event = self.history.apply(record, offset=self.offset, broker_time_ms=int(at_s * 1000))
        self.audit.apply(record, offset=self.offset, broker_time_ms=int(at_s * 1000))
        self.offset += 1
        return event.kind


BEAT = MarshalType.HEARTBEAT
CLAIM = MarshalType.CLAIMING_PARTITION
RELEASE = MarshalType.RELEASING_PARTITION
ANNOUNCE = MarshalType.CLAIMING_MESSAGES


def test_an_orderly_log_shows_no_two_owners() -> None:
    log = Log()
    assert log.add(0, CLAIM, "a") is ClaimEventKind.CLAIMED
    assert log.add(1, BEAT, "a") is ClaimEventKind.RENEWED
    assert log.add(2, CLAIM, "b") is ClaimEventKind.REFUSED
    assert log.add(30, ANNOUNCE, "a", 5) is ClaimEventKind.ANNOUNCED
    assert log.add(31, BEAT, "a", 5) is ClaimEventKind.RENEWED
    assert log.add(40, RELEASE, "a", 5) is ClaimEventKind.RELEASED
    assert log.add(41, CLAIM, "b") is ClaimEventKind.CLAIMED
    assert log.add(42, BEAT, "b", 5) is ClaimEventKind.RENEWED
    assert log.add(162, CLAIM, "a") is ClaimEventKind.TAKEN_OVER  # b fell silent
    assert log.add(163, BEAT, "a", 5) is ClaimEventKind.RENEWED
    assert log.add(164, BEAT, "b", 5) is ClaimEventKind.IGNORED  # too late to have been beside it
    assert log.add(165, RELEASE, "b", 5) is ClaimEventKind.IGNORED
    assert log.audit.dual_claims == []


def test_two_that_act_in_turn_are_found() -> None:
    log = Log()
    log.add(0, BEAT, "a")
    assert log.add(10, BEAT, "b") is ClaimEventKind.HANDED_OVER
    log.add(20, BEAT, "a")
    (found,) = log.audit.dual_claims
    assert (found.first[0], found.second[0], found.offset) == ("a", "b", 2)
    log.add(40, BEAT, "b")
    assert len(log.audit.dual_claims) == 2


def test_a_restart_that_takes_over_is_no_second_owner() -> None:
    log = Log()
    log.add(0, BEAT, "a")
    log.add(5, BEAT, "b")
    log.add(10, BEAT, "b")
    assert log.audit.dual_claims == []


@pytest.mark.parametrize("end", [CLAIM, RELEASE])
def test_what_ends_a_session_ends_its_acts(end: MarshalType) -> None:
    log = Log()
    log.add(0, BEAT, "a")
    log.add(5, end, "a")
    log.add(10, BEAT, "b")
    log.add(20, BEAT, "a")
    assert log.audit.dual_claims == []


def test_clocks_instances_and_impossible_records_are_counted() -> None:
    log = Log()
    log.add(100, BEAT, "a", skew=30)
    log.add(99, BEAT, "a", skew=-2)
    log.add(101, BEAT, "a", partition=-1)
    log.add(101, BEAT, "a", partition=2**31)
    assert log.add(102, MarshalType.RELEASE_GROUP, "a", expires_at_s=200) is ClaimEventKind.PAUSED
    assert log.add(103, MarshalType.RELEASE_GROUP, "a", expires_at_s=0) is ClaimEventKind.RESUMED
    client = log.audit.clients[GROUP, "a"]
    assert (client.least_skew_s, client.most_skew_s) == (-2, 30)
    assert log.audit.impossible == 2
    assert log.audit.steps_back == 1
    assert log.audit.types["Heartbeat"] == 4


def test_a_client_id_in_two_processes_is_found_and_a_restart_is_none() -> None:
    log = Log()
    for second, instance in enumerate("11223"):
        log.add(second, BEAT, "a", instance=instance)
    client = log.audit.clients[GROUP, "a"]
    assert client.returns == 0
    log.add(10, BEAT, "a", instance="2")
    assert client.returns == 1
    other = ClaimAudit(60)
    log.audit = other
    log.add(11, BEAT, "a", instance="4", skew=-9)
    client.merge(other.clients[GROUP, "a"])
    assert (client.records, client.returns, client.least_skew_s) == (7, 1, -9)


def test_g4_a_partition_that_was_lost_before_all_are_held_is_not_read() -> None:
    """It would be read, and never be dropped: its end was told before."""
    told: list[int] = []

    def tell(topic: str, partition: int, token: int) -> None:
        told.append(partition)

    options = ClaimOptions(
        client="me",
        instance="1",
        group=GROUP,
        counts={TOPIC: 2},
        mode=ClaimMode.TOPIC,
        on_claim=tell,
    )
    engine: Any = SimpleNamespace(interval_ms=60_000, log=SimpleNamespace(peers=None))
    claims = Holding(engine, options)

    def session(number: int) -> ClaimSession:
        names = {"client": "me", "instance": "1", "group": GROUP, "topic": TOPIC}
        claimed = ClaimantConfig(**names, partition=number, is_whole_topic=True)
        return ClaimSession(Claimant(ClaimLog(), claimed), 0, claims)

    lost, first, again = session(0), session(1), session(0)
    claims.on_fetch(lost, Fetch(0))
    claims.on_stop(lost, Stop(End.UNCERTAIN, is_lost=True))
    claims.on_fetch(first, Fetch(0))
    assert told == []
    claims.on_fetch(again, Fetch(0))
    assert told == [1, 0]


def test_times_are_seconds_or_a_timedelta_and_never_nan() -> None:
    """Whatever waits takes what every other call that waits takes."""
    name = uuid.uuid4().hex
    servers, short = f"memory://{name}", timedelta(milliseconds=1)
    cluster_of(servers).create_topic("work", 1)
    for topic in ("__marshal", "kafkamq.ranges"):
        init_topic(
            servers,
            topic,
            heartbeat_interval=timedelta(seconds=1),
            retention=timedelta(days=1),
            timeout=timedelta(seconds=30),
        )
    with Cluster(servers, heartbeat_interval=timedelta(seconds=1)) as cluster:
        admin, member = Admin(cluster, "group"), cluster.member("one", "group")
        cluster.ready(timedelta(seconds=30))
        consumer = member.consumer("work")
        ids = {"client_id": "a", "group_id": "ranges"}
        ranges = RangeClaims(servers, "work", heartbeat_interval=1, **ids)
        consumer.wait_for_claims(1, timedelta(seconds=30))
        assert consumer.receive(short) is None
        assert consumer.next_batch(short) is None
        assert list(consumer.batches(short)) == []
        assert ranges.next_range(short) is None
        consumer.flush(timedelta(seconds=30))
        asks: list[Callable[[Any], object]] = [
            cluster.ready,
            cluster.close,
            member.close,
            consumer.receive,
            consumer.next_batch,
            lambda at: next(consumer.batches(at)),
            lambda at: consumer.wait_for_claims(1, at),
            consumer.flush,
            lambda at: consumer.close(timeout=at),
            lambda at: consumer.close(drain=at),
            ranges.next_range,
            ranges.close,
            lambda at: admin.pause(60, timeout=at),
            lambda at: admin.resume(timeout=at),
            admin.wait_until_free,
            lambda at: admin.set_position({}, timeout=at),
            lambda at: init_topic(servers, "other", timeout=at),
            lambda at: init_topic(servers, "other", retention=at),
            lambda at: init_topic(servers, "other", heartbeat_interval=at),
        ]
        for ask in asks:
            with pytest.raises(ConfigError, match="is nan: it must be a finite number"):
                ask(math.nan)
        ranges.close(timedelta(seconds=10))
        consumer.close(drain=timedelta(0), timeout=timedelta(seconds=10))
        admin.wait_until_free(timedelta(seconds=30))
        member.close(timedelta(seconds=10))
        cluster.close(timedelta(seconds=10))
    forget_cluster(name)
