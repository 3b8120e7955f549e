"""What a test may do to a cluster in memory. Nothing goes wrong unless something is set here.

``Faults.plan`` is asked about every request and answers with a ``Fault``, or None. It gets the kind
of the request, the client, and the topic and partition if there is one. Kinds: produce, metadata,
list_offsets, commit, committed, join, init_transactions, send_offsets, end_transaction, admin; and
fetch, the first one behind an assignment or a seek, of which the latency alone counts.

What happens to the brokers' data are methods: ``MemoryKafka.delete_records``, ``truncate``,
``delete_topic`` and ``add_partitions``, ``Groups.expire_offsets`` and ``expel``. ``Producer.fail``
is a fatal error, ``Groups.on_kept`` is told of every commit, and
``Groups.on_known`` when a client knows what is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from confluent_kafka import KafkaError

from kafkamq.transport.memory.log import Place

FATAL = (KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, KafkaError.UNKNOWN_PRODUCER_ID)
"""Codes that end a producer."""

UNKNOWN = KafkaError(KafkaError.UNKNOWN)
"""What a broker says that cannot do something, and does not say why; the client does not retry."""

REFUSALS = (
    KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION),
    KafkaError(KafkaError.COORDINATOR_NOT_AVAILABLE),
    KafkaError(KafkaError.NOT_COORDINATOR),
)
"""What a broker says that was asked as another one took over."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What becomes of one request."""

    latency_s: float = 0.0
    """It takes so long to arrive."""
    error: KafkaError | None = None
    """The broker's answer; nothing has happened. Some are never told, see ``RETRIED``."""
    is_lost: bool = False
    """It never arrives, however often it is tried again: the client's time runs out."""
    is_answer_lost: bool = False
    """It happens, and the client's time runs out nevertheless."""


RETRIED = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.CONCURRENT_TRANSACTIONS,
    }
)
"""A producer tries its requests again by itself after these, a moment later."""

RETRY_S = 0.1

Plan = Callable[[str, object, "Place | None"], "Fault | None"]


class Faults:
    """State of what is wrong now.

    Attributes:
        plan: See the module.
        is_full: Told a producer, says whether its queue has no room for the next record.
        told: Told a topic and its number of partitions, says how many an answer about it names:
            less from a broker that has not heard of all, 0 if not even of the topic.
        has_ids: Whether brokers tell the ids of topics; some do, while they are upgraded.
        is_down: No broker answers.
        offline: These partitions are led by nobody.
        hidden: Of these topics these clients (a client, a name) have not heard yet.
        cut: These clients reach no broker; a member among them is missed after its session timeout.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.is_full: Callable[[object], bool] | None = None
        self.told: Callable[[str, int], int] | None = None
        self.has_ids: Callable[[], bool] = lambda: True
        self.is_down = False
        self.offline: set[Place] = set()
        self.hidden: set[tuple[object, str]] = set()
        self.cut: set[object] = set()

    def separates(self, client: object, place: Place | None = None) -> bool:
        """Whether a request of this client, to this partition, finds no broker."""
        return self.is_down or client in self.cut or place in self.offline

    def of(self, kind: str, client: object, place: Place | None = None) -> Fault | None:
        """What becomes of a request."""
        return None if self.plan is None else self.plan(kind, client, place)
