"""``doctor``: is this machine fit, is the cluster, are the topics; and what to do if not."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib import metadata
from typing import Annotated

import typer

from kafkamq import __version__
from kafkamq.cli import output
from kafkamq.cli.options import Json, Topic, connected_if_named
from kafkamq.config import ServiceConfig
from kafkamq.dev.environment import java_command, java_from
from kafkamq.errors import BrokerError, ConfigError, DeadlineExceededError, KafkaMQError
from kafkamq.markers.overview import Check, cluster_checks
from kafkamq.queue.namespace import check_any_topic, check_name
from kafkamq.transport.admin import Admin

PACKAGES = ("confluent-kafka", "protobuf")
EXTRAS = {
    "zstandard": "parallel",
    "fastavro": "schemas",
    "prometheus-client": "metrics",
    "pyspark": "spark",
    "pandas": "spark",
    "pyarrow": "spark",
    "litestar": "web",
}


@connected_if_named
def doctor(
    config: ServiceConfig | None,
    max_lease: Annotated[
        float, typer.Option(min=0.001, help="The longest lease of your queues, in seconds.")
    ] = 43_200.0,
    redelivery_timeout: Annotated[
        float,
        typer.Option(min=0.001, help="The shortest redelivery timeout of your queues, in seconds."),
    ] = 10.0,
    topic: Topic = "",
    as_json: Json = False,
) -> None:
    """Check this machine, the brokers and the topics; exit code 1 when something cannot work.

    Without a broker's address only this machine is checked.
    """
    checks = [*_machine()]
    if config is not None:
        checks += cluster_checks(
            config,
            max_lease_ms=round(max_lease * 1000),
            redelivery_timeout_ms=round(redelivery_timeout * 1000),
        )
        if topic:
            checks += _of_queue(config, topic, max_lease_ms=round(max_lease * 1000))
    refused = any(check.level == "refuse" for check in checks)
    if as_json:
        output.print_json({"ok": not refused, "checks": [asdict(check) for check in checks]})
    else:
        output.print_table(
            "", ("", "what", "found"), [(check.level, check.what, check.text) for check in checks]
        )
        if config is None:
            output.note("Name a broker with --bootstrap-servers to have it and the topics checked.")
    if refused:
        raise typer.Exit(1)


def _machine() -> Iterator[Check]:
    yield Check("ok", "kafkamq", __version__)
    yield Check("ok", "python", platform.python_version())
    for package in (*PACKAGES, *EXTRAS):
        yield _package(package)
    yield from _tried("java", lambda: java_command(java_from(os.environ)))
    yield from _tried("spark", _spark)


def _package(package: str) -> Check:
    try:
        return Check("ok", package, metadata.version(package))
    except metadata.PackageNotFoundError:
        extra = EXTRAS.get(package)
        whole, level = ("kafkamq", "refuse") if extra is None else (f"kafkamq[{extra}]", "warn")
        return Check(level, package, f"missing; install with: pip install '{whole}'")


def _spark() -> str:
    from kafkamq.spark.session import check_environment

    check_environment()
    return "versions fit together"


def _tried(what: str, check: Callable[[], str]) -> Iterator[Check]:
    """Java and Spark: queues work without them, so their lack is a warning."""
    try:
        yield Check("ok", what, check())
    except (KafkaMQError, ImportError) as error:
        yield Check("warn", what, str(error))


def _of_queue(config: ServiceConfig, topic: str, *, max_lease_ms: int) -> Iterator[Check]:
    """A topic that is a queue, or is to be one (R37)."""
    try:
        check_name(config, topic)
        findings = check_any_topic(replace(config, message_topic=topic), max_lease_ms=max_lease_ms)
        with Admin(config) as admin:
            rights = admin.rights_on(topic)
    except (BrokerError, ConfigError, DeadlineExceededError) as error:
        yield Check("refuse", topic, str(error))
        return
    for finding in findings:
        yield Check(finding.level, finding.topic, finding.text)
    if not findings:
        yield Check("ok", topic, "can be a queue, and lacks nothing")
    if rights and "READ" not in rights:
        yield Check("warn", topic, "this principal lacks Read: no worker or tracker can run as it")
    elif rights and "WRITE" not in rights:
        yield Check("ok", topic, "this principal may read: enough for workers; trackers also Write")
