"""R36 in the fold: who stands by is not live, until its own TICK tells it its epoch."""

from __future__ import annotations

from tests.unit.core_fold import START_MS, Fold, T

from kafkamq.markers.rules.snapshot import restore_tracker, take_snapshot

TOKEN = "token"


def standing_by() -> Fold:
    fold = Fold(engine=(TOKEN, 0))
    fold.start(START_MS, 1)
    fold.crawl(START_MS, START_MS + T + 1)
    return fold


def test_r36_nothing_is_planned_while_it_stands_by() -> None:
    fold = standing_by()
    fold.tick(START_MS + T + 2, engine="another", epoch=7)
    assert not fold.tracker.is_live
    assert list(fold.tracker.plan()) == []
    assert fold.tracker.engine == (TOKEN, 0)


def test_r36_its_tick_makes_it_live_and_tells_its_epoch() -> None:
    fold = standing_by()
    fold.tick(START_MS + T + 2, engine=TOKEN, epoch=7)
    assert fold.tracker.engine == (TOKEN, 7)
    assert [action.message_id.offset for action in fold.tracker.plan()] == [1]


def test_r36_the_state_keeps_the_epoch() -> None:
    fold = standing_by()
    fold.tick(START_MS + T + 2, engine=TOKEN, epoch=7)
    snapshot = take_snapshot(fold.tracker)
    again = restore_tracker(
        snapshot.index, snapshot.changed.__getitem__, partition=0, engine=(TOKEN, 0)
    )
    assert again.is_live
    assert again.engine == (TOKEN, 7)
    other = restore_tracker(
        snapshot.index, snapshot.changed.__getitem__, partition=0, engine=("next", 0)
    )
    assert not other.is_live
    assert other.engine == ("next", 0)


def test_r36_a_state_of_one_that_stands_by_is_not_live() -> None:
    snapshot = take_snapshot(standing_by().tracker)
    again = restore_tracker(
        snapshot.index, snapshot.changed.__getitem__, partition=0, engine=(TOKEN, 0)
    )
    assert not again.is_live
