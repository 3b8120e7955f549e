"""A broker that restarts in the middle of the work: each message is handled, and none is lost."""

from __future__ import annotations

import os
import threading
import uuid

import pytest
from tests.contract.worlds import BACKENDS, world_of
from tests.waiting import wait_until, within

from kafkamq import Worker
from kafkamq.dev import LocalKafka
from kafkamq.dev.environment import cache_dir_from, java_from

_COUNT = 400


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_restart_in_the_middle(name: str) -> None:
    places = {"cache_dir": cache_dir_from(os.environ), "java": java_from(os.environ)}
    seen: set[bytes] = set()
    some = threading.Event()
    with (
        LocalKafka(**places) as broker,
        world_of(name, broker.bootstrap_servers, f"outage-{uuid.uuid4().hex[:8]}") as world,
    ):
        queue = world.queue("work", max_deliveries=20)

        @queue.handler(concurrency=8)
        def handle(body: bytes) -> None:
            seen.add(body)
            if len(seen) >= _COUNT // 8:
                some.set()

        with Worker(world.service, queues=["work"]) as worker:
            producer = queue.producer()
            for number in range(_COUNT // 2):
                producer.send(b"%d" % number, key=b"%d" % (number % 20))
            assert some.wait(within(60))
            broker.kill()
            for number in range(_COUNT // 2, _COUNT):
                producer.send(b"%d" % number, key=b"%d" % (number % 20))
            broker.restart()
            wait_until(lambda: len(seen) == _COUNT, "all of them", 120.0)
            assert not worker.wait(0.0)
        assert world.letters(queue) == []
