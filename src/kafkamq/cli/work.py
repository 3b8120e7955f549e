"""``work``: runs the worker of a user's module."""

from __future__ import annotations

from typing import Annotated

import typer

from kafkamq.cli import output
from kafkamq.cli.loading import load_named
from kafkamq.cli.mistyped import warn_of_unused
from kafkamq.cli.options import MetricsPort, serving_metrics
from kafkamq.errors import ConfigError
from kafkamq.runtime.worker import Worker
from kafkamq.transport.admin import require_brokers
from kafkamq.types import Backend


def load_worker(name: str) -> Worker:
    """The worker that ``module:worker`` names."""
    found = load_named(name, "worker", form="module:worker")
    if not isinstance(found, Worker):
        raise ConfigError(f"{name} is a {type(found).__name__}: it must be a kafkamq.Worker")
    return found


def work(
    worker: Annotated[
        str, typer.Argument(metavar="MODULE:WORKER", help="The kafkamq.Worker to run.")
    ],
    metrics_port: MetricsPort = None,
) -> None:
    """Run a worker's handlers until SIGTERM or Ctrl-C, then let them end."""
    found = load_worker(worker)
    config = found.service_config
    if config is not None:
        require_brokers(config)
        for queue in found.queues:
            if queue.backend is Backend.MARKERS and not queue.topic:
                warn_of_unused(config, queue.queue_id, queue.group_id)
    with serving_metrics(metrics_port):
        output.note(f"Working as {worker}; Ctrl-C ends it.")
        found.run()
