"""``ack(table=...)`` with a real Delta table and a real tracker.

A batch is in the table, its ENDs are not, the leases end, and the tracker's copies come again in a
later batch. Kills are in ``tests/faults/test_spark_delta.py``.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from tests.integration.tracker_logs import Logs, tracker_process
from tests.spark.delta_driver import delta_driver
from tests.waiting import wait_until

from kafkamq.types import Outcome

pytestmark = [pytest.mark.spark, pytest.mark.timeout(580)]

MESSAGES = 20
PATIENCE_S = 200.0
REFUSED = (
    "table plain is of parquet: MERGE INTO needs one of Delta",
    "table short has no column origin_topic, origin_partition, origin_offset, origin_timestamp: ",
    "the rows have no column more, as table wide has",
    "Iceberg has no runtime for Spark 4.2 yet: use a Delta table, or write_once",
    "table nowhere cannot be read: .*nowhere",
    "table dated has origin_timestamp as date: it must be timestamp",
    "table worded has origin_partition as string: it must be bigint",
    "the rows have no column origin_offset: keep",
    "the rows have origin_timestamp as timestamp_ntz: it must be timestamp",
)
ONCE = Counter(str(number) for number in range(MESSAGES))


@pytest.mark.slow
def test_what_copies_bring_again_is_in_the_table_once(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    logs = Logs(bootstrap, namespace)
    for number in range(MESSAGES):
        logs.send(key=b"work", value=b"%d" % number, partition=number % 2)
    with tracker_process(logs.config), delta_driver(logs, tmp_path) as spark:
        spark.tell("break")
        first = Counter(spark.tell("rows"))
        assert first.total() == len(first) > 0
        wait_until(lambda: len(set(logs.copied())) >= len(first), timeout_s=PATIENCE_S)
        spark.tell("run")
        assert Counter(spark.tell("rows")) == ONCE
        files, late = map(int, spark.tell("pruned"))
        assert 1 <= late < files, "the files that cannot have an origin are not read"
        for said, wanted in zip(spark.tell("refused"), REFUSED, strict=True):
            assert re.search(wanted, said), said
    assert len(set(logs.ends(Outcome.ACK))) >= MESSAGES, "the copies, found again in the table"


@pytest.mark.faults
def test_batches_beside_each_other_and_one_of_them_again_are_in_the_table_once(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    with delta_driver(Logs(bootstrap, namespace), tmp_path) as spark:
        *counts, said = spark.tell("merged")
        assert counts == ["280", "280", "0"]
        assert said.startswith("a row has no origin")
