"""What users set: the table of options, and the settings that are made of them.

An ``Option`` below is the one place for its name, default, limits and purpose, whatever has it:
``Service.queue``, handlers, ``ParallelConsumer``, ``Worker``, the commands, Spark. Settings are
frozen, validated when they are built, and have times in milliseconds.

Libraries never read the environment; the CLI does and builds these. Kafka's own properties travel
verbatim in ``ServiceConfig.kafka`` and reach every client (``transport/settings.py``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from kafkamq.errors import ConfigError
from kafkamq.types import Backend

# kafka-mq-go's limit, and that of SQS.
MAX_REDELIVERY_TIMEOUT_MS = 12 * 3_600_000
MAX_QUEUE_ID_BYTES = 1024
# An int32 on the wire.
MAX_COUNT = 2**31 - 1
MAX_SHOWN = 80
Choice = TypeVar("Choice", bound=Enum)
Value = TypeVar("Value")
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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_topic_name(value: object) -> bool:
    return isinstance(value, str) and bool(_TOPIC_NAME.fullmatch(value))


@dataclass(frozen=True)
class Option(Generic[Value]):
    """What users set by one name, whatever they set it for: that of its place in a class.

    ``max_deliveries`` is ``--max-deliveries`` of a command and ``maxDeliveries`` in Spark. Users
    give times in seconds, or as a timedelta; settings have them in milliseconds.
    """

    kind: type[object]  # int, bool, str; float: a time, unless it has another unit
    default: Value
    says: str = ""  # a sentence for ``--help``
    name: str = ""
    least: float = 1
    most: float = math.inf
    choices: tuple[str, ...] = ()
    unit: str = "seconds"

    def __set_name__(self, owner: type[object], name: str) -> None:
        object.__setattr__(self, "name", name)

    @property
    def is_time(self) -> bool:
        return self.kind is float and self.unit == "seconds"

    @property
    def field(self) -> str:
        """Return what settings call it."""
        return f"{self.name}_ms" if self.is_time else self.name

    @property
    def default_ms(self) -> int:
        return int(self.convert(self.default))

    def convert(self, value: Any, *, of: str = "") -> Any:
        """Return what settings have of a user's value; of a time that is None they have 0 ms.

        Raises:
            ConfigError: As ``check``.
        """
        if not self.is_time:
            self.check(value, of=of)
            return value
        if value is None and self.default is None:
            return 0
        value_ms = milliseconds(value, name=of + self.name, minimum=round(self.least * 1000))
        self.check(value_ms / 1000, of=of)
        return value_ms

    def check_in(self, settings: object) -> None:
        """Refuse settings that have what it cannot be."""
        value = getattr(settings, self.field)
        if self.is_time:
            fits = _is_number(value) and isinstance(value, int) and abs(value) < 10**15
            _require(fits, self.field, value, "a whole number, of milliseconds, below 10^15")
            value = value / 1000 if value or self.default is not None else None
        self.check(value)

    def check(self, value: object, *, of: str = "") -> None:
        """Refuse what it cannot be; ``of`` stands before its name.

        Raises:
            ConfigError: Names the value and the limits.
        """
        if value is None and self.default is None:
            return
        if self.choices:
            fits, limit = value in self.choices, " or ".join(map(repr, self.choices))
        elif self.kind is bool:
            fits, limit = isinstance(value, bool), "True or False"
        elif self.kind is str:
            fits, limit = isinstance(value, str), "a text"
        else:
            is_whole = self.kind is int
            most = self.most
            if most == math.inf:
                most = MAX_COUNT if is_whole else _MAX_WAIT_S
            limit = f"{'a whole number' if is_whole else self.unit} >= {self.least:g}"
            shown = f"{most:,}" if is_whole else f"{most:,.15g}"
            limit += " and < 2^31" if most == MAX_COUNT else f" and <= {shown}"
            number: Any = value
            is_number = isinstance(value, int) if is_whole else _is_number(value)
            fits = is_number and not isinstance(value, bool) and self.least <= number <= most
        _require(fits, of + self.name, value, limit)


class Options:
    """The table: what users may set in more than one place."""

    # Of queues.
    redelivery_timeout = Option(
        float, 10.0, "Seconds until a message comes back when its worker dies.",
        least=0.001, most=MAX_REDELIVERY_TIMEOUT_MS / 1000,
    )  # fmt: skip
    max_lease = Option(
        float, 43_200.0, "Seconds that a message may be held, whatever renews it.", least=0.001
    )
    max_deliveries = Option(int, 5, "Deliveries after which a message becomes a dead letter.")
    batch_markers = Option(bool, True, "One marker for many messages; not beside older trackers.")
    delivery = Option(
        str, "at-least-once",
        "With at-most-once a message counts as acked before it is handed out.",
        choices=("at-least-once", "at-most-once"),
    )  # fmt: skip
    group = Option(str, "", "The consumer group; default: the queue's own.")
    max_in_flight = Option(int, 1000)
    receive_buffer = Option(int, 100)
    next_message_timeout = Option(float, 1.0, least=0.001, most=MAX_COUNT / 1000)
    max_messages_per_commit = Option(int, 1000)
    max_inline_payload_bytes = Option(int, 65_536, least=0)
    exactly_once = Option(bool, False)
    null_keys = Option(str, "parallel", choices=("parallel", "serial"))
    on_data_loss = Option(str, "raise", choices=("raise", "skip"))

    # Of handlers, for queues and for parallel consumers.
    ordering = Option(
        str, "key", "What stays in order: key, partition or unordered.",
        choices=("key", "partition", "unordered"),
    )  # fmt: skip
    concurrency = Option(int, 16, 'Handlers at once; "auto": as many as bring more.', most=100_000)
    max_concurrency = Option[int | None](
        int, None, "The most that --concurrency auto may try.", most=100_000
    )
    processes = Option(
        int, 0, "Run a def handler in this many processes instead of threads.", least=0, most=1024
    )
    threads = Option(int, 1, most=1024)
    timeout = Option[float | None](float, None, least=0.001)
    batch_size = Option(int, 0, least=0, most=100_000)
    batch_linger = Option(float, 0.0, least=0)
    max_attempts = Option[int | None](
        int, None, "Attempts after which a record becomes a dead letter; default: no limit."
    )
    max_rate = Option[float | None](
        float, None, "Process at most this many records a second.",
        least=1e-6, most=1e12, unit="records a second",
    )  # fmt: skip
    hung_after = Option(
        float, 43_200.0, "Seconds that all handlers may hang until /live answers no.", least=0.001
    )
    drain = Option(float, 30.0, least=0, most=1e12)

    # Of claims.
    heartbeat_interval = Option(
        float, 60.0, "Heartbeat interval of members, in seconds.", least=0.5
    )
    rules = Option(
        str, "safe", "Protocol of the members: safe, or peer, which Go clients share.",
        choices=("safe", "peer"),
    )  # fmt: skip

    # Of topics.
    partitions = Option(int, 8, "Partitions of the messages topic.")
    marker_partitions = Option(int, 8, "Partitions of the markers topic.")
    replication_factor = Option(
        int, -1, "Replicas of each topic; -1: the broker's default.", least=-1
    )


def options_of(table: type[object]) -> tuple[Option[Any], ...]:
    """Return the options of a class that is a table of them."""
    return tuple(each for each in vars(table).values() if isinstance(each, Option))


def converted(
    options: Iterable[Option[Any]], given: Mapping[str, Any], *, of: str = ""
) -> dict[str, Any]:
    """Return what settings have of those that are given, by the names of their fields."""
    named = [each for each in options if each.name in given]
    return {each.field: each.convert(given[each.name], of=of) for each in named}


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
    redelivery_timeout_ms: int = Options.redelivery_timeout.default_ms  # SQS: visibility timeout
    max_deliveries: int = Options.max_deliveries.default
    max_lease_ms: int = Options.max_lease.default_ms  # from the first START, whatever renews it
    backoff: Backoff = Backoff()
    max_in_flight: int = Options.max_in_flight.default  # held and not settled, per consumer
    # kafka-mq-go calls the next three consumer-receive-buffer-capacity (STARTed ahead of
    # receive()), consumer-next-message-timeout and consumer-max-messages-per-commit.
    receive_buffer: int = Options.receive_buffer.default
    next_message_timeout_ms: int = Options.next_message_timeout.default_ms
    max_messages_per_commit: int = Options.max_messages_per_commit.default
    # A larger one is STARTed by reference (R11).
    max_inline_payload_bytes: int = Options.max_inline_payload_bytes.default
    on_data_loss: str = Options.on_data_loss.default
    exactly_once: bool = Options.exactly_once.default
    delivery: str = Options.delivery.default  # at most once: committed before it is handed out
    batch_markers: bool = Options.batch_markers.default  # (R28-R30)
    backend: Backend = Backend.MARKERS
    topic: str = ""  # of markers: one that exists, or the namespace's; else one of its own
    group_id: str = ""  # group.id; empty: one by namespace and queue
    null_keys: str = Options.null_keys.default  # of offsets, by key, messages without one
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
        for option in options_of(Options):
            if hasattr(self, option.field):
                option.check_in(self)
        _require(
            self.max_lease_ms >= self.redelivery_timeout_ms,
            "max_lease",
            self.max_lease_ms / 1000,
            ">= redelivery_timeout",
        )
        _require(isinstance(self.backoff, Backoff), "backoff", self.backoff, "a Backoff")
        once = self.exactly_once and self.is_at_most_once
        _require(not once, "exactly_once", True, "False with delivery='at-most-once'")
        if self.topic:
            _require(_is_topic_name(self.topic), "topic", self.topic, _TOPIC_NAME_LIMIT)
        if self.group_id:
            utf8(self.group_id, name="group")

    @property
    def is_at_most_once(self) -> bool:
        """Return whether what is handed out counts as acknowledged before that."""
        return self.delivery == "at-most-once"


@dataclass(frozen=True, kw_only=True)
class TrackerConfig:
    """How a redelivery tracker runs, whichever the engine; kafka-mq-go's names in the comments."""

    max_silence_ms: int = 1000  # use-now-if-no-marker-seen: longest silence before a TICK while due
    max_offsets_per_commit: int = 50_000  # num-offsets-per-commit: messages of a transaction (R16)
    max_transaction_bytes: int = 16 * 1024 * 1024  # R16: the most; over slow links it takes less
    position_interval_ms: int = 10_000  # a position without actions is written this often (R22)
    max_deliveries: int = Options.max_deliveries.default  # for STARTs that do not say (R14)
    max_lease_ms: int = Options.max_lease.default_ms  # for STARTs that do not say
    takeover: bool = True  # False: refuse to start while another engine's epoch is the latest

    def __post_init__(self) -> None:
        # R16: a transaction has at most 50,000 messages.
        Option(int, 1, name="max_offsets_per_commit", most=50_000).check(
            self.max_offsets_per_commit
        )
        for name in ("max_silence_ms", "max_transaction_bytes", "position_interval_ms"):
            Option(int, 1, name=name).check(getattr(self, name))
        for option in (Options.max_deliveries, Options.max_lease):
            option.check_in(self)
