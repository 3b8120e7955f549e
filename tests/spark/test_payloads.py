"""Bodies of Avro and Protobuf as columns, where no registry is asked: types, rows, refusals."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import pytest
from google.api.distribution_pb2 import Distribution
from google.api.monitored_resource_pb2 import MonitoredResource
from google.protobuf.struct_pb2 import Struct

from kafkamq import ConfigError, SchemaRegistry
from kafkamq.spark import with_body
from kafkamq.spark.payloads import body_type

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

NOBODY = SchemaRegistry("http://127.0.0.1:9")


def field(name: str, kind: object) -> dict[str, object]:
    return {"name": name, "type": kind}


def record(*fields: dict[str, object], name: str = "Order") -> dict[str, object]:
    return {"type": "record", "name": name, "namespace": "shop", "fields": list(fields)}


def test_columns_of_avro() -> None:
    currency = {"type": "enum", "name": "Currency", "symbols": ["EUR"]}
    price = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
    schema = record(
        field("id", "long"),
        field("at", ["null", {"type": "long", "logicalType": "timestamp-millis"}]),
        field("lines", {"type": "array", "items": record(field("price", price), name="Line")}),
        field("tags", {"type": "map", "values": ["int", "null"]}),
        field("paid_in", currency),
        field("was_in", ["null", "Currency"]),
        field("hash", {"type": "fixed", "name": "Hash", "size": 4}),
        field("key", {"type": "string", "logicalType": "uuid"}),
    )
    found = body_type(NOBODY.avro(json.dumps(schema)))
    assert found.simpleString() == (
        "struct<id:bigint,at:timestamp,lines:array<struct<price:decimal(9,2)>>,"
        "tags:map<string,int>,paid_in:string,was_in:string,hash:binary,key:string>"
    )


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (record(field("a", ["int", "string"])), "body.a is a union of 2 types"),
        (record(field("a", ["null", "Order"])), "body.a is shop.Order, which contains itself"),
        (record(field("a", {"type": "int", "logicalType": "time-millis"})), "is of time-millis"),
        ("string", "is no record"),
    ],
)
def test_what_no_column_can_hold_is_refused(schema: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        body_type(NOBODY.avro(json.dumps(schema)))


def test_other_refusals() -> None:
    with pytest.raises(ConfigError, match=r"is google\.protobuf\.Struct, which contains itself"):
        body_type(NOBODY.protobuf(Struct))
    with pytest.raises(ConfigError, match="schema is of json"):
        body_type(NOBODY.json('{"type": "object"}'))


def test_rows_of_protobuf(spark: SparkSession) -> None:
    made = Distribution(count=3, bucket_counts=[1, 2], range=Distribution.Range(min=1.5))
    made.exemplars.add(value=2.0).timestamp.FromSeconds(1)
    payloads = [b"\0\0\0\0\7\0" + made.SerializeToString(), b"\0\0\0\0\7\0\xff", b"none", None]
    frame = spark.createDataFrame([(each,) for each in payloads], "value BINARY").coalesce(1)
    first, *others = with_body(frame, NOBODY.protobuf(Distribution)).collect()
    body = first.body
    assert (body["count"], body.bucket_counts, body.range.min, body.bucket_options) == (
        3, [1, 2], 1.5, None,
    )  # fmt: skip
    (exemplar,) = body.exemplars
    moment = spark.createDataFrame([(datetime.fromtimestamp(1, timezone.utc),)], ["at"]).first()
    assert moment is not None
    assert (exemplar.value, exemplar.timestamp) == (2.0, moment["at"])
    assert (first.verdict, first.reason) == (None, None)
    assert [(row.body, row.verdict) for row in others] == [(None, "reject")] * 3
    assert others[0].reason.startswith("it does not parse by its schema")
    assert others[1].reason == "the payload has no id of a schema in front"
    assert others[2].reason == "the payload is null"
    labels = MonitoredResource(type="host", labels={"zone": "a"}).SerializeToString()
    maps = spark.createDataFrame([(b"\0\0\0\0\7\0" + labels,)], "value BINARY")
    kept = with_body(maps, NOBODY.protobuf(MonitoredResource), malformed="keep")
    assert kept.columns == ["value", "body"]
    assert [row.labels for row in kept.select("body.labels").collect()] == [{"zone": "a"}]
