"""``consume`` and ``work`` are the commands that run handlers of the user's modules."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Annotated

import typer

from kafkamq.cli import output
from kafkamq.cli.options import MetricsPort, connected, serving_metrics
from kafkamq.cli.queues import warn_of_unused
from kafkamq.config import ServiceConfig, wait_seconds
from kafkamq.errors import ConfigError
from kafkamq.parallel.consumer import ParallelConsumer
from kafkamq.runtime.memory import calm_collector
from kafkamq.runtime.signals import stop_on_signals
from kafkamq.runtime.worker import Worker
from kafkamq.transport.admin import require_brokers
from kafkamq.types import Backend

_SLICE_S = 0.2


Concurrency = Annotated[str, typer.Option(help='Handlers at once; "auto": as many as bring more.')]
MaxConcurrency = Annotated[
    int | None, typer.Option(min=1, help="The most that --concurrency auto may try.")
]
HungAfter = Annotated[
    float,
    typer.Option(min=0.001, help="Seconds that all handlers may hang until /live answers no."),
]


class Order(Enum):
    """The order that is kept among records."""

    KEY = "key"
    PARTITION = "partition"
    UNORDERED = "unordered"


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
def consume(
    config: ServiceConfig,
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
    ordering: Annotated[
        Order, typer.Option(help="What stays in order: key, partition or unordered.")
    ] = Order.KEY,
    concurrency: Concurrency = "16",
    max_concurrency: MaxConcurrency = None,
    processes: Annotated[
        int,
        typer.Option(min=0, help="Run a def handler in this many processes instead of threads."),
    ] = 0,
    max_attempts: Annotated[
        int | None,
        typer.Option(
            min=1, help="Attempts after which a record becomes a dead letter; default: no limit."
        ),
    ] = None,
    dead_letter_topic: Annotated[str, typer.Option(help="Topic for dead letters.")] = "",
    max_rate: Annotated[
        float | None, typer.Option(help="Process at most this many records a second.")
    ] = None,
    drain: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds after Ctrl-C to process the records that were read."),
    ] = 0.0,
    hung_after: HungAfter = 43_200.0,
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
        ordering=ordering.value,
        concurrency=at_once(concurrency),
        max_concurrency=max_concurrency,
        processes=processes,
        max_attempts=max_attempts,
        dead_letter_topic=dead_letter_topic,
        max_rate=max_rate,
        hung_after=hung_after,
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
    """Return the worker that ``module:worker`` names."""
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
    """Return what stands in a module under a name, which may have dots."""
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise ConfigError(f"the {what} is {name!r}: name it as {form}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the folder that the command was given in, as with python -m
    try:
        found: object = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the {what} {name!r} cannot be loaded: {error}") from error
    return found
