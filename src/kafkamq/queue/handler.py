"""What a handler is told when it is registered: checked once, against its queue's backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypedDict

from kafkamq.config import Backoff, QueueConfig, milliseconds
from kafkamq.errors import ConfigError
from kafkamq.queue.arguments import Binder, is_async_function, refuse_generator
from kafkamq.queue.rules.capabilities import (
    Feature,
    backend_of,
    default_order,
    order_feature,
    require,
)
from kafkamq.queue.rules.retry import RetryOn, retry_kinds
from kafkamq.queue.schemas.deserializer import Deserializer, deserializer_of
from kafkamq.types import Backend

DEFAULT_CONCURRENCY = 16
_MAX_CONCURRENCY = 100_000


@dataclass(frozen=True, kw_only=True)
class HandlerSpec:
    """One handler of one queue."""

    queue: QueueConfig
    function: Callable[..., Any]
    binder: Binder = field(repr=False)
    concurrency: int = DEFAULT_CONCURRENCY
    processes: int = 0  # 0: threads, or one event loop
    threads: int = 1  # or coroutines, in each process
    ordering: str = "unordered"
    retry: Backoff | None = None  # None: the queue's
    timeout_ms: int = 0  # 0: none
    batch_size: int = 0  # the most messages of a call; 0: messages, not lists
    batch_linger_ms: int = 0
    max_attempts: int | None = None  # None: the queue's max_deliveries
    retry_on: RetryOn | None = None  # None: any
    max_rate: float | None = None  # messages a second
    deserializer: Deserializer | None = None  # None: the body is read as it is annotated

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__qualname__", self.function))

    @property
    def is_async(self) -> bool:
        return is_async_function(self.function)


class HandlerOptions(TypedDict, total=False):
    """All of them may be left out; times are s, or timedeltas."""

    concurrency: int | None
    """Handlers at once; 16."""
    ordering: str | None
    """What stays in order; None: what the backend has (``kafkamq backends``)."""
    backend: str | None
    """The backend that the handler counts on; must be the queue's."""
    retry: Backoff | None
    """The delay after a failure; None: the queue's back-off."""
    retry_on: type[BaseException] | Sequence[type[BaseException]] | RetryOn | None
    """Exceptions that are worth another attempt; any other one rejects its message. A mapping gives
    kinds a back-off of their own, or None. None: all are. Time that has run out, and a process that
    has died, always are."""
    max_attempts: int | None
    """After so many deliveries a message that failed is rejected; None: the queue's
    ``max_deliveries`` counts, which is never exceeded."""
    timeout: float | timedelta | None
    """s after which it has failed: a coroutine is cancelled, a process with one handler ended, a
    thread left alone."""
    processes: int
    """Run it in so many processes."""
    threads: int
    """Handlers at once in each process: threads for ``def``, coroutines for ``async def``; 1."""
    batch_size: int
    """Give it lists of up to so many messages; 0 (the default): single ones."""
    batch_linger: float | timedelta
    """How long a list that is not full waits for more; 0."""
    max_rate: float | None
    """Messages a second that are begun, at most, in each process of a worker."""
    deserializer: Deserializer | Callable[[bytes], Any] | None
    """Makes the body: a schema of a ``SchemaRegistry``, or a function of the payload, of which any
    exception rejects the message. While the registry does not answer, messages wait for it."""


def make_spec(
    queue: QueueConfig, function: Callable[..., Any], options: HandlerOptions
) -> HandlerSpec:
    for name in options:
        if name not in HandlerOptions.__annotations__:
            raise TypeError(f"there is no option {name!r}")
    if not callable(function):
        raise ConfigError(f"the handler is a {type(function).__name__}: give a function")
    refuse_generator(function)
    asked = f"handler of queue {queue.queue_id!r}"
    backend = options.get("backend")
    if backend is not None and backend_of(backend) is not queue.backend:
        raise ConfigError(
            f"{asked}: backend={backend!r}, and the queue was made with "
            f"{queue.backend.value!r}: give it to Service.queue()"
        )
    order = options.get("ordering") or default_order(queue.backend)
    require(queue.backend, order_feature(order), f"{asked}: ordering={order!r}")
    retry, timeout = options.get("retry"), options.get("timeout")
    retry_on = retry_kinds(options.get("retry_on"))
    if not isinstance(retry, Backoff | None):
        raise ConfigError(f"{asked}: retry is {retry!r}: it must be a Backoff")
    for name, backoffs in (("retry", [retry]), ("retry_on", (retry_on or {}).values())):
        if any(backoffs):
            require(queue.backend, Feature.RETRY_DELAY, f"{asked}: {name}")
    processes, threads, concurrency = _at_once(options, asked)
    batch_size = options.get("batch_size", 0)
    linger_ms = milliseconds(options.get("batch_linger", 0.0), name="batch_linger")
    if linger_ms and not batch_size:
        raise ConfigError(f"{asked}: batch_linger needs a batch_size")
    deserializer = deserializer_of(options.get("deserializer"))
    spec = HandlerSpec(
        queue=queue,
        function=function,
        binder=Binder(function, of_lists=bool(batch_size), deserializer=deserializer),
        concurrency=concurrency,
        processes=processes,
        threads=threads,
        ordering=order,
        retry=retry,
        timeout_ms=0 if timeout is None else milliseconds(timeout, name="timeout", minimum=1),
        batch_size=batch_size,
        batch_linger_ms=linger_ms,
        max_attempts=_attempts(options.get("max_attempts"), queue, asked),
        retry_on=retry_on,
        max_rate=_rate(options.get("max_rate"), asked),
        deserializer=deserializer,
    )
    _check_lease(spec, asked)
    return spec


def _at_once(options: HandlerOptions, asked: str) -> tuple[int, int, int]:
    """Processes, handlers in each, and handlers in all."""
    processes, threads = options.get("processes", 0), options.get("threads", 1)
    concurrency = options.get("concurrency")
    for name, value, minimum in (
        ("concurrency", DEFAULT_CONCURRENCY if concurrency is None else concurrency, 1),
        ("processes", processes, 0),
        ("threads", threads, 1),
        ("batch_size", options.get("batch_size", 0), 0),
    ):
        if type(value) is not int or not minimum <= value <= _MAX_CONCURRENCY:
            raise ConfigError(f"{asked}: {name} is {value!r}: it must be >= {minimum}")
    if threads > 1 and not processes:
        raise ConfigError(f"{asked}: threads is for processes=; else concurrency says how many")
    if processes:
        return processes, threads, processes * threads
    return 0, 1, DEFAULT_CONCURRENCY if concurrency is None else concurrency


def _attempts(given: int | None, queue: QueueConfig, asked: str) -> int | None:
    if given is not None and (type(given) is not int or not 1 <= given <= queue.max_deliveries):
        raise ConfigError(
            f"{asked}: max_attempts is {given!r}: it must be 1 to the queue's max_deliveries, "
            f"{queue.max_deliveries}"
        )
    return given


def _rate(given: float | None, asked: str) -> float | None:
    rate: object = given  # whatever the types say
    if rate is not None and not (isinstance(rate, int | float) and 0 < rate < 1e12):
        raise ConfigError(f"{asked}: max_rate is {given!r}: it must be messages a second, above 0")
    return given


def _check_lease(spec: HandlerSpec, asked: str) -> None:
    """Where nothing renews a lease a handler must end within it."""
    longest_ms = max(spec.queue.redelivery_timeout_ms, 15_000)  # the broker's shortest lock
    if spec.queue.backend is Backend.SHARE and spec.timeout_ms >= longest_ms:
        require(
            spec.queue.backend,
            Feature.LONG_HANDLERS,
            f"{asked}: timeout={spec.timeout_ms / 1000:g} s, a lock of {longest_ms / 1000:g} s",
        )
