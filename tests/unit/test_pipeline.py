"""R5: what was polled, what may be committed, what is read again after a failure."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kafkamq.markers.rules.pipeline import MAX_AGE_MS, Pipeline, Run, RunState


def poll(
    pipeline: Pipeline[str], partition: int, offsets: range, *, own: set[int], at_ms: int = 0
) -> None:
    mine = [offset for offset in offsets if offset in own]
    run = Run(partition, mine, [f"{partition}/{offset}" for offset in mine], at_ms)
    pipeline.polled(
        [run] if mine else [],
        first_offsets={partition: offsets[0]},
        next_offsets={partition: offsets[-1] + 1},
        count=len(offsets),
    )


def start(pipeline: Pipeline[str], count: int) -> list[Run[str]]:
    """Their STARTs are in the log."""
    runs = pipeline.take_many(count)
    for run in runs:
        pipeline.in_log(run)
    return runs


def commit(pipeline: Pipeline[str]) -> list[str]:
    """What may be handed out then."""
    pipeline.committing(pipeline.committable())
    return [message for run in pipeline.committed() for message in run.messages]


def test_foreign_messages_are_committed_along() -> None:
    pipeline: Pipeline[str] = Pipeline()
    poll(pipeline, 0, range(10, 20), own={13, 17})
    assert pipeline.committable().offsets == {0: 13}
    start(pipeline, 1)
    assert pipeline.committable().offsets == {0: 17}
    start(pipeline, 1)
    assert pipeline.committable().offsets == {0: 20}
    assert commit(pipeline) == ["0/13", "0/17"]
    assert pipeline.committable().offsets == {}
    assert not pipeline.is_open


def test_what_is_polled_during_a_commit_is_still_to_be_committed() -> None:
    pipeline: Pipeline[str] = Pipeline()
    poll(pipeline, 0, range(10, 20), own=set())
    pipeline.committing(pipeline.committable())
    poll(pipeline, 0, range(20, 23), own=set())
    pipeline.committed()
    assert pipeline.uncommitted_count == 3
    assert pipeline.committable().offsets == {0: 23}


def test_nothing_is_committed_past_a_start_that_is_under_way() -> None:
    pipeline: Pipeline[str] = Pipeline()
    poll(pipeline, 0, range(10, 20), own={13, 17})
    (first,) = pipeline.take_many(1)
    start(pipeline, 1)
    assert pipeline.committable().offsets == {0: 13}
    poll(pipeline, 0, range(20, 30), own=set())
    assert pipeline.committable().offsets == {0: 13}
    assert commit(pipeline) == []
    pipeline.in_log(first)
    assert pipeline.committable().offsets == {0: 30}
    assert commit(pipeline) == ["0/13", "0/17"]


def test_what_waits_holds_back_its_own_partition_alone() -> None:
    pipeline: Pipeline[str] = Pipeline()
    poll(pipeline, 0, range(2), own={0, 1})
    poll(pipeline, 1, range(2), own={0, 1})
    pipeline.take_many(1)  # no report comes
    pipeline.wait(0, "late")
    assert pipeline.startable_count == 2
    assert [run.partition for run in start(pipeline, 4)] == [1]
    assert commit(pipeline) == ["1/0", "1/1"]
    assert len(pipeline) == 1
    pipeline.go_on(0, "late")
    assert [run.offsets for run in pipeline.take_many(4)] == [[1]]
    pipeline.check()


def test_the_next_run_may_be_sent_while_one_is_committed() -> None:
    pipeline: Pipeline[str] = Pipeline()
    poll(pipeline, 0, range(4), own={0, 1, 2, 3})
    start(pipeline, 2)
    pipeline.committing(pipeline.committable())
    (behind,) = pipeline.take_many(2)
    assert [run.offsets for run in pipeline.committed()] == [[0, 1]]
    assert list(pipeline.under_way()) == [behind]
    assert pipeline.committable().offsets == {}
    pipeline.in_log(behind)
    assert commit(pipeline) == ["0/2", "0/3"]


def test_a_commit_that_fails_gives_up_what_was_started_behind_it() -> None:
    pipeline: Pipeline[str] = Pipeline()
    poll(pipeline, 0, range(6), own=set(range(6)))
    poll(pipeline, 1, range(5, 6), own={5})
    runs = start(pipeline, 2)
    pipeline.committing(pipeline.committable())
    runs += pipeline.take_many(2)
    gone, positions = pipeline.commit_failed()
    assert gone == runs
    assert positions == {0: 0}
    assert all(run.state is RunState.GIVEN_UP for run in gone)
    assert [run.partition for run in pipeline.upcoming()] == [1]  # the other partition's stay
    poll(pipeline, 0, range(6), own=set(range(6)))
    pipeline.check()


def test_a_start_that_fails_leaves_what_is_before_it() -> None:
    pipeline: Pipeline[str] = Pipeline()
    poll(pipeline, 0, range(6), own=set(range(6)))
    start(pipeline, 2)
    (failed,) = pipeline.take_many(2)
    (behind,) = start(pipeline, 1)
    assert pipeline.give_up(failed) == ([failed, behind], 2)
    assert pipeline.give_up(failed) == ([], -1)  # once
    assert pipeline.committable().offsets == {0: 2}
    assert commit(pipeline) == ["0/0", "0/1"]
    assert pipeline.positions() == {0: 2}


def test_a_revoked_partition_is_forgotten_the_others_are_not() -> None:
    pipeline: Pipeline[str] = Pipeline()
    poll(pipeline, 0, range(3), own={0, 1, 2})
    poll(pipeline, 1, range(3), own={0, 1, 2})
    (sent,) = pipeline.take_many(1)
    assert pipeline.revoked([0, 9]) == [sent]
    assert [run.partition for run in start(pipeline, 3)] == [1]
    assert pipeline.committable().offsets == {1: 3}
    assert pipeline.give_up(sent) == ([], -1)


def test_the_answer_to_a_commit_decides_on_what_was_revoked_meanwhile() -> None:
    pipeline: Pipeline[str] = Pipeline()
    for is_done in (True, False):
        poll(pipeline, 0, range(2), own={0, 1})
        (run,) = start(pipeline, 2)
        pipeline.committing(pipeline.committable())
        assert pipeline.revoked([0]) == []
        poll(pipeline, 0, range(40, 42), own={40, 41})  # it came back, from another's position
        if is_done:
            assert pipeline.committed() == [run]
        else:
            assert pipeline.commit_failed() == ([run], {})
        assert pipeline.committable().offsets == {}  # 40 is where it began
        pipeline.check()
        pipeline.revoked([0])


def test_what_went_while_it_was_committed_is_known_when_it_is_polled_again() -> None:
    """A partition may be back with the position from before the commit, which lands late."""
    pipeline: Pipeline[str] = Pipeline()
    poll(pipeline, 0, range(4), own={2, 3})
    start(pipeline, 2)
    pipeline.committing(pipeline.committable())
    pipeline.revoked([0])
    (run,) = pipeline.committed()
    assert run.is_adrift
    assert pipeline.is_polled_again(run) is None
    poll(pipeline, 0, range(2), own=set())
    assert pipeline.is_polled_again(run) is True
    pipeline.revoked([0])
    poll(pipeline, 0, range(4, 6), own=set())
    assert pipeline.is_polled_again(run) is False


def test_a_position_that_may_have_been_set_back_is_committed_again() -> None:
    pipeline: Pipeline[str] = Pipeline()
    poll(pipeline, 0, range(4), own=set())
    commit(pipeline)
    assert pipeline.committable().offsets == {}
    assert not pipeline.is_set_back
    pipeline.commit_again([0, 9])
    assert pipeline.committable().offsets == {0: 4}
    pipeline.committing(pipeline.committable())
    assert pipeline.commit_failed() == ([], {})
    assert pipeline.is_set_back, "until it is committed"
    commit(pipeline)
    assert not pipeline.is_set_back


def test_a_partition_that_waits_for_two_things_waits_for_both() -> None:
    pipeline: Pipeline[str] = Pipeline()
    poll(pipeline, 0, range(2), own={0, 1})
    pipeline.wait(0, "look")
    pipeline.wait(0, "late")
    pipeline.go_on(0, "look")
    assert not pipeline.startable_count
    pipeline.go_on(0, "late")
    assert pipeline.startable_count == 2


def test_deleted_records_are_skipped_what_was_polled_stays() -> None:
    pipeline: Pipeline[str] = Pipeline()
    poll(pipeline, 0, range(3), own={2})
    pipeline.skipped_to(0, 100)
    assert pipeline.committable().offsets == {0: 2}
    start(pipeline, 1)
    assert pipeline.committable().offsets == {0: 100}


def test_a_new_group_begins_at_a_place() -> None:
    pipeline: Pipeline[str] = Pipeline()
    pipeline.placed(0, 40)
    assert pipeline.committable().offsets == {}
    assert pipeline.positions() == {0: 40}


def test_old_ones_are_fetched_again() -> None:
    pipeline: Pipeline[str] = Pipeline()
    assert not pipeline.is_stale(10**9)
    poll(pipeline, 0, range(2), own={0}, at_ms=1000)
    poll(pipeline, 0, range(2, 4), own={2, 3}, at_ms=1000 + MAX_AGE_MS)
    assert not pipeline.is_stale(1000 + MAX_AGE_MS)
    assert pipeline.is_stale(1001 + MAX_AGE_MS)
    assert pipeline.drop_polled() == {0: 0}
    assert (len(pipeline), pipeline.positions()) == (0, {0: 0})


def test_small_polls_are_one_run() -> None:
    pipeline: Pipeline[str] = Pipeline()
    for at in range(5):
        poll(pipeline, 0, range(at, at + 1), own={at})
    assert [run.offsets for run in pipeline.take_many(5)] == [[0, 1, 2, 3, 4]]


def test_what_is_before_a_late_start_of_its_partition_goes_on() -> None:
    """R26: another chunk's markers go to another partition, which may have no leader."""
    pipeline: Pipeline[str] = Pipeline()
    poll(pipeline, 0, range(4094, 4098), own={4095, 4096, 4097})
    first, behind = pipeline.take_many(3)
    assert (first.offsets, behind.offsets) == ([4095], [4096, 4097])
    pipeline.in_log(first)
    assert pipeline.committable().offsets == {0: 4096}
    assert commit(pipeline) == ["0/4095"]


def test_records_are_counted_until_a_commit() -> None:
    pipeline: Pipeline[str] = Pipeline()
    poll(pipeline, 0, range(7), own={0})
    poll(pipeline, 0, range(7, 9), own=set())
    assert pipeline.uncommitted_count == 9
    commit(pipeline)
    assert pipeline.uncommitted_count == 0


_STEPS = ["poll", "take", "report", "commit", "answer", "fail", "give up", "revoke", "stale"]


@given(st.lists(st.sampled_from(_STEPS), max_size=60), st.integers(0, 2**32))
def test_never_commits_what_has_no_start(  # noqa: C901 - a branch for each step
    steps: list[str], seed: int
) -> None:
    """Against sets per partition: committed <= first own message without a START."""
    random = Random(seed)
    pipeline: Pipeline[str] = Pipeline()
    own = {p: {o for o in range(400) if random.random() < 0.4} for p in (0, 1)}
    position, committed = {0: 0, 1: 0}, {0: 0, 1: 0}
    started: dict[int, set[int]] = {0: set(), 1: set()}
    handed: dict[int, list[int]] = {0: [], 1: []}
    under_way: dict[int, int] | None = None  # a commit
    for step in steps:
        partition = random.randrange(2)
        if step == "poll":
            offsets = range(position[partition], position[partition] + random.randrange(1, 6))
            poll(pipeline, partition, offsets, own=own[partition])
            position[partition] = offsets[-1] + 1
        elif step == "take":
            pipeline.take_many(random.randrange(1, 4))
        elif step == "report":
            sent = [each for each in pipeline.under_way() if each.state is RunState.SENT]
            if sent:
                run = random.choice(sent)
                pipeline.in_log(run)
                started[run.partition].update(run.offsets)
        elif step == "commit" and under_way is None:
            covered = pipeline.committable()
            under_way = dict(covered.offsets)
            pipeline.committing(covered)
            committed.update(under_way)  # or it fails, and nobody knows
        elif step == "answer" and under_way is not None:
            under_way = None
            for run in pipeline.committed():
                handed[run.partition] += run.offsets
        elif step == "fail" and under_way is not None:
            under_way = None
            position.update(pipeline.commit_failed()[1])
        elif step == "give up" and any(pipeline.under_way()):
            run = random.choice(list(pipeline.under_way()))
            if under_way is None or run.state is RunState.SENT:
                position[run.partition] = pipeline.give_up(run)[1]
        elif step == "revoke":
            pipeline.revoked([partition])
            position[partition] = committed[partition]
        elif step == "stale":
            position.update(pipeline.drop_polled())
        pipeline.check()
        for number, offset in committed.items():
            assert not {o for o in own[number] if o < offset} - started[number]
            assert handed[number] == sorted(set(handed[number])), "each once, and in order"
