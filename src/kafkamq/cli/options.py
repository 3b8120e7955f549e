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
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TextIO, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from kafkamq.cli import output
from kafkamq.config import Option, ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.metrics import serve_metrics
from kafkamq.transport.settings import is_secret

TRACKER_HERE = "kafkamq tracker --engine local"
"""The tracker that needs nothing else: what every hint names."""


class Command(TyperCommand):
    """A command whose help shows no type behind flags, as they take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """A group of such commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


def _without_types(parameters: list[Any]) -> list[Any]:
    for each in parameters:
        if getattr(each, "is_flag", False):
            each.metavar = ""
    return parameters


def command_group(says: str, commands: Mapping[str, Callable[..., None]]) -> typer.Typer:
    group = typer.Typer(cls=Group, help=says, no_args_is_help=True)
    for name, command in commands.items():
        group.command(name, cls=Command)(command)
    return group


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
class CliSettings(ServiceConfig):
    """Settings as they were read; ``service_config`` checks them, as some commands need none."""

    bootstrap_servers: str = ""

    def __post_init__(self) -> None: ...


_SETTINGS = tuple(each.name for each in fields(CliSettings))
_VARIABLE, _KAFKA_VARIABLE = "kafkamq_", "kafkamq_kafka__"


def parse_pairs(
    option: str, texts: Sequence[str], form: str, instead: Callable[[str], str]
) -> dict[str, str]:
    """Return properties that are given as ``name=value``; ``instead`` says where secrets belong."""
    result = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigError(f"{option} {name!r}: write it as {form}")
        if is_secret(name):
            raise ConfigError(
                f"{option} {name}: a secret does not belong on the command line, where every user "
                f"of the machine can read it; {instead(name)}"
            )
        result[name] = value.strip()
    return result


def parse_properties(values: Sequence[str]) -> dict[str, str]:
    """Return the ``--property name=value`` options as a mapping."""

    def instead(name: str) -> str:
        variable = _KAFKA_VARIABLE.upper() + name.upper().replace(".", "_")
        return f"set {variable}, or name a file with --config"

    return parse_pairs("--property", values, "name=value", instead)


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
    if not settings.bootstrap_servers:
        raise ConfigError(
            "no broker is named: pass --bootstrap-servers HOST:PORT, set "
            "KAFKAMQ_BOOTSTRAP_SERVERS, or start one here with 'kafkamq dev'"
        )
    return ServiceConfig(**{name: getattr(settings, name) for name in _SETTINGS})


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
    """Return Kafka's name of what follows the two underscores."""
    # One property has an underscore itself.
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


@contextmanager
def reading(option: str, path: Path | str) -> Iterator[TextIO]:
    """Open a text that an option names; without the mark that editors of Windows write in front."""
    try:
        with Path(path).open(encoding="utf-8-sig") as opened:
            yield opened
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path}: cannot read it ({error})") from None


def read_file(path: Path) -> dict[str, Any]:
    """Settings from a TOML file, or from Java properties (``*.properties``)."""
    with reading("--config", path) as opened:
        text = opened.read()
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
    except ModuleNotFoundError:
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
        output.note(
            f"Metrics: http://localhost:{server.port}/metrics (also /live, /ready and /handlers)"
        )
        yield


@contextmanager
def ends_by_sigterm() -> Iterator[None]:
    """SIGTERM removes all that was made, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
    # Typer would read the inner signature.
    del wrapper.__wrapped__
    return wrapper


def with_table(
    name: str, *options: Option[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command options of the table; it gets what is said of them as a dict, ``name``."""
    parameters = {}
    for each in options:
        kind: Any = each.kind if each.default is not None else each.kind | None
        limits: dict[str, Any] = {}
        if each.kind in (int, float):
            limits = {"min": each.least, "max": each.most if each.most < math.inf else None}
        metavar = "|".join(each.choices) or None
        told = typer.Option(help=each.says, metavar=metavar, **limits)
        parameters[each.name] = _parameter(each.name, each.default, kind, told)
    return lambda command: with_options(command, name, dict, parameters)


def with_fields(command: Callable[..., None], name: str, kind: type[Any]) -> Callable[..., None]:
    """Gives a command the options that the fields of a dataclass tell of; it gets one as ``name``.

    Such a field has metadata: ``flag``, ``help``, ``metavar``, and ``parse`` with its ``text``.
    """
    types, parameters, parsers = get_type_hints(kind), {}, {}
    for each in fields(kind):
        of = each.metadata
        if "flag" in of:
            told = typer.Option(of["flag"], help=of["help"], metavar=of.get("metavar"))
            default, annotation = of.get("text", each.default), types[each.name]
            if "parse" in of:
                annotation, parsers[each.name] = str, of["parse"]
            parameters[each.name] = _parameter(each.name, default, annotation, told)

    def make(**given: Any) -> object:
        return kind(**given | {each: parse(given[each]) for each, parse in parsers.items()})

    return with_options(command, name, make, parameters)


def _parameter(name: str, default: object, annotation: Any, told: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[annotation, told],
    )


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
