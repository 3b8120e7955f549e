"""Looks at a namespace's dead letters, and sends chosen ones back into their queues.

They are written by ``dead_letter_writer``, and of ``markers`` queues by the tracker.

Dead letters are never deleted here. That one was redriven is a record of the ledger topic, with the
dead letter's place as its key, written in the same transaction as the new copy: so it is redriven
once, however often a redrive is repeated or killed. All redrives of a namespace share one
transactional id; a second one that starts meanwhile ends the first (``FencedError``), and reads
what that one has done before it goes on.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, FencedError
from kafkamq.queue.backend import StoredMessage, load
from kafkamq.queue.wire import headers as names
from kafkamq.queue.wire.headers import Origin, read_message_headers, redrive_headers, restored
from kafkamq.queue.wire.keys import join_key, key_partition, split_key
from kafkamq.transport.admin import Admin
from kafkamq.transport.errors import MISSING, OutcomeUnknownError, TransactionAbortedError, meaning
from kafkamq.transport.log_reader import RecordReader, scan
from kafkamq.transport.record import Record, headers_or_none
from kafkamq.transport.settings import size_limit
from kafkamq.transport.transactions import NewRecord, TransactionalProducer
from kafkamq.types import Backend, DeadLetterReason, Headers

REDRIVEN_FROM = "kafkamq-redriven-from"
"""Header of a redriven message: its dead letter, as ``topic/partition/offset/timestamp_ms``."""

REPLAYED_FROM = "kafkamq-replayed-from"
"""Header of a replayed message: the copy that was chosen, as an origin is written."""
REPLAY_NAME = "kafkamq-replay"
"""Header with the replay's name, by which it knows its own copies again."""

MAX_TRANSACTION_RECORDS = 500
MAX_TRANSACTION_BYTES = 4 * 1024 * 1024
MAX_REFUSALS = 100
MAX_ATTEMPTS = 5
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which dead letters are meant; what is empty does not choose."""

    queue_id: str = ""
    reason: str = ""
    ids: frozenset[str] = field(default_factory=frozenset)
    # None: any.
    places: frozenset[tuple[int, int]] | None = None

    def __contains__(self, letter: object) -> bool:
        return (
            isinstance(letter, DeadLetter)
            and (not self.queue_id or letter.queue_id == self.queue_id)
            and (not self.reason or letter.reason == self.reason)
            and (not self.ids or letter.id in self.ids)
            and (self.places is None or (letter.partition, letter.offset) in self.places)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
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
    headers: Headers
    # Empty, or the dead letter that it was before.
    redriven_from: str
    is_redriven: bool
    # The key of the message; empty: nobody knows its queue.
    raw_key: bytes = b""
    raw_headers: Headers = ()
    # False: a header's name is not UTF-8, so no header is known.
    is_readable: bool = True
    # Key and headers did not fit either: they are where the payload is.
    is_bare: bool = False
    # Where the payload is when it did not fit (R11).
    payload_at: Origin | None = None


@dataclass(frozen=True, slots=True)
class RefusedLetter:
    """A dead letter that stays where it is, as the topic of its queue does not take it."""

    topic: str
    partition: int
    offset: int
    error: str


@dataclass(slots=True)
class RedriveReport:
    """What a redrive did, or would do.

    ``selected`` letters met the selection and were not redriven before. Of these, nothing is left
    to send of ``payload_lost``; ``queue_unknown`` name no queue, nor do their originals;
    ``headers_unreadable`` have a header whose name is not UTF-8, and a copy would lose it; and of
    those that are ``refused`` their queue's topic does not take them, or is gone: the first of them
    are in ``refusals``.
    """

    selected: int = 0
    redriven: int = 0
    already_redriven: int = 0
    payload_lost: int = 0
    queue_unknown: int = 0
    headers_unreadable: int = 0
    refused: int = 0
    refusals: list[RefusedLetter] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The records that are sent again: all dead letters of a namespace.

    Each copy has ``headers``, and a header ``link`` that names the record that it was made of. Keys
    of the ledger begin with ``prefix``.
    """

    topic: str
    link: str = REDRIVEN_FROM
    headers: Headers = ()
    prefix: str = "redrive"

    def read(self, config: ServiceConfig) -> Iterator[DeadLetter]:
        """Yield them, partition by partition interleaved, each in log order."""
        for record in scan(config, self.topic):
            yield dead_letter_of(record, frozenset(), b"")

    def place_of(self, letter: DeadLetter) -> tuple[int, int]:
        """Return the partition and offset under which the ledger has it."""
        return letter.partition, letter.offset


def redrive_transactional_id(config: ServiceConfig) -> str:
    """Under which all redrives of a namespace write, one at a time."""
    return f"kafkamq.{config.dead_letter_topic}.redrive"


def read_dead_letters(config: ServiceConfig) -> Iterator[DeadLetter]:
    """Yield all dead letters of a namespace, those of a partition in log order."""
    done, topic_id = _read_done(config, Source(topic=config.dead_letter_topic))
    for record in scan(config, config.dead_letter_topic):
        yield dead_letter_of(record, done, topic_id)


def redrive(
    config: ServiceConfig,
    selection: Selection,
    *,
    limit: int | None = None,
    dry_run: bool = False,
    on_progress: Callable[[int], None] | None = None,
    max_records: int = MAX_TRANSACTION_RECORDS,
    also: Callable[[RedriveReport, int], Sequence[NewRecord]] | None = None,
    edited: Callable[[StoredMessage], StoredMessage] | None = None,
    source: Source | None = None,
) -> RedriveReport:
    """Sends chosen dead letters back into their queues, each exactly once.

    The message keeps id, key, payload and its sender's headers. It starts again, with its first
    delivery and its whole TTL; ``kafkamq-redriven-from`` names the dead letter. One that is too
    large for its topic, or whose queue's topic is gone, is ``refused`` in the report, and stays.
    What ``on_progress`` and the selection raise ends it between two transactions.

    Args:
        limit: How many go at most.
        on_progress: Told how many went so far, behind each transaction.
        max_records: Of one transaction.
        also: Records that are in the same transaction as so many more copies.
        edited: What is sent in the place of a message.
        source: What is read in the place of dead letters.

    Raises:
        FencedError: Another redrive of this namespace has started: it goes on with the rest.
        BrokerError, DeadlineExceededError: What was redriven stays so; run it again for the rest.
    """
    with closing(TransactionalProducer(config, redrive_transactional_id(config))) as producer:
        if not dry_run:
            # When the ledger is read nothing of a predecessor may be under way.
            producer.init()
        writer = _Writer(
            config=config,
            producer=producer,
            source=source or Source(topic=config.dead_letter_topic),
            on_progress=on_progress or (lambda _: None),
            max_records=min(max_records, MAX_TRANSACTION_RECORDS),
            also=also or (lambda _report, _count: ()),
            edited=edited or (lambda message: message),
        )
        with closing(writer):
            writer.run(selection, math.inf if limit is None else limit, dry_run=dry_run)
    return writer.report


@dataclass(kw_only=True)
class _Writer:
    """Collects dead letters and writes them in transactions."""

    config: ServiceConfig
    producer: TransactionalProducer
    source: Source
    on_progress: Callable[[int], None]
    max_records: int
    also: Callable[[RedriveReport, int], Sequence[NewRecord]]
    edited: Callable[[StoredMessage], StoredMessage]

    def __post_init__(self) -> None:
        self.report = RedriveReport()
        self._partitions: dict[str, int] = {}
        self._readers: dict[str, RecordReader] = {}
        with Admin(self.config) as admin:
            self._ledger_partitions = admin.require_topic(self.config.ledger_topic).partitions
        # Keys of the ledger, as of the last ``init`` of ours.
        self._done, self._topic_id = _read_done(self.config, self.source)
        self._pending: list[tuple[DeadLetter, StoredMessage]] = []
        self._bytes = 0

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def run(self, selection: Selection, most: float, *, dry_run: bool) -> None:
        report = self.report
        for letter in self.source.read(self.config):
            if not dry_run and report.redriven + len(self._pending) >= most:
                # What is pending decides whether it is enough.
                self.flush()
            if (report.selected if dry_run else report.redriven) >= most:
                break
            if letter not in selection:
                continue
            if self.is_done(letter):
                report.already_redriven += 1
                continue
            report.selected += 1
            if not dry_run:
                self.add(letter)
        self.flush()

    def is_done(self, letter: DeadLetter) -> bool:
        """Return whether somebody has redriven it, as the ledger says."""
        return self._done_key(letter) in self._done

    def add(self, letter: DeadLetter) -> None:
        if not letter.is_readable:
            self.report.headers_unreadable += 1
            return
        message = self._message(letter)
        if message is None:
            self.report.payload_lost += 1
            return
        if not split_key(message.key)[0]:
            self.report.queue_unknown += 1
            return
        topic = self._topic_of(letter)
        if not self._partitions_of(topic):
            self._refuse(letter, f"there is no topic {topic}: create it, and redrive again")
            return
        message = self.edited(message)
        self._pending.append((letter, message))
        self._bytes += len(message.payload or b"") + len(message.key) + 256
        if len(self._pending) >= self.max_records or self._bytes >= MAX_TRANSACTION_BYTES:
            self.flush()

    def flush(self) -> None:
        pending, self._pending, self._bytes = self._pending, [], 0
        self._write(pending)

    def _write(self, pending: list[tuple[DeadLetter, StoredMessage]]) -> None:
        """Write in one transaction; what of it somebody has redriven is never sent again.

        Another redrive may do so until an ``init`` of ours has fenced it, whatever became of our
        transaction, so the ledger is read behind each. Where something in it is too large it is
        found by halves: only the broker knows, as what counts is the compressed batch.
        """
        may_be_ours = False
        for attempt in range(1, MAX_ATTEMPTS + 1):
            pending = self._left(pending, may_be_ours=may_be_ours)
            if not pending:
                return
            try:
                self._commit(pending)
            except BrokerError as error:
                is_refused = self.producer.too_large > 0 and not isinstance(error, FencedError)
                may_be_ours = isinstance(error, OutcomeUnknownError)
                may_repeat = may_be_ours or isinstance(error, TransactionAbortedError)
                if not is_refused and (attempt == MAX_ATTEMPTS or not may_repeat):
                    raise
                # A client that may not go on must not fence one that does.
                self._count(0)
                self.producer.init()
                self._done, _ = _read_done(self.config, self.source)
                if not is_refused:
                    _log.warning("a redrive transaction is repeated", extra={"error": str(error)})
                elif len(pending) > 1:
                    self._write(pending[: len(pending) // 2])
                    self._write(pending[len(pending) // 2 :])
                    return
                else:
                    for letter, message in self._left(pending, may_be_ours=may_be_ours):
                        limit = size_limit(self.config, self._topic_of(letter))
                        self._refuse(
                            letter,
                            f"its message, with a payload of {len(message.payload or b''):,} bytes,"
                            f" is larger than {limit} allows: raise it, and redrive again",
                        )
                    return
            else:
                self._count(len(pending))
                return

    def _left(
        self, pending: list[tuple[DeadLetter, StoredMessage]], *, may_be_ours: bool
    ) -> list[tuple[DeadLetter, StoredMessage]]:
        """Return what nobody has redriven; the rest is counted."""
        left = [item for item in pending if not self.is_done(item[0])]
        gone = len(pending) - len(left)
        if gone and may_be_ours:
            self._count(gone)
        elif gone:
            self.report.selected -= gone
            self.report.already_redriven += gone
        return left

    def _refuse(self, letter: DeadLetter, error_text: str) -> None:
        """Name one that its topic does not take, and leave it where it is."""
        report = self.report
        report.refused += 1
        if len(report.refusals) < MAX_REFUSALS:
            place = self.source.topic, letter.partition, letter.offset
            report.refusals.append(RefusedLetter(*place, error_text))

    def _count(self, amount: int) -> None:
        self.report.redriven += amount
        self.on_progress(self.report.redriven)

    def _commit(self, pending: Sequence[tuple[DeadLetter, StoredMessage]]) -> None:
        try:
            with self.producer.transaction():
                for letter, message in pending:
                    self.producer.produce(self._copy(letter, message))
                    key = self._done_key(letter)
                    partition = key_partition(key, self._ledger_partitions)
                    at_ms = b"%d" % int(time.time() * 1000)
                    self.producer.produce((self.config.ledger_topic, partition, key, at_ms, ()))
                self.producer.produce_records(self.also(self.report, len(pending)))
        except BrokerError as error:
            if error.is_fatal and not isinstance(error, FencedError):
                # librdkafka says why only once; of an idempotent producer it is nearly always this.
                raise FencedError(
                    f"{error}: another redrive of this namespace seems to have started; what was "
                    "redriven stays so",
                    code=error.code,
                    is_fatal=True,
                ) from error
            raise

    def _copy(self, letter: DeadLetter, message: StoredMessage) -> NewRecord:
        source = self.source
        place = Origin(source.topic, letter.partition, letter.offset, letter.timestamp_ms)
        links = {REDRIVEN_FROM, source.link, *(name for name, _ in source.headers)}
        headers = tuple(
            header for header in redrive_headers(message.headers) if header[0] not in links
        )
        topic, user_key = self._topic_of(letter), split_key(message.key)[1]
        # In a topic of its own a queue's records have their sender's keys, or none.
        key = message.key if topic == self.config.message_topic else user_key
        if topic != self.config.message_topic:
            headers = restored(headers)
        partitions = self._partitions_of(topic)
        partition = (
            random.randrange(partitions)
            if user_key is None or key is None
            else key_partition(key, partitions)
        )
        headers = *headers, (source.link, place.encode()), *source.headers
        return topic, partition, key, message.payload, headers

    def _topic_of(self, letter: DeadLetter) -> str:
        """Return the topic of its queue's messages: the namespace's, or the queue's own."""
        own = "" if letter.origin is None else letter.origin.topic
        if own in ("", self.config.message_topic, self.config.marker_topic):
            return self.config.message_topic
        return own

    def _partitions_of(self, topic: str) -> int:
        if topic not in self._partitions:
            with Admin(self.config) as admin:
                found = admin.topics([topic]).get(topic)
            self._partitions[topic] = 0 if found is None else found.partitions
        return self._partitions[topic]

    def _done_key(self, letter: DeadLetter) -> bytes:
        source = self.source
        return done_key(self._topic_id, *source.place_of(letter), prefix=source.prefix)

    def _message(self, letter: DeadLetter) -> StoredMessage | None:
        """Say what the letter has, and its original where it refers to that; None: that is gone."""
        if letter.payload_at is None:
            if letter.payload is None and letter.reason == DeadLetterReason.PAYLOAD_LOST.value:
                return None
            return StoredMessage(letter.raw_key, letter.payload, letter.raw_headers)
        original = self._original(letter, letter.payload_at)
        if original is None or letter.is_bare:
            return original
        return StoredMessage(letter.raw_key, original.payload, letter.raw_headers)

    def _original(self, letter: DeadLetter, place: Origin) -> StoredMessage | None:
        """Read the message that a letter refers to, or the SCHEDULE of a delayed one (R11).

        None: it is gone, or another record stands there now (R13).
        """
        config, topic = self.config, place.topic
        if topic not in self._readers:
            self._readers[topic] = RecordReader(config, topic)
        try:
            record = self._readers[topic].read(place.partition, place.offset)
        except BrokerError as error:
            if meaning(error) not in MISSING:
                raise
            return None
        if record is None or place.timestamp_ms not in (0, record.timestamp()[1]):
            return None
        is_shared = topic in (config.message_topic, config.marker_topic)
        # A queue's own topic is read alike, whichever its backend.
        backend = load(Backend.MARKERS if is_shared else Backend.OFFSETS)
        return backend.stored_payload(config, record, letter.queue_id)


def done_key(topic_id: bytes, partition: int, offset: int, *, prefix: str = Source.prefix) -> bytes:
    """Return the ledger's key of a redriven dead letter; a recreated topic has another id (R13)."""
    return f"{prefix}/{topic_id.hex()}/{partition}/{offset}".encode()


def redriven_place(key: bytes | None, topic_id: bytes) -> tuple[int, int] | None:
    """Partition and offset of the dead letter that a ledger's key says is redriven; total.

    None: it is another kind of key, or of a dead letters topic that is gone.
    """
    parts = (key or b"").split(b"/")
    if len(parts) != 4 or parts[0] != Source.prefix.encode():
        return None
    if parts[1] not in (b"", topic_id.hex().encode()):
        return None
    if not (parts[2].isdigit() and parts[3].isdigit()) or len(key or b"") > 128:
        return None
    return int(parts[2]), int(parts[3])


def _read_done(config: ServiceConfig, source: Source) -> tuple[set[bytes], bytes]:
    """Keys of what was redriven, and the id of the source's topic now."""
    with Admin(config) as admin:
        topic_id = admin.require_topic(source.topic).topic_id
    prefix, nameless = (f"{source.prefix}/{id_}/".encode() for id_ in (topic_id.hex(), ""))
    done = set()
    for record in scan(config, config.ledger_topic):
        key = record.key()
        if not isinstance(key, bytes):
            continue
        if key.startswith(nameless):
            # It was written by brokers that did not tell the id yet.
            key = prefix + key.removeprefix(nameless)
        if key.startswith(prefix):
            done.add(key)
    return done, topic_id


def dead_letter_of(record: Record, done: Set[bytes], topic_id: bytes) -> DeadLetter:
    """Return what a record of the dead letters topic says; total. ``done``: keys of the ledger."""
    readable = headers_or_none(record)
    raw_headers = readable or ()
    read = read_message_headers(raw_headers)
    texts = {
        name: value.decode("utf-8", "replace") for name, value in raw_headers if value is not None
    }
    raw_key = record.key() or b""
    queue_id, user_key = split_key(raw_key)
    is_bare = not queue_id
    named, named_key = split_key(dict(raw_headers).get(names.QUEUE_ID))
    if is_bare:
        # R11's last resort has no key: a header names the queue.
        queue_id, user_key = named, named_key
        raw_key = queue_id
    elif named not in (b"", queue_id):
        # It is a parallel consumer's: the key is its record's.
        queue_id, user_key = named, record.key()
        raw_key = join_key(queue_id, user_key)
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
        is_readable=readable is not None,
        is_bare=is_bare,
        payload_at=Origin.read(texts.get(names.PAYLOAD_AT, "").encode()),
    )
