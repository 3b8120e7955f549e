"""What is said of deserializers and registries before anybody is asked."""

from __future__ import annotations

import asyncio
import logging
import pickle
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from kafkamq import ConfigError, Message, SchemaRegistry, SchemaRegistryError
from kafkamq.queue.handler import Binder
from kafkamq.queue.json_values import BodyError
from kafkamq.queue.schemas.registry import Outage, deserializer_of
from kafkamq.runtime.middleware import bound
from kafkamq.testing import MemoryService

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


@dataclass
class Order:
    raw: bytes
    price: Decimal
    when: datetime


class Model(BaseModel):
    raw: bytes
    when: datetime


def of_order(body: Order) -> None: ...
def of_model(body: Model | None) -> None: ...
def of_any(body: Any) -> None: ...
def of_message(message: Message) -> None: ...
def of_class(body: SimpleNamespace) -> None: ...


def given(function: Any, body: object, payload: bytes | None = b"x") -> object:
    binder = Binder(function, deserializer=deserializer_of(lambda _: body))
    (found,) = binder.arguments(SimpleNamespace(payload=payload, raw_headers=()))
    return found


def test_bodies_are_what_is_annotated() -> None:
    fields = {"raw": b"\xff", "price": Decimal(1), "when": NOW}
    assert given(of_order, fields) == Order(b"\xff", Decimal(1), NOW)
    assert given(of_model, {"raw": b"a", "when": NOW}) == Model(raw=b"a", when=NOW)
    assert given(of_model, None, payload=None) is None
    assert given(of_any, 7) == 7
    space = SimpleNamespace()
    assert given(of_class, space) is space
    for function, body, said in (
        (of_order, {**fields, "raw": "text"}, "the body.raw is a string: it must be bytes"),
        (of_order, {**fields, "when": b"x"}, "the body.when is a bytes: it must be datetime"),
        (of_class, {}, "the body is an object: it must be SimpleNamespace"),
        (of_model, {"raw": b"a"}, "the body: when: Field required"),
    ):
        with pytest.raises(BodyError, match=said):
            given(function, body)
    with pytest.raises(BodyError, match="the payload is null"):
        given(of_order, fields, payload=None)


def test_what_cannot_work_is_refused() -> None:
    queue = MemoryService().queue("orders")
    with pytest.raises(ConfigError, match="takes no body, and has a deserializer"):
        queue.handler(deserializer=bytes.decode)(of_message)
    with pytest.raises(ConfigError, match="deserializer is a str"):
        queue.handler(deserializer="avro")(of_any)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="settings of the schema registry"):
        SchemaRegistry("ftp://nowhere")
    registry = SchemaRegistry("http://me:secret@localhost:1", settings={"max.retries": 1})
    assert "secret" not in repr(registry.avro())
    with pytest.raises(ConfigError, match="the avro schema cannot be used"):
        registry.avro("{")
    with pytest.raises(ConfigError, match="name its subject"):
        registry.avro().serialize({})
    with pytest.raises(ConfigError, match="protoc"):
        registry.protobuf(int)


def test_without_the_extra_the_error_names_it() -> None:
    program = (
        "import sys; sys.modules['confluent_kafka.schema_registry'] = None\n"
        "from kafkamq import *\n"
        "SchemaRegistry('http://localhost:1')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'kafkamq[schemas]'" in done.stderr


def test_a_dead_registry_is_asked_once_for_each_back_off() -> None:
    registry = SchemaRegistry("http://127.0.0.1:1", timeout=0.5)
    schema = registry.avro()
    with pytest.raises(BodyError, match="no id of a schema"):  # nobody needs to be asked
        schema.deserialize(b"x")
    with pytest.raises(SchemaRegistryError, match="cannot be asked") as caught:
        schema.deserialize(b"\0\0\0\0\1x")
    assert 0 < caught.value.delay_s <= 0.6
    assert pickle.loads(pickle.dumps(caught.value)).delay_s == caught.value.delay_s
    assert not schema.is_ready(b"\0\0\0\0\1x")
    assert schema.is_ready(b"no frame")


def test_an_outage_keeps_questions_back(caplog: pytest.LogCaptureFixture) -> None:
    outage, asked = Outage("there"), []

    def fail() -> None:
        asked.append(1)
        raise SchemaRegistryError("gone")

    with caplog.at_level(logging.INFO, "kafkamq"):
        for _ in range(3):
            with pytest.raises(SchemaRegistryError, match="gone") as caught:
                outage.ask(fail)
            assert 0 < caught.value.delay_s <= 0.6
    assert len(asked) == 1
    assert caplog.text.count("messages wait for it") == 1


def test_what_may_wait_is_read_beside_the_loop() -> None:
    """And what cannot wait is read at once."""
    loops: list[bool] = []

    class Known:
        def deserialize(self, payload: bytes, headers: object = ()) -> bytes:
            try:
                loops.append(bool(asyncio.get_running_loop()))
            except RuntimeError:
                loops.append(False)
            return payload

        def is_ready(self, payload: bytes, headers: object = ()) -> bool:
            return payload == b"known"

    async def handle(body: bytes) -> None: ...

    call = bound(handle, Binder(handle, deserializer=Known()), is_async=True)
    for payload in (b"known", b"other"):
        asyncio.run(call(SimpleNamespace(payload=payload, raw_headers=())))
    assert loops == [True, False]
