"""The transactional half of a producer in memory: its states, and what ends them."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from kafkamq.transport.memory.client import int_of
from kafkamq.transport.memory.failures import failure, kafka_error
from kafkamq.transport.memory.log import Partition, Transaction
from kafkamq.transport.memory.transactions import StaleEpochError

if TYPE_CHECKING:
    from kafkamq.transport.memory.cluster import MemoryKafka

_FENCED_TEXT = "Local: This instance has been fenced by a newer instance"
_MAGIC = b"CGMDv2:"


def encode_member(group: str, generation: int, member: str) -> bytes:
    return _MAGIC + struct.pack("<i", generation) + f"{group}\0{member}\0".encode() + b"\1"


def decode_member(data: bytes) -> tuple[str, int, str]:
    (generation,) = struct.unpack_from("<i", data, len(_MAGIC))
    group, member, _ = data[len(_MAGIC) + 4 :].split(b"\0")
    return group.decode(), generation, member.decode()


class _State(Enum):
    INIT = "Init"
    READY = "Ready"
    OPEN = "InTransaction"
    ABORTABLE = "AbortableError"
    COMMITTING = "BeginCommit"
    COMMITTED = "CommitNotAcked"
    ABORTING = "BeginAbort"
    FATAL = "FatalError"


class Transactional:
    """What ``Producer`` does with a transactional id; without one only its fatal error."""

    cluster: MemoryKafka
    _purge: Callable[[], None]
    _request: Callable[..., Any]
    _check_open: Callable[[], None]
    _count: int
    flush: Callable[[float], int]

    def __init__(self, settings: Mapping[str, Any]) -> None:
        name = settings.get("transactional.id")
        self.transactional_id: str | None = None if name is None else str(name)
        self._transaction_ms = int_of(settings, 60_000, "transaction.timeout.ms")
        self._state = _State.INIT
        self._epoch = -1
        self._partitions: set[Partition] = set()  # that were added to the transaction
        self._has_offsets = False
        self._skipped: set[Partition] = set()
        self._failed = 0  # deliveries of the transaction
        self._abortable: KafkaError | None = None
        self._fatal: KafkaError | None = None
        self._unraised: KafkaError | None = None  # a fatal error that poll or flush has to raise

    @property
    def _may_produce(self) -> bool:
        return self.transactional_id is None or self._state is _State.OPEN

    # ---- errors

    def _set_fatal(self, error: KafkaError) -> None:
        if self._fatal is not None:
            return
        self._fatal = self._unraised = error
        if self.transactional_id is not None:
            self._state = _State.FATAL
            self._purge()

    def _set_fenced(self, text: str) -> None:
        self._set_fatal(kafka_error(KafkaError._FENCED, text, fatal=True))

    def _fenced_by(self, partition: Partition) -> bool:
        """The client is at its end; whether the partition was part of the transaction."""
        is_joined = partition in self._partitions
        if not is_joined:
            self._set_fenced(f"Failed to add partitions to transaction: {_FENCED_TEXT}")
        else:
            self._set_fenced(
                f"ProduceRequest for {partition.topic.name} [{partition.number}] with 1 message(s)"
                " failed: Broker: Producer attempted an operation with an old epoch: transactional"
                " producer fenced by newer producer instance"
            )
        return is_joined

    def _produce_failed(self, error: KafkaError, text: str) -> None:
        """The broker has refused a record."""
        if self.transactional_id is not None and self._state in (_State.OPEN, _State.COMMITTING):
            self._set_abortable(kafka_error(error.code(), text, abort=True))

    def _refused_by(self, partition: Partition) -> None:
        """The sequence number of a refused record is missing from then on."""
        if self.transactional_id is not None:
            self._skipped.add(partition)

    def _skips(self, partition: Partition) -> bool:
        """Whether one is missing, which ends the transaction; a new epoch mends it."""
        if partition not in self._skipped:
            return False
        text = "skipped sequence numbers"
        code = KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER
        self._set_abortable(kafka_error(code, text, abort=True))
        self._skipped.clear()
        return True

    def _delivery_failed(self) -> None:
        self._failed += 1

    def _set_abortable(self, error: KafkaError) -> None:
        self._state, self._abortable = _State.ABORTABLE, error
        self._purge()

    def _require(self, *states: _State) -> None:
        """Raise what is wrong, unless the state is one of these."""
        self._check_open()
        if self.transactional_id is None:
            raise failure(
                KafkaError._NOT_CONFIGURED, "The Transactional API requires transactional.id"
            )
        if self._state in states:
            return
        if self._fatal is not None:
            self._unraised = None
            raise KafkaException(self._fatal)
        if self._state is _State.ABORTABLE and self._abortable is not None:
            raise KafkaException(self._abortable)
        text = f"Operation not valid in state {self._state.value}"
        raise failure(KafkaError._STATE, text)

    # ---- the calls

    def init_transactions(self, timeout: float = -1) -> None:
        with self.cluster.changed:
            self._require(_State.INIT)
            name = self.transactional_id or ""
            limit_ms = int(self.cluster.settings["transaction.max.timeout.ms"])
            if self._transaction_ms > limit_ms:
                text = "Failed to acquire transactional PID: Broker: Transaction timeout is larger"
                self._set_fatal(
                    kafka_error(KafkaError.INVALID_TRANSACTION_TIMEOUT, text, fatal=True)
                )
                self._require()
            prefix = "Failed to initialize Producer ID: "
            self._epoch = self._request(
                "init_transactions",
                lambda: self.cluster.transactions.init(name, self._transaction_ms),
                timeout,
                prefix,
                retriable=True,
            )
            self._state = _State.READY

    def begin_transaction(self) -> None:
        with self.cluster.changed:
            self._require(_State.READY)
            self._state = _State.OPEN
            self._failed, self._has_offsets = 0, False
            self._partitions.clear()
            self.cluster.transactions.begun_again(self.transactional_id or "", self._epoch)

    def _joined(self, partition: Partition) -> Transaction:
        """The transaction, with the partition in it."""
        transaction = self.cluster.transactions.current(self.transactional_id or "", self._epoch)
        self._partitions.add(partition)
        return transaction

    def send_offsets_to_transaction(
        self, positions: list[TopicPartition], group_metadata: Any, timeout: float = -1
    ) -> None:
        with self.cluster.changed:
            self._require(_State.OPEN)
            if not positions:
                return
            group, generation, member = decode_member(group_metadata)

            def send() -> None:
                transaction = self.cluster.transactions.current(
                    self.transactional_id or "", self._epoch
                )
                self._has_offsets = True
                error = self.cluster.groups.refusal(
                    group, generation, member, is_transactional=True
                )
                if any(self.cluster.is_too_long(each.metadata) for each in positions):
                    error = error or kafka_error(KafkaError.OFFSET_METADATA_TOO_LARGE)
                if error is not None:
                    raise KafkaException(error)
                for each in positions:
                    place = each.topic, each.partition
                    transaction.offsets[group, place] = each.offset, each.metadata

            try:
                self._request(
                    "send_offsets", send, timeout, "Failed to send offsets: ", retriable=True
                )
            except StaleEpochError:
                self._set_fenced(f"Failed to add offsets to transaction: {_FENCED_TEXT}")
                self._require()
            except KafkaException as error:
                inner = error.args[0]
                if inner.code() == KafkaError._TIMED_OUT:
                    raise
                text = f"Failed to commit offsets to transaction on broker: {inner.str()}"
                self._set_abortable(kafka_error(inner.code(), text, abort=True))
                self._require()

    def commit_transaction(self, timeout: float = -1) -> None:
        deadline_s = time.monotonic() + (timeout if timeout >= 0 else 1e9)
        with self.cluster.changed:
            self._require(_State.OPEN, _State.COMMITTING, _State.COMMITTED)
            if self._state is _State.OPEN:
                self._state = _State.COMMITTING
        if self._state is _State.COMMITTING:
            self._flush(deadline_s)
        with self.cluster.changed:
            self._require(_State.COMMITTING, _State.COMMITTED)
            if self._failed and self._state is _State.COMMITTING:
                text = (
                    f"{self._failed} message(s) failed delivery (see individual delivery reports)"
                )
                self._set_abortable(kafka_error(KafkaError._INCONSISTENT, text, abort=True))
                self._require()
            self._state = _State.COMMITTED
            self._end(deadline_s, is_committed=True)

    def abort_transaction(self, timeout: float = -1) -> None:
        """As confluent_kafka's; begins with a purge, and serves its reports."""
        deadline_s = time.monotonic() + (timeout if timeout >= 0 else 1e9)
        with self.cluster.changed:
            self._require(_State.OPEN, _State.ABORTABLE, _State.ABORTING)
            self._state, self._abortable = _State.ABORTING, None
            self._purge()
        self._flush(deadline_s)
        with self.cluster.changed:
            self._require(_State.ABORTING)
            self._end(deadline_s, is_committed=False)

    def _flush(self, deadline_s: float) -> None:
        try:
            left = self.flush(max(0.0, deadline_s - time.monotonic()))
        except KafkaException:  # fatal: ``_require`` raises it
            left = 0
        if left:
            text = (
                "Failed to flush all outstanding messages within the API timeout:"
                f" {left} message(s) remaining"
            )
            raise failure(KafkaError._TIMED_OUT, text, retriable=True)

    def _end(self, deadline_s: float, *, is_committed: bool) -> None:
        """Tell the coordinator, unless it knows of nothing."""
        name, epoch = self.transactional_id or "", self._epoch
        if self._partitions or self._has_offsets:
            try:
                self._request(
                    "end_transaction",
                    lambda: self.cluster.transactions.end(name, epoch, is_committed=is_committed),
                    max(0.0, deadline_s - time.monotonic()),
                    "",
                    retriable=True,
                )
            except StaleEpochError:
                self._set_fenced(f"Failed to end transaction: {_FENCED_TEXT}")
                self._require()
        self._state = _State.READY

    def _abort_at_close(self) -> None:
        """Abort what is open, if the coordinator can be told now."""
        if self.transactional_id is None or self._state not in (_State.OPEN, _State.ABORTABLE):
            return
        if self._partitions or self._has_offsets:
            with suppress(StaleEpochError):
                self.cluster.transactions.end(
                    self.transactional_id, self._epoch, is_committed=False
                )
