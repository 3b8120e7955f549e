"""What a parallel consumer is told, and how its handler is called, here and in processes.

``ParallelOptions`` is what users give; ``make_config`` checks it once, and makes a
``ParallelConfig`` of it, in milliseconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from operator import attrgetter
from typing import Any, TypeAlias

from kafkamq.config import (
    Backoff,
    DeadLetterWriter,
    Option,
    Options,
    ServiceConfig,
    converted,
    one_of,
    options_of,
)
from kafkamq.errors import ConfigError
from kafkamq.parallel.record import ParallelRecord, PlainRecord
from kafkamq.parallel.rules.flow import FlowLimits
from kafkamq.parallel.rules.shards import NullKeys, Ordering
from kafkamq.queue.dead_letter_writer import checked_writer
from kafkamq.queue.handler import (
    CALL_OPTIONS,
    Binder,
    CallOptions,
    CallSettings,
    is_async_function,
    wants_body,
)
from kafkamq.queue.rules.retry import retry_kinds
from kafkamq.queue.schemas.registry import Deserializer, deserializer_of
from kafkamq.runtime.child import RemoteCall, pickled
from kafkamq.runtime.middleware import Middleware, bound, surrounded
from kafkamq.runtime.process_executor import Processes
from kafkamq.runtime.rules.pace import FanOut
from kafkamq.runtime.verdicts import Verdict
from kafkamq.types import PartitionId

RetryDelay: TypeAlias = Callable[[ParallelRecord], float]
"""Seconds until a record that failed is tried again; ``record.attempt`` counts from 1."""

_log = logging.getLogger(__name__)
_TRANSACTION_INTERVAL_MS = 100
_MAX_THREADS, _MAX_COROUTINES = 256, 2_000


class _Own:
    """What only parallel consumers are told."""

    commit_interval = Option(float, 1.0, least=0.001, most=3600)
    commit_timeout = Option(float, 10.0, least=0.001, most=600)
    send_timeout = Option(float, 30.0, least=0.001, most=600)
    revoke_timeout = Option(float, 2.0, least=0)
    stall_after = Option(float, 60.0, least=0.001)
    start = Option(str, "earliest", choices=("earliest", "latest", "none"))
    on_foreign_metadata = Option(str, "ignore", choices=("ignore", "raise"))


_AS_GIVEN = ("backoff", "dead_letter_topic")
_HOOKS = ("on_failure", "on_dead_letter", "on_committed", "on_assigned", "on_revoked")
_LIMITS = (Option(int, 1, name="max_open"), Option(int, 1, name="max_open_bytes", most=1 << 62))
_ON_STALL = Option(str, "report", name="on_stall", choices=("report", "dead-letter"))
_OPTIONS: tuple[Option[Any], ...] = (
    *CALL_OPTIONS, Options.max_concurrency, Options.max_attempts, Options.hung_after,
    Options.on_data_loss, *options_of(_Own),
)  # fmt: skip


class CommitMode(Enum):
    ASYNCHRONOUS = "asynchronous"
    # Nothing new is polled until a commit is confirmed.
    SYNCHRONOUS = "synchronous"
    TRANSACTIONAL = "transactional"


class OnExhausted(Enum):
    """What becomes of a record after its last attempt, or one that its handler rejects."""

    DEAD_LETTER = "dead-letter"
    # The record is counted, logged and passed over.
    SKIP = "skip"
    # The consumer fails; the committed offset stays before the record.
    STOP = "stop"


class ParallelOptions(CallOptions, total=False):
    """All of them may be left out, those of ``CallOptions`` as well; times are s, or timedeltas."""

    null_keys: str
    """By key, records without one are "serial" (the default), as of one key, or "parallel"."""
    max_concurrency: int | None
    """The most handlers at once that ``concurrency="auto"`` may try, in all processes together;
    256 for ``def``, 2,000 for ``async def``."""
    middleware: Sequence[Middleware]
    """Around the handler, the first one outermost (``runtime.middleware``); in its process."""
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
    on_committed: Callable[[Mapping[PartitionId, int]], object]
    """Offsets are committed: gets them by (topic, partition)."""
    on_assigned: Callable[[list[PartitionId]], object]
    """Partitions were assigned: gets them."""
    on_revoked: Callable[[list[PartitionId], bool], object]
    """Partitions were revoked: gets them, and whether they were lost without notice."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(CallSettings):
    service: ServiceConfig
    topics: tuple[str, ...]
    group_id: str
    ordering: Ordering = Ordering.KEY
    null_keys: NullKeys = NullKeys.SERIAL
    is_auto: bool = False  # how many at once is found (``FanOut``)
    max_concurrency: int | None = None  # then at most so many; None: as suits the handler
    middleware: tuple[Middleware, ...] = ()  # around the handler, in its process
    backoff: Backoff | RetryDelay = field(default_factory=lambda: Backoff(max=60.0))
    on_exhausted: OnExhausted | None = None  # None: to the dead letters, if there are any
    dead_letter_topic: str = ""
    dead_letter_writer: DeadLetterWriter | None = None  # in the place of a topic
    commit_mode: CommitMode = CommitMode.ASYNCHRONOUS  # commitMode
    commit_interval_ms: int = _Own.commit_interval.default_ms  # commitInterval; transactional: 100
    commit_timeout_ms: int = _Own.commit_timeout.default_ms  # offsetCommitTimeout
    send_timeout_ms: int = _Own.send_timeout.default_ms  # sendTimeout
    revoke_timeout_ms: int = _Own.revoke_timeout.default_ms  # for what is in flight, when revoked
    stall_after_ms: int = _Own.stall_after.default_ms  # thresholdForTimeSpendInQueueWarning
    gives_up_stalled: bool = False  # a stalled record that waits for a retry: to the dead letters
    hung_after_ms: int = Options.hung_after.default_ms  # all handlers hang: not alive
    limits: FlowLimits = field(default_factory=FlowLimits)  # messageBufferSize, per partition
    start: str = _Own.start.default  # of a group without commits
    on_data_loss: str = Options.on_data_loss.default
    on_foreign_metadata: str = _Own.on_foreign_metadata.default  # invalidOffsetMetadataPolicy
    hooks: Mapping[str, Callable[..., object]] = field(default_factory=dict)  # by their options

    def __post_init__(self) -> None:
        if not self.topics or not all(each and isinstance(each, str) for each in self.topics):
            raise ConfigError(f"topics is {self.topics!r}: name at least one topic")
        if not (self.group_id and isinstance(self.group_id, str)):
            raise ConfigError(f"group_id is {self.group_id!r}: a parallel consumer needs a group")
        for option in _OPTIONS:
            option.check_in(self)
        if not isinstance(self.backoff, Backoff) and not callable(self.backoff):
            raise ConfigError(f"backoff is {self.backoff!r}: give a Backoff or a function")
        self.check_call()
        if self.threads > 1 and self.is_auto:
            raise ConfigError("concurrency='auto' finds the threads of each process: leave it out")
        if self.max_concurrency is not None and not self.is_auto:
            raise ConfigError("max_concurrency is for concurrency='auto'")
        self._check_dead_letters()

    def _check_dead_letters(self) -> None:
        if not isinstance(self.dead_letter_topic, str):
            raise ConfigError(f"dead_letter_topic is {self.dead_letter_topic!r}: name a topic")
        if self.dead_letter_topic and self.dead_letter_writer is not None:
            raise ConfigError("dead_letter_topic and dead_letter_writer: give one of them")
        wanted = ""
        if self.on_exhausted is OnExhausted.DEAD_LETTER:
            wanted = "on_exhausted='dead-letter'"
        elif self.on_exhausted is None and self.max_attempts is not None:
            wanted = "max_attempts"
        elif self.gives_up_stalled:
            wanted = "on_stall='dead-letter'"
        if wanted and not self.has_dead_letters:
            raise ConfigError(
                f"{wanted} needs a dead_letter_topic (or on_exhausted='skip' or 'stop', if what"
                " cannot be processed shall not be kept)"
            )
        if self.dead_letter_topic in self.topics:
            raise ConfigError(f"dead_letter_topic is {self.dead_letter_topic!r}: read here as well")

    @property
    def has_dead_letters(self) -> bool:
        return bool(self.dead_letter_topic) or self.dead_letter_writer is not None

    @property
    def gives_up(self) -> bool:
        """Return whether there is a choice of what becomes of a record that is given up."""
        return self.has_dead_letters or self.on_exhausted is not None

    @property
    def is_transactional(self) -> bool:
        return self.commit_mode is CommitMode.TRANSACTIONAL

    def tell(self, hook: str, *facts: object) -> object:
        return tell(hook, self.hooks.get(hook), *facts)


def make_config(
    service: ServiceConfig,
    topics: str | Sequence[str],
    group_id: str,
    *,
    ordering: str,
    concurrency: int | str,
    options: ParallelOptions,
) -> ParallelConfig:
    for name in options:
        if name == "exact_metadata":
            raise ConfigError(
                "exact_metadata is no option any more: leave it out. Java's Parallel Consumer"
                " passes over offset maps that were written here (docs/parallel.md)"
            )
        if name not in ParallelOptions.__annotations__:
            raise TypeError(f"there is no option {name!r}")
    given = converted(_OPTIONS, options)
    given |= {name: each for name, each in options.items() if name in _AS_GIVEN}
    kinds = {"null_keys": NullKeys, "commit_mode": CommitMode, "on_exhausted": OnExhausted}
    for name, kind in kinds.items():
        if options.get(name) is not None:
            given[name] = one_of(kind, name, options.get(name))
    if given.get("commit_mode") is CommitMode.TRANSACTIONAL:
        given.setdefault("commit_interval_ms", _TRANSACTION_INTERVAL_MS)
    if not isinstance(topics, Iterable):
        raise ConfigError(f"topics is {topics!r}: it must be one name or several")
    is_auto = concurrency == "auto"
    if isinstance(concurrency, str) and not is_auto:
        raise ConfigError(f"concurrency is {concurrency!r}: give a number, or 'auto'")
    return ParallelConfig(
        service=service,
        topics=(topics,) if isinstance(topics, str) else tuple(topics),
        group_id=group_id,
        ordering=one_of(Ordering, "ordering", ordering),
        concurrency=Options.concurrency.default if isinstance(concurrency, str) else concurrency,
        is_auto=is_auto,
        middleware=tuple(options.get("middleware", ())),
        deserializer=deserializer_of(options.get("deserializer")),
        retry_on=retry_kinds(options.get("retry_on")),
        gives_up_stalled=options.get("on_stall") == "dead-letter",
        limits=FlowLimits(**converted(_LIMITS, options)),
        hooks=_hooks(options),
        dead_letter_writer=checked_writer(options.get("dead_letter_writer")),
        **given,
    )


def _hooks(options: ParallelOptions) -> dict[str, Callable[..., object]]:
    given: dict[str, Any] = {name: options.get(name) for name in _HOOKS}
    on_stall = options.get("on_stall", _ON_STALL.default)
    if callable(on_stall):
        given["on_stall"] = on_stall
    else:
        _ON_STALL.check(on_stall)
    hooks = {name: hook for name, hook in given.items() if hook is not None}
    for name, hook in hooks.items():
        if not callable(hook):
            raise ConfigError(f"{name} is {hook!r}: give a function")
    return hooks


def tell(name: str, hook: Callable[..., object] | None, *facts: object) -> object:
    """Call a function of the user's, which must be quick; None also where it failed."""
    if hook is None:
        return None
    try:
        return hook(*facts)
    except BaseException:  # noqa: BLE001 - whatever it is, the work goes on
        _log.exception("a hook failed", extra={"hook": name})
        return None


def is_async_handler(handler: Callable[..., Any]) -> bool:
    if not callable(handler):
        raise ConfigError(
            f"the handler is {type(handler).__name__}: give a function, def or async def, that"
            " takes a record"
        )
    return is_async_function(handler)


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


def from_fields(
    what: tuple[Callable[..., Any], Sequence[Middleware], Deserializer | None],
) -> Callable[[tuple[Any, ...]], Any]:
    """Return in a process the handler and what goes around it, of ``ParallelRecord.fields``."""
    call = called(*what)
    return lambda fields: call(PlainRecord(*fields))


def fan_out_of(config: ParallelConfig, *, is_async: bool) -> FanOut | None:
    """Finds how many handlers are to be at work at once, in each process; None: a fixed number."""
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
    """Return the processes of a handler, with so many slots each (0: ``threads``)."""
    slots = slots or config.threads
    if config.batch_size:
        raise ConfigError("processes= takes records in pieces of its own; leave batch_size out")
    call = RemoteCall(
        function=pickled((handler, config.middleware, config.deserializer)),
        prepare=from_fields,
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
