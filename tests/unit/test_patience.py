"""How long what brokers do not know is looked for (R18)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kafkamq.transport import log_reader
from kafkamq.transport.log_reader import Answers, Patience


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(log_reader, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def test_each_search_has_its_time(clock: SimpleNamespace) -> None:
    searches = Patience(60.0)
    assert not searches.is_over("one")
    clock.now_s = 50.0
    assert not searches.is_over("one")
    assert not searches.is_over("other")
    clock.now_s = 61.0
    assert searches.is_over("one")
    assert not searches.is_over("other")
    clock.now_s = 100.0
    assert searches.is_over("one"), "it is not waited for again"


def test_a_log_that_ends_before_an_offset_has_nothing_behind_it(clock: SimpleNamespace) -> None:
    searches = Patience(60.0)
    for clock.now_s in (0.0, 40.0):
        assert not searches.is_over("log", 10, end=8)
    clock.now_s = 61.0
    assert not searches.is_over("log", 9, end=8), "it was not looked for"
    assert searches.is_over("log", 10, end=8)
    assert searches.is_over("log", 500, end=9)
    assert searches.over_from("log", 9, end=8) == 10, "whoever comes later holds it up no more"


def test_what_the_log_has_had_meanwhile_is_looked_for_again(clock: SimpleNamespace) -> None:
    """An invented offset was given up; then the log grew, and a new leader knew less of it."""
    searches = Patience(60.0)
    for clock.now_s in (0.0, 40.0):
        searches.is_over("log", 10, end=8)
    clock.now_s = 61.0
    assert searches.is_over("log", 10, end=8)
    assert not searches.is_over("log", 20, end=15)


@pytest.mark.parametrize("is_told", [False, True])
def test_what_was_found_is_looked_for_anew(clock: SimpleNamespace, is_told: bool) -> None:
    """Brokers are restarted one after the other: each of them may lag behind for a moment."""
    searches = Patience(60.0)
    for clock.now_s in (0.0, 5.0):
        assert not searches.is_over("log", 10, end=8)
    if is_told:
        searches.found("log", 11)
    clock.now_s = 64.0 if is_told else 70.0
    assert not searches.is_over("log", 10, end=8)


def test_inventions_push_nothing_out(clock: SimpleNamespace) -> None:
    """A thousand at a time are looked for; they take no more memory, and all are over at last."""
    searches, left = Patience(60.0), {*range(2500), "real"}
    assert not searches.is_over("real")
    looks = 0
    while left:
        left -= {each for each in sorted(left, key=str) if searches.is_over(each)}
        clock.now_s += 5.0
        looks += 1
        assert looks < 60
        assert "real" not in left or looks <= 13


def test_a_log_that_does_not_answer_is_waited_for_longer_each_time(clock: SimpleNamespace) -> None:
    """Else one whose answers take long would never be read; it rests in between."""
    answers = Answers()
    for wait_s in (3.0, 6.0, 12.0, 12.0):
        began_s = clock.now_s
        clock.now_s = began_s + wait_s
        assert not answers.is_given_up("log", began_s)
        clock.now_s += 0.1
        assert answers.is_given_up("log", began_s)
        for moment, rests in ((0.0, True), (2 * wait_s - 0.1, True), (0.2, False)):
            clock.now_s += moment
            assert answers.is_resting("log") is rests
            assert not answers.is_resting("other")
