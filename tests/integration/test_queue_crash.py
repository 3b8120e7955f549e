"""SIGKILL of workers under load: nothing is lost, and nothing acked in time comes back."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.faults import read_namespace
from tests.integration.queue_logs import ends, make_service, read_topic, tracked
from tests.waiting import deadline_after, wait_until, within

from kafkamq.queue.service import Service
from kafkamq.testing import check_logs
from kafkamq.types import Outcome

WORKER = Path(__file__).with_name("queue_worker.py")
TOTAL = 3000
KILLS = 4


def start_worker(service: Service) -> subprocess.Popen[bytes]:
    config = service.config
    return subprocess.Popen(
        [sys.executable, str(WORKER), config.bootstrap_servers, config.namespace, "a", "1.5"]
    )


@pytest.mark.faults
def test_killed_workers_lose_nothing(bootstrap: str, namespace: str) -> None:
    with make_service(bootstrap, namespace, partitions=4) as service, tracked(service.config):
        workers = [start_worker(service) for _ in range(3)]
        try:
            producer = service.queue("a").producer()
            deliveries = [producer.send(b"%d" % number) for number in range(100)]
            # Until then there is nobody to kill at work.
            wait_until(lambda: _done(service), "a worker that has begun")
            for number in range(100, TOTAL):
                deliveries.append(producer.send(b"%d" % number))
                if number % (TOTAL // KILLS) == TOTAL // KILLS - 1:
                    victim = workers.pop(0)
                    victim.kill()  # SIGKILL
                    victim.wait()
                    workers.append(start_worker(service))
                elif number % 20 == 0:
                    time.sleep(0.01)
            sent = {delivery.result(within(30)).id for delivery in deliveries}
            deadline_s = deadline_after(150)
            while _done(service) < sent:
                assert time.monotonic() < deadline_s, f"{len(sent - _done(service))} are missing"
                time.sleep(0.5)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        found = read_namespace(service.config)
    verdict = check_logs(
        messages=found.messages,
        markers=found.markers,
        dead_letters=found.dead_letters,
        must_be_settled=False,  # the last workers are killed, too
    )
    verdict.require_ok()  # an ACK that came behind the end of its lease saves no message
    assert verdict.redelivered  # the kills were felt


def _done(service: Service) -> set[str]:
    """Ids of messages of which some copy was acked, by the logs."""
    config = service.config
    places = {(one.partition, one.offset) for one in ends(config, Outcome.ACK) if one is not None}
    return {
        dict(record.headers() or [])["kafkamq-id"].decode()
        for record in read_topic(config.bootstrap_servers, config.message_topic)
        if (record.partition(), record.offset()) in places
    }
