"""Payloads as columns: by a schema of JSON, Avro or Protobuf, and what becomes of all others."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timezone
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from kafkamq.errors import ConfigError, SchemaRegistryError
from kafkamq.queue.json_values import BodyError
from kafkamq.queue.schemas.registry import Schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

BodySchema: TypeAlias = "str | StructType | Schema"
"""DDL or a StructType, of JSON; or what a ``SchemaRegistry`` made, of Avro or Protobuf."""
_Row: TypeAlias = "tuple[Any, str | None, str | None]"

MALFORMED = "the payload is no JSON of the schema"
NULL = "the payload is null"
_TEXT = "_kafkamq_text"
_PATIENCE = 12


def with_body(frame: DataFrame, schema: BodySchema, *, malformed: str = "reject") -> DataFrame:
    """Rows of ``messages`` with a column ``body``, their payload parsed by a schema.

    Args:
        frame: Rows with a column ``value``, of ``read_queue`` or of the view.
        schema: Of JSON as a StructType, or as DDL: ``customer STRING, items ARRAY<STRUCT<name:
            STRING>>``. Of Avro or Protobuf as ``SchemaRegistry.avro`` and ``protobuf`` make it:
            the columns are those of its definition, or of the newest one of its subject at this
            call; bodies that older and newer ones wrote are read as that.
        malformed: What does not parse, or has a field of another type, has a null ``body``, and:
            "reject": the columns ``verdict`` and ``reason`` that reject it; keep them with
            ``ack_token``. "keep": nothing more. A payload that is null is malformed.

    Raises:
        ConfigError: The schema cannot be one, or a column is taken.
        SchemaRegistryError: The registry does not say what the subject's schema is.
    """
    if malformed not in ("reject", "keep"):
        raise ConfigError(f"malformed is {malformed!r}: it must be reject or keep")
    added = ("body", "verdict", "reason") if malformed == "reject" else ("body",)
    taken = [name for name in added if name in frame.columns]
    if taken:
        raise ConfigError(f"column {taken[0]} is taken: with_body adds it; rename yours")
    if isinstance(schema, Schema):
        return _with_registered(frame, schema.newest(), rejects=malformed == "reject")
    return _with_json(frame, schema, rejects=malformed == "reject")


def _with_json(frame: DataFrame, schema: str | StructType, *, rejects: bool) -> DataFrame:
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as fn

    try:
        wanted = StructType.fromDDL(schema) if isinstance(schema, str) else schema
        if not isinstance(wanted, StructType) or not wanted.fields:
            raise ConfigError(f"schema is {schema!r}: it must name the fields of an object")
        parsed = fn.from_json(
            fn.col("value").cast("string"),
            StructType([*wanted.fields, StructField(_TEXT, StringType())]),
            {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _TEXT},
        )
        rows = frame.withColumn("body", parsed)
    except PySparkException as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"schema is {schema!r}: {first_line}") from error
    is_body = fn.col("body").isNotNull() & fn.col("body").getField(_TEXT).isNull()
    columns = {"body": fn.when(is_body, fn.col("body").dropFields(_TEXT))}
    if rejects:
        columns["verdict"] = fn.when(~is_body, fn.lit("reject"))
        columns["reason"] = fn.when(~is_body, fn.lit(MALFORMED))
    return rows.withColumns(columns)


def _with_registered(frame: DataFrame, schema: Schema, *, rejects: bool) -> DataFrame:
    from pyspark import cloudpickle

    added = StructType([StructField("body", body_type(schema))])
    if rejects:
        added = added.add("verdict", StringType()).add("reason", StringType())
    pickled: bytes = cloudpickle.dumps(schema)  # type: ignore[no-untyped-call]  # no hints
    return frame.mapInArrow(
        lambda parts: parse_parts(parts, pickled, added), StructType([*frame.schema, *added])
    )


# ---- in a worker


@lru_cache(maxsize=64)
def _schema_of(pickled: bytes) -> Schema:
    """One for all tasks of the process: it keeps what the registry has answered."""
    schema: Schema = pickle.loads(pickled)
    return schema


def parse_parts(
    parts: Iterator[pa.RecordBatch], pickled: bytes, added: StructType
) -> Iterator[pa.RecordBatch]:
    """Add the columns of ``with_body`` to rows, by a pickled schema."""
    schema = _schema_of(pickled)
    for part in parts:
        rows = [_row(schema, each) for each in _payloads(part)]
        if not rows:
            continue
        try:
            columns = _columns(rows, added)
        except Exception:  # noqa: BLE001 - as below: at least one of them
            columns = _columns([_fitting(row, added) for row in rows], added)
        for name in added.names:
            part = part.append_column(name, columns.column(name).chunk(0))
        yield part


def _columns(rows: Sequence[_Row], added: StructType) -> pa.Table:
    from pyspark.sql.conversion import LocalDataToArrowConversion

    cut = [row[: len(added)] for row in rows]
    return LocalDataToArrowConversion.convert(cut, added, False).combine_chunks()


def _fitting(row: _Row, added: StructType) -> _Row:
    try:
        _columns([row], added)
    except Exception as error:  # noqa: BLE001 - whatever a converter or Arrow raises
        return _unfit(error)
    return row


def _unfit(error: Exception) -> _Row:
    """The verdict of a body that parses; the error's text may have what was in the payload."""
    return None, "reject", f"it does not fit its column: {type(error).__name__}"


def _payloads(part: pa.RecordBatch) -> Iterator[tuple[bytes | None, list[tuple[str, Any]]]]:
    values = part.column("value").to_pylist()
    names = part.schema.names
    headers = part.column("headers").to_pylist() if "headers" in names else [None] * len(values)
    for value, of in zip(values, headers, strict=True):
        yield value, [(each["key"], each["value"]) for each in of or ()]


def _row(schema: Schema, given: tuple[bytes | None, list[tuple[str, Any]]]) -> _Row:
    payload, headers = given
    if payload is None:
        return None, "reject", NULL
    # Counts from the first question that nobody answered.
    until_s: float | None = None
    while True:
        try:
            body = schema.deserialize(payload, headers)
        except BodyError as error:  # noqa: PERF203 - asked again only where nobody answers
            return None, "reject", str(error)
        except SchemaRegistryError as error:
            # No verdict of any message: the source process renews the batch's leases meanwhile.
            now_s = time.monotonic()
            if until_s is None:
                until_s = now_s + _PATIENCE * schema.registry.timeout_s
            elif now_s > until_s:
                raise
            time.sleep(min(error.delay_s, 1.0))
        else:
            break
    try:
        return (_fields(body) if schema.kind == "protobuf" else body), None, None
    except Exception as error:  # noqa: BLE001 - of a value that Python's types do not have
        return _unfit(error)


def _fields(message: Any) -> dict[str, Any]:
    """Return a Protobuf message as a row; a field that knows that it is not set is null."""
    row: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.has_presence and not message.HasField(field.name):
            row[field.name] = None
        elif _is_map(field):
            of = field.message_type.fields_by_name["value"]
            row[field.name] = {key: _value(of, each) for key, each in value.items()}
        elif field.is_repeated:
            row[field.name] = [_value(field, each) for each in value]
        else:
            row[field.name] = _value(field, value)
    return row


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return value.ToDatetime(timezone.utc) if _is_time(field) else _fields(value)
    if field.cpp_type == field.CPPTYPE_UINT64:
        return Decimal(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return str(value) if known is None else known.name
    return value


# ---- types


def body_type(schema: Schema) -> StructType:
    """Return the columns that bodies of a schema have.

    Raises:
        ConfigError: It has what no column can hold.
    """
    if schema.kind == "avro":
        from fastavro.schema import parse_schema

        found = _avro_type(parse_schema(json.loads(schema.definition)), {}, "body")
        if not isinstance(found, StructType):
            raise ConfigError("the avro schema is no record: its bodies have no fields")
        return found
    if schema.kind == "protobuf":
        return _message_type(schema.definition.DESCRIPTOR, (), "body")
    raise ConfigError(
        f"schema is of {schema.kind}: bodies of a registry are columns with avro and protobuf"
    )


_AVRO: Mapping[str, DataType] = {
    "null": NullType(),
    "boolean": BooleanType(),
    "int": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "bytes": BinaryType(),
    "fixed": BinaryType(),
    "string": StringType(),
    "enum": StringType(),
}
# What the deserializer makes of a logical type: on another base it is ignored, as Avro says.
_AVRO_LOGICAL: Mapping[str, DataType] = {
    "int-date": DateType(),
    "long-timestamp-millis": TimestampType(),
    "long-timestamp-micros": TimestampType(),
    "long-local-timestamp-millis": TimestampNTZType(),
    "long-local-timestamp-micros": TimestampNTZType(),
}
_NO_COLUMN = ("int-time-millis", "long-time-micros")
_AVRO_DECIMAL = ("bytes-decimal", "fixed-decimal")
_MAX_PRECISION = 38


def _avro_type(schema: Any, known: dict[str, DataType | None], place: str) -> DataType:
    """Return the type of a schema as fastavro has parsed it: all names in it are full."""
    if isinstance(schema, list):
        members = [each for each in schema if each != "null"]
        if len(members) != 1:
            raise ConfigError(f"{place} is a union of {len(members)} types: no column has several")
        return _avro_type(members[0], known, place)
    if isinstance(schema, str):
        found = known.get(schema, _AVRO.get(schema))
        if found is None:
            raise ConfigError(f"{place} is {schema}, which contains itself: no column can hold it")
        return found
    if "name" in schema:
        known[schema["name"]] = None
    made = _avro_type_of(schema, known, place)
    if "name" in schema:
        known[schema["name"]] = made
    return made


def _avro_type_of(
    schema: Mapping[str, Any], known: dict[str, DataType | None], place: str
) -> DataType:
    kind = schema["type"]
    logical = f"{kind}-{schema.get('logicalType')}"
    if logical in _NO_COLUMN:
        raise ConfigError(f"{place} is of {schema['logicalType']}: no column can hold it")
    if kind == "array":
        return ArrayType(_avro_type(schema["items"], known, place))
    if kind == "map":
        return MapType(StringType(), _avro_type(schema["values"], known, place))
    if logical in _AVRO_DECIMAL:
        precision = schema.get("precision")
        if not precision or precision > _MAX_PRECISION:
            raise ConfigError(
                f"{place} is a decimal of precision {precision}: a column has {_MAX_PRECISION} "
                "digits at most"
            )
        return DecimalType(precision, schema.get("scale", 0))
    if kind not in ("record", "error"):
        return _AVRO_LOGICAL.get(logical) or _avro_type(kind, known, place)
    made = StructType()
    for field in schema["fields"]:
        made.add(field["name"], _avro_type(field["type"], known, f"{place}.{field['name']}"))
    return made


def _message_type(descriptor: Any, above: Sequence[str], place: str) -> StructType:
    """Return the type of a Protobuf message, which is in messages of the types ``above``."""
    if descriptor.full_name in above:
        name = descriptor.full_name
        raise ConfigError(f"{place} is {name}, which contains itself: no column can hold it")
    made = StructType()
    inside = (*above, descriptor.full_name)
    for field in descriptor.fields:
        kind = _field_type(field, inside, f"{place}.{field.name}")
        if field.is_repeated and not _is_map(field):
            kind = ArrayType(kind)
        made.add(field.name, kind)
    return made


def _field_type(field: Any, above: Sequence[str], place: str) -> DataType:
    if _is_map(field):
        of = field.message_type.fields_by_name
        value = _field_type(of["value"], above, place)
        return MapType(_field_type(of["key"], above, place), value)
    if field.message_type is not None:
        return TimestampType() if _is_time(field) else _message_type(
            field.message_type, above, place
        )  # fmt: skip
    kinds: Mapping[int, DataType] = {
        field.CPPTYPE_INT32: IntegerType(),
        field.CPPTYPE_INT64: LongType(),
        field.CPPTYPE_UINT32: LongType(),
        field.CPPTYPE_UINT64: DecimalType(20, 0),
        field.CPPTYPE_DOUBLE: DoubleType(),
        field.CPPTYPE_FLOAT: FloatType(),
        field.CPPTYPE_BOOL: BooleanType(),
        field.CPPTYPE_ENUM: StringType(),
    }
    is_bytes = field.type == field.TYPE_BYTES
    return kinds.get(field.cpp_type, BinaryType() if is_bytes else StringType())


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _is_time(field: Any) -> bool:
    return bool(field.message_type.full_name == "google.protobuf.Timestamp")
