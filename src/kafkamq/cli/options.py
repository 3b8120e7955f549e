"""Options that several commands share, and what they make of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from kafkamq.cli import output
from kafkamq.cli.settings import CliSettings, load_settings, service_config
from kafkamq.config import ServiceConfig
from kafkamq.metrics import serve_metrics

TRACKER_HERE = "kafkamq tracker --engine local"
"""The tracker that needs nothing else: what every hint names."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Topic = Annotated[
    str, typer.Option(help="The topic whose messages are all the queue's; default: shared.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Count what would be sent, and send nothing.")
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        min=0,
        max=65535,
        help="Port for /metrics, /live and /ready while the command runs; 0: a free one.",
    ),
]

Bootstrap = Annotated[
    str | None,
    typer.Option(
        "--bootstrap-servers",
        "-b",
        metavar="HOST:PORT[,...]",
        help="Kafka's brokers, host:port[,host:port...] (KAFKAMQ_BOOTSTRAP_SERVERS).",
    ),
]
_NAMESPACE_HELP = "Prefix of the topics (KAFKAMQ_NAMESPACE; default: kafkamq)."
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help=_NAMESPACE_HELP)]
LongNamespace = Annotated[str | None, typer.Option("--namespace", help=_NAMESPACE_HELP)]
LetterN = Annotated[
    str | None, typer.Option("-n", help="The namespace; a number is taken for --count.")
]
Property = Annotated[
    list[str] | None,
    typer.Option(
        "--property",
        "-p",
        metavar="NAME=VALUE",
        help="One of Kafka's own properties; may be repeated. No secrets here.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="File of settings and Kafka properties, TOML or *.properties; secrets belong there.",
    ),
]


@contextmanager
def serving_metrics(port: int | None) -> Iterator[None]:
    """Serve metrics and health while the block runs; None: don't."""
    if port is None:
        yield
        return
    with serve_metrics(port) as server:
        output.note(f"Metrics: http://localhost:{server.port}/metrics (also /live and /ready)")
        yield


def with_options(
    command: Callable[..., None],
    name: str,
    make: Callable[..., object],
    options: Mapping[str, inspect.Parameter] | None = None,
) -> Callable[..., None]:
    """Gives a command the options of ``make``; it gets what that makes of them as ``name``."""
    added = inspect.signature(make, eval_str=True).parameters if options is None else options

    @wraps(command)
    def wrapper(**arguments: Any) -> None:
        given = {option: arguments.pop(option) for option in added}
        letter = given.pop("letter", None)
        if letter is not None and letter.isascii() and letter.isdigit():
            arguments["count"] = arguments["count"] or int(letter)
        elif letter is not None:
            given["namespace"] = given["namespace"] or letter
        command(**{name: make(**given)}, **arguments)

    own = inspect.signature(command, eval_str=True).parameters
    parameters = [item for item in own.values() if item.name != name] + list(added.values())
    keyword_only = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in parameters]
    # A function may have one, whatever its type says.
    wrapper.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {item.name: item.annotation for item in keyword_only}
    del wrapper.__wrapped__  # Typer would read the inner signature
    return wrapper


def _settings(
    *,
    bootstrap_servers: Bootstrap = None,
    namespace: Namespace = None,
    kafka_property: Property = None,
    config_file: ConfigFile = None,
) -> CliSettings:
    return load_settings(
        bootstrap_servers=bootstrap_servers,
        namespace=namespace,
        properties=kafka_property or (),
        config=config_file,
    )


def _config(**given: Any) -> ServiceConfig:
    return service_config(_settings(**given))


_CONNECTION = inspect.signature(_settings, eval_str=True).parameters


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the connection options; it gets them as its first argument, ``config``."""
    return with_options(command, "config", _config, _CONNECTION)


def connected_without_n(command: Callable[..., None]) -> Callable[..., None]:
    """As ``connected``, for a command with ``count``: a number behind ``-n`` is meant for that.

    It was the letter's only meaning in earlier releases; anything else is the namespace.
    """
    namespace = _CONNECTION["namespace"]
    letter = namespace.replace(name="letter", annotation=LetterN)
    options = {**_CONNECTION, "namespace": namespace.replace(annotation=LongNamespace)}
    return with_options(command, "config", _config, {**options, "letter": letter})


def connected_if_named(command: Callable[..., None]) -> Callable[..., None]:
    """As ``connected``; ``config`` is None when no broker is named anywhere."""

    def make(**given: Any) -> ServiceConfig | None:
        settings = _settings(**given)
        return service_config(settings) if settings.bootstrap_servers else None

    return with_options(command, "config", make, _CONNECTION)
