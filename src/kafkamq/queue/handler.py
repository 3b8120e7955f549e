"""What a handler is told when it is registered: checked once, against its queue's backend."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from kafkamq.config import Backoff, QueueConfig, milliseconds
from kafkamq.errors import ConfigError
from kafkamq.queue.arguments import Binder
from kafkamq.queue.rules.capabilities import (
    Feature,
    backend_of,
    default_order,
    order_feature,
    require,
)
from kafkamq.types import Backend

__all__ = ["DEFAULT_CONCURRENCY", "HandlerSpec", "make_spec"]

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
    ordering: str = "unordered"
    retry: Backoff | None = None  # None: the queue's
    timeout_ms: int = 0  # 0: none

    @property
    def name(self) -> str:
        """For people."""
        return str(getattr(self.function, "__qualname__", self.function))

    @property
    def is_async(self) -> bool:
        """Whether calling it gives an awaitable."""
        call = getattr(self.function, "__call__", None)  # noqa: B004 - an async __call__
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)


def make_spec(
    queue: QueueConfig,
    function: Callable[..., Any],
    *,
    concurrency: int | None,
    processes: int,
    ordering: str | None,
    backend: str | None,
    retry: Backoff | None,
    timeout: float | timedelta | None,
) -> HandlerSpec:
    """A handler that can work.

    Raises:
        ConfigError: It cannot, or its backend lacks what is asked; names those that have it.
    """
    if not callable(function):
        raise ConfigError(f"the handler is a {type(function).__name__}: give a function")
    asked = f"handler of queue {queue.queue_id!r}"
    if backend is not None and backend_of(backend) is not queue.backend:
        raise ConfigError(
            f"{asked}: backend={backend!r}, and the queue was made with "
            f"{queue.backend.value!r}: give it to Service.queue()"
        )
    count = concurrency if concurrency is not None else processes or DEFAULT_CONCURRENCY
    for name, value, minimum in (("concurrency", count, 1), ("processes", processes, 0)):
        if type(value) is not int or not minimum <= value <= _MAX_CONCURRENCY:
            raise ConfigError(f"{asked}: {name} is {value!r}: it must be >= {minimum}")
    order = ordering if ordering is not None else default_order(queue.backend)
    require(queue.backend, order_feature(order), f"{asked}: ordering={order!r}")
    if retry is not None:
        if not isinstance(retry, Backoff):
            raise ConfigError(f"{asked}: retry is {retry!r}: it must be a Backoff")
        require(queue.backend, Feature.RETRY_DELAY, f"{asked}: retry")
    spec = HandlerSpec(
        queue=queue,
        function=function,
        binder=Binder(function),
        concurrency=processes or count,
        processes=processes,
        ordering=order,
        retry=retry,
        timeout_ms=0 if timeout is None else milliseconds(timeout, name="timeout", minimum=1),
    )
    if processes and spec.is_async:
        raise ConfigError(f"{asked}: processes= is for def handlers")
    _check_lease(spec, asked)
    return spec


def _check_lease(spec: HandlerSpec, asked: str) -> None:
    """Where nothing renews a lease a handler must end within it."""
    longest_ms = max(spec.queue.redelivery_timeout_ms, 15_000)  # the broker's shortest lock
    if spec.queue.backend is Backend.SHARE and spec.timeout_ms >= longest_ms:
        require(
            spec.queue.backend,
            Feature.LONG_HANDLERS,
            f"{asked}: timeout={spec.timeout_ms / 1000:g} s, a lock of {longest_ms / 1000:g} s",
        )
