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

__all__ = [
    "TRACKER_HERE",
    "Json",
    "MetricsPort",
    "connected",
    "connected_if_named",
    "connected_without_n",
    "serving_metrics",
]

TRACKER_HERE = "kafkamq tracker --engine local"
"""The tracker that needs nothing else: what every hint names."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
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
_CONNECTION: Mapping[str, object] = {
    "bootstrap_servers": Bootstrap,
    "namespace": Namespace,
    "kafka_property": Property,
    "config_file": ConfigFile,
}


@contextmanager
def serving_metrics(port: int | None) -> Iterator[None]:
    """Serve metrics and health while the block runs; None: don't."""
    if port is None:
        yield
        return
    with serve_metrics(port) as server:
        output.note(f"Metrics: http://localhost:{server.port}/metrics (also /live and /ready)")
        yield


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the connection options; it gets them as its first argument, ``config``."""
    return _with_options(command, service_config, _CONNECTION)


def connected_without_n(command: Callable[..., None]) -> Callable[..., None]:
    """As ``connected``, for a command with ``count``: a number behind ``-n`` is meant for that.

    It was the letter's only meaning in earlier releases; anything else is the namespace.
    """
    options = {**_CONNECTION, "namespace": LongNamespace, "letter": LetterN}
    return _with_options(command, service_config, options)


def connected_if_named(command: Callable[..., None]) -> Callable[..., None]:
    """As ``connected``; ``config`` is None when no broker is named anywhere."""
    return _with_options(
        command,
        lambda settings: service_config(settings) if settings.bootstrap_servers else None,
        _CONNECTION,
    )


def _with_options(
    command: Callable[..., None],
    make: Callable[[CliSettings], ServiceConfig | None],
    options: Mapping[str, object],
) -> Callable[..., None]:
    @wraps(command)
    def wrapper(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in options}
        letter = given.pop("letter", None)
        if letter is not None and letter.isascii() and letter.isdigit():
            arguments["count"] = arguments["count"] or int(letter)
        elif letter is not None:
            given["namespace"] = given["namespace"] or letter
        command(make(_settings(**given)), **arguments)

    parameters = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]
    keyword_only = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in parameters]
    signature = inspect.Signature([*keyword_only, *added], return_annotation=None)
    wrapper.__signature__ = signature  # type: ignore[attr-defined]  # functions may have one
    wrapper.__annotations__ = {item.name: item.annotation for item in signature.parameters.values()}
    del wrapper.__wrapped__  # Typer would read the inner signature
    return wrapper


def _settings(
    *,
    bootstrap_servers: str | None,
    namespace: str | None,
    kafka_property: list[str] | None,
    config_file: Path | None,
) -> CliSettings:
    return load_settings(
        bootstrap_servers=bootstrap_servers,
        namespace=namespace,
        properties=kafka_property or (),
        config=config_file,
    )
