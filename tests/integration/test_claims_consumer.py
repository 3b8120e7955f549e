"""Members on a real broker: claims, positions, releases, takeovers, restarts."""

from __future__ import annotations

import threading

import pytest
from tests.integration.claim_logs import ClaimTopics
from tests.waiting import wait_until, within

from kafkamq.claims import Consumer
from kafkamq.errors import ConfigError, LeaseLostError, StateError


@pytest.fixture
def topics(bootstrap: str) -> ClaimTopics:
    return ClaimTopics(bootstrap)


def take(consumer: Consumer, count: int) -> list[int]:
    """So many messages, committed; fewer when none came for long."""
    found = []
    while len(found) < count:
        message = consumer.receive(within(30.0))
        if message is None:
            break
        found.append(int(message.payload or b"-1"))
        message.commit()
    return found


def test_everything_is_handed_out_once_and_a_release_moves_it_on(topics: ClaimTopics) -> None:
    topics.fill(40)
    with topics.cluster() as first, topics.cluster() as second:
        with first.member("a", topics.group).consumer(topics.work, claims="greedy") as consumer:
            assert sorted(take(consumer, 20)) == sorted({*range(40)} - {*take(consumer, 20)})
            held = consumer.claims
            assert set(held) == {(topics.work, 0), (topics.work, 1)}
        topics.fill(10, first=40)
        with second.member("b", topics.group).consumer(topics.work, claims="greedy") as consumer:
            assert sorted(take(consumer, 10)) == list(range(40, 50))
            assert consumer.receive(0.2) is None
            assert all(consumer.claims[place] > token for place, token in held.items())
    assert topics.audit().dual_claims == []


def test_what_is_not_committed_comes_again(topics: ClaimTopics) -> None:
    topics.fill(20)
    with topics.cluster() as cluster:
        member = cluster.member("a", topics.group)
        with member.consumer(topics.work, claims="greedy") as consumer:
            seen = [consumer.receive(within(30.0)) for _ in range(20)]
            for message in seen[:6]:
                assert message is not None
                message.commit()
            message = seen[7]
            assert message is not None
        with pytest.raises(LeaseLostError, match="has ended"):
            message.commit()
        with member.consumer(topics.work, claims="greedy") as consumer:
            again = {
                int(m.payload or b"")
                for m in (consumer.receive(within(30.0)) for _ in range(14))
                if m
            }
            assert len(again) == 14
            assert again == {int(m.payload or b"") for m in seen[6:] if m}


def test_members_share_and_a_silent_one_is_replaced(bootstrap: str) -> None:
    topics = ClaimTopics(bootstrap, interval_s=2.0)
    topics.fill(20)
    with topics.cluster() as first, topics.cluster() as second:
        one = first.member("a", topics.group).consumer(topics.work, max_claims=1)
        two = second.member("b", topics.group).consumer(topics.work, max_claims=1)
        one.wait_for_claims(1)
        two.wait_for_claims(1)
        assert not set(one.claims) & set(two.claims)
        assert len(take(two, 10)) == 10
        two.flush()
        two.close()
        third = second.member("c", topics.group).consumer(topics.work, claims="greedy")
        third.wait_for_claims(1)
        first.engine._is_stopping = True  # its process freezes: no heartbeat any more
        third.wait_for_claims(2)
        assert first.engine.stats.won == 1
        assert len(take(third, 10)) == 10
        assert one.receive(0.2) is None  # its lease ended before the other one could claim
        third.close()
        one.close(timeout=0.1)
    assert topics.audit().dual_claims == []


def test_a_restarted_client_takes_up_its_own_at_once(topics: ClaimTopics) -> None:
    topics.fill(10)
    with topics.cluster() as cluster:
        member = cluster.member("a", topics.group)
        first = member.consumer(topics.work, claims="greedy")
        assert len(take(first, 10)) == 10
        tokens = first.claims
        first.close(release=False)
        other = cluster.member("b", topics.group).consumer(topics.work, claims="greedy")
        topics.fill(2, first=10)
        with member.consumer(topics.work, claims="greedy") as second:
            assert sorted(take(second, 2)) == [10, 11]
            assert all(second.claims[place] > token for place, token in tokens.items())
        other.close()


def test_whole_topics_are_claimed_as_a_unit(topics: ClaimTopics) -> None:
    with topics.cluster() as first, topics.cluster() as second:
        # One holds partition 1; the other one has the key, and gets no message before the rest.
        one = first.member("a", topics.group).consumer(topics.work, claims="greedy")
        one.wait_for_claims(2)
        two = second.member("b", topics.group).consumer(topics.work, claims="topic")
        assert two.complete_topics == frozenset()
        one.close()
        wait_until(lambda: two.complete_topics == {topics.work})
        topics.fill(4)
        assert sorted(take(two, 4)) == [0, 1, 2, 3]
        two.close()


def test_a_batch_that_was_not_taken_is_given_back(topics: ClaimTopics) -> None:
    topics.fill(6)
    with topics.cluster() as cluster:
        member = cluster.member("a", topics.group)
        with member.consumer(topics.work, delivery="at-most-once", claims="greedy") as consumer:
            consumer.wait_for_claims(2)
            batches = consumer._batches
            assert batches is not None

            def is_committed() -> bool:
                assert batches.next_batch(0.0) is None
                claims = [member.claim_of(topics.work, number) for number in range(2)]
                return any(claim.offset > 0 for claim in claims)

            take_nothing = batches._take
            batches._take = lambda: None  # type: ignore[method-assign]  # the application is slow
            wait_until(is_committed)
            batches._take = take_nothing  # type: ignore[method-assign]
        with member.consumer(topics.work, delivery="at-most-once", claims="greedy") as consumer:
            found: list[int] = []
            for batch in consumer.batches(timeout=within(60.0)):
                found += [int(message.payload or b"") for message in batch.messages]
                if len(found) == 6:
                    break
            assert sorted(found) == list(range(6))


def test_flush_writes_positions_now(topics: ClaimTopics) -> None:
    topics.fill(8)
    with topics.cluster() as cluster, topics.cluster() as observer:
        member = cluster.member("a", topics.group)
        with member.consumer(topics.work, claims="greedy") as consumer:
            take(consumer, 8)
            consumer.flush()
            seen = observer.member("o", topics.group)
            wait_until(lambda: seen.claim_of(topics.work, 0).offset == 4)
            wait_until(lambda: seen.claim_of(topics.work, 1).offset == 4)


def test_positions_are_committed_while_another_thread_polls(topics: ClaimTopics) -> None:
    """Neither waits for the other: all of it is done in bounded time."""
    topics.fill(3000)
    flushed: list[dict[tuple[str, int], int]] = []
    with topics.cluster() as cluster:
        with cluster.member("a", topics.group).consumer(topics.work, claims="greedy") as consumer:
            consumer.wait_for_claims(2)
            is_over = threading.Event()

            def flush() -> None:
                while not is_over.is_set():
                    consumer.flush(within(20.0))
                    flushed.append(consumer.positions())

            thread = threading.Thread(target=flush, daemon=True)
            thread.start()
            assert len(take(consumer, 3000)) == 3000
            wait_until(lambda: len(flushed) > 3)
            is_over.set()
            thread.join(within(40.0))
            assert not thread.is_alive()
            consumer.flush()
        committed = cluster.engine.admin.committed(
            [(topics.group, (topics.work, number)) for number in range(2)]
        )
        assert [place.offset for place in committed] == [1500, 1500]


def test_partitions_that_are_added_are_claimed(topics: ClaimTopics) -> None:
    from confluent_kafka.admin import AdminClient, NewPartitions

    with (
        topics.cluster() as cluster,
        cluster.member("a", topics.group).consumer(topics.work, claims="greedy") as consumer,
    ):
        consumer.wait_for_claims(2)
        admin = AdminClient({"bootstrap.servers": topics.bootstrap})
        admin.create_partitions([NewPartitions(topics.work, 3)])[topics.work].result(within(10))
        consumer._count_ms = 0  # rather than ten seconds from now
        consumer.wait_for_claims(3)


def test_what_cannot_work_is_refused(topics: ClaimTopics) -> None:
    with topics.cluster() as cluster:
        for client in ("", "a/b", "x" * 250, "a\n"):
            with pytest.raises(ConfigError, match="client_id"):
                cluster.member(client, "g")
        member = cluster.member("a", topics.group)
        with pytest.raises(ConfigError, match="claims is 'lazy'"):
            member.consumer(topics.work, claims="lazy")
        with member.consumer(topics.work, delivery="at-most-once") as consumer:
            with pytest.raises(StateError, match="batches"):
                consumer.receive()
            with pytest.raises(StateError, match="already"):
                member.consumer(topics.work)
    with pytest.raises(StateError, match="closed"):
        consumer.next_batch(0.1)
