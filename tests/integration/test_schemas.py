"""Bodies with schemas, by a real registry that answers, hangs and knows no such schema."""

from __future__ import annotations

import asyncio
import logging
import pickle
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from google.type.money_pb2 import Money
from harness.registry import LocalRegistry
from tests.integration import schema_handlers
from tests.integration.parallel_tools import make, make_topic, read_all
from tests.integration.queue_logs import make_service, tracked
from tests.integration.schema_handlers import FIRST, SECOND, Order
from tests.sure_producer import SureProducer
from tests.waiting import wait_until

from kafkamq import (
    ConfigError,
    Message,
    OutgoingRecord,
    SchemaRegistry,
    SchemaRegistryError,
    Service,
    Worker,
)
from kafkamq.queue.dead_letters import read_dead_letters
from kafkamq.queue.json_values import BodyError

_DOCS = Path(__file__).parents[2] / "docs" / "worker.md"
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
OF_JSON = """{"type": "object", "title": "Order", "required": ["id"],
    "properties": {"id": {"type": "integer"}, "secret": {"type": "string"}}}"""


@pytest.fixture
def service(bootstrap: str, namespace: str) -> Iterator[Service]:
    with make_service(bootstrap, namespace) as service:
        yield service


@pytest.fixture
def paused(schema_registry: LocalRegistry) -> Iterator[LocalRegistry]:
    """One that hangs, until the test lets it go on."""
    schema_registry.pause()
    yield schema_registry
    schema_registry.resume()


def send(bootstrap: str, topic: str, *payloads: bytes) -> None:
    producer = SureProducer({"bootstrap.servers": bootstrap})
    for payload in payloads:
        producer.produce(topic, payload)
    producer.confirm()


@dataclass
class Noted(Order):
    note: str = "new"


def test_a_worker_reads_what_older_and_newer_schemas_wrote(
    service: Service, schema_registry: LocalRegistry, namespace: str, tmp_path: Path
) -> None:
    """Also in a process; and what does not parse is rejected at once, with its reason."""
    registry = SchemaRegistry(schema_registry.url)
    first = registry.avro(FIRST, subject=namespace)
    second = registry.avro(SECOND, subject=namespace)
    sent = [Order(1, str(tmp_path / "1")), Noted(2, str(tmp_path / "2"))]
    old, new = first.serialize(sent[0]), second.serialize(sent[1])
    seen: list[Noted] = []
    queue = service.queue("orders", max_deliveries=5)
    queue.handler(deserializer=second)(_into(seen))
    apart = service.queue("apart")
    apart.handler(deserializer=first, processes=1)(schema_handlers.write)
    bad = [b"no frame", old[:5] + b"\xffsecret", b"\0\xff\xff\xff\xffsecret"]
    with tracked(service.config), Worker(service), queue.producer() as producer:
        for payload in (old, new, *bad):
            producer.send(payload)
        with apart.producer() as other:
            other.send(old)
            other.send(new)
        wait_until(lambda: len(seen) == 2, "both")
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "the files")
        wait_until(lambda: len(list(read_dead_letters(service.config))) == 3, "the dead letters")
    assert sorted(seen, key=lambda each: each.id) == [Noted(1, sent[0].file, note="none"), sent[1]]
    letters = {letter.payload: letter for letter in read_dead_letters(service.config)}
    assert {letter.reason for letter in letters.values()} == {"rejected"}
    assert {letter.delivery_count for letter in letters.values()} == {1}
    errors = [letters[payload].error for payload in bad]
    assert errors[0].endswith("the payload has no id of a schema in front")
    assert "it does not parse by its schema: " in errors[1]
    assert "Schema 4294967295 not found" in errors[2]
    assert not any("secret" in error for error in errors)


def test_a_registry_that_hangs_costs_no_attempt(
    service: Service, paused: LocalRegistry, caplog: pytest.LogCaptureFixture, namespace: str
) -> None:
    """One delivery is all that a message has; bodies whose schemas are known go on meanwhile."""
    paused.resume()
    writer = SchemaRegistry(paused.url)
    known = writer.avro(FIRST, subject=f"{namespace}-known")
    other = writer.avro(SECOND, subject=f"{namespace}-other")
    payloads = [known.serialize(Order(1)), known.serialize(Order(2))]
    held = other.serialize(Noted(3))
    queue, seen = service.queue("held", max_deliveries=1), list[tuple[int, int]]()

    @queue.handler(deserializer=SchemaRegistry(paused.url, timeout=0.2).avro())
    async def handle(order: dict, message: Message) -> None:
        seen.append((order["id"], message.delivery_count))

    with tracked(service.config), Worker(service), queue.producer() as producer:
        producer.send(payloads[0])
        wait_until(lambda: seen, "the first")
        paused.pause()
        with caplog.at_level(logging.WARNING, "kafkamq"):
            producer.send(held)
            wait_until(lambda: "messages wait for it" in caplog.text, "the outage")
        producer.send(payloads[1])
        wait_until(lambda: len(seen) == 2, "what is known")
        assert seen == [(1, 1), (2, 1)]
        paused.resume()
        wait_until(lambda: len(seen) == 3, "what was held")
    assert seen[2] == (3, 1)
    assert not list(read_dead_letters(service.config))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_parallel_consumer_waits_for_the_registry(
    bootstrap: str, namespace: str, paused: LocalRegistry, is_async: bool
) -> None:
    """A look-up that hangs keeps one handler, not the event loop; it is no attempt."""
    paused.resume()
    topic, letters = make_topic(bootstrap, namespace), make_topic(bootstrap, f"{namespace}-dead")
    schema = SchemaRegistry(paused.url).json(OF_JSON, subject=f"{topic}-value")
    sent = [schema.serialize({"id": number}) for number in range(3)]
    other = SchemaRegistry(paused.url).json(
        OF_JSON.replace("secret", "more"), subject=f"{topic}-other"
    )
    seen = list[int]()

    def handle(order: dict) -> None:
        seen.append(order["id"])

    async def handle_async(order: dict) -> None:
        handle(order)

    options = {
        "ordering": "unordered", "concurrency": 2, "max_attempts": 1,
        "dead_letter_topic": letters, "deserializer": SchemaRegistry(paused.url, timeout=30).json(),
    }  # fmt: skip
    held, bad = other.serialize({"id": 9}), sent[0][:5] + b'{"id": "secret"}'
    with make(bootstrap, topic, namespace, **options) as consumer:
        consumer.poll(handle_async if is_async else handle)
        send(bootstrap, topic, sent[0])
        wait_until(lambda: seen == [0], "the first")
        paused.pause()
        send(bootstrap, topic, held, bad, sent[1])
        wait_until(lambda: seen == [0, 1], "what is known")
        (letter,) = read_all(bootstrap, letters, 1)
        paused.resume()
        wait_until(lambda: seen == [0, 1, 9], "what was held")
    assert letter.value() == bad
    assert "$.id breaks the schema's 'type'" in str(letter.headers())
    assert "secret" not in str(letter.headers())


def test_results_and_protobuf(
    bootstrap: str, namespace: str, schema_registry: LocalRegistry
) -> None:
    topic, results = make_topic(bootstrap, namespace), make_topic(bootstrap, f"{namespace}-results")
    registry = SchemaRegistry(schema_registry.url)
    money = registry.protobuf(Money, subject=f"{topic}-value")
    orders = registry.avro(FIRST, subject=f"{results}-value")

    async def count(price: Money) -> OutgoingRecord:
        value = await asyncio.to_thread(orders.serialize, Order(price.units))
        return OutgoingRecord(topic=results, value=value)

    with make(bootstrap, topic, namespace, deserializer=money) as consumer:
        send(bootstrap, topic, money.serialize(Money(currency_code="EUR", units=3)))
        consumer.poll_and_produce(count)
        (result,) = read_all(bootstrap, results, 1)
    assert registry.avro().deserialize(result.value()) == asdict(Order(3))


def test_what_cannot_be_written_or_read_says_why(
    schema_registry: LocalRegistry, namespace: str
) -> None:
    registry = SchemaRegistry(schema_registry.url)
    orders = registry.avro(FIRST, subject=namespace)
    framed = orders.serialize(Order(7))
    assert orders.deserialize(framed) == asdict(Order(7))
    with pytest.raises(ConfigError, match="does not fit the schema of") as caught:
        orders.serialize({"id": "secret"})
    assert "secret" not in str(caught.value)
    other = '{"type": "record", "name": "Order", "fields": [{"name": "x", "type": "string"}]}'
    with pytest.raises(BodyError, match="No default value for field x"):
        registry.avro(other).deserialize(framed)
    unknown = registry.avro(other, subject=f"{namespace}-none", register=False)
    with pytest.raises(ConfigError, match="the registry has none"):
        unknown.serialize({"x": ""})
    strict = registry.json(OF_JSON, subject=f"{namespace}-json")
    with pytest.raises(ConfigError, match="breaks the schema's 'type'"):
        strict.serialize({"id": "secret"})
    again = pickle.loads(pickle.dumps(orders))
    assert again.deserialize(framed) == asdict(Order(7))
    wrong = SchemaRegistry(schema_registry.url.replace("/apis/", "/nothing/"))
    with pytest.raises(SchemaRegistryError, match="HTTP status 404"):
        wrong.avro().deserialize(framed)


def test_the_documented_program_runs(schema_registry: LocalRegistry) -> None:
    found = _BLOCK.findall(_DOCS.read_text("utf-8"))
    (block,) = [text for text in found if "registry.avro" in text]
    exec(block.replace("http://localhost:8081", schema_registry.url), {"__name__": "__main__"})


def _into(seen: list[Noted]) -> object:
    def handle(order: Noted) -> None:
        seen.append(order)

    return handle
