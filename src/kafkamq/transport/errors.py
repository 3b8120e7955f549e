"""Kafka's errors as ours: what failed, where, whether to repeat it, and what to do about it.

librdkafka reports some failures only to its error callback, never to the call that waits: wrong
credentials, and that no broker answers. ``ErrorWatch`` is that callback; who waits asks it.
"""

from __future__ import annotations

import re
import time

from confluent_kafka import KafkaError, KafkaException

from kafkamq.errors import (
    BrokerError,
    DataLossError,
    DeadlineExceededError,
    FencedError,
    KafkaMQError,
)

__all__ = [
    "BROKER_GONE",
    "ErrorWatch",
    "OutcomeUnknownError",
    "TransactionAbortedError",
    "UNANSWERED",
    "broker_error",
    "is_lasting",
    "kafka_error",
    "may_pass",
    "raised_error",
]


class TransactionAbortedError(BrokerError):
    """The transaction is known not to have happened; it may be repeated."""


class OutcomeUnknownError(BrokerError):
    """The transaction may or may not have happened; the ledger tells after its next opening."""


_HINTS = {
    "_AUTHENTICATION": "check sasl.username, sasl.password and sasl.mechanism (or the client's "
    "certificate) in the kafka settings",
    "SASL_AUTHENTICATION_FAILED": "check sasl.username, sasl.password and sasl.mechanism",
    "_SSL": "check security.protocol, ssl.ca.location and the client's certificate",
    "_RESOLVE": "check the host names in bootstrap_servers",
    "_TRANSPORT": "check bootstrap_servers, security.protocol and that the broker runs",
    "_ALL_BROKERS_DOWN": "check bootstrap_servers and that the brokers run",
    "_UNKNOWN_TOPIC": "create the topics first: `kafkamq create` or Service.create_topics()",
    "_UNKNOWN_PARTITION": "the topic has fewer partitions than expected; was it recreated?",
    "UNKNOWN_TOPIC_OR_PART": "create the topics first: `kafkamq create` or Service.create_topics()",
    "UNKNOWN_TOPIC_ID": "the topic was deleted or recreated; restart",
    "TOPIC_AUTHORIZATION_FAILED": "grant this principal Read, Write and Describe on the topic",
    "GROUP_AUTHORIZATION_FAILED": "grant this principal Read on the group",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": "grant this principal Write on transactional ids that "
    "begin so (a queue's with kafkamq/NAMESPACE/QUEUE/, others with kafkamq.)",
    "CLUSTER_AUTHORIZATION_FAILED": "grant this principal Write on the topic that it writes to (to "
    "create topics: Create on them, or on the cluster)",
    "MSG_SIZE_TOO_LARGE": "raise max.message.bytes of the topic, or send less",
    "_MSG_TIMED_OUT": "the brokers did not confirm the record in time; check their state",
    "NOT_ENOUGH_REPLICAS": "fewer replicas are in sync than min.insync.replicas; check brokers",
    "INVALID_REPLICATION_FACTOR": "the cluster has fewer brokers than the replication factor",
    "POLICY_VIOLATION": "the cluster's policy refuses these settings",
    "UNSUPPORTED_VERSION": "kafkamq needs Kafka 2.8 or newer",
    "_AUTO_OFFSET_RESET": "the log has no such position: it was truncated or deleted there, or the "
    "topic recreated",
    "_MAX_POLL_EXCEEDED": "the process did not poll for max.poll.interval.ms; it was paused or "
    "blocked",
    "INVALID_TRANSACTION_TIMEOUT": "lower transaction.timeout.ms, or raise the brokers' "
    "transaction.max.timeout.ms",
}

_TLS_ALERT = "tls alert"
"""The broker refuses our certificate, or its absence; with TLS 1.3 only after the handshake."""

_FENCED = frozenset(
    {
        KafkaError._FENCED,
        KafkaError.PRODUCER_FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.FENCED_INSTANCE_ID,
    }
)
_TIMED_OUT = frozenset({KafkaError._TIMED_OUT, KafkaError._TIMED_OUT_QUEUE})
_DATA_LOSS = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})
_CREDENTIALS = frozenset(
    {KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL}
)
_FORBIDDEN = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
_NOISE = re.compile(r"^\S+/(bootstrap|\d+): | \(after \d+ms in state \w+\)")
"""What librdkafka says of itself around the cause."""

_REFUSAL_S = 60.0
"""A refusal of credentials holds so long; librdkafka tries on and tells repetitions within 30 s."""

BROKER_GONE = frozenset(
    {
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._DESTROY_BROKER,  # it went out of the cluster's metadata with a request
    }
)
"""librdkafka's own words for: who was asked is not there."""

UNANSWERED = BROKER_GONE | {KafkaError._TIMED_OUT}
"""What a question without an answer ends with."""

_RETRIABLE = BROKER_GONE | frozenset(
    {
        KafkaError._MSG_TIMED_OUT,
        KafkaError._WAIT_COORD,
        KafkaError._WAIT_CACHE,
        KafkaError._RESOLVE,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.CONCURRENT_TRANSACTIONS,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError._NOENT,  # no leader is known (yet): a partition that was just added
        KafkaError.FENCED_LEADER_EPOCH,  # the client has not heard of the election yet
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.NOT_CONTROLLER,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.BROKER_NOT_AVAILABLE,
    }
)


def kafka_error(error: KafkaError | KafkaException) -> KafkaError:
    """The KafkaError inside, whichever of the two was caught."""
    if isinstance(error, KafkaException):
        inner = error.args[0] if error.args else None
        return inner if isinstance(inner, KafkaError) else KafkaError(KafkaError._FAIL, str(error))
    return error


def raised_error(error: KafkaException | SystemError) -> KafkaException:
    """The fatal error that librdkafka raised out of ``poll`` or ``flush`` of a producer.

    It never reaches ``error_cb``. Where delivery reports were served by the same call, Python wraps
    it into a SystemError (a callback "returned a result with an exception set").

    Raises:
        SystemError: it is another one.
    """
    cause = error if isinstance(error, KafkaException) else error.__cause__
    if cause is None and "returned NULL without setting an exception" in str(error):
        # A report that was served by the same call has lost it.
        return KafkaException(KafkaError(KafkaError._FATAL, "lost in a delivery report"))
    if not isinstance(cause, KafkaException):
        raise error
    return cause


def is_lasting(error: KafkaError) -> bool:
    """Whether waiting mends nothing: somebody must mend credentials or rights, or start anew."""
    return error.fatal() or error.code() in _CREDENTIALS | _FORBIDDEN


def may_pass(error: BaseException) -> bool:
    """Whether the same call may succeed later, with nothing mended but the cluster."""
    if isinstance(error, DeadlineExceededError):
        return True
    return isinstance(error, BrokerError) and error.is_retriable


def broker_error(error: KafkaError | KafkaException, doing: str) -> KafkaMQError:
    """Our error for Kafka's; raise it ``from`` the exception that was caught.

    Args:
        error: What librdkafka or the broker said.
        doing: What was being done, and where, as a participle: "reading topic x".

    Returns:
        FencedError, DataLossError, DeadlineExceededError or BrokerError, with what to do.
    """
    inner = kafka_error(error)
    code, name = inner.code(), inner.name()
    text = f"{doing} failed: {inner.str()} ({name})"
    hint = _HINTS.get(name)
    if hint:
        text = f"{text}; {hint}"
    if code in _FENCED:
        return FencedError(
            f"{text}; another instance took over: stop this one", code=name, is_fatal=True
        )
    if code in _DATA_LOSS:
        return DataLossError(text, code=name)
    if code in _TIMED_OUT:
        return DeadlineExceededError(text)
    retriable = code not in _CREDENTIALS and (inner.retriable() or code in _RETRIABLE)
    return BrokerError(text, code=name, is_retriable=retriable, is_fatal=inner.fatal())


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
        self._fatal: KafkaError | None = None  # the client is unusable
        self._refused: KafkaError | None = None  # wrong credentials
        self._refused_s = 0.0  # monotonic
        self._transport: KafkaError | None = None
        self._down_since: float | None = None  # monotonic s

    def __call__(self, error: KafkaError) -> None:
        """Take an error from librdkafka; called inside poll, consume or flush."""
        # No lock: librdkafka may call with an exception pending, which comes up between taking one
        # and releasing it; then every later call would wait for it for good.
        code = error.code()
        if error.fatal():
            self._fatal = self._fatal or error
        elif code in _CREDENTIALS:
            self._refused, self._refused_s = error, time.monotonic()
        elif code == KafkaError._ALL_BROKERS_DOWN:
            if self._down_since is None:
                self._down_since = time.monotonic()
        elif code == KafkaError._TRANSPORT and _TLS_ALERT in error.str():
            self._refused = KafkaError(KafkaError._SSL, error.str())
            self._refused_s = time.monotonic()
        elif code in (KafkaError._TRANSPORT, KafkaError._RESOLVE):
            self._transport = error

    def check(self, doing: str) -> None:
        """Raise what no waiting can mend.

        Raises:
            BrokerError: Wrong credentials, or the client is unusable.
            FencedError: Another instance took over.
        """
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
    def is_down(self) -> bool:
        """Whether no broker could be reached, as far as was told."""
        return self._down_since is not None

    def deadline(self, doing: str, timeout_s: float) -> DeadlineExceededError:
        """The error to raise when a bounded wait is over: names the servers and the last cause."""
        text = f"{doing} did not end within {timeout_s:g} s at {self._servers}"
        if self._down_since is not None or self._transport is not None:
            text = f"{text}: no broker answers{self._cause()}; {_HINTS['_ALL_BROKERS_DOWN']}"
        return DeadlineExceededError(text)

    def silence(self) -> DeadlineExceededError:
        """The error of a client that never had an answer."""
        text = f"no broker answers at {self._servers}{self._cause()}"
        return DeadlineExceededError(f"{text}; {_HINTS['_ALL_BROKERS_DOWN']}")

    def _cause(self) -> str:
        cause = self._transport
        return "" if cause is None else f" ({_NOISE.sub('', cause.str())})"
