"""What an earlier release left in Kafka goes on with this one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.parallel_tools import Seen, committed, make
from tests.upgrade.left import left_behind, take_over
from tests.waiting import wait_until

from kafkamq import Service
from kafkamq.dev import LocalKafka
from kafkamq.markers.tracker.local import LocalTracker


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalKafka]:
    with left_behind(tmp_path_factory.mktemp("left")) as kafka:
        yield kafka


def test_a_namespace_goes_on_where_it_was(kafka: LocalKafka) -> None:
    with Service(kafka.bootstrap_servers, namespace="local") as service:
        service.create_topics(partitions=2, marker_partitions=2)  # those of then are good
        with LocalTracker(service.config).in_thread():
            take_over(service)


def test_a_map_of_runs(kafka: LocalKafka) -> None:
    servers, group = kafka.bootstrap_servers, "runs"
    assert committed(servers, group, "records")[0] == 3
    seen = Seen()
    with make(servers, "records", group) as consumer:
        consumer.poll(seen)
        wait_until(lambda: committed(servers, group, "records") == (1000, ""))
    # Its end is not known: what it says is not believed (docs).
    assert sorted(seen.places) == [(0, offset) for offset in range(3, 1000)]
