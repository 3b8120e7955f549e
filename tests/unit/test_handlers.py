"""Handlers: what they are given by their annotations, and what is refused when they are made."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import typing
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import InitVar, dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from types import SimpleNamespace
from typing import ClassVar, Literal
from uuid import UUID, uuid4

import pytest
from pydantic import BaseModel

from kafkamq import Backoff, ConfigError, Message, ParallelConsumer, Worker, aio
from kafkamq.cli.handlers import load_worker
from kafkamq.queue.handler import Binder
from kafkamq.queue.json_values import BodyError
from kafkamq.runtime.rules.pace import RunAhead
from kafkamq.testing import MemoryService


@dataclass
class Line:
    item: str
    price: float = 1.0


@dataclass
class Order:
    id: int
    lines: list[Line] = field(default_factory=list)
    note: str | None = None


class Model(BaseModel):
    id: int


def of_bytes(body: bytes) -> None: ...
def of_text(body: str) -> None: ...
def of_dict(body: dict) -> None: ...
def of_numbers(body: list[int]) -> None: ...
def of_order(body: Order) -> None: ...
def of_model(body: Model) -> None: ...
def of_nothing() -> None: ...
def of_two(one: str, two: bytes) -> None: ...
def of_set(body: set) -> None: ...
def with_option(message: Message, dry_run: bool = False) -> None: ...
def with_message(body: bytes, message: Message = None) -> None: ...  # type: ignore[assignment]
def with_default(body: dict | None = None) -> None: ...
def with_hidden_body(message: Message, body: Order | None = None) -> None: ...
def with_late_message(body: bytes, limit: int = 1, message: Message | None = None) -> None: ...


class Kind(Enum):
    BIG = "big"


@dataclass
class Priced:
    when: datetime = datetime(2020, 1, 1, tzinfo=UTC)
    kind: Kind = Kind.BIG
    price: Decimal = Decimal(0)
    id: UUID | None = None
    tags: tuple[str, ...] = ()
    pair: tuple[int, str] = (0, "")
    unit: Literal["kg", "g"] = "kg"
    most: ClassVar[complex] = 1j  # no field of the object
    age: timedelta = field(init=False, compare=False)  # nor given


@dataclass
class Odd:
    what: Backoff
    how: complex = 0j


@dataclass
class Initialized:
    id: int
    text: InitVar[str] = ""


@dataclass
class BarelyInitialized:
    id: int
    text: InitVar = ""


class Level(Enum):
    LOW = 1
    HIGH = 2


@dataclass
class Stock:
    counts: dict[int, Line]
    by_kind: Mapping[Kind, int] = field(default_factory=dict)
    by_price: dict[Decimal, str] = field(default_factory=dict)
    level: Literal[Level.HIGH, "any"] = "any"
    names: Sequence[str] = ()
    marks: AbstractSet[str] = frozenset()
    more: Mapping = field(default_factory=dict)
    some: typing.Sequence = ()


def of_stock(body: Stock) -> None: ...
def of_mapping(body: Mapping[UUID, Sequence[int]]) -> None: ...
def of_sequence(body: Sequence[Literal["a", "b"]]) -> None: ...
def of_float_keys(body: dict[float, str]) -> None: ...
def of_level_keys(body: dict[Level, str]) -> None: ...
def of_literal_keys(body: dict[Literal[1, 2], str]) -> None: ...
def of_union_keys(body: dict[int | str, str]) -> None: ...
def of_bytes_literal(body: list[Literal[b"x"]]) -> None: ...
def of_priced(body: Priced) -> None: ...
def of_odd(body: Odd) -> None: ...
def of_initialized(body: list[Initialized]) -> None: ...
def of_barely_initialized(body: BarelyInitialized) -> None: ...


STOCK = Stock({7: Line("x"), -1: Line("y")})


def parsed(function, payload):
    (body,) = Binder(function).arguments(SimpleNamespace(payload=payload))
    return body


@pytest.mark.parametrize(
    ("function", "payload", "body"),
    [
        (of_bytes, b"\xff", b"\xff"),
        (of_text, "käse".encode(), "käse"),
        (of_dict, b'{"a": 1}', {"a": 1}),
        (of_numbers, b"[1, 2]", [1, 2]),
        (of_order, b'{"id": 1, "extra": 0}', Order(1)),
        (
            of_order,
            b'{"id": 1, "lines": [{"item": "x", "price": 2}], "note": null}',
            Order(1, [Line("x", 2)]),
        ),
        (of_model, b'{"id": "7"}', Model(id=7)),
        (with_default, b'{"a": 1}', {"a": 1}),
        (
            of_priced,
            b'{"when": "2024-05-06T07:08:09Z", "kind": "big", "price": "1.10", "tags": ["x"],'
            b' "id": "00000000-0000-0000-0000-000000000001", "pair": [1, "y"], "unit": "g"}',
            Priced(
                datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC),
                Kind.BIG,
                Decimal("1.10"),
                UUID(int=1),
                ("x",),
                (1, "y"),
                "g",
            ),
        ),
        (of_stock, b'{"counts": {"7": {"item": "x"}, "-1": {"item": "y"}}}', STOCK),
        (
            of_stock,
            b'{"counts": {}, "by_kind": {"big": 3}, "by_price": {"1.10": "x"}, "level": 2,'
            b' "names": ["x"], "marks": ["y"], "more": {"a": [1]}, "some": [1, "z"]}',
            Stock(
                {},
                {Kind.BIG: 3},
                {Decimal("1.10"): "x"},
                Level.HIGH,
                ["x"],
                {"y"},
                {"a": [1]},
                [1, "z"],
            ),
        ),
        (of_mapping, b'{"00000000-0000-0000-0000-000000000001": [1]}', {UUID(int=1): [1]}),
        (of_sequence, b'["a", "b"]', ["a", "b"]),
    ],
)
def test_bodies(function, payload, body) -> None:
    assert parsed(function, payload) == body


@pytest.mark.parametrize(
    ("function", "payload", "said"),
    [
        (of_bytes, None, "the payload is null"),
        (of_text, b"ab\xff", "no UTF-8 at byte 2"),
        (of_dict, b"[]", "the body is a list: it must be dict"),
        (of_dict, b"{", "the payload is no JSON"),
        (of_numbers, b"[1, true]", r"the body\[1\] is a boolean: it must be int"),
        (of_order, b'{"id": 1, "lines": [{}]}', r"the body.lines\[0\] has no item"),
        (of_order, b'{"id": 1, "note": 5}', "the body.note is a number: it must be str"),
        (of_order, b"7", "the body is a number: it must be an object"),
        (of_priced, b'{"when": 5}', "the body.when is a number: it must be datetime"),
        (of_priced, b'{"when": "secret"}', "the body.when is no datetime"),
        (of_priced, b'{"kind": "secret"}', "the body.kind is no Kind"),
        (of_priced, b'{"price": []}', "the body.price is a list: it must be Decimal"),
        (of_priced, b'{"id": "no"}', "the body.id is no UUID"),
        (of_priced, b'{"tags": "no"}', "the body.tags is a string: it must be tuple"),
        (of_priced, b'{"tags": [1]}', r"the body.tags\[0\] is a number: it must be str"),
        (of_priced, b'{"pair": [1]}', "the body.pair has 1 items: it must have 2"),
        (of_priced, b'{"unit": "secret"}', "the body.unit is none of the values"),
        (of_stock, b'{"counts": {"secret": {"item": "x"}}}', "a key of the body.counts is no int"),
        (of_stock, b'{"counts": {"07": {"item": "x"}}}', "a key of the body.counts is no int"),
        (of_stock, b'{"counts": {"7": 1}}', "the body.counts.7 is a number: it must be an object"),
        (of_stock, b'{"counts": {}, "by_kind": {"secret": 1}}', "of the body.by_kind is no Kind"),
        (of_stock, b'{"counts": {}, "by_price": {"1": "x", "1.0": "y"}}', "are the same Decimal"),
        (of_stock, b'{"counts": {}, "level": 1}', "the body.level is none of the values"),
        (of_stock, b'{"counts": {}, "level": true}', "the body.level is none of the values"),
        (of_stock, b'{"counts": {}, "names": "secret"}', "names is a string: it must be Sequence"),
        (of_stock, b'{"counts": {}, "more": []}', "the body.more is a list: it must be Mapping"),
        (of_mapping, b"[]", "the body is a list: it must be Mapping"),
        (of_model, b'{"id": "secret"}', "^id: Input should be a valid integer"),
        (of_dict, b"[" * 100_000, "nested too deeply|no JSON"),
    ],
)
def test_bodies_that_do_not_fit(function, payload, said) -> None:
    with pytest.raises(BodyError, match=said) as caught:
        parsed(function, payload)
    assert "secret" not in str(caught.value)


def test_what_has_a_default_keeps_it() -> None:
    message = SimpleNamespace(payload=b"x")
    assert Binder(with_option).arguments(message) == [message]
    assert Binder(with_message).arguments(message) == [b"x", message]


@pytest.mark.parametrize(
    "function",
    [
        of_nothing,
        of_two,
        of_set,
        of_odd,
        of_initialized,
        of_barely_initialized,
        of_float_keys,
        of_level_keys,
        of_literal_keys,
        of_union_keys,
        of_bytes_literal,
        with_hidden_body,
        with_late_message,
        7,
    ],
)
def test_handlers_that_take_something_else(function) -> None:
    with pytest.raises(ConfigError):
        MemoryService().queue("q").handler()(function)


async def an_async_handler(message: Message) -> None: ...


@pytest.mark.parametrize(
    ("backend", "options", "said"),
    [
        ("share", {"retry": Backoff()}, "markers, offsets and claims have it"),
        ("share", {"timeout": 16.0}, "markers, offsets and claims have it"),
        ("markers", {"ordering": "key"}, "offsets has it"),
        ("markers", {"ordering": "random"}, "it must be one of 'key'"),
        ("claims", {"backend": "offsets"}, "the queue was made with 'claims'"),
        ("markers", {"concurrency": 0}, "concurrency is 0"),
        ("markers", {"processes": -1}, "processes is -1"),
        ("markers", {"threads": 2}, "threads is for processes="),
        ("markers", {"batch_size": -1}, "batch_size is -1"),
        ("markers", {"batch_linger": 1}, "needs a batch_size"),
        ("markers", {"batch_size": 2}, "with batch_size it is a list"),
        ("markers", {"max_attempts": 6}, "max_attempts is 6: it must be 1 to"),
        ("markers", {"max_rate": 0}, "max_rate is 0"),
        ("markers", {"retry_on": (OSError, "x")}, "give kinds of exceptions"),
        ("markers", {"retry_on": {OSError: 5}}, "give kinds of exceptions"),
        ("share", {"retry_on": {OSError: Backoff()}}, "retry_on"),
        ("markers", {"timeout": 0}, "timeout is 0"),
        ("markers", {"retry": 5}, "retry is 5"),
    ],
)
def test_what_cannot_work_is_refused_at_once(backend, options, said) -> None:
    queue = MemoryService().queue("q", backend=backend)
    with pytest.raises(ConfigError, match=said):
        queue.handler(**options)(an_async_handler)


def yields(message):
    yield message


async def yields_async(message):
    yield message


class Yields:
    def __call__(self, message):
        yield message

    def handle(self, message):
        yield message


def measured(function):
    @functools.wraps(function)
    def call(message):
        return function(message)

    return call


class YieldsWhenCalled(Yields):
    def __init__(self, message):
        self.message = message


def drained(function):
    @functools.wraps(function)
    def call(message):
        return list(function(message))

    return call


YIELDING = [
    yields,
    yields_async,
    Yields(),
    Yields().handle,
    contextlib.contextmanager(yields),
    contextlib.asynccontextmanager(yields_async),
    functools.cache(yields),
    functools.partial(Yields().handle),
]


@pytest.mark.parametrize("function", YIELDING)
def test_a_handler_that_yields_is_refused(function) -> None:
    """A call of it would not run it, and look like a success."""
    with pytest.raises(ConfigError, match=r"yields.* return what comes of it"):
        MemoryService().queue("q").handler()(function)
    consumer = ParallelConsumer("t", group_id="g", bootstrap_servers=f"memory://{uuid4().hex}")
    with consumer, pytest.raises(ConfigError, match="yields"):
        consumer.poll(function)


def test_a_decorator_that_runs_what_yields_is_accepted() -> None:
    """What another one returns is looked at when it is called."""
    service = MemoryService()
    for name, function in (
        ("q", drained(yields)),
        ("r", measured(yields)),
        ("s", YieldsWhenCalled),
    ):
        service.queue(name).handler()(function)
    assert len(service.handlers) == 3


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"processes": 1}])
def test_where_nobody_iterates_over_results_they_are_not_yielded(options) -> None:
    servers = f"memory://{uuid4().hex}"
    with ParallelConsumer("t", group_id="g", bootstrap_servers=servers, **options) as consumer:
        for start in (consumer.poll_and_produce, consumer.produce_and_stream, consumer.stream):
            with pytest.raises(ConfigError, match="yields"):
                start(yields)


def test_an_asyncio_consumer_refuses_what_yields() -> None:
    async def main() -> None:
        servers = f"memory://{uuid4().hex}"
        async with aio.ParallelConsumer("t", group_id="g", bootstrap_servers=servers) as consumer:
            with pytest.raises(ConfigError, match="yields"):
                await consumer.poll_and_produce(yields_async)

    asyncio.run(main())


def test_decorated_handlers_are_of_their_own_kind() -> None:
    service = MemoryService()
    for function in (measured(an_async_handler), functools.partial(an_async_handler)):
        service.queue("q").handler()(function)
    assert [spec.is_async for spec in service.handlers] == [False, True]


def test_a_worker_needs_one_handler_of_each_queue() -> None:
    service = MemoryService()
    with pytest.raises(ConfigError, match="no handler to run"):
        Worker(service).start()
    queue = service.queue("q")
    queue.handler()(of_bytes)
    with pytest.raises(ConfigError, match="no handler of other"):
        Worker(service, queues=["q", "other"]).start()
    queue.handler()(of_text)
    with pytest.raises(ConfigError, match="several handlers"):
        Worker(service).start()


def test_middleware_is_of_its_handlers_kind() -> None:
    service = MemoryService()
    service.queue("q").handler()(an_async_handler)
    with pytest.raises(ConfigError, match="must its middleware be"):
        Worker(service, middleware=[lambda message, call: call(message)]).start()


def test_middleware_goes_around_handlers() -> None:
    service = MemoryService()
    queue = service.queue("q")
    order: list[str] = []

    def outer(message, call):
        order.append("outer")
        return call(message)

    def inner(message, call):
        order.append("inner")
        return call(message)

    @queue.handler()
    def handle(body: str) -> None:
        order.append(body)

    queue.producer().send(b"x")
    with Worker(service, middleware=[outer, inner]) as worker:
        while not worker.handled:
            assert not worker.wait(0.01)
    assert order == ["outer", "inner", "x"]


def test_run_ahead_follows_the_pace() -> None:
    ahead = RunAhead(concurrency=100, maximum=1000)
    assert ahead.wanted(0, 0, 1000) == 100
    assert ahead.wanted(100, 0, 1100) == 0
    assert ahead.wanted(100, 1000, 1200) == 300  # 10 a ms: 300 in 30 ms
    assert ahead.wanted(100, 100_000, 1300) == 900
    slow = RunAhead(concurrency=100, maximum=1000, is_ahead=False)
    assert slow.wanted(0, 0, 1000) == 100
    assert slow.wanted(10, 10_000, 1100) == 90


@pytest.mark.parametrize("name", ["nothing", "no.such:worker", "json:dumps", "json:nothing"])
def test_only_workers_are_run(name: str) -> None:
    with pytest.raises(ConfigError):
        load_worker(name)
