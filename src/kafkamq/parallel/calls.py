"""What is called for a record, here and in processes: the handler, and middleware around it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from kafkamq.errors import ConfigError
from kafkamq.parallel.config import ParallelConfig, is_async_handler
from kafkamq.parallel.record import ParallelRecord, PlainRecord
from kafkamq.queue.arguments import Binder, wants_body
from kafkamq.runtime.batches import bound
from kafkamq.runtime.child import RemoteCall
from kafkamq.runtime.middleware import Middleware, surrounded
from kafkamq.runtime.process_executor import Processes


def called(
    handler: Callable[..., Any], middleware: Sequence[Middleware], *, takes_lists: bool = False
) -> Callable[[Any], Any]:
    """Takes a record, or a list; the handler itself, where there is nothing to add to it."""
    is_async = is_async_handler(handler)
    call = handler
    if wants_body(handler, of_lists=takes_lists):
        call = bound(handler, Binder(handler, of_lists=takes_lists), is_async=is_async)
    if not middleware:
        return call
    name = getattr(handler, "__qualname__", repr(handler))
    return surrounded(call, middleware, is_async=is_async, name=name)


def from_fields(
    what: tuple[Callable[..., Any], Sequence[Middleware]],
) -> Callable[[tuple[Any, ...]], Any]:
    """In a process of handlers: the handler and its middleware, of ``ParallelRecord.fields``."""
    call = called(*what)
    return lambda fields: call(PlainRecord(*fields))


def processes_of(
    config: ParallelConfig,
    handler: Callable[..., object],
    *,
    is_async: bool,
    wants_results: bool = False,
) -> Processes:
    """As many as the configuration says."""
    if config.batch_size:
        raise ConfigError("processes= takes records in pieces of its own; leave batch_size out")
    try:
        function = pickle.dumps((handler, config.middleware))
    except Exception as error:
        raise ConfigError(
            "processes= needs a handler that can be imported, as a module's function, and such"
            f" middleware ({error})"
        ) from error
    call = RemoteCall(
        function=function,
        prepare=from_fields,
        is_async=is_async,
        slots=config.threads,
        wants_all=wants_results,
        timeout_ms=config.timeout_ms if is_async or config.threads > 1 else 0,
    )
    return Processes(
        call=call,
        count=config.processes,
        pack=ParallelRecord.fields,
        place=_place,
        timeout_ms=config.timeout_ms,
        owner=config,
    )


def _place(record: ParallelRecord) -> tuple[str, int, int]:
    return record.place
