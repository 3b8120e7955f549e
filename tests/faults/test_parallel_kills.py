"""The processes of a parallel consumer's handlers are killed; signals reach their group."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.faults.figures import say
from tests.integration.parallel_kills import Notes, signal_children, signal_groups
from tests.integration.parallel_tools import make_topic
from tests.unit import parallel_handlers as handlers

pytestmark = [pytest.mark.faults, pytest.mark.timeout(500)]

RECORDS = int(os.environ.get("KAFKAMQ_TEST_RECORDS", "100000"))
KILLS = 50
SIGNALS = 20


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Notes:
    monkeypatch.setenv(handlers.SEEN, "")  # as it was, in the end
    return Notes(tmp_path / "seen")


def test_processes_are_killed_fifty_times(bootstrap: str, namespace: str, notes: Notes) -> None:
    """Idle, reading, working, answering: all are seen, those of a key in order."""
    topic = make_topic(bootstrap, namespace, 2)
    again = signal_children(bootstrap, topic, namespace, notes, records=RECORDS, count=KILLS)
    say({"records": RECORDS, "kills of processes": KILLS, "unseen": 0, "seen again": again})
    assert again <= KILLS  # what a process was at, if it is killed


def test_processes_are_stopped_and_killed_twenty_times(
    bootstrap: str, namespace: str, notes: Notes
) -> None:
    """What is stopped never goes on by itself: it is ended when its time is over."""
    topic = make_topic(bootstrap, namespace, 2)
    again = signal_children(
        bootstrap,
        topic,
        namespace,
        notes,
        records=RECORDS // 5,
        count=SIGNALS,
        numbers=(signal.SIGSTOP, signal.SIGKILL),
        timeout=2.0,
    )
    say({"records": RECORDS // 5, "stops and kills": SIGNALS, "unseen": 0, "seen again": again})
    assert again <= SIGNALS


def test_the_group_gets_twenty_signals(bootstrap: str, namespace: str, notes: Notes) -> None:
    """Ctrl-C or SIGTERM, to parent and children alike: each record is seen, and once."""
    topic = make_topic(bootstrap, namespace, 2)
    again = signal_groups(bootstrap, topic, namespace, notes, records=RECORDS, signals=SIGNALS)
    say({"records": RECORDS, "signals to the group": SIGNALS, "unseen": 0, "seen again": again})
    assert again == 0
