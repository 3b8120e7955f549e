"""A group moves between ours and Parallel Consumer for Java: each reads the other's offset maps."""

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


def handover(classpath: str, *arguments: str) -> dict:
    found = subprocess.run(
        ["java", "-cp", classpath, "Handover", *arguments],
        capture_output=True,
        text=True,
        timeout=within(90),
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


def test_there_and_back_again(bootstrap: str, namespace: str, classpath: str) -> None:
    topic, group = make_topic(bootstrap, namespace), namespace
    fill(bootstrap, topic, [f"k{n}" for n in range(1000)])
    stuck = {3, 500, 501, 900}

    def handle(record: object) -> None:
        if record.offset in stuck:  # type: ignore[attr-defined]
            raise OSError("stuck")

    seen = Seen(handle)
    with make(
        bootstrap, topic, group, backoff=lambda record: 60.0, exact_metadata=True
    ) as consumer:
        assert consumer.is_exact
        consumer.poll(seen)
        wait_until(lambda: len(seen) == 996)
    ours = handover(classpath, "read", bootstrap, group, topic)
    assert ours == {
        "offset": 3,
        "characters": len(committed(bootstrap, group, topic)[1]),
        "incompletes": sorted(stuck),
    }
    theirs = handover(classpath, "work", bootstrap, group, topic, "901", "500")
    assert theirs["done"] == [3, 501, 900]
    offset, metadata = committed(bootstrap, group, topic)
    assert offset == 500 and metadata
    again = Seen()
    with make(bootstrap, topic, group, exact_metadata=True) as consumer:
        consumer.poll(again)
        wait_until(lambda: committed(bootstrap, group, topic) == (1000, ""))
    assert again.places == [(0, 500)]
