"""Handlers in processes: kills and signals lose nothing, and keep the order of keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.parallel_kills import Notes, signal_children, signal_groups
from tests.integration.parallel_tools import make_topic
from tests.unit import parallel_handlers as handlers


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Notes:
    monkeypatch.setenv(handlers.SEEN, "")  # as it was, in the end
    return Notes(tmp_path / "seen")


@pytest.mark.faults
def test_processes_are_killed(bootstrap: str, namespace: str, notes: Notes) -> None:
    topic = make_topic(bootstrap, namespace, 2)
    again = signal_children(bootstrap, topic, namespace, notes, records=1000, count=4)
    assert again <= 4  # what a process was at, if it is killed


def test_signals_to_the_whole_group_end_it_cleanly(
    bootstrap: str, namespace: str, notes: Notes
) -> None:
    topic = make_topic(bootstrap, namespace, 2)
    assert signal_groups(bootstrap, topic, namespace, notes, records=5000, signals=1) == 0
