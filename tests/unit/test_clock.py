"""The clock of leases goes on where the process's own monotonic clock stands still."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

SUSPENDED_S = 3600
PROGRAM = """
import time
from kafkamq.transport.clock import monotonic_ms, public_s
ahead_s = monotonic_ms() / 1000 - time.monotonic()
left_s = public_s(monotonic_ms() + 10_000) - time.monotonic()
print(round(ahead_s), round(left_s))
"""


def run(*options: str) -> list[int]:
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("there is no unshare")
    done = subprocess.run(
        [unshare, "--time", *options, "--fork", sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare" in done.stderr:
        pytest.skip(f"no time namespaces here: {done.stderr.strip()}")
    assert not done.returncode, done.stderr
    return [int(each) for each in done.stdout.split()]


def test_it_counts_the_time_that_a_machine_is_suspended() -> None:
    """A time namespace whose boot time is an hour ahead, as after a suspension of an hour."""
    before, _ = run("--boottime", "0")
    after, left = run("--boottime", str(SUSPENDED_S))
    assert after - before == SUSPENDED_S
    assert left == 10  # what users see is of time.monotonic()
