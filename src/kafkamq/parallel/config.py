"""What a parallel consumer is told: validated once, in milliseconds inside."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypeAlias

from kafkamq.config import Backoff, DeadLetterWriter, ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.rules.flow import FlowLimits
from kafkamq.parallel.rules.shards import NullKeys, Ordering
from kafkamq.queue.arguments import is_async_function
from kafkamq.queue.rules.retry import RetryOn
from kafkamq.queue.schemas.deserializer import Deserializer
from kafkamq.runtime.middleware import Middleware
from kafkamq.runtime.verdicts import Verdict

__all__ = [
    "CommitMode",
    "Hooks",
    "OnExhausted",
    "ParallelConfig",
    "Partition",
    "RetryDelay",
    "Verdict",
    "choice",
    "is_async_handler",
    "tell",
]

Partition: TypeAlias = tuple[str, int]
"""Topic and partition."""

RetryDelay: TypeAlias = Callable[[ParallelRecord], float]
"""Seconds until a record that failed is tried again; ``record.attempt`` counts from 1."""

_MAX_CONCURRENCY = 100_000

_log = logging.getLogger(__name__)


class CommitMode(Enum):
    """How offsets are committed."""

    ASYNCHRONOUS = "asynchronous"  # in the background, every ``commit_interval``
    SYNCHRONOUS = "synchronous"  # nothing new is polled until the commit is confirmed
    TRANSACTIONAL = "transactional"  # with the results, exactly once


class OnExhausted(Enum):
    """What becomes of a record after its last attempt, or one that its handler rejects."""

    DEAD_LETTER = "dead-letter"
    SKIP = "skip"  # counted, logged and passed over
    STOP = "stop"  # the consumer fails; the offset stays before the record


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Functions of the user's; they must be quick, and what they raise is logged."""

    # A handler failed: gets the record and the error, may return a verdict instead of the policy's.
    # In the thread of the worker.
    on_failure: Callable[[ParallelRecord, BaseException], Verdict | None] | None = None
    # A dead letter is in Kafka: gets the record and the reason.
    on_dead_letter: Callable[[ParallelRecord, str], object] | None = None
    # Offsets were committed: gets them by (topic, partition).
    on_committed: Callable[[Mapping[Partition, int]], object] | None = None
    # A record has held the committed offset back for ``stall_after``: gets topic, partition, offset
    # and seconds.
    on_stall: Callable[[str, int, int, float], object] | None = None
    # Partitions came: gets them as (topic, partition).
    on_assigned: Callable[[list[Partition]], object] | None = None
    # Partitions went: gets them, and whether they were lost without notice.
    on_revoked: Callable[[list[Partition], bool], object] | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            hook = getattr(self, each.name)
            if hook is not None and not callable(hook):
                raise ConfigError(f"{each.name} is {hook!r}: give a function")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """One parallel consumer; Parallel Consumer's names in the comments."""

    service: ServiceConfig
    topics: tuple[str, ...]
    group_id: str
    ordering: Ordering = Ordering.KEY
    null_keys: NullKeys = NullKeys.SERIAL
    concurrency: int = 16  # maxConcurrency: handlers at once; or how many to begin with
    is_auto: bool = False  # how many at once is found (``runtime.rules.fan_out``)
    max_concurrency: int | None = None  # then at most so many; None: as suits the handler
    processes: int = 0  # handlers run in so many processes; 0: in this one
    threads: int = 1  # or coroutines, in each process
    timeout_ms: int = 0  # of a call; 0: none
    middleware: tuple[Middleware, ...] = ()  # around the handler, in its process
    deserializer: Deserializer | None = None  # makes the body that the handler takes
    batch_size: int = 0  # batchSize: the most records of a call; 0: records, not lists
    batch_linger_ms: int = 0  # how long a list that is not full waits for more
    max_attempts: int | None = None  # None: forever, as Parallel Consumer
    retry_on: RetryOn | None = None  # None: any; PCRetriableException
    backoff: Backoff | RetryDelay = field(default_factory=lambda: Backoff(max=60.0))
    on_exhausted: OnExhausted | None = None  # None: to the dead letters, if there are any
    dead_letter_topic: str = ""
    dead_letter_writer: DeadLetterWriter | None = None  # in the place of a topic
    commit_mode: CommitMode = CommitMode.ASYNCHRONOUS  # commitMode
    commit_interval_ms: int = 1000  # commitInterval; transactional: 100
    commit_timeout_ms: int = 10_000  # offsetCommitTimeout
    send_timeout_ms: int = 30_000  # sendTimeout
    revoke_timeout_ms: int = 2_000  # for what is in flight, when partitions are revoked
    stall_after_ms: int = 60_000  # thresholdForTimeSpendInQueueWarning
    gives_up_stalled: bool = False  # a stalled record that waits for a retry: to the dead letters
    hung_after_ms: int = 43_200_000  # handlers that all hang for so long: not alive
    max_rate: float | None = None  # records a second, of this consumer
    limits: FlowLimits = field(default_factory=FlowLimits)  # messageBufferSize, per partition
    start: str = "earliest"  # of a group without commits: or "latest", or "none" (an error)
    on_data_loss: str = "raise"  # or "skip"
    on_foreign_metadata: str = "ignore"  # invalidOffsetMetadataPolicy: or "raise"
    hooks: Hooks = field(default_factory=Hooks)

    def __post_init__(self) -> None:
        if not self.topics or not all(each and isinstance(each, str) for each in self.topics):
            raise ConfigError(f"topics is {self.topics!r}: name at least one topic")
        if not (self.group_id and isinstance(self.group_id, str)):
            raise ConfigError(f"group_id is {self.group_id!r}: a parallel consumer needs a group")
        for name, minimum, maximum in (
            ("concurrency", 1, _MAX_CONCURRENCY),
            ("processes", 0, 1024),
            ("threads", 1, 1024),
            ("timeout_ms", 0, 1 << 40),
            ("batch_size", 0, 100_000),
            ("commit_interval_ms", 1, 3_600_000),
            ("commit_timeout_ms", 1, 600_000),
            ("send_timeout_ms", 1, 600_000),
            ("stall_after_ms", 1, 1 << 40),
            ("hung_after_ms", 1, 1 << 40),
        ):
            value = getattr(self, name)
            if not _is_whole(value):
                raise ConfigError(f"{name} is {value!r}: give a whole number")
            if not minimum <= value <= maximum:
                raise ConfigError(f"{name} is {value!r}: it must be {minimum} to {maximum:,}")
        attempts = self.max_attempts
        if attempts is not None and (not _is_whole(attempts) or attempts < 1):
            raise ConfigError(f"max_attempts is {attempts!r}: at least 1, or None: forever")
        if not isinstance(self.backoff, Backoff) and not callable(self.backoff):
            raise ConfigError(f"backoff is {self.backoff!r}: give a Backoff or a function")
        self._check_slots()
        if self.batch_linger_ms and not self.batch_size:
            raise ConfigError("batch_linger needs a batch_size")
        choice("start", self.start, ("earliest", "latest", "none"))
        choice("on_data_loss", self.on_data_loss, ("raise", "skip"))
        choice("on_foreign_metadata", self.on_foreign_metadata, ("ignore", "raise"))
        self._check_dead_letters()

    def _check_slots(self) -> None:
        if self.threads > 1 and not self.processes:
            raise ConfigError("threads is for processes=; else concurrency says how many")
        if self.threads > 1 and self.is_auto:
            raise ConfigError("concurrency='auto' finds the threads of each process: leave it out")
        most = self.max_concurrency
        if most is None:
            return
        if not self.is_auto:
            raise ConfigError("max_concurrency is for concurrency='auto'")
        if not _is_whole(most) or not 1 <= most <= _MAX_CONCURRENCY:
            raise ConfigError(
                f"max_concurrency is {most!r}: it must be 1 to {_MAX_CONCURRENCY:,}, a whole number"
            )

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
        """Whether there is a place for what is given up."""
        return bool(self.dead_letter_topic) or self.dead_letter_writer is not None

    @property
    def gives_up(self) -> bool:
        """Whether it is said what becomes of a record that is given up."""
        return self.has_dead_letters or self.on_exhausted is not None

    @property
    def is_transactional(self) -> bool:
        return self.commit_mode is CommitMode.TRANSACTIONAL


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}: it must be one of {', '.join(allowed)}")
    return str(value)


def is_async_handler(handler: Callable[..., Any]) -> bool:
    if not callable(handler):
        raise ConfigError(
            f"the handler is {type(handler).__name__}: give a function, def or async def, that"
            " takes a record"
        )
    return is_async_function(handler)


def tell(name: str, hook: Callable[..., object] | None, *facts: object) -> object:
    """What the hook returns; None also where there is none, or it failed."""
    if hook is None:
        return None
    try:
        return hook(*facts)
    except BaseException:  # noqa: BLE001 - whatever it is, the work goes on
        _log.exception("a hook failed", extra={"hook": name})
        return None
