"""Setting the position of a live group: everything moves, or nothing does."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.waiting import wait_until, within

from kafkamq.claims import Admin, Claim, Cluster, init_topic
from kafkamq.claims import admin as administration
from kafkamq.errors import BrokerError, DeadlineExceededError
from kafkamq.transport.clients import open_producer
from kafkamq.transport.memory.cluster import cluster_of, forget_cluster
from kafkamq.types import MarshalRecord, MarshalType, PartitionId

GROUP, TOPIC = "group", "work"
FIRST, SECOND = (TOPIC, 0), (TOPIC, 1)
Refusal = Callable[[MarshalRecord], bool]


class Office:
    """One process with a group's administration, on Kafka in memory; others write beside it."""

    def __init__(self, servers: str, interval_s: float) -> None:
        self.cluster = Cluster(servers, heartbeat_interval=interval_s)
        self.cluster.ready(within(30))
        self.admin = Admin(self.cluster, GROUP, client_id="adm")
        self.refuses: Refusal = lambda _: False
        self.is_unread: Refusal = lambda _: False
        self.sent: list[MarshalRecord] = []
        engine = self.cluster.engine
        self._send = engine.send

        def send(partition: int, record: MarshalRecord, report: Callable[[int], None]) -> None:
            """Fail what is refused, and name a later place of what is not read back."""
            self.sent.append(record)
            if self.refuses(record):
                report(-1)
                return
            late = 1000 if self.is_unread(record) else 0
            self._send(partition, record, lambda at: report(at + late))

        engine.send = send  # type: ignore[method-assign]

    def set(self, positions: dict[PartitionId, int], timeout_s: float) -> dict[PartitionId, int]:
        return self.admin.set_position(dict(positions), timeout=timeout_s)

    def claim(self, place: PartitionId) -> Claim:
        return self.cluster.member("seer", GROUP).claim_of(*place)

    def write(
        self,
        type: MarshalType,
        partition: int,
        client: str,
        instance: str = "1",
        offset: int = 0,
        expires_at_s: int = 0,
    ) -> None:
        engine = self.cluster.engine
        record = MarshalRecord(
            type,
            time_s=int(engine.clock.now_s()),
            instance=instance,
            client=client,
            group=GROUP,
            topic="" if expires_at_s else TOPIC,
            partition=partition,
            offset=offset,
            expires_at_s=expires_at_s,
        )
        with engine.lock:
            self._send(engine.partition_of(TOPIC), record, lambda _: None)

    def occupy(self, partition: int, offset: int = 0) -> None:
        """A member that does not know pauses, as the last Go version, holds a partition."""
        self.write(MarshalType.CLAIMING_PARTITION, partition, "go")
        self.write(MarshalType.HEARTBEAT, partition, "go", offset=offset)
        wait_until(lambda: self.claim((TOPIC, partition)).client == "go")

    def committed(self, place: PartitionId) -> int:
        (found,) = self.cluster.engine.admin.committed([(GROUP, place)], stable=False)
        return found.offset


@pytest.fixture
def servers() -> Iterator[str]:
    name = uuid.uuid4().hex
    servers = f"memory://{name}"
    kafka = cluster_of(servers)
    kafka.create_topic(TOPIC, 2)
    producer = open_producer({"bootstrap.servers": servers})
    for partition in (0, 1):
        for number in range(40):
            producer.produce(TOPIC, b"%d" % number, partition=partition)
    producer.flush(10)
    kafka.delete_records(TOPIC, 0, 10)
    init_topic(servers, heartbeat_interval=1)
    yield servers
    forget_cluster(name)


@pytest.fixture
def office(servers: str) -> Iterator[Office]:
    office = Office(servers, 60)
    yield office
    office.cluster.close(5)


def is_pause(record: MarshalRecord) -> bool:
    return record.type is MarshalType.RELEASE_GROUP and record.expires_at_s > 0


def is_resume(record: MarshalRecord) -> bool:
    return record.type is MarshalType.RELEASE_GROUP and not record.expires_at_s


def test_a_live_group_is_moved_and_goes_on(office: Office) -> None:
    with office.cluster.member("c", GROUP).hold(TOPIC, claims="greedy") as hold:
        hold.wait_for_claims(2, within(30))
        for place in (FIRST, SECOND):
            hold.commit_position(*place, 35)
        hold.flush(within(30))
        wanted = {FIRST: 15, SECOND: 17}
        assert office.set(wanted, within(30)) == wanted
        assert {place: office.committed(place) for place in wanted} == wanted
        hold.wait_for_claims(2, within(30))
        assert hold.positions() == wanted
    assert office.admin.paused_until() == 0


def test_an_interrupt_leaves_no_pause(office: Office) -> None:
    def interrupt(record: MarshalRecord) -> bool:
        if record.type is MarshalType.CLAIMING_PARTITION:
            raise KeyboardInterrupt
        return False

    office.refuses = interrupt
    with pytest.raises(KeyboardInterrupt):
        office.set({FIRST: 15}, within(30))
    assert any(map(is_pause, office.sent))
    assert office.admin.paused_until() == 0


def test_while_it_goes_on_the_group_stays_away(servers: str) -> None:
    office = Office(servers, 1)
    with office.cluster.member("c", GROUP).hold(TOPIC, claims="greedy") as hold:
        hold.wait_for_claims(2, within(30))
        office.refuses = lambda each: each.client == "adm" and bool(each.topic)
        with ThreadPoolExecutor(1) as threads:
            moving = threads.submit(office.set, {FIRST: 15}, within(0.5))
            wait_until(lambda: not hold.claims)
            with pytest.raises(DeadlineExceededError, match="could not be claimed"):
                moving.result()
        hold.wait_for_claims(2, within(30))
    office.cluster.close(5)


@pytest.mark.parametrize(("target", "expected"), [(2000, 40), (0, 10), (3, 10), (10, 10), (39, 39)])
def test_targets_are_clamped_to_what_exists(office: Office, target: int, expected: int) -> None:
    assert office.set({FIRST: target}, within(30)) == {FIRST: expected}
    assert office.claim(FIRST).offset == expected


def test_a_target_of_zero_also_moves_the_commit(office: Office) -> None:
    """Zero in the coordination log means that nothing is known; the commit must say it too."""
    assert office.set({SECOND: 30}, within(30)) == {SECOND: 30}
    assert office.committed(SECOND) == 30
    assert office.set({SECOND: 0}, within(30)) == {SECOND: 0}
    assert office.committed(SECOND) == 0
    assert office.claim(SECOND).offset == 0


def test_nothing_moves_when_one_partition_is_not_released(office: Office) -> None:
    office.occupy(1, offset=33)
    assert office.set({FIRST: 30}, within(30)) == {FIRST: 30}
    with pytest.raises(DeadlineExceededError) as caught:
        office.set({FIRST: 15, SECOND: 17}, within(0.5))
    assert "no position of group group was changed" in str(caught.value)
    assert "work[0]: another partition could not be claimed" in str(caught.value)
    assert "work[1]: could not be claimed: held by another" in str(caught.value)
    assert "paused" not in str(caught.value)
    assert office.claim(FIRST).offset == 30
    assert office.claim(FIRST).is_claimable
    assert office.claim(SECOND).offset == 33
    assert office.admin.paused_until() == 0


def test_a_partition_that_is_lost_before_the_move_is_claimed_again(office: Office) -> None:
    office.occupy(1)
    with ThreadPoolExecutor(1) as threads:
        moving = threads.submit(office.set, {FIRST: 15, SECOND: 17}, within(30))
        wait_until(lambda: office.claim(FIRST).client == "adm")
        before = office.claim(FIRST)
        office.write(MarshalType.RELEASING_PARTITION, 0, "adm", before.instance, offset=22)
        wait_until(lambda: office.claim(FIRST).token > before.token)
        office.write(MarshalType.RELEASING_PARTITION, 1, "go")
        assert moving.result() == {FIRST: 15, SECOND: 17}


def test_a_group_that_cannot_be_paused_is_left_alone(office: Office) -> None:
    office.refuses = is_pause
    with pytest.raises(DeadlineExceededError, match=r"the group could not be paused$"):
        office.set({FIRST: 15}, 0.2)
    assert office.claim(FIRST).token == -1


@pytest.mark.parametrize("is_written", [False, True])
def test_it_says_so_when_the_resume_was_not_read_back(
    office: Office, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    monkeypatch.setattr(administration, "MIN_RESUME_S", 0.2)
    if is_written:
        office.is_unread = is_resume
    else:
        office.refuses = is_resume
    with pytest.raises(BrokerError, match=r"were changed: work\[0\]; group group is still paused"):
        office.set({FIRST: 15}, within(0.5))
    assert office.committed(FIRST) == 15
    assert (office.admin.paused_until() == 0) is is_written


@pytest.mark.parametrize("lasts_s", [3600, 20])
def test_a_pause_that_was_there_before_goes_on(office: Office, lasts_s: int) -> None:
    until = office.admin.pause(lasts_s)
    assert office.set({FIRST: 15}, within(30)) == {FIRST: 15}
    assert office.admin.paused_until() == until
    assert all(each.topic or each.expires_at_s >= until for each in office.sent)


def test_a_pause_that_had_ended_before_is_resumed_as_none(office: Office) -> None:
    engine = office.cluster.engine
    office.write(MarshalType.RELEASE_GROUP, 0, "other", expires_at_s=int(engine.clock.now_s()) - 9)
    log = engine.log.logs[engine.partition_of(TOPIC)]
    wait_until(lambda: log.paused_until(GROUP))
    assert office.set({FIRST: 15}, within(30)) == {FIRST: 15}
    assert is_resume(office.sent[-1])


@pytest.mark.parametrize("is_queued", [True, False])
def test_an_interrupt_at_a_record_leaves_nothing_under_way(
    office: Office, monkeypatch: pytest.MonkeyPatch, is_queued: bool
) -> None:
    engine = office.cluster.engine
    writer = engine.open_writer()
    produce = writer.produce

    def interrupted(*arguments: Any) -> None:
        if is_queued:
            produce(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer, "produce", interrupted)
        with pytest.raises(KeyboardInterrupt):
            office.set({FIRST: 15}, within(30))
    # What was queued before has its report when this is over.
    assert office.set({FIRST: 15}, within(30)) == {FIRST: 15}
    wait_until(lambda: not engine.under_way, "all reports", 5)


def test_a_move_that_is_not_confirmed_is_told(servers: str) -> None:
    office = Office(servers, 1)

    def is_release(record: MarshalRecord) -> bool:
        return record.type is MarshalType.RELEASING_PARTITION and record.partition == 1

    office.refuses = is_release
    with pytest.raises(BrokerError) as caught:
        office.set({FIRST: 15, SECOND: 17}, within(30))
    assert "were changed in part: work[1]: may not have moved: released" in str(caught.value)
    assert "changed: work[0];" in str(caught.value)
    assert office.committed(FIRST) == 15
    assert office.admin.paused_until() == 0
    office.cluster.close(5)


def test_no_target_is_no_work(office: Office) -> None:
    assert office.set({}, 1) == {}
    assert office.sent == []


def test_a_pause_outlasts_the_attempt(office: Office) -> None:
    before_s = int(office.cluster.engine.clock.now_s())
    office.set({FIRST: 15}, 100)
    record = office.sent[0]
    assert record.type is MarshalType.RELEASE_GROUP
    assert record.version == 0
    assert record.expires_at_s >= before_s + 200 + 60
