"""``stat``: backlog per queue, and what the tracker says of each marker partition."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from kafkamq.cli import output
from kafkamq.cli.options import TRACKER_HERE, Json, connected
from kafkamq.config import ServiceConfig
from kafkamq.markers.overview import MAX_SCANNED, MarkerPartition, overview
from kafkamq.transport.admin import require_brokers


@connected
def stat(
    config: ServiceConfig,
    max_scanned: Annotated[
        int,
        typer.Option(
            min=0, help="Count a queue's messages if at most this many records have to be read."
        ),
    ] = MAX_SCANNED,
    as_json: Json = False,
) -> None:
    """Show backlogs, and what the tracker does."""
    require_brokers(config)
    found = overview(config, max_scanned=max_scanned)
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
    output.print_table(
        f"Tracker of {config.marker_topic}",
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
        [_row(partition) for partition in found.markers],
    )
    if all(partition.status is None for partition in found.markers):
        output.note(f"No tracker has run here yet: {TRACKER_HERE}")


def _number(value: int, is_counted: bool) -> str:
    return f"{value:,}" if is_counted else f"at most {value:,}"


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
