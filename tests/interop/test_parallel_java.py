"""A group moves between ours and Parallel Consumer for Java, whose offset maps we read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.integration.parallel_tools import (
    Seen,
    committed,
    fill,
    make,
    make_topic,
)
from tests.waiting import wait_until, within

HARNESS = Path(__file__).parents[2] / "benchmarks" / "peers" / "parallel-consumer"
pytestmark = [
    pytest.mark.faults,  # it needs Maven and its repository
    pytest.mark.skipif(shutil.which("mvn") is None, reason="Maven builds the Java library's test"),
]


@pytest.fixture(scope="module")
def classpath() -> str:
    command = ["mvn", "-q", "-B", "compile", "dependency:build-classpath"]
    subprocess.run(
        [*command, "-Dmdep.outputFile=target/cp"], cwd=HARNESS, check=True, timeout=within(200)
    )
    target = HARNESS / "target"
    return f"{target / 'classes'}{os.pathsep}{(target / 'cp').read_text().strip()}"


def handover(classpath: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["java", "-cp", classpath, "Handover", *arguments],
        capture_output=True,
        text=True,
        timeout=within(90),
        check=False,
    )


def test_java_passes_over_our_maps_and_we_read_its(
    bootstrap: str, namespace: str, classpath: str
) -> None:
    topic, group = make_topic(bootstrap, namespace), namespace
    fill(bootstrap, topic, [f"k{n}" for n in range(1000)])
    stuck = {3, 500, 501, 900}

    def handle(record: object) -> None:
        if record.offset in stuck:  # type: ignore[attr-defined]
            raise OSError("stuck")

    seen = Seen(handle)
    with make(bootstrap, topic, group, backoff=lambda record: 60.0) as consumer:
        consumer.poll(seen)
        wait_until(lambda: len(seen) == 996)
    offset, metadata = committed(bootstrap, group, topic)
    assert offset == 3 and metadata.endswith("\0")
    read = handover(classpath, "read", bootstrap, group, topic)
    assert read.returncode != 0 and "Illegal base64 character" in read.stderr, read.stderr
    # So it begins at the offset. Where many are left, its map is one that shows its end.
    left = [*range(501, 1000, 2)]
    stuck_there = ",".join(map(str, left))
    worked = handover(classpath, "work", bootstrap, group, topic, "999", stuck_there)
    assert worked.returncode == 0, worked.stderr
    assert json.loads(worked.stdout.splitlines()[-1])["done"] == [
        offset for offset in range(3, 1000) if offset not in left
    ]
    offset, metadata = committed(bootstrap, group, topic)
    assert offset == 501 and metadata and not metadata.endswith("\0")
    again = Seen()
    with make(bootstrap, topic, group) as consumer:
        consumer.poll(again)
        wait_until(lambda: committed(bootstrap, group, topic) == (1000, ""))
    assert sorted(again.places) == [(0, offset) for offset in left]
