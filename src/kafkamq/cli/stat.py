"""``stat``: backlog per queue, what the tracker says of each marker partition, and one worker."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kafkamq.cli import output
from kafkamq.cli.health import Host, ask, not_ours
from kafkamq.cli.options import TRACKER_HERE, Json, connected
from kafkamq.config import ServiceConfig
from kafkamq.markers.overview import MAX_SCANNED, MarkerPartition, overview
from kafkamq.transport.admin import require_brokers

# Label and value of a gauge in Prometheus' text form; queue ids need no escapes.
_FIGURE = re.compile(
    r'^kafkamq_(in_flight|ready|under_way|poll_age_seconds)\{queue="([^"]+)"\} (\S+)', re.MULTILINE
)


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
        output.print_json(
            {
                "namespace": config.namespace,
                "messages": found.messages,
                "messages_counted": found.messages_counted,
                "dead_letters": found.dead_letters,
                "dead_letters_counted": found.dead_letters_counted,
                "queues": [asdict(queue) for queue in found.queues],
                "markers": [_as_json(partition) for partition in found.markers],
                "worker": worker,
            }
        )
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
    """What a process says of each queue that it receives from."""
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
            "ready": found.get(("ready", queue_id)),  # of `markers` queues, as all that follows
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


def _as_json(partition: MarkerPartition) -> dict[str, Any]:
    return {
        "partition": partition.partition,
        "end": partition.end,
        "lag": partition.lag,
        "status": None if partition.status is None else asdict(partition.status),
    }
