"""F4 for the Kafka sink as users write it: fifteen SIGKILLs of its driver, then of its workers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from tests.faults.figures import say
from tests.integration.tracker_logs import read_topic
from tests.spark.processes import python_workers, start_driver
from tests.spark.test_source import produce
from tests.waiting import wait_until, within

from kafkamq.queue.wire.keys import key_partition

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(900)]

KILLS = 15
COUNT = 40_000
BATCH_ROWS = {"driver": 700, "worker": 200}  # so that there is always a batch to cut short
PATIENCE_S = 150.0
_PROGRAM = """
import sys
import kafkamq.spark
from kafkamq.spark.session import build_session
servers, name, checkpoint, batch_rows = sys.argv[1:]
spark = kafkamq.spark.register(build_session())
rows = spark.readStream.format("kafkamq").option("kafka.bootstrap.servers", servers)
rows = rows.option("topic", name + ".in").option("maxRowsPerTrigger", batch_rows).load()
rows = rows.selectExpr("key", "value", "array(named_struct('key', 'n', 'value', value)) AS headers")
writer = rows.writeStream.format("kafkamq-sink").option("kafka.bootstrap.servers", servers)
writer = writer.option("topic", name + ".out").option("checkpointLocation", checkpoint)
query = writer.trigger(processingTime="0 seconds").start()
while True:
    try:
        query.awaitTermination()
    except Exception as error:  # a worker was killed: its task ends the query
        print(str(error)[:200], flush=True)
        query = writer.trigger(processingTime="0 seconds").start()
"""


@pytest.mark.parametrize("victim", ["driver", "worker"])
def test_the_sink_is_killed_fifteen_times(
    bootstrap: str, namespace: str, tmp_path: Path, victim: str
) -> None:
    out = f"{namespace}.out"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    topics = [NewTopic(f"{namespace}.in", 3, 1), NewTopic(out, 3, 1)]
    for made in admin.create_topics(topics).values():
        made.result(within(30))
    produce(bootstrap, f"{namespace}.in", COUNT, partition=-1)
    seed = random.SystemRandom().randrange(10**6)
    chance = random.Random(seed)

    def written() -> int:
        return len(read_topic(bootstrap, out))

    kills = 0
    process = _start(bootstrap, namespace, tmp_path, BATCH_ROWS[victim])
    try:
        while kills < KILLS:
            before = written()
            assert before < COUNT, f"seed {seed}: all was written after {kills} kills"
            wait_until(lambda before=before: written() > before, timeout_s=PATIENCE_S)
            time.sleep(0.6 * chance.random())  # anywhere in a batch
            assert process.poll() is None, "the driver ended by itself"
            if victim == "driver":
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(within(30))
                process = _start(bootstrap, namespace, tmp_path, BATCH_ROWS[victim])
                kills += 1
            elif workers := python_workers(process.pid):
                os.kill(chance.choice(workers), signal.SIGKILL)
                kills += 1
        wait_until(lambda: written() >= COUNT, timeout_s=2 * PATIENCE_S)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(within(30))
    found = Counter(
        (record.partition(), record.key(), record.value(), tuple(record.headers() or ()))
        for record in read_topic(bootstrap, out)
    )
    expected = Counter(
        (key_partition(b"k%d" % number, 3), b"k%d" % number, value, (("n", value),))
        for number, value in ((number, b"%d" % number) for number in range(COUNT))
    )
    wrong = sum(((found - expected) + (expected - found)).values())
    row = {"scenario": f"the sink, {victim} killed", "seed": seed, "sent": COUNT, "kills": kills}
    say({**row, "violations": wrong})
    assert found == expected, f"seed {seed}"


def _start(
    bootstrap: str, namespace: str, folder: Path, batch_rows: int
) -> subprocess.Popen[bytes]:
    checkpoint = str(folder / "checkpoint")
    return start_driver(_PROGRAM, bootstrap, namespace, checkpoint, str(batch_rows))
