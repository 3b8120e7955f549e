"""Looks at a namespace's dead letters, and sends chosen ones back into their queues.

Dead letters are never deleted here. That one was redriven is a record of the ledger topic, with the
dead letter's place as its key, written in the same transaction as the new copy: so it is redriven
once, however often a redrive is repeated or killed. All redrives of a namespace share one
transactional id; a second one that starts meanwhile ends the first (``FencedError``), and reads
what that one has done before it goes on.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from confluent_kafka import Message

from kafkamq.clients.admin import Admin
from kafkamq.clients.errors import OutcomeUnknownError, TransactionAbortedError
from kafkamq.clients.reader import RecordReader
from kafkamq.clients.transactions import Record, TransactionalProducer
from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, FencedError, WireError
from kafkamq.kafka.scan import scan
from kafkamq.types import Headers
from kafkamq.wire import headers as names
from kafkamq.wire.headers import Origin, read_message_headers, redrive_headers
from kafkamq.wire.keys import split_key
from kafkamq.wire.partitions import key_partition

__all__ = [
    "REDRIVEN_FROM",
    "DeadLetter",
    "RedriveReport",
    "Selection",
    "read_dead_letters",
    "redrive",
    "redrive_transactional_id",
]

REDRIVEN_FROM = "kafkamq-redriven-from"
"""Header of a redriven message: its dead letter, as ``topic/partition/offset/timestamp_ms``."""

MAX_TRANSACTION_RECORDS = 500
MAX_TRANSACTION_BYTES = 4 * 1024 * 1024
MAX_ATTEMPTS = 5  # of one transaction whose outcome is unknown or that was aborted
_KEY_PREFIX = "redrive"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which dead letters are meant; what is empty does not choose."""

    queue_id: str = ""
    reason: str = ""
    ids: frozenset[str] = field(default_factory=frozenset)

    def __contains__(self, letter: object) -> bool:
        """Whether a dead letter is meant."""
        return (
            isinstance(letter, DeadLetter)
            and (not self.queue_id or letter.queue_id == self.queue_id)
            and (not self.reason or letter.reason == self.reason)
            and (not self.ids or letter.id in self.ids)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """One record of the dead letters topic."""

    partition: int
    offset: int
    timestamp_ms: int
    queue_id: str
    id: str
    reason: str
    error: str
    delivery_count: int
    origin: Origin | None
    user_key: bytes | None
    payload: bytes | None
    headers: Headers  # the user's
    redriven_from: str  # empty, or the dead letter that it was before
    is_redriven: bool
    raw_key: bytes = b""
    raw_headers: Headers = ()
    payload_at: Origin | None = None  # the payload did not fit; it is there (R11)


@dataclass(slots=True)
class RedriveReport:
    """What a redrive did, or would do."""

    selected: int = 0  # met the selection and were not redriven before
    redriven: int = 0
    already_redriven: int = 0
    payload_lost: int = 0  # of the selected: nothing is left to send


def redrive_transactional_id(config: ServiceConfig) -> str:
    """Under which all redrives of a namespace write, one at a time."""
    return f"kafkamq.{config.dead_letter_topic}.redrive"


def read_dead_letters(config: ServiceConfig) -> Iterator[DeadLetter]:
    """All dead letters of a namespace, partition by partition interleaved, each in log order.

    Raises:
        BrokerError: The topics do not exist, or the broker refuses.
        DeadlineExceededError: No broker answers.
    """
    done, topic_id = _read_done(config)
    for record in scan(config, config.dead_letter_topic):
        yield _dead_letter(record, done, topic_id)


def redrive(
    config: ServiceConfig,
    selection: Selection,
    *,
    limit: int | None = None,
    dry_run: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> RedriveReport:
    """Sends chosen dead letters back into their queues, each exactly once.

    The message keeps id, key, payload and its sender's headers. It starts anew: its first delivery,
    and its whole TTL; ``kafkamq-redriven-from`` names the dead letter.

    Args:
        config: The namespace.
        selection: Which ones.
        limit: At most so many; None: all.
        dry_run: Only count.
        on_progress: Called with the number redriven so far.

    Raises:
        FencedError: Another redrive of this namespace has started: it goes on with the rest.
        BrokerError, DeadlineExceededError: What was redriven stays so; run it again for the rest.
    """
    producer = TransactionalProducer(config, redrive_transactional_id(config))
    payloads = RecordReader(config, config.message_topic)
    report = RedriveReport()
    try:
        if not dry_run:
            producer.init()  # before the ledger is read: nothing of a predecessor is under way then
        writer = _Writer(config, producer, payloads, report, on_progress or (lambda _: None))
        for letter in read_dead_letters(config):
            if limit is not None and report.selected >= limit:
                break
            if letter not in selection:
                continue
            if letter.is_redriven:
                report.already_redriven += 1
                continue
            report.selected += 1
            if not dry_run:
                writer.add(letter)
        writer.flush()
    finally:
        payloads.close()
        producer.close()
    return report


class _Writer:
    """Collects dead letters and writes them in transactions."""

    def __init__(
        self,
        config: ServiceConfig,
        producer: TransactionalProducer,
        payloads: RecordReader,
        report: RedriveReport,
        on_progress: Callable[[int], None],
    ) -> None:
        self._config = config
        self._producer = producer
        self._payloads = payloads
        self._report = report
        self._on_progress = on_progress
        with Admin(config) as admin:
            self._partitions = admin.require_topic(config.message_topic).partitions
            self._ledger_partitions = admin.require_topic(config.ledger_topic).partitions
            self._topic_id = admin.require_topic(config.dead_letter_topic).topic_id
        self._pending: list[tuple[DeadLetter, bytes | None]] = []
        self._bytes = 0

    def add(self, letter: DeadLetter) -> None:
        payload = self._payload(letter)
        if payload is None and (letter.payload_at or letter.reason == "payload-lost"):
            self._report.payload_lost += 1
            return
        self._pending.append((letter, payload))
        self._bytes += len(payload or b"") + len(letter.raw_key) + 256
        if len(self._pending) >= MAX_TRANSACTION_RECORDS or self._bytes >= MAX_TRANSACTION_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what is pending; a transaction of unknown outcome is looked up, not repeated."""
        pending, self._pending, self._bytes = self._pending, [], 0
        for attempt in range(1, MAX_ATTEMPTS + 1):
            if not pending:
                return
            try:
                self._commit(pending)
            except (OutcomeUnknownError, TransactionAbortedError) as error:
                if attempt == MAX_ATTEMPTS:
                    raise
                _log.warning("a redrive transaction is repeated", extra={"error": str(error)})
                before = len(pending)
                self._producer.init()
                done, _ = _read_done(self._config)
                pending = [item for item in pending if self._done_key(item[0]) not in done]
                self._count(before - len(pending))
            else:
                self._count(len(pending))
                return

    def _count(self, amount: int) -> None:
        self._report.redriven += amount
        self._on_progress(self._report.redriven)

    def _commit(self, pending: Sequence[tuple[DeadLetter, bytes | None]]) -> None:
        self._producer.begin()
        try:
            for letter, payload in pending:
                self._producer.produce(self._copy(letter, payload))
                self._producer.produce(self._done_record(letter))
            self._producer.commit()
        except BrokerError as error:
            self._producer.abort()
            is_fatal = error.is_fatal or error.code == "_FATAL"
            if is_fatal and not isinstance(error, FencedError):
                # librdkafka says why only once; of an idempotent producer it is nearly always this.
                raise FencedError(
                    f"{error}: another redrive of this namespace seems to have started; what was "
                    "redriven stays so",
                    code=error.code,
                    is_fatal=True,
                ) from error
            raise
        except BaseException:
            self._producer.abort()
            raise

    def _copy(self, letter: DeadLetter, payload: bytes | None) -> Record:
        place = Origin(
            self._config.dead_letter_topic, letter.partition, letter.offset, letter.timestamp_ms
        )
        headers = tuple(
            header for header in redrive_headers(letter.raw_headers) if header[0] != REDRIVEN_FROM
        )
        partition = (
            random.randrange(self._partitions)
            if letter.user_key is None
            else key_partition(letter.raw_key, self._partitions)
        )
        return (
            self._config.message_topic,
            partition,
            letter.raw_key,
            payload,
            (*headers, (REDRIVEN_FROM, place.encode())),
        )

    def _done_key(self, letter: DeadLetter) -> bytes:
        return done_key(self._topic_id, letter.partition, letter.offset)

    def _done_record(self, letter: DeadLetter) -> Record:
        key = self._done_key(letter)
        partition = key_partition(key, self._ledger_partitions)
        return self._config.ledger_topic, partition, key, b"%d" % int(time.time() * 1000), ()

    def _payload(self, letter: DeadLetter) -> bytes | None:
        place = letter.payload_at
        if place is None:
            return letter.payload
        if place.topic != self._config.message_topic:
            return None
        found = self._payloads.read(place.partition, place.offset)
        return None if found is None else found.value()


def done_key(topic_id: bytes, partition: int, offset: int) -> bytes:
    """The ledger's key of a redriven dead letter; a topic made anew has another id (R13)."""
    return f"{_KEY_PREFIX}/{topic_id.hex()}/{partition}/{offset}".encode()


def _read_done(config: ServiceConfig) -> tuple[set[bytes], bytes]:
    """Keys of what was redriven, and the id of the dead letters topic now."""
    with Admin(config) as admin:
        topic_id = admin.require_topic(config.dead_letter_topic).topic_id
    prefix = f"{_KEY_PREFIX}/{topic_id.hex()}/".encode()
    done = set()
    for record in scan(config, config.ledger_topic):
        key = record.key()
        if isinstance(key, bytes) and key.startswith(prefix):
            done.add(key)
    return done, topic_id


def _dead_letter(record: Message, done: set[bytes], topic_id: bytes) -> DeadLetter:
    raw_headers: Headers = tuple(record.headers() or ())  # type: ignore[arg-type]  # always pairs
    read = read_message_headers(raw_headers)
    texts = {
        name: value.decode("utf-8", "replace") for name, value in raw_headers if value is not None
    }
    raw_key = record.key() or b""
    queue_id, user_key = split_key(raw_key)
    partition, offset = record.partition() or 0, record.offset() or 0
    return DeadLetter(
        partition=partition,
        offset=offset,
        timestamp_ms=record.timestamp()[1],
        queue_id=queue_id.decode("utf-8", "replace"),
        id=read.id,
        reason=texts.get(names.REASON, ""),
        error=texts.get(names.ERROR, ""),
        delivery_count=read.delivery_count,
        origin=read.origin,
        user_key=user_key,
        payload=record.value(),
        headers=read.user,
        redriven_from=texts.get(REDRIVEN_FROM, ""),
        is_redriven=done_key(topic_id, partition, offset) in done,
        raw_key=raw_key,
        raw_headers=raw_headers,
        payload_at=_place(texts.get(names.PAYLOAD_AT)),
    )


def _place(text: str | None) -> Origin | None:
    if text is None:
        return None
    try:
        return Origin.decode(text.encode())
    except WireError:
        return None
