"""A member of a group, as a process for tests that kill it.

Run: parallel_member.py BOOTSTRAP TOPIC OUT GROUP NAME PROTOCOL MODE LOSSES. It writes a record for
each, to OUT: its key, value "partition offset name"; it is done when that is in Kafka. MODE: of
commits. LOSSES: a file for partitions that the group took from it, as it was silent for too long.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from pathlib import Path

from kafkamq import OutgoingRecord, ParallelConsumer, ParallelRecord
from kafkamq.runtime.signals import stop_on_signals


def main(
    bootstrap: str,
    topic: str,
    out: str,
    group: str,
    name: str,
    protocol: str,
    mode: str,
    losses: str,
) -> None:
    stop = threading.Event()
    stop_on_signals(stop.set, (signal.SIGTERM,))
    chance = random.Random(name)

    def handle(record: ParallelRecord) -> OutgoingRecord:
        if chance.random() < 0.002:
            time.sleep(chance.random() * 0.05)
        if chance.random() < 0.0005 and record.attempt == 1:
            raise OSError("now and then")
        place = b"%d %d %s" % (record.partition, record.offset, name.encode())
        return OutgoingRecord(topic=out, key=record.key, value=place)

    def on_revoked(partitions: list[tuple[str, int]], is_lost: bool) -> None:
        if is_lost:
            with Path(losses).open("a") as file:
                file.writelines(f"{name} {partition}\n" for _, partition in partitions)

    kafka = (
        {"group.protocol": "consumer"} if protocol == "broker" else {"session.timeout.ms": "6000"}
    )
    with ParallelConsumer(
        topic,
        group_id=group,
        bootstrap_servers=bootstrap,
        kafka=kafka,
        concurrency=8,
        commit_interval=0.2,
        commit_mode=mode,
        backoff=lambda record: 0.02,
        on_revoked=on_revoked,
        revoke_timeout=10,  # a dozen members that start at once on few cores: a result takes long
    ) as consumer:
        consumer.poll_and_produce(handle)
        while not stop.wait(0.1):
            if consumer.wait(0):
                break


if __name__ == "__main__":
    main(*sys.argv[1:])
