"""One transactional producer: begin, produce, offsets, commit; waits bounded, outcomes named."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, FencedError, StateError
from kafkamq.transport.clients import Producer, flush_in_slices, open_producer
from kafkamq.transport.errors import (
    ErrorWatch,
    Meaning,
    OutcomeUnknownError,
    TransactionAbortedError,
    broker_error,
    kafka_error,
    meaning,
    raised_error,
)
from kafkamq.transport.job_thread import JobThread
from kafkamq.transport.settings import transactional_settings
from kafkamq.types import Headers

NewRecord: TypeAlias = tuple[str, int, "bytes | None", "bytes | None", Headers]
"""Topic, partition, key, value, headers."""

Delivered: TypeAlias = "Callable[[KafkaError | None, Message], None]"

# One blocking call; between two of them errors of the connection are looked at.
_SLICE_S = 0.5
_CLOSE_S = 5.0
_METADATA_S = 5.0
# A call of one slice that has not returned by then never will.
_OVERDUE_S = 12.0
_log = logging.getLogger(__name__)
# Ending a client that a thread is inside of would hang, or crash.
_abandoned: list[object] = []


class CallAbandonedError(Exception):
    """The call did not return; its client must not be touched again."""


class BoundedCall:
    """Runs one client's calls one after the other in a daemon thread; one owner thread.

    ``rd_kafka_send_offsets_to_transaction`` can block forever when a group's coordinator has left
    the cluster's metadata for a moment, as every restart of a broker does (librdkafka issues 5456,
    5511). So who waits for such calls has a bound. A call that is overdue is abandoned together
    with its client, which can neither be used nor ended any more.
    """

    def __init__(self) -> None:
        self._thread = JobThread("kafkamq-calls")

    def run(self, call: Callable[[], object], *, timeout_s: float, client: object) -> None:
        """Run ``call`` in time, or raise CallAbandonedError and keep ``client`` forever."""
        returned = threading.Event()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - raised by the owner
                failures.append(error)
            returned.set()

        self._thread.add(run)
        if not returned.wait(timeout_s):
            self.close()
            _abandoned.append(client)
            _log.warning(
                "a call into librdkafka did not return; its client is abandoned",
                extra={"timeout_s": timeout_s, "abandoned": len(_abandoned)},
            )
            raise CallAbandonedError(f"librdkafka did not return within {timeout_s:g} s")
        if failures:
            # This frame, to which the error refers, keeps neither the error nor so the client: both
            # would stay until the garbage collector comes.
            raise failures.pop()

    def close(self) -> None:
        """End the thread behind its call; the next call has another one."""
        self._thread.end()
        self._thread = JobThread("kafkamq-calls")


class TransactionalProducer:
    """A producer of one transactional id; one owner thread.

    Every method raises ``FencedError`` when another producer of the same id was initialised later,
    ``TransactionAbortedError`` when the transaction is known not to have happened, and
    ``OutcomeUnknownError`` when only ``init`` and a look into the log can tell.
    """

    def __init__(self, config: ServiceConfig, transactional_id: str, **settings: object) -> None:
        self.transactional_id = transactional_id
        self.too_large = 0
        self._config = config
        self._more = settings
        self._watch = ErrorWatch(config.bootstrap_servers)
        self._producer: Producer | None = None
        self._calls = BoundedCall()
        self.is_ready = False
        self._in_transaction = False

    def init(self, *, timeout_s: float = 30.0) -> None:
        """Fence earlier producers of the id; what they had under way is settled when it returns.

        Makes a new client where this one is unusable: a fenced one can never be used again.
        """
        self._discard()
        self._watch = ErrorWatch(self._config.bootstrap_servers)
        settings = transactional_settings(
            self._config, transactional_id=self.transactional_id, **self._more
        )
        producer = open_producer(settings, self._watch)
        self._producer = producer
        self._bounded(
            f"initialising transactions of {self.transactional_id}",
            producer.init_transactions,
            timeout_s,
        )
        self.is_ready = True

    def begin(self) -> None:
        producer = self._ready()
        self.too_large = 0
        try:
            producer.begin_transaction()
        except KafkaException as error:
            raise self._failed(error, "beginning a transaction") from error
        self._in_transaction = True

    def produce(
        self, record: NewRecord, *, timeout_s: float = 30.0, on_delivery: Delivered | None = None
    ) -> None:
        """Queue one record of the open transaction; waits (bounded) while the queue is full."""
        self.produce_records((record,), timeout_s=timeout_s, on_delivery=on_delivery)

    def offer(self, record: NewRecord, *, on_delivery: Delivered) -> bool:
        """Queue one record if that can be done without waiting; False: ``produce`` says why not."""
        topic, partition, key, value, headers = record
        own = list(headers) if headers else None
        try:
            self._ready().produce(
                topic, value, key, partition, on_delivery=on_delivery, headers=own
            )
        except (BufferError, KafkaException):
            return False
        return True

    def produce_many(
        self,
        topic: str,
        partition: int,
        messages: Sequence[dict[str, Any]],
        *,
        timeout_s: float = 30.0,
    ) -> None:
        """Queue records of one partition; quicker than one by one."""
        doing = f"producing to {topic}"
        deadline_s = time.monotonic() + timeout_s
        left, may_ask = list(messages), True
        while left:
            try:
                self._ready().produce_batch(topic, left, partition)
            except KafkaException as error:
                raise self._failed(error, doing) from error
            refused = [each for each in left if "_error" in each]
            refusals = [message.pop("_error") for message in refused]
            self.too_large += sum(meaning(each) is Meaning.TOO_LARGE for each in refusals)
            if may_ask and any(self._is_known_now(topic, each) for each in refusals):
                left, may_ask = refused, False
                continue
            for refusal in refusals:
                if meaning(refusal) is not Meaning.QUEUE_FULL:
                    raise self._failed(KafkaException(refusal), doing)
            if refused:
                if time.monotonic() > deadline_s:
                    raise self._watch.deadline(doing, timeout_s)
                self._serve(doing, 0.1)
            left = refused

    def produce_records(
        self,
        records: Iterable[NewRecord],
        *,
        timeout_s: float = 60.0,
        on_delivery: Delivered | None = None,
    ) -> None:
        """Queue many records of any topic, with headers; each waits while the queue is full."""
        produce, report = self._ready().produce, on_delivery or self._on_delivery
        may_ask = True
        for topic, partition, key, value, headers in records:
            own = list(headers) if headers else None
            deadline_s = 0.0
            while True:
                try:
                    produce(topic, value, key, partition, report, None, 0, own)
                    break
                except BufferError:
                    now_s = time.monotonic()
                    deadline_s = deadline_s or now_s + timeout_s
                    if now_s > deadline_s:
                        doing = "producing in a transaction"
                        raise self._watch.deadline(doing, timeout_s) from None
                    self._serve("producing in a transaction", 0.1)
                except KafkaException as error:
                    if may_ask and self._is_known_now(topic, kafka_error(error)):
                        may_ask = False
                        continue
                    if meaning(error) is Meaning.TOO_LARGE:
                        # It is refused here, before it reaches the broker.
                        self.too_large += 1
                    raise self._failed(error, f"producing to {topic}[{partition}]") from error

    def _is_known_now(self, topic: str, error: KafkaError) -> bool:
        """Return whether a partition that is new to the client may be known now; it looks seldom
        (R26).
        """
        if meaning(error) is not Meaning.NO_PARTITION:
            return False
        with suppress(KafkaException):
            self._ready().list_topics(topic, timeout=_METADATA_S)
            return True
        return False

    def flush(self, *, timeout_s: float = 10.0) -> None:
        """Wait until the queued records are confirmed or refused; ``commit`` does so by itself."""
        self._report("flushing a transaction", partial(flush_in_slices, self._ready(), timeout_s))

    def send_offsets(
        self, positions: Sequence[TopicPartition], group_metadata: bytes, *, timeout_s: float = 10.0
    ) -> None:
        """Commit offsets for a group in the open transaction, as the member that it names."""
        producer = self._ready()
        offsets = list(positions)
        doing = f"sending offsets of {self.transactional_id}"
        if not group_metadata:
            # Kafka would take offsets from anybody.
            raise broker_error(KafkaError(KafkaError.UNKNOWN_MEMBER_ID), doing)
        self._bounded(
            doing,
            lambda slice_s: producer.send_offsets_to_transaction(offsets, group_metadata, slice_s),
            timeout_s,
        )

    def commit(self, *, timeout_s: float = 30.0) -> None:
        """Commit the open transaction; all its records are in the logs when this returns."""
        producer = self._ready()
        doing = f"committing a transaction of {self.transactional_id}"
        try:
            self._bounded(doing, producer.commit_transaction, timeout_s)
        except (TransactionAbortedError, FencedError):
            raise
        except (BrokerError, DeadlineExceededError) as error:
            self.is_ready = False
            raise OutcomeUnknownError(
                f"{error}: whether it was committed is not known", is_retriable=True
            ) from error
        self._in_transaction = False

    def abort(self, *, timeout_s: float = 10.0) -> FencedError | None:
        """Abort the open transaction, if any; one that cannot be aborted ends at ``init``.

        Returns what says that another producer of the id was initialised meanwhile.
        """
        producer = self._producer
        if producer is None or not self._in_transaction:
            return None
        self._in_transaction = False
        try:
            self._bounded(
                f"aborting a transaction of {self.transactional_id}",
                producer.abort_transaction,
                timeout_s,
            )
        except (BrokerError, DeadlineExceededError) as error:
            # The next init aborts the transaction; the broker's timeout does it otherwise.
            self.is_ready = False
            return error if isinstance(error, FencedError) else None
        return None

    @contextmanager
    def transaction(self, *, timeout_s: float = 30.0) -> Iterator[None]:
        """Commit what is produced in the block when that ends normally, else abort it."""
        self.begin()
        try:
            yield
            self.commit(timeout_s=timeout_s)
        except BaseException:
            self.abort()
            raise

    def close(self) -> None:
        """End the client; an open transaction is aborted (bounded). Idempotent."""
        self.abort(timeout_s=_CLOSE_S)
        self._discard()
        self._calls.close()

    def _ready(self) -> Producer:
        if self._producer is None or not self.is_ready:
            raise StateError(f"the producer of {self.transactional_id} needs init() first")
        return self._producer

    def _discard(self) -> None:
        producer, self._producer = self._producer, None
        is_idle = self.is_ready and not self._in_transaction
        self.is_ready = self._in_transaction = False
        if producer is None:
            return
        # Nothing of it may be sent any more, and nobody waits for it.
        producer.purge()
        if is_idle:
            producer.close()
        else:
            # Closing would abort the transaction first, without a bound, and raise when fenced;
            # dropping the last reference ends the client without either.
            with suppress(KafkaException, SystemError):
                # A fatal error is raised by the next poll, too.
                partial(producer.poll)(0)

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        if error is not None and meaning(error) is Meaning.TOO_LARGE:
            self.too_large += 1

    def _bounded(self, doing: str, call: Callable[[float], object], timeout_s: float) -> None:
        """Run one of librdkafka's resumable calls in slices, up to the bound."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            slice_s = max(0.01, min(_SLICE_S, left_s))
            try:
                self._calls.run(partial(call, slice_s), timeout_s=_OVERDUE_S, client=self._producer)
                self._watch.forget()
                return
            except CallAbandonedError as error:
                # The bounded call keeps it.
                self._producer = None
                self.is_ready = self._in_transaction = False
                raise BrokerError(f"{doing}: {error}", code="HANGS", is_retriable=True) from None
            except KafkaException as error:
                inner = kafka_error(error)
                resumable = inner.retriable() and not inner.txn_requires_abort()
                if not resumable or inner.fatal():
                    raise self._failed(error, doing) from error
                if left_s <= 0:
                    self.is_ready = False
                    raise self._watch.deadline(doing, timeout_s) from error
                if meaning(inner) is not Meaning.TIMED_OUT:
                    time.sleep(0.05)
            self._serve(doing, 0.0)

    def _serve(self, doing: str, timeout_s: float) -> None:
        """Serve callbacks; raises what no waiting can mend."""
        if self._producer is not None:
            self._report(doing, partial(self._producer.poll, timeout_s))
        self._watch.check(doing)

    def _report(self, doing: str, call: Callable[[], object]) -> None:
        """Make a call that serves delivery reports; a fatal error comes out of it, too."""
        try:
            call()
        except (KafkaException, SystemError) as error:
            raise self._failed(raised_error(error), doing) from error

    def _failed(self, error: KafkaException, doing: str) -> Exception:
        """Classify; leaves this producer either ready for ``begin`` or in need of ``init``."""
        if meaning(error) is Meaning.FATAL and self._producer is not None:
            # Who produces behind a fatal error, or lost it in a report, is not told which it was.
            try:
                self._producer.begin_transaction()
            except KafkaException as named:
                error = named if kafka_error(named).fatal() else error
        inner = kafka_error(error)
        ours = broker_error(error, f"{doing} at {self._config.bootstrap_servers}")
        if inner.txn_requires_abort() and not inner.fatal():
            fenced = self.abort()
            if fenced is not None:
                return fenced
            code = ours.code if isinstance(ours, BrokerError) else inner.name()
            return TransactionAbortedError(f"{ours}: aborted", code=code, is_retriable=True)
        if inner.fatal() or meaning(inner) is Meaning.FATAL or isinstance(ours, FencedError):
            self.is_ready = self._in_transaction = False
        return ours
