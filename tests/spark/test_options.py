"""Options of the source, how it shares out a limit, and what is checked before Spark starts."""

from __future__ import annotations

import sys
from dataclasses import replace
from decimal import Decimal
from importlib import metadata
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kafkamq.cli.app import app
from kafkamq.cli.spark import jobs
from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.dev.environment import free_ports
from kafkamq.errors import ConfigError
from kafkamq.spark import session
from kafkamq.spark.options import parse_source_options, queue_options
from kafkamq.spark.source.planning import shared_out

SERVICE = ServiceConfig(
    bootstrap_servers="service:9092", namespace="ns", kafka={"sasl.password": "secret", "a": "1"}
)


def test_options_stand_above_what_was_registered() -> None:
    options = parse_source_options(
        {
            "topic": "orders",
            "kafka.bootstrap.servers": "other:9092",
            "kafka.a": "2",
            "maxRowsPerTrigger": "10",
            "startingOffsets": '{"orders":{"0":5,"1":-2}}',
        },
        SERVICE,
    )
    assert options.config.bootstrap_servers == "other:9092"
    assert options.config.kafka == {"sasl.password": "secret", "a": "2"}
    assert options.config.quarantine_topic == "ns.quarantine"
    assert options.max_rows == 10
    assert options.starting == {"orders": {"0": 5, "1": -2}}


QUEUE = {"view": "messages", "queue": "q", "acknowledge": "true"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "kafka.bootstrap.servers"),
        ({"kafka.bootstrap.servers": "h:1"}, "topic"),
        ({"topik": "x"}, "topik"),
        ({"mode": "raw"}, "raw"),
        ({"startingOffsets": "yesterday"}, "startingOffsets"),
        ({"startingOffsets": '{"orders":{"0":-3}}'}, "startingOffsets"),
        ({"endingOffsets": "[1]"}, "endingOffsets"),
        ({"maxRowsPerTrigger": "0"}, "maxRowsPerTrigger"),
        (
            {"maxRowsPerTrigger": "1e3"},
            "maxRowsPerTrigger is '1e3': .*<= 9,223,372,036,854,775,808",
        ),
        ({"includeHeaders": "yes"}, "includeHeaders is 'yes': it must be true or false"),
        ({"view": "messages", "queue": "q", "group": "g"}, "group is for queues.*read_queue"),
        ({"view": "messages", "maxLease": "9"}, "maxLease is for queues.*read_queue"),
        ({"maxRowsPerTrigger": "1", "maxOffsetsPerTrigger": "1"}, "mean the same: give one"),
        ({"view": "markers", "topic": "x"}, "topic is 'x': view markers reads .*leave the view"),
        ({**QUEUE, "topic": "x"}, "topic is 'x': view messages reads the namespace's own"),
        ({"view": "deliveries", "minPartitions": "5"}, "minPartitions means nothing to view del"),
        ({"view": "in_flight", "minPartitions": "5"}, "minPartitions means nothing to view in_f"),
        ({"view": "letters"}, "view is 'letters'.*in_flight"),
        ({"view": "markers", "includeHeaders": "true"}, "includeHeaders"),
        ({"view": "markers", "queue": "emails"}, "queue is 'emails'.*deliveries.*where"),
        ({"startingOffsets": '{"oders":{"0":5}}'}, "startingOffsets names topic 'oders'"),
        ({"startingTimestamp": "yesterday"}, "startingTimestamp"),
        ({"startingTimestamp": "1", "startingOffsets": "latest"}, "startingTimestamp and starting"),
        ({"endingTimestamp": "-1"}, "endingTimestamp"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss"),
        ({"namespace": "a b"}, "namespace"),
        ({"partitions": "a"}, "partitions"),
        ({"acknowledge": "true"}, "read_queue"),
        ({**QUEUE, "maxDeliveries": "0"}, "maxDeliveries is 0: it must be a whole number >= 1"),
        ({**QUEUE, "redeliveryTimeout": "0.5"}, "redeliveryTimeout is '0.5': it must be seconds"),
        ({**QUEUE, "redeliveryTimeout": "86400"}, "redeliveryTimeout is '86400'.*<= 43,200"),
        ({**QUEUE, "maxLease": "31622401"}, "maxLease is '31622401'.*<= 31,622,400"),
        ({**QUEUE, "maxLease": "soon"}, "maxLease is 'soon': it must be seconds >= 1"),
        ({**QUEUE, "maxLease": "1e12"}, "maxLease is '1e12'.*>= 1 and <= 31,622,400"),
        ({**QUEUE, "batchMarkers": "on"}, "batchMarkers is 'on'"),
        (
            {**QUEUE, "maxLease": "5"},
            "maxLease is 5: it must be at least redeliveryTimeout",
        ),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], named: str) -> None:
    usable = {"kafka.bootstrap.servers": "h:1"}
    if "view" not in options:
        usable["topic"] = "orders"
    given = options if named in ("kafka.bootstrap.servers", "topic") else {**usable, **options}
    with pytest.raises(ConfigError, match=named):
        parse_source_options(given, None)


def test_a_queue_that_is_acknowledged_has_the_defaults_of_queues_but_for_its_timeout() -> None:
    usual = QueueConfig(queue_id="q", redelivery_timeout_ms=60_000)
    assert parse_source_options(QUEUE, SERVICE).acknowledge == usual
    given = {"maxDeliveries": "3", "maxLease": "7200", "group": "g", "BATCHMARKERS": "False"}
    own = parse_source_options({**QUEUE, **given}, SERVICE).acknowledge
    assert own == replace(
        usual, max_deliveries=3, max_lease_ms=7_200_000, group_id="g", batch_markers=False
    )


def test_numbers_of_a_queue_may_be_of_any_kind() -> None:
    usual: dict[str, Any] = {
        "redelivery_timeout": 30.0,
        "max_deliveries": 3,
        "max_lease": 90.0,
        "batch_markers": True,
        "group": None,
    }
    numbers = {
        "redelivery_timeout": Decimal(30),
        "max_deliveries": np.int64(3),
        "max_lease": np.float32(90),
    }
    rows: Any = np.int64(100)
    assert queue_options(rows, {**usual, **numbers}) == queue_options(100, usual)
    for name in ("redelivery_timeout", "max_deliveries"):
        with pytest.raises(ConfigError, match=f"^{name} is True"):
            queue_options(100, {**usual, name: True})


def test_a_view_brings_its_topic_and_a_namespace_its_names() -> None:
    for view, topic in (
        ("messages", "ns.messages"),
        ("deliveries", "ns.markers"),
        ("in_flight", "ns.markers"),
        ("dead_letters", "ns.dead-letters"),
        ("markers", "ns.markers"),
    ):
        assert parse_source_options({"view": view}, SERVICE).topic == topic
    other = parse_source_options({"view": "messages", "namespace": "shop"}, SERVICE)
    assert other.topic == "shop.messages"
    assert other.config.kafka == SERVICE.kafka


def test_times_are_milliseconds_or_iso_8601() -> None:
    for text, expected in (
        ("1700000000123", 1_700_000_000_123),
        ("2023-11-14T22:13:20", 1_700_000_000_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000),
        ("2023-11-15T00:13:20.5+02:00", 1_700_000_000_500),
    ):
        options = {"view": "markers", "startingTimestamp": text}
        assert parse_source_options(options, SERVICE).starting == expected


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)), min_size=1, max_size=20),
    st.one_of(st.none(), st.integers(1, 10**6)),
)
def test_a_limit_is_shared_out_by_backlog(logs: list[tuple[int, int]], limit: int | None) -> None:
    starts = {number: start for number, (start, _) in enumerate(logs)}
    ends = {number: start + backlog for number, (start, backlog) in enumerate(logs)}
    found = shared_out(starts, ends, limit)
    taken = {number: found[number] - starts[number] for number in starts}
    total = sum(backlog for _, backlog in logs)
    for number, (_, backlog) in enumerate(logs):
        assert 0 <= taken[number] <= backlog
        assert taken[number] > 0 or backlog == 0, "every backlog advances"
    if limit is None or limit >= total:
        assert found == ends
    else:
        assert limit <= sum(taken.values()) <= limit + len(logs)


@pytest.mark.parametrize(
    ("name", "version"), [("pandas", "3.0.1"), ("pyspark", "4.1.0"), ("pyarrow", "17.0")]
)
def test_an_unsupported_package_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str, version: str
) -> None:
    real = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda asked: version if asked == name else real(asked)
    )
    with pytest.raises(ConfigError, match=rf"{name} is {version}.*must be.*pip install"):
        session.check_environment()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(asked: str) -> str:
        if asked == "protobuf":
            raise metadata.PackageNotFoundError(asked)
        return real(asked)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(sys.modules, "google.protobuf", None)  # nor is there a module without it
    with pytest.raises(ConfigError, match=r"protobuf.*is missing"):
        session.check_environment()


def test_packages_without_an_installers_files_tell_their_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = session.check_packages()

    def version(asked: str) -> str:
        raise metadata.PackageNotFoundError(asked)

    monkeypatch.setattr(metadata, "version", version)  # an archive, or an image of Spark's
    assert session.check_packages() == known


def test_missing_java_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(ConfigError, match="Java 17 or newer is missing"):
        session.check_environment()


def test_the_environment_of_the_tests_is_fine() -> None:
    assert set(session.check_environment()) == {"pyspark", "pandas", "pyarrow", "protobuf", "java"}


@pytest.mark.parametrize("master", ["foo", "local[x]", "spark://host", ""])
def test_a_master_that_is_none_is_refused_before_spark_starts(master: str) -> None:
    with pytest.raises(ConfigError, match=r"master is '.*': it must be local\[N\], spark://"):
        session.build_session(master=master)


@pytest.mark.parametrize("command", [("sql", "SELECT 1"), ("replay", "--everything"), ("audit",)])
def test_a_master_that_does_not_answer_is_refused_before_spark_starts(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "has_session", lambda: False)  # a session would be taken as it is
    monkeypatch.setattr(jobs, "require_namespace", lambda *_: None)
    (port,) = free_ports(1)
    master = f"spark://127.0.0.1:{port}"
    arguments = [*command, "--bootstrap-servers", "127.0.0.1:1", "--master", master]
    failed = CliRunner().invoke(app, arguments).exception
    assert isinstance(failed, ConfigError)
    assert str(failed).startswith(f"master is {master}: nothing answers there")
