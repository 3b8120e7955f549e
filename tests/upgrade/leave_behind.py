"""Makes an archive in ``tests/vectors``: what an earlier release leaves behind.

    python -m tests.upgrade.leave_behind 624a574b tests/vectors/left-on-spark.tar.xz \\
        spark fresh-spark streams

A real broker's data folder, and beside it the checkpoints of Spark and its tables, so that topic
ids, times and leader epochs are those that the release has seen. ``earlier.py`` and ``streams.py``
run with the release's code, which git gives by its revision; the broker is today's. All of it is
due a minute later. ``left-behind.tar.xz`` has ``maps local fresh-local`` of 1405565, whose modules
had other names.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from kafkamq.dev import LocalKafka

ROOT = Path(__file__).parents[2]
STATE_NOTE = "checkpoint/state/0/_metadata/v2/0"
PLACE = "/LEFT-BEHIND"
PROPERTIES = {"offsets.topic.num.partitions": "1", "transaction.state.log.num.partitions": "1"}


def leave(revision: str, folder: Path, kinds: Sequence[str]) -> None:
    """``folder/kafka``, and what is beside it."""
    source = folder / "source"
    source.mkdir()
    command = ["git", "archive", revision]
    files = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=files, check=True)
    environment = {**os.environ, "PYTHONPATH": f"{source / 'src'}:{source}"}
    with LocalKafka(data_dir=folder / "kafka", properties=PROPERTIES) as kafka:
        servers = kafka.bootstrap_servers
        admin = AdminClient({"bootstrap.servers": servers})
        if "maps" in kinds:
            admin.create_topics([NewTopic("records", 1, 1)])["records"].result(30)
            producer = Producer({"bootstrap.servers": servers})
            for number in range(1000):
                producer.produce("records", b"%d" % number, b"k%d" % number)
            producer.flush()
        for kind in kinds:
            if kind == "streams":
                leave_streams(servers, folder, environment)
                continue
            checkpoint = f"file://{folder / 'checkpoint'}"
            subprocess.run(
                [sys.executable, Path(__file__).with_name("earlier.py"), kind, servers, checkpoint],
                env=environment,
                check=True,
                timeout=600,
            )
        _wait_until_dead(admin)
    if "spark" in kinds:
        note = folder / STATE_NOTE  # in which Spark names its schema by its whole path
        note.write_text(note.read_text().replace(str(folder), PLACE))
        note.with_name(f".{note.name}.crc").unlink(missing_ok=True)


def leave_streams(servers: str, folder: Path, environment: Mapping[str, str]) -> None:
    """The test says whether each was killed where its name says; if not, run it once more."""
    from tests.upgrade.streams import BATCH, STREAMS

    program = [sys.executable, Path(__file__).with_name("streams.py"), "killed", servers]
    for name in STREAMS:
        process = subprocess.Popen(
            [*program, folder, name], env=environment, start_new_session=True
        )
        if name == "table_output":
            version = folder / name / "_delta_log" / f"{2:020}.json"
            while process.poll() is None and not version.exists():
                time.sleep(0.001)
        elif name.endswith("_output"):
            _wait_for_rows(BATCH + 1, f"{name}-out", servers, process)
        if name.endswith("_output"):
            os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(300) == -signal.SIGKILL, "the stream ended by itself"


def _wait_for_rows(count: int, topic: str, servers: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until so many are committed, or the process has ended."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "rows"})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(2)])
    while process.poll() is None and count > 0:
        count -= sum(row.error() is None for row in consumer.consume(100, 0.005))
    consumer.close()


def _wait_until_dead(admin: AdminClient) -> None:
    """No group has a member: they end with their sessions, which the broker would remember."""
    while True:
        groups = [each.group_id for each in admin.list_consumer_groups().result().valid]
        found = admin.describe_consumer_groups(groups)
        if not any(future.result().members for future in found.values()):
            return


def main(revision: str, target: str, *kinds: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        leave(revision, folder, kinds)
        with tarfile.open(target, "w:xz", preset=9) as archive:
            archive.add(folder / "kafka" / "data", "kafka/data")
            for path in sorted(folder.iterdir()):
                if path.name not in {"kafka", "source"}:
                    archive.add(path, path.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
