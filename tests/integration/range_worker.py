"""A member that shares a partition by ranges, as a process, for tests that kill it.

Every message that it is handed is one line of its trace: ``offset token monotonic_ms``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kafkamq.claims import RangeClaims
from kafkamq.errors import LeaseLostError
from kafkamq.transport.clock import monotonic_ms

ROOT = Path(__file__).resolve().parents[2]


def start(
    trace: Path, topics: Any, size: int, delivery: str = "at-least-once"
) -> subprocess.Popen[str]:
    """A worker; its client id is the trace's name."""
    places = (topics.bootstrap, topics.coordination, topics.work, topics.group)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.integration.range_worker", str(trace), *places),
            *(str(topics.interval_s), str(size), delivery),
        ],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_trace(*paths: Path) -> list[tuple[int, int, int]]:
    """When which offset was handed out, and under which token: ``ms, token, offset``, sorted."""
    found = []
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else ():
            offset, token, at_ms = map(int, line.split())
            found.append((at_ms, token, offset))
    return sorted(found)


def main() -> None:
    path, bootstrap, coordination, topic, group, interval_s, size, delivery = sys.argv[1:]
    trace = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    member = RangeClaims(
        bootstrap, topic, client_id=Path(path).stem, group_id=group, size=int(size),
        range_topic=coordination, heartbeat_interval=float(interval_s), delivery=delivery,
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: member.stop())  # after the batch under way
    with member:
        for claimed in member:
            try:
                for batch in claimed.batches():
                    for message in batch.messages:
                        line = f"{message.offset} {message.token} {monotonic_ms()}\n"
                        os.write(trace, line.encode())
                        time.sleep(0.002)
                if delivery == "at-least-once":
                    claimed.done()
            except LeaseLostError:  # noqa: PERF203 - each range for itself
                continue  # another member has it


if __name__ == "__main__":
    main()
