"""No two queues share a consumer group, whatever they and their namespaces are called."""

from __future__ import annotations

from itertools import combinations

from kafkamq.config import ServiceConfig
from kafkamq.markers.tracker.ledger import LedgerKey
from kafkamq.markers.tracker.local import tracker_group
from kafkamq.queue.names import group_of


def config(namespace: str) -> ServiceConfig:
    return ServiceConfig(bootstrap_servers="h:1", namespace=namespace)


def test_queues_of_namespaces_whose_names_run_into_each_other() -> None:
    names = [("t8", "x.y"), ("t8.x", "y"), ("t8", "x/y"), ("t8", "x"), ("t8.x.y", "y")]
    groups = [group_of(config(namespace), queue_id) for namespace, queue_id in names]
    assert len(set(groups)) == len(groups)
    for namespace, other in combinations(("t8", "t8.x", "t8.x.y"), 2):  # stat lists by prefix
        assert not group_of(config(other), "y").startswith(group_of(config(namespace), ""))


def test_queues_that_are_called_like_a_tracker_s_group() -> None:
    t8 = config("t8")
    theirs = {tracker_group(t8), LedgerKey.of_markers(t8, 0).transactional_id}
    assert not theirs & {group_of(t8, name) for name in ("markers.tracker", "markers.0")}
