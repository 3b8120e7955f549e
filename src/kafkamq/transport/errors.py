"""Classifies each KafkaError: what failed, where, whether to repeat it, and what to do about it.

librdkafka reports some failures only to its error callback, never to the call that waits: wrong
credentials, and that no broker answers. ``ErrorWatch`` is that callback; who waits asks it.
"""

from __future__ import annotations

import re
import time
from enum import Enum

from confluent_kafka import KafkaError, KafkaException

from kafkamq.errors import (
    BrokerError,
    DataLossError,
    DeadlineExceededError,
    FencedError,
    KafkaMQError,
)

# They are confluent-kafka's, which only ``transport`` imports.
__all__ = ["KafkaError", "KafkaException"]


class Meaning(Enum):
    """What an error means for the call that meets it; each code has one meaning."""

    BROKER_GONE = "who was asked is not there; retry"
    TIMED_OUT = "no answer in time; retry"
    RETRIABLE = "the cluster is not ready, or its state has moved on; retry"
    REBALANCING = "the group is moving on; retry"
    STALE_MEMBER = "the group has moved on: it passes, in the group as it is then"
    NO_MEMBER = "the member is none any more; it passes, once it has joined again"
    QUEUE_FULL = "the client's queue of records is full; it passes when some are confirmed"
    PURGED = "the record's client was ended before it was sent; it may be written again"
    LOG_END = "a reader has reached the end of a partition: no failure"
    OUTSIDE_LOG = "the log has no such position: data loss"
    NO_TOPIC = "no such topic, as far as who was asked knows"
    NO_PARTITION = "no such partition, as far as the client knows: ask for the topic again"
    FENCED = "another instance took over"
    CREDENTIALS = "credentials are refused"
    FORBIDDEN = "a right is missing"
    TOO_LARGE = "a record, or the batch that it is in, is too large"
    INVALID_RECORD = "a record is refused for what it is"
    OTHERS_FAULT = "a record is refused for another one of its batch"
    METADATA_TOO_LARGE = "the metadata of a commit is too large"
    EXISTS = "the topic exists already"
    NO_GROUP = "there is no such group"
    GROUP_FULL = "the group takes no more members"
    UNSUPPORTED = "the brokers are too old for the question"
    FATAL = "the client is unusable: make a new one"
    OTHER = "anything else: not retriable"


_CODES: dict[Meaning, tuple[str, ...]] = {
    # _DESTROY_BROKER: it went out of the cluster's metadata with a request.
    Meaning.BROKER_GONE: ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_DESTROY_BROKER"),
    Meaning.TIMED_OUT: ("_TIMED_OUT", "_TIMED_OUT_QUEUE"),
    Meaning.RETRIABLE: (
        "_MSG_TIMED_OUT",
        "_WAIT_COORD",
        "_WAIT_CACHE",
        "_RESOLVE",
        # The next poll joins the group again.
        "_MAX_POLL_EXCEEDED",
        # No leader is known, as of a partition that was just added.
        "_NOENT",
        "LEADER_NOT_AVAILABLE",
        "NOT_LEADER_FOR_PARTITION",
        "REQUEST_TIMED_OUT",
        "COORDINATOR_LOAD_IN_PROGRESS",
        "COORDINATOR_NOT_AVAILABLE",
        "NOT_COORDINATOR",
        "NOT_ENOUGH_REPLICAS",
        "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
        "CONCURRENT_TRANSACTIONS",
        "UNSTABLE_OFFSET_COMMIT",
        "NETWORK_EXCEPTION",
        # The client has not heard of the election yet.
        "FENCED_LEADER_EPOCH",
        "UNKNOWN_LEADER_EPOCH",
        "OFFSET_NOT_AVAILABLE",
        "NOT_CONTROLLER",
        "KAFKA_STORAGE_ERROR",
        "BROKER_NOT_AVAILABLE",
    ),
    Meaning.REBALANCING: ("REBALANCE_IN_PROGRESS",),
    # ILLEGAL_GENERATION: a commit that waits behind the member's own join has the one from before.
    Meaning.STALE_MEMBER: ("ILLEGAL_GENERATION", "STALE_MEMBER_EPOCH"),
    Meaning.NO_MEMBER: ("UNKNOWN_MEMBER_ID", "FENCED_MEMBER_EPOCH", "_ASSIGNMENT_LOST"),
    Meaning.QUEUE_FULL: ("_QUEUE_FULL",),
    Meaning.PURGED: ("_PURGE_QUEUE", "_PURGE_INFLIGHT"),
    Meaning.LOG_END: ("_PARTITION_EOF",),
    Meaning.OUTSIDE_LOG: ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"),
    Meaning.NO_TOPIC: ("_UNKNOWN_TOPIC", "UNKNOWN_TOPIC_OR_PART"),
    Meaning.NO_PARTITION: ("_UNKNOWN_PARTITION",),
    Meaning.FENCED: ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH", "FENCED_INSTANCE_ID"),
    Meaning.CREDENTIALS: ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "_SSL"),
    Meaning.FORBIDDEN: (
        "TOPIC_AUTHORIZATION_FAILED",
        "GROUP_AUTHORIZATION_FAILED",
        "CLUSTER_AUTHORIZATION_FAILED",
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    ),
    Meaning.TOO_LARGE: ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE"),
    Meaning.INVALID_RECORD: ("INVALID_RECORD",),
    Meaning.OTHERS_FAULT: ("_INVALID_DIFFERENT_RECORD",),
    Meaning.METADATA_TOO_LARGE: ("OFFSET_METADATA_TOO_LARGE",),
    Meaning.EXISTS: ("TOPIC_ALREADY_EXISTS",),
    Meaning.NO_GROUP: ("GROUP_ID_NOT_FOUND",),
    Meaning.GROUP_FULL: ("GROUP_MAX_SIZE_REACHED",),
    Meaning.UNSUPPORTED: ("UNSUPPORTED_VERSION", "_UNSUPPORTED_FEATURE"),
    Meaning.FATAL: ("_FATAL",),
}
_MEANINGS = {name: what for what, names in _CODES.items() for name in names}

UNANSWERED = frozenset({Meaning.BROKER_GONE, Meaning.TIMED_OUT})
"""What a question without an answer ends with."""

REFUSALS = frozenset({Meaning.CREDENTIALS, Meaning.FORBIDDEN})
"""What somebody must mend."""

MISSING = frozenset({Meaning.NO_TOPIC, Meaning.NO_PARTITION})
"""What a broker that has just started may say of a topic, too."""

_RETRIABLE = UNANSWERED | {
    Meaning.RETRIABLE,
    Meaning.REBALANCING,
    Meaning.STALE_MEMBER,
    Meaning.NO_MEMBER,
    Meaning.QUEUE_FULL,
    Meaning.PURGED,
    Meaning.LOG_END,
}


class TransactionAbortedError(BrokerError):
    """The transaction is known not to have happened; it may be repeated."""


class OutcomeUnknownError(BrokerError):
    """The transaction may or may not have happened; the ledger tells after its next opening."""


_NO_TOPIC = (
    "create the topics first: `kafkamq create` or Service.create_topics(); or is the namespace, "
    "which their names begin with, another one?"
)
_HINTS = {
    "_AUTHENTICATION": "check sasl.username, sasl.password and sasl.mechanism (or the client's "
    "certificate) in the kafka settings",
    "SASL_AUTHENTICATION_FAILED": "check sasl.username, sasl.password and sasl.mechanism",
    "_SSL": "check security.protocol, ssl.ca.location and the client's certificate",
    "_RESOLVE": "check the host names in bootstrap_servers",
    "_TRANSPORT": "check bootstrap_servers, security.protocol and that the broker runs",
    "_ALL_BROKERS_DOWN": "check bootstrap_servers and that the brokers run",
    "_UNKNOWN_TOPIC": _NO_TOPIC,
    "_UNKNOWN_PARTITION": "the topic has fewer partitions than expected; was it recreated?",
    "UNKNOWN_TOPIC_OR_PART": _NO_TOPIC,
    "UNKNOWN_TOPIC_ID": "the topic was deleted or recreated; restart",
    "TOPIC_AUTHORIZATION_FAILED": "grant this principal Read, Write and Describe on the topic",
    "GROUP_AUTHORIZATION_FAILED": "grant this principal Read on the group",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": "grant this principal Write on transactional ids that "
    "begin so (a queue's with kafkamq/NAMESPACE/QUEUE/, others with kafkamq.)",
    "CLUSTER_AUTHORIZATION_FAILED": "grant this principal Write on the topic that it writes to (to "
    "create topics: Create on them, or on the cluster)",
    "MSG_SIZE_TOO_LARGE": "raise max.message.bytes of the topic (and message.max.bytes, where "
    "the kafka settings have it), or send less",
    "_MSG_TIMED_OUT": "the brokers did not confirm the record in time; check their state",
    "NOT_ENOUGH_REPLICAS": "fewer replicas are in sync than min.insync.replicas; check brokers",
    "INVALID_REPLICATION_FACTOR": "the cluster has fewer brokers than the replication factor",
    "POLICY_VIOLATION": "the cluster's policy refuses these settings",
    "UNSUPPORTED_VERSION": "kafkamq needs Kafka 2.8 or newer",
    "_AUTO_OFFSET_RESET": "the log has no such position: it was truncated or deleted there, or the "
    "topic recreated",
    "_MAX_POLL_EXCEEDED": "the process did not poll for max.poll.interval.ms; it was paused or "
    "blocked",
    "_PURGE_QUEUE": "its client ended and was replaced; do it again",
    "_PURGE_INFLIGHT": "its client ended and was replaced; do it again",
    "INVALID_SESSION_TIMEOUT": "set session.timeout.ms within the brokers' "
    "group.min.session.timeout.ms and group.max.session.timeout.ms",
    "INVALID_TRANSACTION_TIMEOUT": "lower transaction.timeout.ms, or raise the brokers' "
    "transaction.max.timeout.ms",
}

_TLS_ALERT = "tls alert"
"""The broker refuses our certificate, or its absence; with TLS 1.3 only after the handshake."""

_NOISE = re.compile(
    r"^\S+/(bootstrap|\d+): | \(after \d+ms in state \w+(, \d+ identical error\(s\) suppressed)?\)"
)
"""What librdkafka says of itself around the cause."""

_REFUSAL_S = 60.0
"""A refusal of credentials holds so long; librdkafka tries on and tells repetitions within 30 s."""


def kafka_error(error: KafkaError | KafkaException) -> KafkaError:
    if isinstance(error, KafkaException):
        inner = error.args[0] if error.args else None
        return inner if isinstance(inner, KafkaError) else KafkaError(KafkaError._FAIL, str(error))
    return error


def raised_error(error: KafkaException | SystemError) -> KafkaException:
    """Return the fatal error that librdkafka raised out of ``poll`` or ``flush`` of a producer.

    It never reaches ``error_cb``. Where delivery reports were served by the same call, Python wraps
    it into a SystemError (a callback "returned a result with an exception set").
    """
    cause = error if isinstance(error, KafkaException) else error.__cause__
    if cause is None and "returned NULL without setting an exception" in str(error):
        # A report that was served by the same call has lost it.
        return KafkaException(KafkaError(KafkaError._FATAL, "lost in a delivery report"))
    if not isinstance(cause, KafkaException):
        raise error
    return cause


def raised_inside(error: SystemError) -> BaseException:
    """Return what a consumer's callback raised: ours raise only what interrupts them.

    Python wraps it, or confluent-kafka loses it; what is lost is taken for Ctrl-C.
    """
    if error.__cause__ is not None:
        return error.__cause__
    is_lost = "returned NULL without setting an exception" in str(error)
    return KeyboardInterrupt() if is_lost else error


def meaning(error: BaseException | KafkaError) -> Meaning:
    if isinstance(error, KafkaException):
        error = kafka_error(error)
    if isinstance(error, KafkaError):
        return _MEANINGS.get(error.name(), Meaning.OTHER)
    if isinstance(error, BrokerError):
        return _MEANINGS.get(error.code, Meaning.OTHER)
    is_late = isinstance(error, DeadlineExceededError)
    return Meaning.TIMED_OUT if is_late else Meaning.OTHER


def is_retriable(error: BaseException | KafkaError, *, or_missing: bool = False) -> bool:
    """Return whether the same call may succeed later, with nothing mended but the cluster.

    Of an event that a reader polls: whether polling on is all that is needed.
    """
    if isinstance(error, KafkaException):
        error = kafka_error(error)
    if isinstance(error, KafkaError):
        what = meaning(error)
        is_refused = error.fatal() or what in REFUSALS
        is_known_retriable = what in _RETRIABLE or (or_missing and what in MISSING)
        return not is_refused and (error.retriable() or is_known_retriable)
    return isinstance(error, DeadlineExceededError) or (
        isinstance(error, BrokerError) and error.is_retriable
    )


def is_fatal(error: KafkaError) -> bool:
    """Return whether waiting mends nothing.

    Credentials or a right are refused, or the client has ended.
    """
    return has_ended(error) or meaning(error) in REFUSALS


def has_ended(error: KafkaError | KafkaException) -> bool:
    """Return whether the error ended its client, or says that another one did."""
    inner = kafka_error(error)
    return inner.fatal() or meaning(inner) is Meaning.FATAL


def broker_error(error: KafkaError | KafkaException | KafkaMQError, doing: str) -> KafkaMQError:
    """Our error for Kafka's; raise it ``from`` the exception that was caught.

    Args:
        error: What librdkafka or the broker said; if it is ours already, it stays as it is.
        doing: What was being done, and where, as a participle: "reading topic x".
    """
    if isinstance(error, KafkaMQError):
        return error
    inner = kafka_error(error)
    name, what = inner.name(), meaning(inner)
    text = f"{doing} failed: {inner.str()} ({name})"
    hint = _HINTS.get(name)
    if hint:
        text = f"{text}; {hint}"
    if what is Meaning.FENCED:
        return FencedError(
            f"{text}; another instance took over: stop this one", code=name, is_fatal=True
        )
    if what is Meaning.OUTSIDE_LOG:
        return DataLossError(text, code=name)
    if what is Meaning.TIMED_OUT:
        return DeadlineExceededError(text)
    return BrokerError(text, code=name, is_retriable=is_retriable(inner), is_fatal=has_ended(inner))


class ErrorWatch:
    """An ``error_cb`` that keeps what it was told, for the calls that wait; thread-safe.

    Wrong credentials (and errors that end the client) are raised at once by ``check``; that no
    broker answers is only named by ``deadline`` when the caller's bound is over, because
    librdkafka goes on trying and often succeeds. It goes on after refused credentials too: a
    refusal that is not repeated for a minute is over (a token was renewed, a broker had just
    started), and so is one after which a call succeeds.
    """

    def __init__(self, bootstrap_servers: str) -> None:
        self._servers = bootstrap_servers
        self._fatal: KafkaError | None = None
        self._refused: KafkaError | None = None
        self._refused_s = 0.0
        self._transport: KafkaError | None = None
        self._down_since: float | None = None
        # While this is not set ``check`` has nothing to raise.
        self.is_troubled = False

    def __call__(self, error: KafkaError) -> None:
        """Take an error from librdkafka; called inside poll, consume or flush."""
        # No lock: librdkafka may call with an exception pending, which comes up between taking one
        # and releasing it; then every later call would wait for it for good.
        code = error.code()
        if has_ended(error):
            self._fatal = self._fatal or error
            self.is_troubled = True
        elif meaning(error) is Meaning.CREDENTIALS:
            self._refused, self._refused_s = error, time.monotonic()
            self.is_troubled = True
        elif code == KafkaError._ALL_BROKERS_DOWN:
            if self._down_since is None:
                self._down_since = time.monotonic()
        elif code == KafkaError._TRANSPORT and _TLS_ALERT in error.str():
            self._refused = KafkaError(KafkaError._SSL, error.str())
            self._refused_s = time.monotonic()
            self.is_troubled = True
        elif code in (KafkaError._TRANSPORT, KafkaError._RESOLVE):
            self._transport = error

    def check(self, doing: str) -> None:
        """Raise what no waiting can mend."""
        error = self._fatal
        if error is None and time.monotonic() - self._refused_s < _REFUSAL_S:
            error = self._refused
        if error is not None:
            raise broker_error(error, f"{doing} at {self._servers}")

    def forget(self) -> None:
        """A call succeeded: what was wrong with the connection is over."""
        if any(known is not None for known in (self._down_since, self._transport, self._refused)):
            self._down_since = self._transport = self._refused = None

    @property
    def has_ended(self) -> bool:
        return self._fatal is not None

    @property
    def is_down(self) -> bool:
        return self._down_since is not None

    def deadline(self, doing: str, timeout_s: float) -> DeadlineExceededError:
        """Return the error of a bounded wait that is over: it names servers and the last cause."""
        text = f"{doing} did not end within {timeout_s:g} s at {self._servers}"
        if self._down_since is not None or self._transport is not None:
            text = f"{text}: no broker answers{self._cause()}; {_HINTS['_ALL_BROKERS_DOWN']}"
        return DeadlineExceededError(text)

    def silence(self) -> DeadlineExceededError:
        """Return the error of a client that never had an answer."""
        text = f"no broker answers at {self._servers}{self._cause()}"
        return DeadlineExceededError(f"{text}; {_HINTS['_ALL_BROKERS_DOWN']}")

    def _cause(self) -> str:
        cause = self._transport
        return "" if cause is None else f" ({_NOISE.sub('', cause.str())})"
