"""Clients and serdes of a schema registry: only this module imports Confluent's.

Without the extra ``schemas`` it cannot be imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError as RefusedError
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from kafkamq.errors import ConfigError, SchemaRegistryError
from kafkamq.queue.json_values import BodyError
from kafkamq.queue.wire.headers import clean
from kafkamq.types import Header

# These are the registry's own codes; another 404 does not come from a registry.
_NOT_FOUND = range(40400, 40500)
# The schema is incompatible, or invalid.
_REFUSED = (409, 422)
# What serdes ask of the client, of which each can ask the registry.
_QUESTIONS = (
    "get_latest_version", "get_schema", "get_schema_by_guid", "get_version", "lookup_schema",
    "register_schema", "register_schema_full_response",
)  # fmt: skip


def make_client(settings: Mapping[str, Any]) -> SchemaRegistryClient:
    """Return a client whose errors are ours."""
    try:
        client = SchemaRegistryClient(dict(settings))
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(f"the settings of the schema registry: {error}") from None
    for name in _QUESTIONS:
        setattr(client, name, _translated(getattr(client, name)))
    return client


def _translated(method: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*given: Any, **named: Any) -> Any:
        try:
            return method(*given, **named)
        except (SchemaRegistryError, BodyError, ConfigError):
            raise
        except RefusedError as error:
            if error.error_code in _NOT_FOUND:
                raise BodyError(clean(f"the registry has none: {error.error_message}")) from None
            if error.http_status_code in _REFUSED:
                raise ConfigError(
                    clean(f"the registry refuses the schema: {error.error_message}")
                ) from None
            raise SchemaRegistryError(
                f"the schema registry answers with HTTP status {error.http_status_code}"
            ) from None
        except Exception as error:  # noqa: BLE001 - whatever its HTTP client raises
            raise SchemaRegistryError(
                clean(f"the schema registry cannot be asked: {type(error).__name__}: {error}")
            ) from None

    return ask


def make_reader(
    kind: str, client: SchemaRegistryClient, schema: Any
) -> Callable[[bytes, Sequence[Header]], Any]:
    """Reads framed payloads; those of Protobuf without asking."""
    conf = {"subject.name.strategy": _no_subject}
    read: Any
    if kind == "avro":
        read = AvroDeserializer(client, schema, conf=conf)
    elif kind == "json":
        conf["validate"] = True  # type: ignore[assignment]  # settings are of any type
        read = JSONDeserializer(schema, schema_registry_client=client, conf=conf)
    else:
        read = ProtobufDeserializer(schema, conf)

    def parse(payload: bytes, headers: Sequence[Header]) -> Any:
        try:
            return read(payload, SerializationContext("", MessageField.VALUE, list(headers)))
        except (SchemaRegistryError, BodyError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a parser raises
            raise BodyError(f"it does not parse by its schema: {_reason(error)}") from None

    return parse


def make_writer(
    kind: str, client: SchemaRegistryClient, schema: Any, subject: str, *, register: bool
) -> Callable[[Any], bytes]:
    """Frames values; of ``avro`` and ``json`` dicts, dataclasses and pydantic models."""
    conf = {
        "auto.register.schemas": register,
        "subject.name.strategy": lambda context, name: subject,
    }
    write: Any
    if kind == "avro":
        write = AvroSerializer(client, schema, _plain, conf)
    elif kind == "json":
        write = JSONSerializer(schema, client, _plain, conf)
    else:
        write = ProtobufSerializer(schema, client, conf)

    def serialize(value: Any) -> bytes:
        try:
            framed: bytes = write(value, SerializationContext(subject, MessageField.VALUE, []))
        except (SchemaRegistryError, ConfigError):
            raise
        except BodyError as error:
            raise ConfigError(f"subject {subject!r}: {error}") from None
        except Exception as error:  # noqa: BLE001 - as above
            raise ConfigError(
                f"the value does not fit the schema of {subject!r}: {_reason(error)}"
            ) from None
        return framed

    return serialize


def _no_subject(context: object, name: object) -> None:
    """Reading needs a schema's id alone."""
    del context, name


def _plain(value: Any, context: object) -> Any:
    del context
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    dump = getattr(value, "model_dump", None)
    return value if dump is None else dump()


def _reason(error: Exception) -> str:
    cause = error.__context__
    rule, path = getattr(cause, "validator", None), getattr(cause, "json_path", None)
    if rule is not None and path is not None:
        return clean(f"{path} breaks the schema's {rule!r}")
    name = type(error).__name__
    return clean(f"{name}: {error}") if name == "SchemaResolutionError" else name
