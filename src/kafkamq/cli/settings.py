"""Where the commands take their settings from: options, environment, file, in this order.

Only the commands read the environment. ``KAFKAMQ_BOOTSTRAP_SERVERS`` and its like name the fields
of ``CliSettings``; ``KAFKAMQ_KAFKA__SASL_PASSWORD`` is Kafka's property ``sasl.password``: what
follows the two underscores, in lower case and with dots. A file is TOML, or Java properties when
its name ends in ``.properties``. Secrets come from the environment or a file, never from an option:
every user of a machine can read the arguments of its processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from kafkamq.config import TOPICS, ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.transport.settings import is_secret


class CliSettings(BaseSettings):
    """What the commands need to reach one namespace."""

    model_config = SettingsConfigDict(
        env_prefix="KAFKAMQ_",
        env_nested_delimiter="__",
        extra="forbid",
        env_parse_none_str="\0",  # no text is none: `null` may be a password, `none` a codec
    )

    bootstrap_servers: str = ""
    namespace: str = "kafkamq"
    message_topic: str = ""
    marker_topic: str = ""
    dead_letter_topic: str = ""
    tracker_topic: str = ""
    ledger_topic: str = ""
    quarantine_topic: str = ""
    kafka: dict[str, str] = Field(default_factory=dict, repr=False)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Reads the environment only; ``load_settings`` lays the file below and options above."""
        del settings_cls, init_settings, dotenv_settings, file_secret_settings
        return (env_settings,)


def parse_properties(values: Sequence[str]) -> dict[str, str]:
    """The ``--property name=value`` options as a mapping."""
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
    return CliSettings.model_construct(**_checked(merged, where=str(config or "settings")))


def service_config(settings: CliSettings) -> ServiceConfig:
    """The library's settings from the commands' settings."""
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
    """The fields that the environment sets, Kafka's properties with their dots."""
    try:
        read = CliSettings()
    except ValidationError as error:
        raise ConfigError(f"environment KAFKAMQ_*: {_complaints(error)}") from None
    except SettingsError:
        raise ConfigError(
            "environment KAFKAMQ_KAFKA: it is no JSON object; set one variable for each of Kafka's "
            "properties, as KAFKAMQ_KAFKA__SASL_PASSWORD"
        ) from None
    values = {name: getattr(read, name) for name in read.model_fields_set}
    if "kafka" in values:
        values["kafka"] = {
            _property_name(name.lower()): value for name, value in values["kafka"].items()
        }
    return values


def _property_name(variable: str) -> str:
    """Kafka's name of what follows the two underscores; one property has an underscore itself."""
    return variable if variable == "log_level" else variable.replace("_", ".")


def _checked(values: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Validates merged values; messages name fields, never values: one may be a secret."""
    fields = CliSettings.model_fields
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(f"{where}: unknown setting {name!r}; known are {', '.join(fields)}")
        if name != "kafka" and not isinstance(value, str):
            raise ConfigError(f"{where}: {name} must be a text")
    kafka = values["kafka"]
    for name, value in kafka.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}: kafka.{name} must be a text, a number, true or false")
    defaults = {
        name: field.get_default(call_default_factory=True) for name, field in fields.items()
    }
    return {**defaults, **values}


def _complaints(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()
    )


def read_file(path: Path) -> dict[str, Any]:
    """Settings from a TOML file, or from Java properties (``*.properties``)."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows write a mark in front
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot read it ({error})") from None
    if path.suffix.lower() == ".properties":
        return _from_properties(text, path)
    return _from_toml(text, path)


# As Java reads them, but for names that end at a blank: those are more often words without a sign.
_PROPERTY = re.compile(r"((?:\\.|[^\\=:])+)[=:](.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


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
