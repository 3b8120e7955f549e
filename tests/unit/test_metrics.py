"""Metrics: names are a contract, what is counted is what is shown, and health is the loops' age."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from tests.waiting import within
from typer.main import get_command

from kafkamq import Service
from kafkamq.cli.app import app
from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.markers.tracker.metrics import TrackerMetrics
from kafkamq.markers.wire.records import TrackerStatus
from kafkamq.metrics import (
    Counter,
    Gauge,
    Histogram,
    catalog,
    families,
    register_metrics,
    serve_metrics,
)
from kafkamq.metrics.health import Health, health
from kafkamq.queue.consumer import HandOutAges
from kafkamq.queue.producer import Delivery, Destination, Sender, SendRecorder

DASHBOARD = Path(__file__).parents[2] / "dashboards" / "kafkamq.json"
BOTH = ("queue", "partition")
QUEUE = ("queue",)
PARTITION = ("partition",)
QUERY = ("query",)

NAMES = {  # alerts and dashboards of users name them: they do not change
    "kafkamq_messages_sent": ("counter", BOTH),
    "kafkamq_sends_failed": ("counter", QUEUE),
    "kafkamq_send_seconds": ("histogram", QUEUE),
    "kafkamq_messages_received": ("counter", BOTH),
    "kafkamq_messages_received_again": ("counter", BOTH),
    "kafkamq_messages_acked": ("counter", BOTH),
    "kafkamq_messages_nacked": ("counter", BOTH),
    "kafkamq_messages_rejected": ("counter", BOTH),
    "kafkamq_messages_released": ("counter", BOTH),
    "kafkamq_leases_lost": ("counter", BOTH),
    "kafkamq_late_verdicts": ("counter", BOTH),
    "kafkamq_in_flight": ("gauge", QUEUE),
    "kafkamq_ready": ("gauge", QUEUE),
    "kafkamq_under_way": ("gauge", QUEUE),
    "kafkamq_poll_age_seconds": ("gauge", QUEUE),
    "kafkamq_send_to_receive_seconds": ("histogram", QUEUE),
    "kafkamq_receive_to_verdict_seconds": ("histogram", QUEUE),
    "kafkamq_tracker_redelivered": ("counter", PARTITION),
    "kafkamq_tracker_dead_lettered": ("counter", PARTITION),
    "kafkamq_tracker_late_verdicts": ("counter", PARTITION),
    "kafkamq_tracker_malformed_markers": ("counter", PARTITION),
    "kafkamq_tracker_in_progress": ("gauge", PARTITION),
    "kafkamq_tracker_due": ("gauge", PARTITION),
    "kafkamq_tracker_awaited": ("gauge", PARTITION),
    "kafkamq_tracker_oldest_deadline_seconds": ("gauge", PARTITION),
    "kafkamq_tracker_position": ("gauge", PARTITION),
    "kafkamq_tracker_lag": ("gauge", PARTITION),
    "kafkamq_tracker_live": ("gauge", PARTITION),
    "kafkamq_spark_standby": ("gauge", QUERY),
    "kafkamq_lso_stalled_seconds": ("gauge", PARTITION),
    "kafkamq_messages_lso_stalled_seconds": ("gauge", PARTITION),
    "kafkamq_tracker_lateness_seconds": ("histogram", PARTITION),
    "kafkamq_spark_running": ("gauge", QUERY),
    "kafkamq_spark_failures": ("counter", QUERY),
    "kafkamq_spark_rows": ("counter", QUERY),
    "kafkamq_spark_rows_per_second": ("gauge", QUERY),
    "kafkamq_spark_batch_seconds": ("histogram", QUERY),
    "kafkamq_spark_state_bytes": ("gauge", QUERY),
    "kafkamq_spark_state_rows": ("gauge", QUERY),
    "kafkamq_spark_backlog": ("gauge", QUERY),
}


def test_names_kinds_and_labels_are_pinned() -> None:
    found = {family.name: (family.kind, family.labels) for family in families()}
    assert {name: found.get(name) for name in NAMES} == NAMES
    for name, (_, labels) in found.items():  # other parts' too
        assert name.startswith("kafkamq_")
        of_claims = name.startswith("kafkamq_claims_")
        more = {"group", "topic", "client", "reason"} if of_claims else set()
        more |= {"query"} if name.startswith("kafkamq_spark_") else set()
        assert set(labels) <= {"queue", "partition"} | more


def test_the_dashboard_asks_for_what_there_is() -> None:
    shown = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [
        target["expr"] for panel in shown["panels"] for target in panel.get("targets", [])
    ]
    asked = set(re.findall(r"kafkamq_[a-z_]+", " ".join(expressions)))
    series = set()
    for name, (kind, _) in NAMES.items():
        series |= {
            "counter": {f"{name}_total"},
            "gauge": {name},
            "histogram": {f"{name}_bucket"},
        }[kind]
    assert asked == series  # nothing that is not there, and nothing left out
    for expression in expressions:  # each label is one of the metric that it asks for
        (name,) = re.findall(r"kafkamq_[a-z_]+", expression)
        known = {"le"} if name.endswith("_bucket") else set()
        known |= set(NAMES[re.sub(r"_(total|bucket)$", "", name)][1])
        (grouped,) = re.findall(r"by \(([^)]*)\)", expression)
        (chosen,) = re.findall(r"\{([^}]*)\}", expression)
        assert set(grouped.split(", ")) <= known, expression
        assert set(re.findall(r"(\w+)=", chosen)) <= known | {"job"}, expression
    ids = [panel["id"] for panel in shown["panels"]]
    assert len(ids) == len(set(ids))


def test_of_two_consumers_of_a_queue_the_older_poll_is_shown() -> None:
    forget = [
        catalog.POLL_AGE.watch(lambda age_s=age_s: {("two",): age_s}) for age_s in (0.25, 0.75, 0.5)
    ]
    assert catalog.POLL_AGE.values()[("two",)] == 0.75
    for each in forget:
        each()


def test_what_is_added_and_what_is_watched_is_summed() -> None:
    counter = Counter("kafkamq_test", "Text.", BOTH)
    counter.add(2, "orders", 0)
    counter.add(3, "orders", 0)
    forget = counter.watch(lambda: {("orders", "0"): 10.0, ("orders", "1"): 1.0})
    assert counter.values() == {("orders", "0"): 15.0, ("orders", "1"): 1.0}
    forget()
    forget()
    assert counter.values() == {("orders", "0"): 5.0}


def test_a_source_may_add_what_it_has_noted() -> None:
    gauge = Gauge("kafkamq_test", "Text.", QUEUE)

    def note() -> dict[tuple[str, ...], float]:
        gauge.set(7, "late")
        return {}

    gauge.watch(note)
    assert gauge.values() == {("late",): 7.0}


def test_a_histogram_counts_into_the_bucket_that_holds_the_value() -> None:
    histogram = Histogram("kafkamq_test", "Text.", QUEUE, (0.1, 1.0))
    histogram.observe(0.1, "a")  # a bound belongs to its bucket: le
    histogram.observe_all([(0.5, 2), (9.0, 1)], "a")
    (found,) = histogram.distributions().values()
    assert found.counts == [1, 2, 1]
    assert found.total == pytest.approx(10.1)


def test_what_is_served_can_be_read_by_prometheus() -> None:
    (sent,) = [family for family in families() if family.name == "kafkamq_messages_sent"]
    (took,) = [family for family in families() if family.name == "kafkamq_send_seconds"]
    assert isinstance(sent, Counter)
    assert isinstance(took, Histogram)
    sent.add(3, "served", 1)
    took.observe(0.02, "served", count=3)
    with serve_metrics(0, host="127.0.0.1") as server:
        text = _get(server.port, "/metrics")[1]
        assert _get(server.port, "/elsewhere")[0] == 404
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["kafkamq_messages_sent_total", (("partition", "1"), ("queue", "served"))] == 3
    buckets = [
        samples["kafkamq_send_seconds_bucket", (("le", bound), ("queue", "served"))]
        for bound in ("0.01", "0.025", "+Inf")
    ]
    assert buckets == [0, 3, 3]  # cumulated


def test_they_go_into_a_registry_of_the_applications() -> None:
    registry = CollectorRegistry()
    register_metrics(registry)
    register_metrics(registry)  # as two modules of one program may
    names = [family.name for family in registry.collect()]
    assert set(NAMES) <= set(names)
    assert len(names) == len(set(names))


def test_a_taken_port_is_refused() -> None:
    with serve_metrics(0, host="127.0.0.1") as server, pytest.raises(ConfigError, match="listen"):
        serve_metrics(server.port, host="127.0.0.1")


def test_nothing_is_imported_for_counting() -> None:
    code = (
        "import sys; import kafkamq.queue.service, kafkamq.metrics; "
        "print([name for name in ('prometheus_client', 'http.server') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_prometheus_client_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from kafkamq.metrics import serve_metrics\n"
        "serve_metrics(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ConfigError" in done.stderr
    assert "kafkamq[metrics]" in done.stderr


def test_whatever_works_until_it_is_ended_serves_them() -> None:
    """All but those that only start another program, and those that only show."""
    found = dict(_commands(get_command(app)))
    works = {
        name
        for name, command in found.items()
        if any("Ctrl-C" in str(each.help) for each in (command, *options(command)))
    }
    others = {"dev", "demo", "spark master", "spark worker", "claims watch", "top", "web"}
    claims = {"claims consume", "claims ranges consume"}
    assert works - others == {*claims, "consume", "receive", "tracker", "work"}
    served = {
        name
        for name, command in found.items()
        if any("--metrics-port" in each.opts for each in options(command))
    }
    assert served == works - others


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def options(command: Any) -> list[Any]:
    return [each for each in command.params if hasattr(each, "help")]


def test_a_trackers_metrics_are_those_of_its_status() -> None:
    config = ServiceConfig(bootstrap_servers="nowhere:1", namespace="a")
    status = TrackerStatus(
        topic="a.markers", partition=77, engine="local", epoch=1, clock_ms=5000, position=11,
        entries=12, due=13, deadline_ms=3500, late_verdicts=14, malformed=15, redelivered=16,
        dead_lettered=17, is_live=False,
    )  # fmt: skip
    shown = {
        catalog.POSITION: 11, catalog.IN_PROGRESS: 12, catalog.DUE: 13, catalog.TRACKER_LATE: 14,
        catalog.MALFORMED: 15, catalog.REDELIVERED: 16, catalog.DEAD_LETTERED: 17,
        catalog.LIVE: 0, catalog.OLDEST_DEADLINE: -1.5,
    }  # fmt: skip
    metrics = TrackerMetrics(config, lambda: [status])
    try:
        found = {family: family.values().get(("77",)) for family in shown}
    finally:
        metrics.close()
    assert found == shown
    assert all(("77",) not in family.values() for family in shown)


def test_a_send_that_failed_is_counted() -> None:
    class Failing(Sender):
        def __init__(self) -> None:
            self.recorder, self.reported = SendRecorder(), 0

        def failed(self, error: KafkaError) -> KafkaError:
            return error

    delivery = Delivery(Destination(Failing(), "failing", "topic"), "id")
    delivery._report(KafkaError(KafkaError._MSG_TIMED_OUT), Message())
    assert catalog.SEND_FAILED.values()["failing",] == 1


def test_health_is_the_age_of_the_loops() -> None:
    own = Health()
    assert own.is_live()
    assert not own.is_ready()  # nothing runs yet
    able = [False]
    hung = own.add("hung", max_age_s=0.0)
    own.add("turning", max_age_s=60.0, is_ready=lambda: able[0])
    assert not own.is_live()
    own.remove(hung)
    assert own.is_live()
    assert not own.is_ready()
    able[0] = True
    assert own.is_ready()


def test_probes_answer_by_status() -> None:
    with serve_metrics(0, host="127.0.0.1") as server:
        loop = health.add("of a test", max_age_s=0.0)
        try:
            status, text = _get(server.port, "/live")
            assert status == 503
            assert "of a test" in text
        finally:
            health.remove(loop)
        assert "of a test" not in _get(server.port, "/ready")[1]


def _get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=within(10)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_consumer_that_cannot_be_opened_leaves_nothing_that_scrapes_ask() -> None:
    def kept() -> int:
        gc.collect()
        return sum(isinstance(each, HandOutAges) for each in gc.get_objects())

    with Service("127.0.0.1:1", kafka={"socket.timeout.ms": "abc"}) as service:
        before = kept()
        with pytest.raises(ConfigError):
            service.queue("q").consumer()
        assert kept() == before


class _Aged:
    """A message of which the time of its record alone is asked."""

    def __init__(self, written_ms: int) -> None:
        self._record, self._written_ms = self, written_ms

    def timestamp(self) -> tuple[int, int]:
        return 1, self._written_ms


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 33, 1000])
def test_ages_of_batches_count_each_message_and_pass_none_over(size: int) -> None:
    ages = HandOutAges(f"sampled {size}")
    ages.wall_ms = lambda: 10_000_000
    batch: Any = [_Aged(9_999_000)] * size
    batch[size // 3] = _Aged(6_400_000)
    rounds = 640
    for number in range(rounds):
        ages.note(batch, number)
    ages.watch()()
    found = catalog.SEND_TO_RECEIVE_SECONDS.distributions()[f"sampled {size}",]
    assert sum(found.counts) == size * rounds
    assert found.total / rounds == pytest.approx(3600 + (size - 1), rel=0.1)
