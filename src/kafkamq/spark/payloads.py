"""Payloads as columns: JSON by a schema, and what becomes of a payload that is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.types import StringType, StructField, StructType

from kafkamq.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MALFORMED = "the payload is no JSON of the schema"
_TEXT = "_kafkamq_text"  # of a payload that does not parse


def with_body(
    frame: DataFrame, schema: str | StructType, *, malformed: str = "reject"
) -> DataFrame:
    """Rows of ``messages`` with a column ``body``, their payload parsed as JSON.

    Args:
        frame: Rows with a column ``value``, of ``read_queue`` or of the view.
        schema: As a StructType, or as DDL: ``customer STRING, items ARRAY<STRUCT<name: STRING>>``.
        malformed: What does not parse, or has a field of another type, has a null ``body``, and:
            "reject": the columns ``verdict`` and ``reason`` that reject it; keep them with
            ``ack_token``. "keep": nothing more. A payload that is null is malformed.

    Raises:
        ConfigError: The schema cannot be one, or a column is taken.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as fn

    if malformed not in ("reject", "keep"):
        raise ConfigError(f"malformed is {malformed!r}: it must be reject or keep")
    added = ("body", "verdict", "reason") if malformed == "reject" else ("body",)
    taken = [name for name in added if name in frame.columns]
    if taken:
        raise ConfigError(f"column {taken[0]} is taken: with_body adds it; rename yours")
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
    if malformed == "reject":
        columns["verdict"] = fn.when(~is_body, fn.lit("reject"))
        columns["reason"] = fn.when(~is_body, fn.lit(MALFORMED))
    return rows.withColumns(columns)
