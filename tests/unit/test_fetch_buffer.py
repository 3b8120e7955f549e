"""R5: what was polled, what may be committed, where a failure seeks back to."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kafkamq.markers.rules.fetch_buffer import MAX_AGE_MS, FetchBuffer, Run


def poll(
    buffer: FetchBuffer[str],
    partition: int,
    offsets: range,
    *,
    own: set[int],
    at_ms: int = 0,
):
    mine = [offset for offset in offsets if offset in own]
    run = Run(partition, mine, [f"{partition}/{offset}" for offset in mine], at_ms)
    buffer.polled(
        [run] if mine else [],
        first_offsets={partition: offsets[0]},
        next_offsets={partition: offsets[-1] + 1},
        count=len(offsets),
    )


def test_foreign_messages_are_committed_along() -> None:
    buffer: FetchBuffer[str] = FetchBuffer()
    poll(buffer, 0, range(10, 20), own={13, 17})
    assert buffer.committable() == {0: 13}
    buffer.take_many(1)
    buffer.started()
    assert buffer.committable() == {0: 17}
    buffer.take_many(1)
    buffer.started()
    assert buffer.committable() == {0: 20}
    buffer.committed({0: 20})
    assert buffer.committable() == {}


def test_what_is_polled_during_a_commit_is_still_to_be_committed() -> None:
    buffer: FetchBuffer[str] = FetchBuffer()
    poll(buffer, 0, range(10, 20), own=set())
    count = buffer.uncommitted_count
    poll(buffer, 0, range(20, 23), own=set())
    buffer.committed({0: 20}, count)
    assert buffer.uncommitted_count == 3
    assert buffer.committable() == {0: 23}


def test_nothing_is_committed_past_a_start_that_is_under_way() -> None:
    buffer: FetchBuffer[str] = FetchBuffer()
    poll(buffer, 0, range(10, 20), own={13, 17})
    buffer.take_many(1)
    buffer.take_many(1)
    assert buffer.committable() == {0: 13}
    poll(buffer, 0, range(20, 30), own=set())
    assert buffer.committable() == {0: 13}
    buffer.started()
    assert buffer.committable() == {0: 30}


def test_a_failure_seeks_back_to_what_is_committed() -> None:
    buffer: FetchBuffer[str] = FetchBuffer()
    poll(buffer, 0, range(10, 20), own={13, 17})
    poll(buffer, 1, range(5, 6), own={5})
    buffer.take_many(1)
    buffer.started()
    buffer.committed({0: 14})
    buffer.take_many(1)
    assert buffer.rewind([0]) == {0: 14}
    head = buffer.head()
    assert head is not None
    assert head == "1/5"  # the other partition's stay
    assert buffer.committable() == {1: 5} or buffer.committable() == {}
    poll(buffer, 0, range(14, 20), own={17})
    assert len(buffer) == 2


def test_before_any_commit_it_seeks_back_to_where_polling_began() -> None:
    buffer: FetchBuffer[str] = FetchBuffer()
    poll(buffer, 0, range(10, 20), own={13})
    buffer.take_many(1)
    assert buffer.rewind() == {0: 10}
    assert buffer.head() is None


def test_a_revoked_partition_is_forgotten_the_others_are_not() -> None:
    buffer: FetchBuffer[str] = FetchBuffer()
    poll(buffer, 0, range(3), own={0, 1, 2})
    poll(buffer, 1, range(3), own={0, 1, 2})
    buffer.take_many(1)
    buffer.revoked([0, 9])
    assert [run.partition for run in buffer.take_many(3)] == [1]
    buffer.started()
    assert buffer.committable() == {1: 3}
    buffer.committed({0: 3, 1: 3})  # a commit that was under way
    assert buffer.rewind([0]) == {}


def test_deleted_records_are_skipped_what_was_polled_stays() -> None:
    buffer: FetchBuffer[str] = FetchBuffer()
    poll(buffer, 0, range(3), own={2})
    buffer.skipped_to(0, 100)
    assert buffer.committable() == {0: 2}
    buffer.take_many(1)
    buffer.started()
    assert buffer.committable() == {0: 100}


def test_a_new_group_begins_at_a_place() -> None:
    buffer: FetchBuffer[str] = FetchBuffer()
    buffer.placed(0, 40)
    assert buffer.committable() == {}
    assert buffer.rewind() == {0: 40}


def test_old_ones_are_fetched_again() -> None:
    buffer: FetchBuffer[str] = FetchBuffer()
    assert not buffer.is_stale(10**9)
    poll(buffer, 0, range(2), own={0}, at_ms=1000)
    assert not buffer.is_stale(1000 + MAX_AGE_MS)
    assert buffer.is_stale(1001 + MAX_AGE_MS)


def test_records_are_counted_until_a_commit() -> None:
    buffer: FetchBuffer[str] = FetchBuffer()
    poll(buffer, 0, range(7), own={0})
    poll(buffer, 0, range(7, 9), own=set())
    assert buffer.uncommitted_count == 9
    buffer.committed({0: 9})
    assert buffer.uncommitted_count == 0


@given(
    st.lists(
        st.sampled_from(["poll", "take", "started", "commit", "rewind", "revoke"]), max_size=60
    ),
    st.integers(0, 2**32),
)
def test_never_commits_what_has_no_start(steps: list[str], seed: int) -> None:
    """Against a list per partition: committed <= first own message without a START."""
    random = Random(seed)
    buffer: FetchBuffer[tuple[int, int]] = FetchBuffer()
    own = {p: {o for o in range(400) if random.random() < 0.4} for p in (0, 1)}
    position = {0: 0, 1: 0}
    committed = {0: 0, 1: 0}
    started: dict[int, set[int]] = {0: set(), 1: set()}
    taken: dict[int, set[int]] = {0: set(), 1: set()}
    for step in steps:
        partition = random.randrange(2)
        if step == "poll":
            count = random.randrange(1, 6)
            offsets = range(position[partition], position[partition] + count)
            mine = [offset for offset in offsets if offset in own[partition]]
            run = Run(partition, mine, [(partition, offset) for offset in mine], 0)
            buffer.polled(
                [run] if mine else [],
                first_offsets={partition: offsets[0]},
                next_offsets={partition: offsets[-1] + 1},
                count=count,
            )
            position[partition] = offsets[-1] + 1
        elif step == "take" and len(buffer):
            for run in buffer.take_many(random.randrange(1, 4)):
                taken[run.partition].update(offset for _, offset in run.messages)
        elif step == "started":
            buffer.started()
            for number in (0, 1):
                started[number] |= taken[number]
                taken[number].clear()
        elif step == "commit":
            offsets_now = buffer.committable()
            buffer.committed(offsets_now)
            committed.update(offsets_now)
        elif step in ("rewind", "revoke"):
            for number in (0, 1):
                taken[number].clear()
            sought = buffer.rewind()
            assert all(offset == committed[number] for number, offset in sought.items())
            if step == "revoke":
                buffer.revoked([0, 1])
            position.update(committed)
        buffer.check()
        for number, offset in committed.items():
            missing = {o for o in own[number] if o < offset} - started[number]
            assert not missing
