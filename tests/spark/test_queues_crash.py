"""SIGKILL of a driver that acknowledges: readers see each output once (`read_committed`)."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest
from tests.integration.tracker_logs import Logs, tracker_process
from tests.spark.queue_driver import open_messages, output, output_topic, queue_driver
from tests.waiting import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(580)]

PATIENCE_S = 200.0
MESSAGES = 900


def test_a_driver_that_is_killed_while_it_acknowledges(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    logs = Logs(bootstrap, namespace)
    out = output_topic(logs)
    expected = Counter(b"%d" % number for number in range(MESSAGES))
    for number in range(MESSAGES):
        logs._producer.produce(logs.config.message_topic, b"%d" % number, b"work", number % 2)
    logs._producer.confirm(30)
    with tracker_process(logs.config):
        with queue_driver(logs, tmp_path / "checkpoint", out) as process:

            def is_under_way(process: subprocess.Popen[bytes] = process) -> bool:
                assert process.poll() is None, "the driver ended by itself"
                return bool(open_messages(logs)) and bool(output(logs, out))

            wait_until(is_under_way, timeout_s=PATIENCE_S)
        with queue_driver(logs, tmp_path / "checkpoint", out) as process:

            def is_done(process: subprocess.Popen[bytes] = process) -> bool:
                assert process.poll() is None, "the driver ended by itself"
                return output(logs, out).keys() >= expected.keys() and not open_messages(logs)

            wait_until(is_done, timeout_s=PATIENCE_S)
    assert output(logs, out) == expected
