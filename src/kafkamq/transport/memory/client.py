"""Clients in memory share this: requests, metadata, errors, and states of transactions."""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its __all__ lacks them
    BrokerMetadata,
    ClusterMetadata,
    PartitionMetadata,
    TopicMetadata,
)

from kafkamq.transport.memory.cluster import StaleEpochError, cluster_of
from kafkamq.transport.memory.state import (
    RETRIED,
    RETRY_S,
    Fault,
    Partition,
    Topic,
    Transaction,
    failure,
    kafka_error,
)
from kafkamq.types import PartitionId

BROKER_ID = 1
_FOREVER_S = 1e9
T = TypeVar("T")


def int_of(settings: Mapping[str, Any], default: int, *names: str) -> int:
    for name in names:
        if name in settings:
            return int(float(str(settings[name])))
    return default


class Client:
    _closed_text = "Handle has been closed"

    def __init__(self, settings: Mapping[str, Any], logger: object = None) -> None:
        self.client_id = str(settings.get("client.id", "rdkafka"))
        self.cluster = cluster_of(str(settings["bootstrap.servers"]))
        self.known: dict[str, int] = {}
        self._is_closed = False
        self._error_cb: Callable[[KafkaError], None] | None = settings.get("error_cb")
        self._errors: deque[KafkaError] = deque()
        self._has_told_outage = False

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(self._closed_text)

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        self._check_open()
        prefix = "Failed to get metadata: "
        return self._request(
            "metadata", lambda: self._metadata(topic), timeout, prefix, down=KafkaError._TRANSPORT
        )

    def _metadata(self, topic: str | None) -> Any:
        topics = self.cluster.topics
        names = sorted(topics) if topic is None else [topic]
        answer: Any = ClusterMetadata()
        broker: Any = BrokerMetadata()
        broker.id, broker.host, broker.port = BROKER_ID, self.cluster.name, 9092
        answer.cluster_id = self.cluster.name
        answer.controller_id = answer.orig_broker_id = BROKER_ID
        answer.orig_broker_name = f"{self.cluster.name}:9092/{BROKER_ID}"
        answer.brokers = {BROKER_ID: broker}
        answer.topics = {name: _topic_metadata(name, self._told(name)) for name in names}
        for name in names:
            self._learn(name)
        return answer

    def _topic(self, name: str) -> Topic | None:
        is_hidden = (self, name) in self.cluster.faults.hidden
        return None if is_hidden else self.cluster.topics.get(name)

    def _told(self, name: str) -> list[int] | None:
        """Get its partitions as the broker says that is asked; None: it knows of no such topic."""
        topic, told = self._topic(name), self.cluster.faults.told
        count = 0 if topic is None else len(topic.partitions)
        if count and told is not None:
            count = told(name, count)
        return list(range(count)) or None

    def _learn(self, topic: str) -> int:
        """Hear of a topic; how many partitions it has, 0 without one."""
        found = self._topic(topic)
        if found is None:
            self.known.pop(topic, None)
            return 0
        self.known[topic] = len(found.partitions)
        return len(found.partitions)

    # ---- requests

    def _request(
        self,
        kind: str,
        effect: Callable[[], T],
        timeout: float | None,
        prefix: str,
        *,
        place: PartitionId | None = None,
        retriable: bool = False,
        down: int = KafkaError._TIMED_OUT,
    ) -> T:
        """Return what ``effect`` does; ``Faults.plan`` gets ``kind`` and ``place``."""
        cluster = self.cluster
        with cluster.changed:
            now_s = cluster.tick()
            faults = cluster.faults
            if faults.plan is None and not faults.is_down and not faults.cut and not faults.offline:
                return effect()
            deadline_s = now_s + (_FOREVER_S if timeout is None or timeout < 0 else timeout)
            fault = faults.of(kind, self, place) or Fault()
            if retriable and fault.error is not None and fault.error.code() in RETRIED:
                fault = Fault(latency_s=fault.latency_s + RETRY_S)
            arrives_s = now_s + fault.latency_s
            while now_s < arrives_s or faults.separates(self, place):
                code = down if faults.separates(self, place) else KafkaError._TIMED_OUT
                self._must_go_on(now_s, deadline_s, prefix, retriable, code)
                cluster.wait(min(deadline_s, arrives_s if now_s < arrives_s else deadline_s))
                now_s = cluster.tick()
            if fault.error is not None:
                raise failure(fault.error.code(), prefix + fault.error.str())
            answer = None if fault.is_lost else effect()
            while fault.is_lost or fault.is_answer_lost:
                self._must_go_on(now_s, deadline_s, prefix, retriable)
                cluster.wait(deadline_s)
                now_s = cluster.tick()
            return answer  # type: ignore[return-value]  # only a lost request has none

    def _must_go_on(
        self,
        now_s: float,
        deadline_s: float,
        prefix: str,
        retriable: bool,
        code: int = KafkaError._TIMED_OUT,
    ) -> None:
        if self.cluster.faults.separates(self):
            self._tell_outage()
        if now_s >= deadline_s:
            raise failure(code, prefix + kafka_error(code).str(), retriable=retriable)

    # ---- what comes unasked

    def _tell_outage(self) -> None:
        """``error_cb`` hears once that no broker answers."""
        if not self._has_told_outage:
            self._has_told_outage = True
            text = f"{self.cluster.name}:9092/{BROKER_ID}: Connect failed: Connection refused"
            self._errors.append(kafka_error(KafkaError._TRANSPORT, text))
            self._errors.append(kafka_error(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))

    def _look_around(self) -> None:
        """Notice outages and their ends; hold ``changed``."""
        faults = self.cluster.faults
        if faults.is_down or self in faults.cut:
            self._tell_outage()
        else:
            self._has_told_outage = False

    def _serve_errors(self) -> int:
        """Call ``error_cb``; not while ``changed`` is held."""
        count = 0
        while self._errors:
            error = self._errors.popleft()
            count += 1
            if self._error_cb is not None:
                self._error_cb(error)
        return count

    @contextmanager
    def _turns(self, timeout: float | None) -> Iterator[Callable[[], bool]]:
        """Hold ``changed``; gives a function that waits for changes, False when time is over."""
        cluster = self.cluster
        with cluster.changed:
            now_s = cluster.tick()
            until_s = now_s + (_FOREVER_S if timeout is None or timeout < 0 else timeout)

            def wait() -> bool:
                if time.monotonic() >= until_s:
                    return False
                cluster.wait(until_s)
                cluster.tick()
                return True

            yield wait


def _topic_metadata(name: str, numbers: Sequence[int] | None) -> TopicMetadata:
    answer = TopicMetadata()
    answer.topic = name
    if numbers is None:
        answer.error = kafka_error(KafkaError.UNKNOWN_TOPIC_OR_PART)
        return answer
    for number in numbers:
        each = PartitionMetadata()
        each.id, each.leader = number, BROKER_ID
        each.replicas, each.isrs = [BROKER_ID], [BROKER_ID]
        answer.partitions[number] = each
    return answer


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


class Transactional(Client):
    """What ``Producer`` does with a transactional id; without one only its fatal error."""

    _purge: Callable[[], None]
    flush: Callable[[float], int]

    def __init__(self, settings: Mapping[str, Any], logger: object = None) -> None:
        super().__init__(settings, logger)
        name = settings.get("transactional.id")
        self.transactional_id: str | None = None if name is None else str(name)
        self._transaction_ms = int_of(settings, 60_000, "transaction.timeout.ms")
        self._state = _State.INIT
        self._epoch = -1
        self._partitions: set[Partition] = set()
        self._has_offsets = False
        self._skipped: set[Partition] = set()
        self._failed = 0
        self._abortable: KafkaError | None = None
        self._fatal: KafkaError | None = None
        self._unraised: KafkaError | None = None

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
        if self.transactional_id is not None and self._state in (_State.OPEN, _State.COMMITTING):
            self._set_abortable(kafka_error(error.code(), text, abort=True))

    def _refused_by(self, partition: Partition) -> None:
        """The sequence number of a refused record is missing from then on."""
        if self.transactional_id is not None:
            self._skipped.add(partition)

    def _skips(self, partition: Partition) -> bool:
        """Return whether one is missing, which ends the transaction; a new epoch mends it."""
        if partition not in self._skipped:
            return False
        text = "skipped sequence numbers"
        code = KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER
        self._set_abortable(kafka_error(code, text, abort=True))
        self._skipped.clear()
        return True

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
        """Purge what is queued and serve its reports, then abort, as confluent_kafka does."""
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
        except KafkaException:
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
