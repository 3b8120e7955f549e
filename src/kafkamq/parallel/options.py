"""What users may ask of a parallel consumer, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any, TypedDict

from kafkamq.config import Backoff, DeadLetterWriter, ServiceConfig, milliseconds, one_of
from kafkamq.errors import ConfigError
from kafkamq.parallel.config import (
    CommitMode,
    Hooks,
    OnExhausted,
    ParallelConfig,
    Partition,
    RetryDelay,
    Verdict,
    choice,
)
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.rules.flow import FlowLimits
from kafkamq.parallel.rules.shards import NullKeys, Ordering
from kafkamq.queue.dead_letter_writer import checked_writer
from kafkamq.queue.rules.retry import RetryOn, retry_kinds
from kafkamq.queue.schemas.deserializer import Deserializer, deserializer_of
from kafkamq.runtime.middleware import Middleware

_TRANSACTION_INTERVAL_MS = 100
_START = 16  # handlers at once, where it is found how many
_PLAIN = (
    "max_concurrency", "processes", "threads", "batch_size", "max_attempts", "backoff",
    "dead_letter_topic", "max_rate", "start", "on_data_loss", "on_foreign_metadata",
)  # fmt: skip
_TIMES = {  # and the least that they may be, in ms
    "timeout": 1,
    "batch_linger": 0,
    "commit_interval": 1,
    "commit_timeout": 1,
    "send_timeout": 1,
    "revoke_timeout": 0,
    "stall_after": 1,
    "hung_after": 1,
}
_CHOICES = {"null_keys": NullKeys, "commit_mode": CommitMode, "on_exhausted": OnExhausted}


class ParallelOptions(TypedDict, total=False):
    """All of them may be left out; times are s, or timedeltas."""

    null_keys: str
    """By key, records without one are "serial" (the default), as of one key, or "parallel"."""
    max_concurrency: int | None
    """The most handlers at once that ``concurrency="auto"`` may try, in all processes together;
    256 for ``def``, 2,000 for ``async def``."""
    processes: int
    """Run the handler in so many processes; it must be importable there, and gets plain records."""
    threads: int
    """Handlers at once in each process: threads for ``def``, coroutines for ``async def``; 1."""
    timeout: float | timedelta | None
    """s after which a call has failed: a coroutine is cancelled, a process with one handler ended,
    a thread left alone; None (the default): never."""
    middleware: Sequence[Middleware]
    """Around the handler, the first one outermost (``runtime.middleware``); in its process."""
    deserializer: Deserializer | Callable[[bytes], Any] | None
    """Makes the handler's body: a schema of a ``SchemaRegistry``, or a function of the value, of
    which any exception rejects the record. Without the registry a record is tried again, which is
    none of its attempts."""
    batch_size: int
    """Give the handler lists of up to so many records; 0 (the default): single records."""
    batch_linger: float | timedelta
    """How long a list that is not full waits for more; 0."""
    max_attempts: int | None
    """Then a record is given up; None (the default): it is tried forever. A handler that ended
    well, and whose result could not be written for want of brokers or rights, has not failed."""
    retry_on: type[BaseException] | Sequence[type[BaseException]] | RetryOn | None
    """Exceptions that are worth another attempt; any other one rejects its record. A mapping gives
    kinds a back-off of their own, or None. None (the default): all are. Time that has run out, and
    a process that has died, always are."""
    backoff: Backoff | RetryDelay
    """Until the next attempt: 1 s, doubled up to 60 s; or a function of the record."""
    on_exhausted: str
    """What is given up goes to the "dead-letter" topic (the default), or "skip" or "stop".

    Without a choice and without a ``dead_letter_topic`` nothing is given up: a record that its
    handler rejects is tried again, and an error says why."""
    dead_letter_topic: str
    """Where dead letters go."""
    dead_letter_writer: DeadLetterWriter | None
    """Keeps them instead, elsewhere than on Kafka."""
    commit_mode: str
    """"asynchronous" (the default), "synchronous", or "transactional" with the results."""
    commit_interval: float | timedelta
    """Between commits; 1, transactional 0.1."""
    commit_timeout: float | timedelta
    """For the answer to a commit, where one is waited for; 10."""
    send_timeout: float | timedelta
    """Until Kafka has results and dead letters; 30."""
    revoke_timeout: float | timedelta
    """For what is in flight when partitions go to others; 2."""
    stall_after: float | timedelta
    """A record that holds the committed offset back for so long is reported; 60."""
    on_stall: str | Callable[[str, int, int, float], object]
    """Then: "report" (the default), "dead-letter", or a function of topic, partition, offset, s."""
    hung_after: float | timedelta
    """For so long all handlers may hang: none ends, or their event loop is blocked. Then health
    says that the consumer is not alive; after 5 minutes, that it is not ready. 43,200 (12 hours),
    as the longest lease of a queue: set it to what your longest handler may take."""
    max_rate: float | None
    """Records a second, at most."""
    max_open: int
    """Records of a partition that are read and not done, at most (and one poll); 10,000."""
    max_open_bytes: int
    """How much their values may take, about; 256 MiB. Of each partition."""
    start: str
    """Without a committed offset: "earliest" (the default), "latest", or "none": an error."""
    on_data_loss: str
    """The position is not in the log: "raise" (the default), or "skip" to its start."""
    on_foreign_metadata: str
    """What another program left at the committed offset: "ignore" (the default) or "raise"."""
    on_failure: Callable[[ParallelRecord, BaseException], Verdict | None]
    """A handler raised: gets record and error, may return a verdict."""
    on_dead_letter: Callable[[ParallelRecord, str], object]
    """A dead letter is in Kafka: gets record and reason."""
    on_committed: Callable[[Mapping[Partition, int]], object]
    """Offsets are committed: gets them by (topic, partition)."""
    on_assigned: Callable[[list[Partition]], object]
    """Partitions came."""
    on_revoked: Callable[[list[Partition], bool], object]
    """Partitions went; with whether they were lost without notice."""


def make_config(
    service: ServiceConfig,
    topics: str | Sequence[str],
    group_id: str,
    *,
    ordering: str,
    concurrency: int | str,
    options: ParallelOptions,
) -> ParallelConfig:
    """The configuration that is meant."""
    for name in options:
        if name == "exact_metadata":
            raise ConfigError(
                "exact_metadata is no option any more: leave it out. Java's Parallel Consumer"
                " passes over offset maps that were written here (docs/parallel.md)"
            )
        if name not in ParallelOptions.__annotations__:
            raise TypeError(f"there is no option {name!r}")
    given: dict[str, Any] = {name: value for name, value in options.items() if name in _PLAIN}
    for name, minimum_ms in _TIMES.items():
        value: Any = options.get(name)
        if value is not None or (name in options and name != "timeout"):
            given[f"{name}_ms"] = milliseconds(value, name=name, minimum=minimum_ms)
    for name, kind in _CHOICES.items():
        if options.get(name) is not None:
            given[name] = one_of(kind, name, options.get(name))
    if given.get("commit_mode") is CommitMode.TRANSACTIONAL:
        given.setdefault("commit_interval_ms", _TRANSACTION_INTERVAL_MS)
    max_rate = options.get("max_rate")
    _require(
        max_rate is None or isinstance(max_rate, int | float), "max_rate", max_rate, "a number"
    )
    _require(isinstance(topics, Iterable), "topics", topics, "one name or several")
    is_auto = concurrency == "auto"
    return ParallelConfig(
        service=service,
        topics=(topics,) if isinstance(topics, str) else tuple(topics),
        group_id=group_id,
        ordering=one_of(Ordering, "ordering", ordering),
        concurrency=_START if is_auto else _whole(concurrency),
        is_auto=is_auto,
        middleware=tuple(options.get("middleware", ())),
        deserializer=deserializer_of(options.get("deserializer")),
        retry_on=retry_kinds(options.get("retry_on")),
        gives_up_stalled=options.get("on_stall") == "dead-letter",
        limits=_limits(options),
        hooks=_hooks(options),
        dead_letter_writer=checked_writer(options.get("dead_letter_writer")),
        **given,
    )


def _whole(concurrency: int | str) -> int:
    if isinstance(concurrency, str):
        raise ConfigError(f"concurrency is {concurrency!r}: give a number, or 'auto'")
    return concurrency


def _limits(options: ParallelOptions) -> FlowLimits:
    max_open: Any = options.get("max_open", 10_000)
    _require(isinstance(max_open, int) and max_open > 0, "max_open", max_open, "at least 1")
    limits = FlowLimits(max_open=max_open, resume_open=max_open // 2)
    max_open_bytes: Any = options.get("max_open_bytes", limits.max_open_bytes)
    _require(isinstance(max_open_bytes, int), "max_open_bytes", max_open_bytes, "a whole number")
    return replace(limits, max_open_bytes=max_open_bytes)


def _hooks(options: ParallelOptions) -> Hooks:
    on_stall = options.get("on_stall", "report")
    if not callable(on_stall):
        choice("on_stall", on_stall, ("report", "dead-letter"))
    given: dict[str, Any] = {each.name: options.get(each.name) for each in fields(Hooks)}
    return Hooks(**{**given, "on_stall": on_stall if callable(on_stall) else None})


def _require(is_fine: bool, name: str, value: object, wanted: str) -> None:
    if not is_fine:
        raise ConfigError(f"{name} is {value!r}: it must be {wanted}")
