"""``consume`` and ``work`` are the commands that run handlers of the user's modules."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from kafkamq.cli import output
from kafkamq.cli.options import MetricsPort, connected, serving_metrics, with_table
from kafkamq.cli.queues import warn_of_unused
from kafkamq.config import Options, ServiceConfig, wait_seconds
from kafkamq.errors import ConfigError
from kafkamq.parallel.consumer import ParallelConsumer
from kafkamq.runtime.memory import calm_collector
from kafkamq.runtime.signals import stop_on_signals
from kafkamq.runtime.worker import Worker
from kafkamq.transport.admin import require_brokers
from kafkamq.types import Backend

_SLICE_S = 0.2


def load_handler(name: str) -> Callable[..., object]:
    """Return the function that ``module:function`` names."""
    found = load_named(name, "handler", form="module:function")
    if not callable(found):
        raise ConfigError(f"the handler {name!r} is no function")
    return found


def at_once(text: str) -> int | str:
    """Return what ``--concurrency`` says; the consumer refuses what is neither."""
    return int(text) if text.isascii() and text.isdecimal() else text


@connected
@with_table(
    "settings", Options.ordering, Options.max_concurrency, Options.processes, Options.max_attempts,
    Options.max_rate, Options.hung_after,
)  # fmt: skip
def consume(
    config: ServiceConfig,
    settings: dict[str, Any],
    handler: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Function (def or async def) that is called with each record.",
        ),
    ],
    topic: Annotated[
        list[str], typer.Option("--topic", "-t", help="Topic to read; may be repeated.")
    ],
    group: Annotated[str, typer.Option("--group", "-g", help="The consumer group.")],
    concurrency: Annotated[str, typer.Option(help=Options.concurrency.says)] = str(
        Options.concurrency.default
    ),
    dead_letter_topic: Annotated[str, typer.Option(help="Topic for dead letters.")] = "",
    drain: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds after Ctrl-C to process the records that were read."),
    ] = 0.0,
    metrics_port: MetricsPort = None,
) -> None:
    """Process records with a function, many at once, until Ctrl-C."""
    function, drain_s = load_handler(handler), wait_seconds(drain, name="--drain")
    stopping = threading.Event()
    consumer = ParallelConsumer(
        topic,
        group_id=group,
        bootstrap_servers=config.bootstrap_servers,
        kafka=config.kafka,
        concurrency=at_once(concurrency),
        dead_letter_topic=dead_letter_topic,
        **settings,
    )
    calm_collector()
    stop_on_signals(stopping.set, at_once=partial(consumer.close, 0.0))
    require_brokers(config)
    with serving_metrics(metrics_port):
        try:
            consumer.poll(function)
            output.note(f"Processing {', '.join(topic)} as {group}; Ctrl-C ends it.")
            while not stopping.is_set():
                if consumer.wait(_SLICE_S):
                    break
        finally:
            consumer.close(drain=drain_s)


def load_worker(name: str) -> Worker:
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


def load_named(name: str, what: str, *, form: str) -> object:
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise ConfigError(f"the {what} is {name!r}: name it as {form}")
    if "" not in sys.path:
        # The folder that the command was given in is searched, as with ``python -m``.
        sys.path.insert(0, "")
    try:
        found: object = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the {what} {name!r} cannot be loaded: {error}") from error
    return found
