"""``stat``, ``health``, ``doctor`` and ``backends``: what is there, and how it does."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from http.client import HTTPConnection, HTTPException
from importlib import metadata
from typing import Annotated, Any

import typer

from kafkamq import __version__
from kafkamq.cli import output
from kafkamq.cli.options import (
    TRACKER_HERE,
    Json,
    Topic,
    connected,
    connected_if_named,
    with_table,
)
from kafkamq.config import Options, ServiceConfig, converted
from kafkamq.dev.environment import java_command, java_from
from kafkamq.errors import BrokerError, ConfigError, DeadlineExceededError, KafkaMQError
from kafkamq.markers.overview import MAX_SCANNED, Check, MarkerPartition, cluster_checks, overview
from kafkamq.queue.namespace import check_any_topic, check_name
from kafkamq.queue.rules.capabilities import (
    CAPABILITIES,
    Feature,
    heads,
    markdown_table,
    rows,
)
from kafkamq.transport.admin import Admin, require_brokers
from kafkamq.types import Backend

# Label and value of a gauge in Prometheus' text form; queue ids need no escapes.
_FIGURE = re.compile(
    r'^kafkamq_(in_flight|ready|under_way|poll_age_seconds)\{queue="([^"]+)"\} (\S+)', re.MULTILINE
)
Host = Annotated[str, typer.Option(help="Host that the process runs on.")]
_TIMEOUT_S = 5.0
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


@connected
def stat(
    config: ServiceConfig,
    max_scanned: Annotated[
        int,
        typer.Option(
            min=0, help="Count a queue's messages if at most this many records have to be read."
        ),
    ] = MAX_SCANNED,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=1,
            max=65535,
            help="Show what the worker of this --metrics-port holds.",
        ),
    ] = None,
    host: Host = "localhost",
    as_json: Json = False,
) -> None:
    """Show backlogs, what the tracker does and, by its --metrics-port, what a worker has."""
    require_brokers(config)
    found = overview(config, max_scanned=max_scanned)
    worker = None if port is None else _worker(host, port)
    if as_json:
        markers = [{**asdict(each), "lag": each.lag} for each in found.markers]
        facts = {**asdict(found), "markers": markers, "worker": worker}
        output.print_json({"namespace": config.namespace, **facts})
        return
    output.print_table(
        f"Queues of {config.namespace} ("
        f"{_number(found.dead_letters, found.dead_letters_counted)} dead letters in all)",
        ("queue", "waiting", "workers", "behind, all queues"),
        [
            (
                queue.queue_id,
                queue.waiting,
                queue.members,
                _number(queue.behind, queue.waiting is not None),
            )
            for queue in found.queues
        ],
    )
    _print_markers(found.markers, config.marker_topic)
    if worker is not None:
        output.print_table(
            f"Worker at {host}:{port}",
            ("queue", "in flight", "ready", "under way", "last poll, s ago"),
            [tuple(each.values()) for each in worker],
        )


def _worker(host: str, port: int) -> list[dict[str, Any]]:
    """Return what a process says of each queue that it receives from."""
    text = ask(host, port, "/metrics").decode(errors="replace")
    if "kafkamq_" not in text:
        raise not_ours(port)
    found = {
        (name, queue_id): float(value) if name == "poll_age_seconds" else int(float(value))
        for name, queue_id, value in _FIGURE.findall(text)
    }
    return [
        {
            "queue_id": queue_id,
            "in_flight": found.get(("in_flight", queue_id)),
            "ready": found.get(("ready", queue_id)),
            "under_way": found.get(("under_way", queue_id)),
            "poll_age_s": found.get(("poll_age_seconds", queue_id)),
        }
        for queue_id in sorted({queue_id for _, queue_id in found})
    ]


def _number(value: int, is_counted: bool) -> str:
    return f"{value:,}" if is_counted else f"at most {value:,}"


def _print_markers(partitions: Sequence[MarkerPartition], topic: str) -> None:
    output.print_table(
        f"Tracker of {topic}",
        (
            "partition",
            "open",
            "due",
            "lag",
            "position",
            "clock",
            "late",
            "copies",
            "dead",
            "engine",
        ),
        [_row(partition) for partition in partitions],
    )
    if all(partition.status is None for partition in partitions):
        output.note(f"No tracker has run here yet: {TRACKER_HERE}")


def _row(partition: MarkerPartition) -> tuple[Any, ...]:
    status = partition.status
    if status is None:
        return (partition.partition, *[None] * 9)
    return (
        partition.partition,
        status.entries,
        status.due,
        partition.lag,
        status.position,
        output.time_of(status.clock_ms)[11:],
        status.late_verdicts,
        status.redelivered,
        status.dead_lettered,
        f"{status.engine} {status.epoch}",
    )


def health(
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="The process's --metrics-port.")
    ] = 9400,
    host: Host = "localhost",
    live: Annotated[
        bool, typer.Option("--live", help="Ask only whether the process is alive (/live).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Ask a worker or tracker that serves --metrics-port whether it is alive and can work.

    Exit code 0: yes; 1: no, or nobody answers. Ready means for a worker that it runs and its
    handlers do not hang, for a tracker that it has read what its predecessor wrote, and redelivers.
    """
    path = "/live" if live else "/ready"
    found = _loops(host, port, path)
    if as_json:
        output.print_json(found)
    else:
        rows = [
            (
                loop["name"],
                loop["is_live"],
                loop["is_ready"],
                loop["age_s"],
                loop["max_age_s"],
                loop.get("error_text", ""),
            )
            for loop in found["loops"]
        ]
        columns = ("loop", "alive", "ready", "age in s", "at most", "now")
        output.print_table(f"{path[1:]}: {'yes' if found['ok'] else 'no'}", columns, rows)
    if not found["ok"]:
        raise typer.Exit(1)


def _loops(host: str, port: int, path: str) -> dict[str, Any]:
    try:
        found = json.loads(ask(host, port, path))
    except ValueError:
        found = None
    if not isinstance(found, dict) or "loops" not in found:
        raise not_ours(port)
    return found


def ask(host: str, port: int, path: str) -> bytes:
    """Return what a process answers at its metrics port."""
    connection = HTTPConnection(host, port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    except (OSError, HTTPException) as error:
        raise BrokerError(f"nobody answers at {host}:{port}: {error}", code="NO_ANSWER") from None
    finally:
        connection.close()


def not_ours(port: int) -> ConfigError:
    return ConfigError(f"--port {port}: what answers there is no --metrics-port of kafkamq")


_OF_QUEUES = (
    replace(Options.max_lease, says="The longest lease of your queues, in seconds."),
    replace(
        Options.redelivery_timeout,
        says="The shortest redelivery timeout of your queues, in seconds.",
    ),
)


@connected_if_named
@with_table("of_queues", *_OF_QUEUES)
def doctor(
    config: ServiceConfig | None,
    of_queues: dict[str, Any],
    topic: Topic = "",
    as_json: Json = False,
) -> None:
    """Check this machine, the brokers and the topics; exit code 1 when something cannot work.

    Without a broker's address only this machine is checked.
    """
    leases = converted(_OF_QUEUES, of_queues)
    checks = [*_machine()]
    if config is not None:
        checks += cluster_checks(config, **leases)
        if topic:
            checks += _of_queue(config, topic, max_lease_ms=leases["max_lease_ms"])
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
        try:
            yield Check("ok", package, metadata.version(package))
        except metadata.PackageNotFoundError:  # noqa: PERF203 - each one is looked for
            is_extra = package in EXTRAS
            whole = f"kafkamq[{EXTRAS[package]}]" if is_extra else "kafkamq"
            missing = f"missing; install with: pip install '{whole}'"
            yield Check("warn" if is_extra else "refuse", package, missing)
    yield from _tried("java", lambda: java_command(java_from(os.environ)))
    yield from _tried("spark", _spark)


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


def backends(
    as_json: Json = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as docs/backends.md has it.")
    ] = False,
) -> None:
    """Show what the four backends can do."""
    if markdown:
        sys.stdout.write(markdown_table())
    elif as_json:
        output.print_json({each.value: _facts(each) for each in Backend})
    else:
        output.print_table("Backends", ("", *heads()), rows())


def _facts(backend: Backend) -> dict[str, object]:
    found = CAPABILITIES[backend]
    return {
        "memory": found.memory,
        "orders": list(found.orders),
        "features": {each.name.lower(): each in found.features for each in Feature},
        "notes": {each.name.lower(): text for each, text in found.notes.items()},
        "lease": found.lease,
        "delivery_count": found.delivery_count,
        "max_workers": found.max_workers,
        "min_kafka": found.min_kafka,
    }
