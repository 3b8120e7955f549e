"""What is called for a record, here and in processes: the handler, and middleware around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from kafkamq.errors import ConfigError
from kafkamq.parallel.config import ParallelConfig, is_async_handler
from kafkamq.parallel.record import ParallelRecord, PlainRecord
from kafkamq.queue.arguments import Binder, wants_body
from kafkamq.queue.schemas.deserializer import Deserializer
from kafkamq.runtime.batches import bound
from kafkamq.runtime.child import remote_call
from kafkamq.runtime.middleware import Middleware, surrounded
from kafkamq.runtime.process_executor import Processes
from kafkamq.runtime.rules.fan_out import FanOut

_MAX_THREADS, _MAX_COROUTINES = 256, 2_000  # where nobody says how many may be tried


def called(
    handler: Callable[..., Any],
    middleware: Sequence[Middleware],
    deserializer: Deserializer | None = None,
    *,
    takes_lists: bool = False,
) -> Callable[[Any], Any]:
    """Takes a record, or a list; the handler itself, where there is nothing to add to it."""
    is_async = is_async_handler(handler)
    call = handler
    if deserializer is not None or wants_body(handler, of_lists=takes_lists):
        binder = Binder(handler, of_lists=takes_lists, deserializer=deserializer)
        call = bound(handler, binder, is_async=is_async)
    if not middleware:
        return call
    name = getattr(handler, "__qualname__", repr(handler))
    return surrounded(call, middleware, is_async=is_async, name=name)


def called_for(config: ParallelConfig, handler: Callable[..., Any]) -> Callable[[Any], Any]:
    """As ``called``, as the configuration says."""
    takes_lists = bool(config.batch_size)
    return called(handler, config.middleware, config.deserializer, takes_lists=takes_lists)


def from_fields(
    what: tuple[Callable[..., Any], Sequence[Middleware], Deserializer | None],
) -> Callable[[tuple[Any, ...]], Any]:
    """In a process: the handler and what goes around it, of ``ParallelRecord.fields``."""
    call = called(*what)
    return lambda fields: call(PlainRecord(*fields))


def fan_out_of(config: ParallelConfig, *, is_async: bool) -> FanOut | None:
    """Finds how many handlers are to be at work at once, in each process; None: it is said."""
    if not config.is_auto:
        return None
    maximum = config.max_concurrency or (_MAX_COROUTINES if is_async else _MAX_THREADS)
    processes = max(1, config.processes)
    start, maximum = max(1, config.concurrency // processes), max(1, maximum // processes)
    return FanOut(start=start, maximum=maximum)


def processes_of(
    config: ParallelConfig,
    handler: Callable[..., object],
    *,
    is_async: bool,
    slots: int = 0,
    wants_results: bool = False,
) -> Processes:
    """As many as the configuration says, with so many slots each (0: ``threads``)."""
    slots = slots or config.threads
    if config.batch_size:
        raise ConfigError("processes= takes records in pieces of its own; leave batch_size out")
    call = remote_call(
        (handler, config.middleware, config.deserializer),
        from_fields,
        is_async=is_async,
        slots=slots,
        wants_all=wants_results,
        timeout_ms=config.timeout_ms,
    )
    return Processes(
        call=call,
        count=config.processes,
        pack=ParallelRecord.fields,
        place=attrgetter("place"),
        timeout_ms=config.timeout_ms,
        owner=config,
    )
