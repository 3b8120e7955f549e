"""Settings: frozen, validated when they are built; times in milliseconds inside.

Libraries never read the environment; the CLI does and builds these. Kafka's own properties travel
verbatim in ``ServiceConfig.kafka`` and reach every client (``transport/settings.py``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any, Protocol, TypeVar

from kafkamq.errors import ConfigError
from kafkamq.types import Backend

__all__ = [
    "MAX_REDELIVERY_TIMEOUT_MS",
    "TOPICS",
    "Backoff",
    "QueueConfig",
    "ServiceConfig",
    "TrackerConfig",
    "milliseconds",
    "one_of",
    "utf8",
]

# kafka-mq-go's limit, and that of SQS.
MAX_REDELIVERY_TIMEOUT_MS = 12 * 3_600_000
MAX_QUEUE_ID_BYTES = 1024
# An int32 on the wire.
MAX_COUNT = 2**31 - 1
# So many characters of a value stand in an error text.
MAX_SHOWN = 80
Choice = TypeVar("Choice", bound=Enum)
_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")
# 31 years; a wait of ten times as long raises OverflowError.
_MAX_WAIT_S = 1e9
_TOPIC_NAME_LIMIT = "1-249 of letters, digits, '.', '_' and '-'"


def milliseconds(value: float | timedelta, *, name: str, minimum: int = 0) -> int:
    """Return a duration in seconds (or a timedelta) as whole milliseconds.

    Raises:
        ConfigError: not a number, not finite, or below ``minimum`` (milliseconds).
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise _refusal(name, value, "seconds as a number, or a timedelta")
    if not -1e12 < seconds < 1e12:
        # This also refuses NaN.
        raise _refusal(name, value, "a finite number of seconds, below 10^12")
    result = round(seconds * 1000)
    if result < minimum:
        raise _refusal(name, value, f"at least {minimum / 1000:g} s")
    return result


def wait_seconds(
    value: float | timedelta, *, name: str = "timeout", may_be_endless: bool = False
) -> float:
    """Return how long to wait for an end, in seconds: what is left of a time may be negative, which
    is 0.

    Raises:
        ConfigError: not a number, or not finite where it may not be endless (``math.inf``).
    """
    if may_be_endless and value == math.inf:
        return _MAX_WAIT_S
    wait_ms = milliseconds(value, name=name, minimum=-(10**15))
    return max(0.0, min(wait_ms / 1000, _MAX_WAIT_S))


def utf8(value: str, *, name: str) -> bytes:
    """Return a text as it travels.

    Raises:
        ConfigError: no text, or with half a surrogate pair, which UTF-8 does not have.
    """
    if not isinstance(value, str):
        raise _refusal(name, value, "a text")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise _refusal(name, value, "a text without lone surrogates") from None


def one_of(kind: type[Choice], name: str, value: object) -> Choice:
    """Return the member that has this value.

    Raises:
        ConfigError: None has; names them.
    """
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(each.value) for each in kind)
        raise _refusal(name, value, f"one of {known}") from None


def _refusal(name: str, value: object, limit: str) -> ConfigError:
    try:
        shown = repr(value)
    except ValueError:
        shown = f"a huge {type(value).__name__}"
    if len(shown) > MAX_SHOWN:
        shown = shown[: MAX_SHOWN - 3] + "..."
    return ConfigError(f"{name} is {shown}: it must be {limit}")


def _require(condition: bool, name: str, value: object, limit: str) -> None:
    if not condition:
        raise _refusal(name, value, limit)


def _require_count(name: str, value: object, minimum: int = 1) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    is_within = is_count and minimum <= value <= MAX_COUNT  # type: ignore[operator]  # an int
    _require(is_within, name, value, f"a whole number >= {minimum} and < 2^31")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_topic_name(value: object) -> bool:
    return isinstance(value, str) and bool(_TOPIC_NAME.fullmatch(value))


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Delay before a nacked message comes back: first x 2^(deliveries - 1), capped, with jitter."""

    first: float = 1.0  # s, after the first delivery
    max: float = 600.0  # s
    jitter: float = 0.2  # the delay is multiplied by 1 - jitter .. 1 + jitter

    def __post_init__(self) -> None:
        for name in ("first", "max", "jitter"):
            value = getattr(self, name)
            _require(_is_number(value), f"backoff.{name}", value, "a number")
        milliseconds(self.first, name="backoff.first")
        milliseconds(self.max, name="backoff.max")
        _require(self.max >= self.first, "backoff.max", self.max, f">= first ({self.first})")
        _require(0.0 <= self.jitter <= 1.0, "backoff.jitter", self.jitter, "between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """One namespace on one cluster: where it is and what its topics are called."""

    bootstrap_servers: str  # bootstrap.servers
    namespace: str = "kafkamq"
    message_topic: str = ""  # default NS.messages
    marker_topic: str = ""  # default NS.markers
    dead_letter_topic: str = ""  # default NS.dead-letters
    tracker_topic: str = ""  # default NS.tracker: compacted status
    ledger_topic: str = ""  # default NS.ledger
    quarantine_topic: str = ""  # default NS.quarantine: records that no tracker could decode (R21)
    kafka: Mapping[str, str] = field(default_factory=dict, repr=False)  # verbatim, may hold secrets

    def __post_init__(self) -> None:
        _require(
            bool(utf8(self.bootstrap_servers, name="bootstrap_servers")),
            "bootstrap_servers",
            self.bootstrap_servers,
            "host:port[,host:port...]",
        )
        _require(_is_topic_name(self.namespace), "namespace", self.namespace, _TOPIC_NAME_LIMIT)
        for name, suffix in TOPICS.items():
            if getattr(self, name) == "":
                object.__setattr__(self, name, f"{self.namespace}.{suffix}")
            value: str = getattr(self, name)
            _require(_is_topic_name(value), name, value, _TOPIC_NAME_LIMIT)
        if not isinstance(self.kafka, Mapping):
            # Its values may be secrets, which are not shown.
            raise ConfigError(f"kafka is a {type(self.kafka).__name__}: it must be a mapping")
        # It stays as it is now, whatever becomes of the argument.
        object.__setattr__(self, "kafka", dict(self.kafka))
        names = [getattr(self, name) for name in TOPICS]
        _require(len(set(names)) == len(names), "topic names", names, "different from each other")

    @property
    def topics(self) -> dict[str, str]:
        """Return its topics, by the names of the fields above."""
        return {name: getattr(self, name) for name in TOPICS}


TOPICS = {
    "message_topic": "messages",
    "marker_topic": "markers",
    "dead_letter_topic": "dead-letters",
    "tracker_topic": "tracker",
    "ledger_topic": "ledger",
    "quarantine_topic": "quarantine",
}
"""What each is called behind the namespace, where it has no name of its own."""


class DeadLetterWriter(Protocol):
    """Keeps dead letters elsewhere than on Kafka."""

    def write(self, letter: Any) -> object:
        """Keep an ``OutgoingDeadLetter``; returning means that it is kept.

        It is called by one thread of each consumer, for one letter at a time. An exception means
        that it is not kept: it is given again, after a pause of up to 2 s, until it is. So it may
        come twice, with the same ``origin``. A write that hangs holds up all others.
        """


@dataclass(frozen=True, kw_only=True)
class QueueConfig:
    """How one logical queue is worked on; kafka-mq-go's names in the comments."""

    queue_id: str
    redelivery_timeout_ms: int = 10_000  # redelivery-timeout; SQS: visibility timeout
    max_deliveries: int = 5
    max_lease_ms: int = 43_200_000  # from the first START, whatever renews it
    backoff: Backoff = Backoff()
    max_in_flight: int = 1000  # messages held and not settled, per consumer
    receive_buffer: int = 100  # consumer-receive-buffer-capacity: STARTed ahead of receive()
    next_message_timeout_ms: int = 1000  # consumer-next-message-timeout
    max_messages_per_commit: int = (
        1000  # consumer-max-messages-per-commit, those of other queues included
    )
    max_inline_payload_bytes: int = 65_536  # larger ones are STARTed by reference (R11)
    on_data_loss: str = "raise"  # or "skip"
    exactly_once: bool = False
    delivery: str = "at-least-once"  # or "at-most-once": committed before it is handed out
    batch_markers: bool = True  # markers of many messages in one record (R28-R30)
    backend: Backend = Backend.MARKERS
    topic: str = ""  # of markers: one that exists, or the namespace's; else one of its own
    group_id: str = ""  # group.id; empty: one by namespace and queue
    null_keys: str = "parallel"  # or "serial": of offsets, by key, messages without one
    dead_letter_writer: DeadLetterWriter | None = field(default=None, compare=False)  # None: Kafka

    def __post_init__(self) -> None:
        encoded = utf8(self.queue_id, name="queue_id")
        _require(
            0 < len(encoded) <= MAX_QUEUE_ID_BYTES,
            "queue_id",
            self.queue_id,
            f"1-{MAX_QUEUE_ID_BYTES} bytes of UTF-8",
        )
        _require(b"\0" not in encoded, "queue_id", self.queue_id, "free of NUL characters")
        _require(
            0 < self.redelivery_timeout_ms <= MAX_REDELIVERY_TIMEOUT_MS,
            "redelivery_timeout",
            self.redelivery_timeout_ms / 1000,
            "> 0 s and <= 12 h",
        )
        _require(
            self.max_lease_ms >= self.redelivery_timeout_ms,
            "max_lease",
            self.max_lease_ms / 1000,
            ">= redelivery_timeout",
        )
        _require(isinstance(self.backoff, Backoff), "backoff", self.backoff, "a Backoff")
        for name in (
            "max_deliveries",
            "max_in_flight",
            "receive_buffer",
            "next_message_timeout_ms",
            "max_messages_per_commit",
        ):
            _require_count(name, getattr(self, name))
        _require_count("max_inline_payload_bytes", self.max_inline_payload_bytes, 0)
        for name in ("exactly_once", "batch_markers"):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, value, "True or False")
        for name, allowed in (
            ("on_data_loss", ("raise", "skip")),
            ("null_keys", ("parallel", "serial")),
            ("delivery", ("at-least-once", "at-most-once")),
        ):
            value = getattr(self, name)
            _require(value in allowed, name, value, f"{allowed[0]!r} or {allowed[1]!r}")
        once = self.exactly_once and self.is_at_most_once
        _require(not once, "exactly_once", True, "False with delivery='at-most-once'")
        self._require_place()

    @property
    def is_at_most_once(self) -> bool:
        """Return whether what is handed out counts as acknowledged before that."""
        return self.delivery == "at-most-once"

    def _require_place(self) -> None:
        if self.topic:
            _require(_is_topic_name(self.topic), "topic", self.topic, _TOPIC_NAME_LIMIT)
        if self.group_id:
            utf8(self.group_id, name="group")


@dataclass(frozen=True, kw_only=True)
class TrackerConfig:
    """How a redelivery tracker runs, whichever the engine; kafka-mq-go's names in the comments."""

    max_silence_ms: int = 1000  # use-now-if-no-marker-seen: longest silence before a TICK while due
    max_offsets_per_commit: int = 50_000  # num-offsets-per-commit: messages of a transaction (R16)
    max_transaction_bytes: int = 16 * 1024 * 1024  # R16: the most; over slow links it takes less
    position_interval_ms: int = 10_000  # a position without actions is written this often (R22)
    max_deliveries: int = 5  # for STARTs that do not say (R14)
    max_lease_ms: int = 43_200_000  # for STARTs that do not say
    takeover: bool = True  # False: refuse to start while another engine's epoch is the latest

    def __post_init__(self) -> None:
        for name in (
            "max_silence_ms",
            "max_offsets_per_commit",
            "max_transaction_bytes",
            "position_interval_ms",
            "max_deliveries",
            "max_lease_ms",
        ):
            _require_count(name, getattr(self, name))
        _require(
            self.max_offsets_per_commit <= 50_000,
            "max_offsets_per_commit",
            self.max_offsets_per_commit,
            "<= 50,000 (R16)",
        )
