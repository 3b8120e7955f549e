"""What the processes of a parallel consumer's handlers are told."""

from __future__ import annotations

import pickle
from collections.abc import Callable

from kafkamq.errors import ConfigError
from kafkamq.parallel.calls import from_fields
from kafkamq.parallel.config import ParallelConfig
from kafkamq.parallel.record import ParallelRecord
from kafkamq.runtime.child import RemoteCall
from kafkamq.runtime.process_executor import Processes

__all__ = ["processes_of"]


def processes_of(
    config: ParallelConfig,
    handler: Callable[..., object],
    *,
    is_async: bool,
    wants_results: bool = False,
) -> Processes:
    """As many as the configuration says.

    Raises:
        ConfigError: The handler cannot be called in another process.
    """
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
