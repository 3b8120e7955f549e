"""Members that share one partition by ranges, on a real broker."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from tests.integration import range_worker
from tests.integration.claim_logs import ClaimTopics
from tests.integration.range_worker import read_trace
from tests.integration.test_claims_crash import kill
from tests.waiting import wait_until, within

from kafkamq.claims import ClaimedRange, RangeClaims
from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, DataLossError, DeadlineExceededError, LeaseLostError
from kafkamq.transport.admin import Admin as KafkaAdmin


def members(topics: ClaimTopics, *names: str, **options: Any) -> list[RangeClaims]:
    return [
        RangeClaims(
            topics.bootstrap,
            topics.work,
            client_id=name,
            group_id=topics.group,
            range_topic=topics.coordination,
            heartbeat_interval=topics.interval_s,
            **options,
        )
        for name in names
    ]


def end(claimed: ClaimedRange) -> None:
    """Say that a range is done, again while nobody knows whether it is."""
    while True:
        with suppress(DeadlineExceededError):
            return claimed.done()


def test_members_share_one_partition_and_a_silent_one_is_replaced(bootstrap: str) -> None:
    topics = ClaimTopics(bootstrap, partitions=1, interval_s=2.0)
    topics.fill(1000)
    first, second = members(topics, "a", "b", size=50)
    seen: Counter[int] = Counter()
    took: Counter[str] = Counter()
    # The first one dies with two ranges in hand, one of them claimed ahead.
    wait_until(lambda: len(first.held()) == 2)
    lost = first.next_range(60.0)
    assert lost is not None
    first.engine.stop()  # no heartbeat any more
    finished: set[int] = set()
    told: Counter[int] = Counter()  # of what was handed out: that its range was lost
    wrong: list[BaseException] = []

    def work_on(claimed: ClaimedRange, name: str) -> None:
        mine = []
        try:
            for message in claimed:
                mine.append(int(message.payload or b""))
                seen[mine[-1]] += 1
                took[name] += 1
                assert message.token == claimed.token
            end(claimed)
            finished.update(mine)
        except LeaseLostError:  # it was silent itself, as on a machine that stalls
            told.update(mine)

    def work(member: RangeClaims, name: str) -> None:
        try:
            for claimed in member:
                work_on(claimed, name)
        except BaseException as error:  # noqa: BLE001 - asserted below
            wrong.append(error)

    third = members(topics, "c", size=50)[0]
    threads = [
        threading.Thread(target=work, args=(member, name), daemon=True)
        for member, name in ((second, "b"), (third, "c"))
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: wrong or len(finished) == 1000, timeout_s=90.0)
    with pytest.raises(LeaseLostError, match="not held any more"):
        lost.done(lost.next)
    for member in (second, third):
        member.stop()
    for thread in threads:
        thread.join(within(60))
        assert not thread.is_alive()
    assert wrong == []
    # Nobody was handed what another one had, but for what its member was told to have lost.
    assert {number for number, times in seen.items() if times > 1 + told[number]} == set()
    assert set(took) == {"b", "c"}
    first.close()
    second.close()
    third.close()
    # What is done is done for those who come later.
    topics.fill(10, first=1000)
    (late,) = members(topics, "d", size=50)
    with late:
        claimed = late.next_range(60.0)
        assert claimed is not None
        found = []
        for message in claimed:
            found.append(int(message.payload or b""))
            if len(found) == 10:
                break
        assert found == list(range(1000, 1010))
        claimed.done()


@pytest.mark.parametrize(
    "kills", [2, pytest.param(12, marks=[pytest.mark.faults, pytest.mark.timeout(600)])]
)
def test_killed_members_lose_nothing_and_repeat_a_range_at_most(
    bootstrap: str, tmp_path: Path, kills: int
) -> None:
    size, total = 40, 400 * kills
    topics = ClaimTopics(bootstrap, partitions=1, interval_s=2.0)
    topics.fill(total)
    traces = [tmp_path / f"{number}.trace" for number in range(kills + 2)]
    chance = random.Random(kills)
    running = {number: range_worker.start(traces[number], topics, size) for number in (0, 1)}
    try:
        for number in range(2, kills + 2):
            wanted = len(read_trace(*traces)) + chance.randint(20, 150)
            wait_until(lambda n=wanted: len(read_trace(*traces)) >= n, timeout_s=60.0)
            victim = chance.choice(list(running))
            kill(running.pop(victim))
            running[number] = range_worker.start(traces[number], topics, size)
        wait_until(
            lambda: len({offset for _, _, offset in read_trace(*traces)}) == total, timeout_s=120.0
        )
    finally:
        for process in running.values():
            kill(process)
    trace = read_trace(*traces)
    seen = Counter(offset for _, _, offset in trace)
    assert sum(seen.values()) - total <= size * kills, "more than a range was repeated for a kill"
    newest: dict[int, int] = {}
    for _, token, offset in trace:
        assert token >= newest.get(offset, 0), "two members had the same offset at once"
        newest[offset] = token
    sys.stdout.write(f"{kills} kills: {total} messages, {len(trace) - total} again, none lost\n")


@pytest.mark.parametrize(
    "kills", [1, pytest.param(12, marks=[pytest.mark.faults, pytest.mark.timeout(600)])]
)
def test_at_most_once_killed_members_repeat_nothing_and_lose_a_batch_at_most(
    bootstrap: str, tmp_path: Path, kills: int
) -> None:
    size, total = 40, 400 * kills
    topics = ClaimTopics(bootstrap, partitions=1, interval_s=2.0)
    topics.fill(total)
    traces = [tmp_path / f"{number}.trace" for number in range(kills + 2)]
    chance = random.Random(kills)
    running = {
        number: range_worker.start(traces[number], topics, size, "at-most-once")
        for number in (0, 1)
    }
    with KafkaAdmin(ServiceConfig(bootstrap_servers=bootstrap)) as admin:

        def is_done() -> bool:
            (place,) = admin.committed([(topics.group, (topics.work, 0))], stable=False)
            return place.offset >= total

        try:
            for number in range(2, kills + 2):
                wanted = len(read_trace(*traces)) + chance.randint(20, 150)
                wait_until(lambda n=wanted: len(read_trace(*traces)) >= n, timeout_s=60.0)
                kill(running.pop(chance.choice(list(running))))
                running[number] = range_worker.start(traces[number], topics, size, "at-most-once")
            wait_until(is_done, timeout_s=120.0)
            # A batch that was handed out is traced to its end.
            for process in running.values():
                process.send_signal(signal.SIGTERM)
            for process in running.values():
                process.wait(within(30))
        finally:
            for process in running.values():
                kill(process)
    seen = Counter(offset for _, _, offset in read_trace(*traces))
    assert set(seen.values()) == {1}, "something was handed out twice"
    assert total - len(seen) <= size * kills, "more than a batch was lost for a kill"


def test_what_cannot_work_is_refused(bootstrap: str) -> None:
    topics = ClaimTopics(bootstrap, partitions=1)
    with pytest.raises(ConfigError, match="size"):
        members(topics, "a", size=0)
    with pytest.raises(ConfigError, match="client_id"):
        members(topics, "a/b")


def test_messages_that_were_deleted_before_they_were_done(bootstrap: str) -> None:
    """Nothing is passed over in silence, and who says so goes on."""
    topics = ClaimTopics(bootstrap, partitions=1, interval_s=2.0)
    topics.fill(300)
    (first,) = members(topics, "a", size=50)
    with first:
        claimed = first.next_range(60.0)
        assert claimed is not None
        assert len(list(claimed)) == 50
        claimed.done()
    delete = AdminClient({"bootstrap.servers": bootstrap}).delete_records
    for done in delete([TopicPartition(topics.work, 0, 120)]).values():
        done.result()
    with pytest.raises(DataLossError, match="is 50, and the log has 120 to 300"):
        members(topics, "b", size=50)
    (late,) = members(topics, "c", size=50, on_data_loss="skip")
    seen = []
    with late:
        for claimed in late:
            seen += [int(message.payload or b"") for message in claimed]
            claimed.done()
            if len(seen) == 180:
                break
    assert sorted(seen) == list(range(120, 300))
