"""Bodies of Avro and Protobuf as columns, where no registry is asked: types, rows, refusals."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from fastavro import parse_schema, schemaless_writer
from google.api.distribution_pb2 import Distribution
from google.api.monitored_resource_pb2 import MonitoredResource
from google.protobuf.struct_pb2 import Struct
from pyspark.sql.types import StructType

from kafkamq import ConfigError, SchemaRegistry
from kafkamq.spark import payloads, with_body
from kafkamq.spark.payloads import body_type, parse_parts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kafkamq.queue.schemas.registry import Schema

pytestmark = pytest.mark.spark

NOBODY = SchemaRegistry("http://127.0.0.1:9")


def field(name: str, kind: object) -> dict[str, object]:
    return {"name": name, "type": kind}


def record(*fields: dict[str, object], name: str = "Order") -> dict[str, object]:
    return {"type": "record", "name": name, "namespace": "shop", "fields": list(fields)}


def decimal(precision: int | None) -> dict[str, object]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": 0}


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
        (record(field("a", decimal(39))), "body.a is a decimal of precision 39: .* 38 digits"),
        (record(field("a", decimal(None))), "body.a is a decimal of precision None"),
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


def test_a_subject_whose_schema_refers_to_others_is_refused(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(b"x",)], "value BINARY")
    money = {"name": "shop.Money", "subject": "money", "version": 1}
    newest = record(field("a", "shop.Money"))
    named = {"subject": "orders", "id": 7, "version": 1, "references": [money]}
    with (
        registry_of({0: newest}, **named) as registry,
        pytest.raises(ConfigError, match=r"'orders': its schema refers to those of shop\.Money"),
    ):
        with_body(frame, registry.avro(subject="orders"))


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


@contextmanager
def registry_of(
    schemas: Mapping[int, object], refusals: int = 0, **others: object
) -> Iterator[SchemaRegistry]:
    """A registry that answers the first questions of each schema with 503; 0 is the newest one."""
    left = dict.fromkeys(schemas, refusals)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            last = self.path.partition("?")[0].rpartition("/")[2]
            number = int(last) if last.isdigit() else 0
            left[number] -= 1
            is_answered = left[number] < 0
            self.send_response(200 if is_answered else 503)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            answer = {"schema": json.dumps(schemas[number]), **others} if is_answered else {}
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield SchemaRegistry(f"http://127.0.0.1:{server.server_port}", timeout=30.0)
    finally:
        server.shutdown()
        server.server_close()


def avro_of(number: int, schema: object, value: object) -> bytes:
    """Frame a value as Confluent's serializers do."""
    written = BytesIO()
    schemaless_writer(written, parse_schema(schema), value)  # type: ignore[arg-type]
    return b"\0" + number.to_bytes(4, "big") + written.getvalue()


def parsed(schema: Schema, *parts: list[bytes]) -> list[tuple[object, object]]:
    """Body and reason of each row, as a worker finds them."""
    return [row for part in parsed_parts(schema, iter(parts)) for row in part]


def parsed_parts(
    schema: Schema, parts: Iterator[list[bytes]]
) -> Iterator[list[tuple[object, object]]]:
    added = StructType().add("body", body_type(schema)).add("verdict", "string")
    frames = (pa.RecordBatch.from_pydict({"value": part}) for part in parts)
    for made in parse_parts(frames, pickle.dumps(schema), added.add("reason", "string")):
        rows = made.to_pylist()
        assert {row["verdict"] for row in rows if row["reason"]} <= {"reject"}
        yield [(row["body"], row["reason"]) for row in rows]


def test_a_protobuf_body_that_fits_no_column_is_rejected() -> None:
    payloads = []
    for seconds, nanos in ((1, 0), (10**15, 0), (0, -5), (2, 0)):
        made = Distribution(count=seconds % 10)
        at = made.exemplars.add().timestamp
        at.seconds, at.nanos = seconds, nanos
        payloads.append(b"\0\0\0\0\7\0" + made.SerializeToString())
    rows = parsed(NOBODY.protobuf(Distribution), payloads)
    assert [body and body["count"] for body, _ in rows] == [1, None, None, 2]  # type: ignore[index]
    unfit = "it does not fit its column: ValueError"
    assert [reason for _, reason in rows] == [None, unfit, unfit, None]


def test_an_avro_body_that_fits_no_column_is_rejected() -> None:
    price = {"type": "bytes", "logicalType": "decimal", "precision": 3, "scale": 2}
    wanted = record(field("n", "int"), field("price", price))
    wider = record(field("n", "long"), field("price", "bytes"))
    rows = [(1, 150), (2**40, 150), (2, 123_456), (3, -999)]
    payloads = [
        # An int is a varint of any length, as a long is, and a decimal has any bytes.
        avro_of(7, wider, {"n": n, "price": unscaled.to_bytes(4, "big", signed=True)})
        for n, unscaled in rows
    ]
    with registry_of({7: wanted}) as registry:
        found = parsed(registry.avro(json.dumps(wanted)), payloads)
    assert [body for body, _ in found] == [
        {"n": 1, "price": Decimal("1.50")}, None, None, {"n": 3, "price": Decimal("-9.99")},
    ]  # fmt: skip
    reasons = [reason for _, reason in found]
    assert reasons == [
        None,
        "it does not fit its column: ArrowInvalid",
        "it does not fit its column: InvalidOperation",
        None,
    ]


def test_a_task_waits_for_the_registry_from_when_it_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long the task has worked before."""
    passed_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s, sleep=time.sleep)
    monkeypatch.setattr(payloads, "time", clock)
    first, second = (record(field(name, "int")) for name in "ab")
    both = record(field("a", ["null", "int"]) | {"default": None})

    def parts() -> Iterator[list[bytes]]:
        nonlocal passed_s
        yield [avro_of(1, first, {"a": 1})]
        passed_s += 1000.0
        yield [avro_of(2, second, {"b": 2})]
        passed_s += 1000.0
        yield [avro_of(3, first, {"a": 3})]

    with registry_of({1: first, 2: second, 3: first}, refusals=1) as registry:
        found = list(parsed_parts(registry.avro(json.dumps(both)), parts()))
    assert found == [[({"a": 1}, None)], [({"a": None}, None)], [({"a": 3}, None)]]


def test_a_logical_type_on_another_base_is_ignored() -> None:
    of_string = {"type": "string", "logicalType": "date"}
    price = {"type": "string", "logicalType": "decimal", "precision": 9, "scale": 2}
    key = {"type": "fixed", "name": "Key", "size": 16, "logicalType": "uuid"}
    of_int = {"type": "int", "logicalType": "timestamp-millis"}
    of_long = {"type": "long", "logicalType": "time-millis"}
    kinds = dict(zip("abcde", (of_string, price, key, of_int, of_long), strict=True))
    wanted = record(*(field(name, kind) for name, kind in kinds.items()))
    body = {"a": "today", "b": "1.50", "c": bytes(range(16)), "d": 7, "e": 8}
    plain = {"a": "string", "b": "string", "d": "int", "e": "long"}
    written = record(*(field(name, plain.get(name, kind)) for name, kind in kinds.items()))
    with registry_of({7: wanted}) as registry:
        schema = registry.avro(json.dumps(wanted))
        assert body_type(schema).simpleString() == (
            "struct<a:string,b:string,c:binary,d:int,e:bigint>"
        )
        assert parsed(schema, [avro_of(7, written, body)]) == [(body, None)]
