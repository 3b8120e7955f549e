"""The deadlines of the tests themselves, which a busy machine makes longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import SLOWNESS, measure_slowness, wait_until, within

ROOT = Path(__file__).parents[2]
INNER = """
import signal, pytest

@pytest.mark.timeout(100)
def test_by_its_mark():
    assert 200 < signal.getitimer(signal.ITIMER_REAL)[0] <= 300

def test_by_the_command():
    assert 800 < signal.getitimer(signal.ITIMER_REAL)[0] <= 900
"""


def test_the_factor_is_from_one_to_six() -> None:
    assert 1.0 <= measure_slowness(0) <= 6.0
    assert measure_slowness(10_000) == 6.0


def test_a_deadline_is_longer_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOWNESS, "3.5")
    assert within(10.0) == 35.0
    with pytest.raises(AssertionError, match=r"not within 0\.35 s: it"):
        wait_until(lambda: False, "it", 0.1)


def test_so_is_what_a_test_may_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SLOWNESS, "3")
    Path(tmp_path, "test_inner.py").write_text(INNER)
    arguments = ["-q", "-p", "tests.conftest", "--timeout=300"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "--rootdir", tmp_path, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr
