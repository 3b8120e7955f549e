"""What clients must know of a namespace's topics: ids, partitions, limits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kafkamq.config import ServiceConfig
from kafkamq.errors import KafkaMQError
from kafkamq.queue.rules.broker_time import BrokerClock
from kafkamq.queue.topics import check_topics, raise_refusals
from kafkamq.transport.admin import Admin, TopicInfo

CONNECT_TIMEOUT_S = 15.0
_END_S = 5.0  # for the thread that asks again, which gives up at once
MAX_AGE_S = 300.0  # Kafka's metadata.max.age.ms: new partitions are used after this at the latest
IDENTITY_AGE_S = 15.0  # of workers: STARTs that name a topic by its former id are soon made again
COPY_OVERHEAD_BYTES = 1024  # what a copy adds: batch and record framing, origin, count
DEAD_LETTER_OVERHEAD_BYTES = 8192  # beyond that: the reason, 4 KiB of error text, the queue id
MARKER_OVERHEAD_BYTES = 1024  # what a START or SCHEDULE adds, without its headers
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    """The topics of a namespace as they are now."""

    message_topic_id: bytes
    message_partitions: int
    marker_partitions: int
    message_retention_ms: int  # negative: forever; 0: for no time that can be relied on
    marker_retention_ms: int  # negative: forever
    max_message_bytes: int  # what a copy and a dead letter can carry (R11)
    max_marker_bytes: int  # what fits into a START or SCHEDULE
    stamp: bytes = b""  # of a queue that is a topic of its own (R38): what our records there have
    is_broker_time: bool = True  # the messages' timestamps are

    @classmethod
    def of(cls, config: ServiceConfig, topics: Mapping[str, TopicInfo]) -> NamespaceFacts:
        messages, markers = topics[config.message_topic], topics[config.marker_topic]
        copies = messages.max_message_bytes - COPY_OVERHEAD_BYTES
        dead_letters = topics.get(config.dead_letter_topic)
        if dead_letters is not None:
            copies = min(copies, dead_letters.max_message_bytes - DEAD_LETTER_OVERHEAD_BYTES)
        return cls(
            message_topic_id=messages.topic_id,
            message_partitions=messages.partitions,
            marker_partitions=markers.partitions,
            message_retention_ms=messages.kept_ms,
            marker_retention_ms=markers.retention_ms,
            max_message_bytes=copies,
            max_marker_bytes=markers.max_message_bytes - MARKER_OVERHEAD_BYTES,
        )

    def are_of_another_topic(self, former: NamespaceFacts) -> bool:
        """Whether the messages' topic was recreated since ``former``.

        A topic whose id one of the two does not know is no other one: brokers begin to tell ids,
        or some of them do, while they are upgraded.
        """
        ids = self.message_topic_id, former.message_topic_id
        return all(ids) and ids[0] != ids[1]


class Namespace:
    """Asks the cluster for the facts, and keeps them; thread-safe."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.broker_clock = BrokerClock()  # by the delivery reports of all who use it
        self._lock = threading.Lock()
        self._facts: NamespaceFacts | None = None
        self._asked_s = 0.0
        self._true_s = 0.0  # monotonic; when these facts were last true
        self.certain_until_s = 0.0  # ... and those before them
        self._looked: set[tuple[str, str]] = set()  # queues and groups
        self._checked: set[int] = set()  # max_lease_ms that the topics allow
        self._refreshing: threading.Thread | None = None
        self._is_closed = False

    def facts(self) -> NamespaceFacts:
        """The latest facts; asks when nothing is known yet."""
        facts = self._facts
        if facts is not None:
            return facts
        with self._lock:
            if self._facts is None:
                self._true_s = time.monotonic()
                self._facts = self._ask()
            return self._facts

    def require(self, max_lease_ms: int) -> NamespaceFacts:
        """``facts``, of topics that a queue with that longest lease can use (R23, R25)."""
        facts = self.facts()
        if max_lease_ms not in self._checked:
            ours = (self.config.message_topic, self.config.marker_topic)
            found = check_topics(
                self.config, max_lease_ms=max_lease_ms, timeout_s=CONNECT_TIMEOUT_S
            )
            raise_refusals([finding for finding in found if finding.topic in ours])
            self._checked.add(max_lease_ms)
        return facts

    def is_first_look(self, queue_id: str, group: str) -> bool:
        """Whether nobody has asked this before, of a queue and its group."""
        found = queue_id, group
        is_first = found not in self._looked
        self._looked.add(found)
        return is_first

    def refresh_if_old(self, max_age_s: float = MAX_AGE_S) -> None:
        """Ask again when the facts are old, without waiting for the answer."""
        if self._facts is None or time.monotonic() - self._asked_s < max_age_s:
            return
        with self._lock:
            before = self._refreshing
            if self._is_closed or (before is not None and before.is_alive()):
                return
            self._asked_s = time.monotonic()
            self._refreshing = threading.Thread(
                target=self._refresh, name="kafkamq-topics", daemon=True
            )
            self._refreshing.start()

    def _refresh(self) -> None:
        """A failure leaves the facts as they are."""
        try:
            self.ask_again()
        except KafkaMQError as error:
            if not self._is_closed:
                _log.warning("topics could not be described again", extra={"said": str(error)})

    def close(self) -> None:
        """Ask nobody any more; who waits for an answer gives up. Idempotent."""
        self._is_closed = True
        with self._lock:
            thread = self._refreshing
        if thread is not None:
            thread.join(_END_S)

    def _admin(self) -> Admin:
        return Admin(self.config, timeout_s=CONNECT_TIMEOUT_S, is_over=lambda: self._is_closed)

    def ask_again(self) -> NamespaceFacts:
        """The facts of now; the same object while nothing has changed."""
        began_s = time.monotonic()
        facts = self._ask()
        with self._lock:
            known = self._facts
            if known is not None and not facts.message_topic_id:  # this broker does not tell
                facts = replace(facts, message_topic_id=known.message_topic_id)
            if known is None or known != facts:
                self.certain_until_s, self._facts, known = self._true_s, facts, facts
            self._true_s = began_s
            return known

    def _ask(self) -> NamespaceFacts:
        names = (self.config.message_topic, self.config.marker_topic, self.config.dead_letter_topic)
        with self._admin() as admin:
            topics = admin.topics(names)
            for name in names[:2]:
                if name not in topics:  # raises, and says how to create it, if it is not new
                    topics[name] = admin.require_topic(name)
        self._asked_s = time.monotonic()
        return NamespaceFacts.of(self.config, topics)
