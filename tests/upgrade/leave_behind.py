"""Makes ``tests/vectors/left-behind.tar.xz``: what an earlier release leaves behind.

    python -m tests.upgrade.leave_behind 1405565 tests/vectors/left-behind.tar.xz

A real broker's data folder, and the checkpoint of a Spark tracker beside it, so that topic ids,
times and leader epochs are those that the release has seen. ``earlier.py`` runs with the release's
code, which git gives by its revision; the broker is today's. All of it is due a minute later.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from kafkamq.dev import LocalKafka

ROOT = Path(__file__).parents[2]
STATE_NOTE = "checkpoint/state/0/_metadata/v2/0"
PLACE = "/LEFT-BEHIND"
PROPERTIES = {"offsets.topic.num.partitions": "1", "transaction.state.log.num.partitions": "1"}


def leave(revision: str, folder: Path) -> None:
    """``folder/kafka`` and ``folder/checkpoint``."""
    source = folder / "source"
    source.mkdir()
    files = subprocess.run(
        ["git", "archive", revision, "src"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    ).stdout
    subprocess.run(["tar", "-x", "-C", source], input=files, check=True)
    with LocalKafka(data_dir=folder / "kafka", properties=PROPERTIES) as kafka:
        servers = kafka.bootstrap_servers
        admin = AdminClient({"bootstrap.servers": servers})
        admin.create_topics([NewTopic("records", 1, 1)])["records"].result(30)
        producer = Producer({"bootstrap.servers": servers})
        for number in range(1000):
            producer.produce("records", b"%d" % number, b"k%d" % number)
        producer.flush()
        for kind in ("maps", "local", "spark", "fresh"):
            checkpoint = f"file://{folder / 'checkpoint'}"
            subprocess.run(
                [sys.executable, Path(__file__).with_name("earlier.py"), kind, servers, checkpoint],
                env={**os.environ, "PYTHONPATH": str(source / "src")},
                check=True,
                timeout=600,
            )
        _wait_until_dead(admin)
    note = folder / STATE_NOTE  # in which Spark names its schema by its whole path
    note.write_text(note.read_text().replace(str(folder), PLACE))
    note.with_name(f".{note.name}.crc").unlink(missing_ok=True)


def _wait_until_dead(admin: AdminClient) -> None:
    """No group has a member: they end with their sessions, which the broker would remember."""
    while True:
        groups = [each.group_id for each in admin.list_consumer_groups().result().valid]
        found = admin.describe_consumer_groups(groups)
        if not any(future.result().members for future in found.values()):
            return


def main(revision: str, target: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        leave(revision, folder)
        with tarfile.open(target, "w:xz", preset=9) as archive:
            archive.add(folder / "kafka" / "data", "kafka/data")
            archive.add(folder / "checkpoint", "checkpoint")


if __name__ == "__main__":
    main(*sys.argv[1:])
