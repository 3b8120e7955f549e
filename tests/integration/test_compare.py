"""``kafkamq compare`` on a real broker, with few messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from tests.integration.cli_tools import Commands
from tests.waiting import within

SMALL = ("--messages", "60", "--partitions", "2", "--concurrency", "8", "--slow", "5%:200")


def left_behind(bootstrap: str, namespace: str) -> list[str]:
    """Topics and groups of a namespace."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    groups = admin.list_consumer_groups(request_timeout=within(10)).result(within(20)).valid
    names = [*admin.list_topics(timeout=within(10)).topics, *(each.group_id for each in groups)]
    return [name for name in names if namespace in name]


@pytest.mark.faults
def test_a_killed_process_and_a_report(bootstrap: str, namespace: str, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    arguments = ("--only", "offsets", "--workers", "2", "--lease", "6", "--report", str(report))
    (said,) = Commands(bootstrap, namespace).json("compare", *SMALL, *arguments)
    (found,) = said["contenders"]
    assert found["notes"] == []
    assert (found["contender"], found["ordering"], found["lost"]) == ("offsets", "key", 0)
    assert found["keys_in_order"] == found["keys"] == 60
    assert found["per_second"] > 0
    assert found["blocking_s"] >= found["blocking_ideal_s"]
    assert found["latency_p99_ms"] >= found["latency_p50_ms"] > 0
    assert found["recovery_s"] > 0
    assert found["extra_records"] > 0
    assert "<svg" in report.read_text()
    assert left_behind(bootstrap, namespace) == []


@pytest.mark.faults
def test_backends_side_by_side(bootstrap: str, namespace: str) -> None:
    arguments = ("--only", "markers,share", "--workers", "1", "--handler-ms", "0-1")
    (said,) = Commands(bootstrap, namespace).json("compare", *SMALL, *arguments)
    for found in said["contenders"]:
        assert (found["lost"], found["keys"]) == (0, 60), found
        assert found["notes"] == ["recovery: it takes two processes or more"]
    markers, share = said["contenders"]
    assert 0 < markers["extra_records"] < 2  # START and END, which several messages share
    assert 0 < share["extra_records"] < 2
    assert left_behind(bootstrap, namespace) == []


@pytest.mark.faults
def test_each_backend_gets_over_a_killed_process(bootstrap: str, namespace: str) -> None:
    arguments = ("--only", "markers,share,claims", "--workers", "2", "--lease", "6")
    (said,) = Commands(bootstrap, namespace).json("compare", *SMALL, *arguments)
    for found in said["contenders"]:
        assert (found["lost"], found["notes"]) == (0, []), found
        assert 0 < found["recovery_s"] < 30
    assert left_behind(bootstrap, namespace) == []
