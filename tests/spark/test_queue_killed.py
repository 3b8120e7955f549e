"""SIGKILL in the middle of acknowledging: an open transaction, and the batch that repeats it.

The parts are called as Spark calls them, in a process without a JVM; with Spark and many kills it
is in ``tests/faults/test_spark_queues.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from tests.integration.tracker_logs import Logs, read_topic
from tests.spark.test_queue_reader import SCHEMA, offsets, rows
from tests.waiting import within

from kafkamq.config import ServiceConfig
from kafkamq.spark.checkpoint import CheckpointNote
from kafkamq.spark.options import parse_source_options
from kafkamq.spark.queues.committing import CommitSettings, commit_slots, next_epoch
from kafkamq.spark.queues.leasing import QueuePartition, QueueReader
from kafkamq.types import MarkerType, Outcome

pytestmark = pytest.mark.spark

SLOTS = 2
ENGINE = "ack-killed"
MESSAGES = 40
_PROGRAM = """
import json, sys
from kafkamq.markers.tracker.ledger import Ledger
from kafkamq.config import ServiceConfig
from tests.spark.test_queue_killed import acknowledge, queue_reader
from tests.spark.test_queue_reader import plan
reader = queue_reader(ServiceConfig(bootstrap_servers=sys.argv[1], namespace=sys.argv[2]))
begin = reader.initialOffset()
end, tasks = plan(reader, begin)
commit = Ledger.commit
def waits(ledger, *arguments, **named):
    if ledger.key.transactional_id.endswith(".1"):
        ledger.producer.flush()
        print(json.dumps([begin, end]), flush=True)
        sys.stdin.read()
    return commit(ledger, *arguments, **named)
Ledger.commit = waits
acknowledge(reader, tasks, sys.argv[3], epoch=1)
"""


def queue_reader(config: ServiceConfig) -> QueueReader:
    options = {"view": "messages", "queue": "emails", "acknowledge": "true"}
    return QueueReader(parse_source_options(options, config), SCHEMA)


def acknowledge(
    reader: QueueReader, tasks: list[QueuePartition], topic: str, *, epoch: int
) -> list[dict[str, Any]]:
    """STARTs of batch 0, then one transaction for each slot."""
    found = rows(reader, tasks)
    assert offsets(found) == list(range(MESSAGES))
    empty = dict.fromkeys(("verdict", "delay", "reason", "headers", "partition", "topic", "key"))
    output = [
        {
            **empty,
            "ack_token": row["ack_token"],
            "value": b"%d" % row["offset"],
            "_slot": row["offset"] % SLOTS,
        }
        for row in found
    ]
    config = reader.options.config
    settings = CommitSettings(config=config, topic=topic, engine=ENGINE, epoch=epoch)
    parts = commit_slots(iter([pa.RecordBatch.from_pylist(output)]), settings, 0)
    return [part.to_pylist()[0] for part in parts]


@pytest.mark.faults
def test_each_output_is_there_once_after_a_kill_in_the_middle(
    bootstrap: str, namespace: str
) -> None:
    logs = Logs(bootstrap, namespace)
    out = f"{namespace}-out"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(out, 1, 1)])[out].result(within(30))
    logs.send(MESSAGES, key=b"emails")
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, bootstrap, namespace, out],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        begin, end = json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()
    note = CheckpointNote(topic=logs.config.ledger_topic, tasks=SLOTS, engine=ENGINE)
    epoch = next_epoch(logs.config, note)  # which aborts what the killed one left open
    assert epoch == 2
    written = Counter(message.value() for message in read_topic(bootstrap, out))
    assert written == Counter(b"%d" % n for n in range(MESSAGES) if n % SLOTS == 0)
    restarted = queue_reader(logs.config)
    try:
        again = [t for t in restarted.partitions(begin, end) if isinstance(t, QueuePartition)]
        done = acknowledge(restarted, again, out, epoch=epoch)
    finally:
        restarted.stop()
    each = MESSAGES // SLOTS
    assert [(one["skipped"], one["written"]) for one in done] == [(each, 0), (0, each)]
    written = Counter(message.value() for message in read_topic(bootstrap, out))
    assert written == Counter(b"%d" % n for n in range(MESSAGES))
    ends = [marker for _, marker in logs.said() if marker.type is MarkerType.END]
    assert {one.outcome for one in ends} == {Outcome.ACK}
    assert {one.message_id.offset for one in ends if one.message_id} == set(range(MESSAGES))
