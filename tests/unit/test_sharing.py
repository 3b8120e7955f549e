"""What several processes share is made once, and kept while anybody uses it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.sharing import shared
from tests.waiting import within


def test_it_is_made_once_and_kept_until_nobody_uses_it(tmp_path: Path) -> None:
    made: list[str] = []
    may_end, ended = threading.Event(), threading.Event()

    def make() -> str:
        made.append(f"number {len(made)}")
        return made[-1]

    def use_first() -> None:
        with shared(tmp_path / "it", make):
            first_has_it.set()
            may_end.wait(within(60))
        ended.set()

    first_has_it = threading.Event()
    first = threading.Thread(target=use_first)
    first.start()
    assert first_has_it.wait(within(60))
    with shared(tmp_path / "it", make) as found, shared(tmp_path / "it", make) as again:
        assert found == again == "number 0"
        may_end.set()
        assert not ended.wait(0.05)
    first.join()
    with shared(tmp_path / "it", make) as found:
        assert found == "number 1"
    assert len(made) == 2


def test_who_could_not_make_it_leaves_it_to_others(tmp_path: Path) -> None:
    def fail() -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), shared(tmp_path / "it", fail):
        pytest.fail("it was not made")
    with shared(tmp_path / "it", lambda: "it") as found:
        assert found == "it"
