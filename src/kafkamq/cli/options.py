"""Here are the options that several commands share, and the settings that they, the environment
and a file make.

They count in this order. Only the commands read the environment: ``KAFKAMQ_BOOTSTRAP_SERVERS`` and
its like name the fields of ``CliSettings``; ``KAFKAMQ_KAFKA__SASL_PASSWORD`` is Kafka's property
``sasl.password``: what follows the two underscores, in lower case and with dots. A file is TOML, or
Java properties when its name ends in ``.properties``. Secrets come from the environment or a file,
never from an option: every user of a machine can read the arguments of its processes.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from kafkamq.cli import output
from kafkamq.config import TOPICS, ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.metrics import serve_metrics
from kafkamq.transport.settings import is_secret

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
# As Java reads them, but for names that end at a blank: those are more often words without a sign.
_PROPERTY = re.compile(r"((?:\\.|[^\\=:])+)[=:](.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


@dataclass(frozen=True, kw_only=True)
class CliSettings:
    """What the commands need to reach one namespace."""

    bootstrap_servers: str = ""
    namespace: str = "kafkamq"
    message_topic: str = ""
    marker_topic: str = ""
    dead_letter_topic: str = ""
    tracker_topic: str = ""
    ledger_topic: str = ""
    quarantine_topic: str = ""
    kafka: Mapping[str, str] = field(default_factory=dict, repr=False)


_SETTINGS = tuple(each.name for each in fields(CliSettings))
_VARIABLE, _KAFKA_VARIABLE = "kafkamq_", "kafkamq_kafka__"


def parse_properties(values: Sequence[str]) -> dict[str, str]:
    """Return the ``--property name=value`` options as a mapping."""
    result = {}
    for text in values:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigError(f"--property {name!r}: write it as name=value")
        if is_secret(name):
            variable = "KAFKAMQ_KAFKA__" + name.upper().replace(".", "_")
            raise ConfigError(
                f"--property {name}: a secret does not belong on the command line, where every "
                f"user of the machine can read it; set {variable}, or name a file with --config"
            )
        result[name] = value.strip()
    return result


def load_settings(
    *,
    bootstrap_servers: str | None = None,
    namespace: str | None = None,
    properties: Sequence[str] = (),
    config: Path | None = None,
) -> CliSettings:
    """Merges options over the environment over a file."""
    merged: dict[str, Any] = read_file(config) if config is not None else {}
    environment = _environment()
    kafka = {
        **merged.get("kafka", {}),
        **environment.pop("kafka", {}),
        **parse_properties(properties),
    }
    options = {"bootstrap_servers": bootstrap_servers, "namespace": namespace}
    merged |= environment
    merged |= {name: value for name, value in options.items() if value is not None}
    servers = kafka.pop("bootstrap.servers", "")
    merged["bootstrap_servers"] = merged.get("bootstrap_servers") or servers
    merged["kafka"] = kafka
    return CliSettings(**_checked(merged, where=str(config or "settings")))


def service_config(settings: CliSettings) -> ServiceConfig:
    """Return the library's settings from the commands' settings."""
    if not settings.bootstrap_servers:
        raise ConfigError(
            "no broker is named: pass --bootstrap-servers HOST:PORT, set "
            "KAFKAMQ_BOOTSTRAP_SERVERS, or start one here with 'kafkamq dev'"
        )
    topics = {name: getattr(settings, name) for name in TOPICS}
    return ServiceConfig(
        bootstrap_servers=settings.bootstrap_servers,
        namespace=settings.namespace,
        kafka=settings.kafka,
        **topics,
    )


def _environment() -> dict[str, Any]:
    """Return the fields that the environment sets, Kafka's properties with their dots."""
    values: dict[str, Any] = {}
    kafka: dict[str, str] = {}
    for variable, value in os.environ.items():
        name = variable.lower()
        if name.startswith(_KAFKA_VARIABLE):
            kafka[name.removeprefix(_KAFKA_VARIABLE)] = value
        elif name.removeprefix(_VARIABLE) in _SETTINGS and name.startswith(_VARIABLE):
            values[name.removeprefix(_VARIABLE)] = value
    if "kafka" in values:
        kafka = {**_json_object(values["kafka"]), **kafka}
    if kafka:
        values["kafka"] = {_property_name(name.lower()): value for name, value in kafka.items()}
    return values


def _json_object(text: str) -> dict[str, str]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ConfigError(
            "environment KAFKAMQ_KAFKA: it is no JSON object of texts; set one variable for each "
            "of Kafka's properties, as KAFKAMQ_KAFKA__SASL_PASSWORD"
        )
    return found


def _property_name(variable: str) -> str:
    """Return Kafka's name of what follows the two underscores; one property has an underscore
    itself.
    """
    return variable if variable == "log_level" else variable.replace("_", ".")


def _checked(values: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Validates merged values; messages name fields, never values: one may be a secret."""
    for name, value in values.items():
        if name not in _SETTINGS:
            known = ", ".join(_SETTINGS)
            raise ConfigError(f"{where}: unknown setting {name!r}; known are {known}")
        if name != "kafka" and not isinstance(value, str):
            raise ConfigError(f"{where}: {name} must be a text")
    for name, value in values["kafka"].items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}: kafka.{name} must be a text, a number, true or false")
    return dict(values)


def read_file(path: Path) -> dict[str, Any]:
    """Settings from a TOML file, or from Java properties (``*.properties``)."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows write a mark in front
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot read it ({error})") from None
    if path.suffix.lower() == ".properties":
        return _from_properties(text, path)
    return _from_toml(text, path)


def _from_properties(text: str, path: Path) -> dict[str, Any]:
    """``kafkamq.namespace=...`` and its like are ours, everything else is Kafka's."""
    ours: dict[str, Any] = {}
    kafka: dict[str, str] = {}
    for number, line in _logical_lines(text):
        found = _PROPERTY.fullmatch(line)
        if found is None:
            raise ConfigError(f"--config {path}, line {number}: write it as name=value")
        name, value = (_ESCAPE.sub(_unescaped, part.strip()) for part in found.groups())
        if name.startswith("kafkamq."):
            ours[name.removeprefix("kafkamq.").replace(".", "_").replace("-", "_")] = value
        else:
            kafka[name] = value
    return {**ours, "kafka": kafka}


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPES.get(code, code)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Number and text of each line that says something, with what it goes on with."""
    line, first = "", 0
    for number, raw in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        part = raw.lstrip()
        if not line and (not part or part[0] in "#!"):
            continue
        first = first or number
        line += part
        if (len(part) - len(part.rstrip("\\"))) % 2:
            line = line[:-1]
            continue
        yield first, line
        line, first = "", 0
    if line:
        yield first, line


def _from_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[no-redef,import-not-found,unused-ignore]
        except ModuleNotFoundError:
            raise ConfigError(
                f"--config {path}: reading TOML needs Python 3.11 or the package tomli; "
                "a .properties file works without"
            ) from None
    try:
        values: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path}: {error}") from None
    kafka = values.get("kafka", {})
    if not isinstance(kafka, dict):
        raise ConfigError(f"--config {path}: kafka must be a table of Kafka's properties")
    values["kafka"] = {name: _property_text(value) for name, value in _flatten(kafka).items()}
    return values


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``sasl.password`` may be written with or without quotes, where TOML makes tables of it."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _property_text(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


# What commands share.


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
        command(**{name: make(**given)}, **arguments)

    own = inspect.signature(command, eval_str=True).parameters
    parameters = [item for item in own.values() if item.name != name] + list(added.values())
    keyword_only = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in parameters]
    # A function may have one, whatever its type says.
    wrapper.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {item.name: item.annotation for item in keyword_only}
    del wrapper.__wrapped__  # Typer would read the inner signature
    return wrapper


def with_fields(command: Callable[..., None], name: str, kind: type[Any]) -> Callable[..., None]:
    """Gives a command the options that the fields of a dataclass tell of; it gets one as ``name``.

    Such a field has metadata: ``flag``, ``help``, ``metavar``, and ``parse`` with its ``text``.
    """
    told = {each.name: each for each in fields(kind) if "flag" in each.metadata}
    types = get_type_hints(kind)
    options = {}
    for each in told.values():
        has_text = "parse" in each.metadata
        option = typer.Option(
            each.metadata["flag"],
            help=each.metadata["help"],
            metavar=each.metadata.get("metavar"),
        )
        options[each.name] = inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.metadata["text"] if has_text else each.default,
            annotation=Annotated[str if has_text else types[each.name], option],
        )

    def make(**given: Any) -> object:
        parsed = {
            each: told[each].metadata.get("parse", lambda value: value)(value)
            for each, value in given.items()
        }
        return kind(**parsed)

    return with_options(command, name, make, options)


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


def connected_if_named(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a connection; ``config`` is None when no broker is named anywhere."""

    def make(**given: Any) -> ServiceConfig | None:
        settings = _settings(**given)
        return service_config(settings) if settings.bootstrap_servers else None

    return with_options(command, "config", make, _CONNECTION)
