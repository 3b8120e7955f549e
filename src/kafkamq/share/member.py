"""One member of a share group and the thread that owns it; and how many a consumer has.

The client gives records in batches, and no more before each record of a batch has its verdict: what
is slow holds back the rest of its own batch alone. So there are few members while batches are
quick, and more when handlers are idle while members are held back.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kafkamq.queue.topic_consumer import TopicMessage
from kafkamq.transport.clients import open_share_consumer
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import (
    KafkaError,
    KafkaException,
    Meaning,
    broker_error,
    is_fatal,
    is_retriable,
    kafka_error,
    meaning,
)
from kafkamq.transport.record import AcknowledgeType, Record, TopicPartition
from kafkamq.types import PartitionOffset

_POLL_S = 0.25
_TURN_S = 0.02
_COMMIT_S = 10.0
_LEAVE_S = 10.0
AGAIN_S = 0.5
# The patience with errors that waiting rarely mends, as of a topic that is gone.
PATIENCE_S = 60.0
# A group takes 200 members by default.
MAX_MEMBERS = 24
HELD_BACK_MS = 100
_UNKNOWN = (4, 8)
_HANDLERS_OF_ONE = 12
_HANDLERS_AT_LEAST = 4
_log = logging.getLogger(__name__)


class ShareMessage(TopicMessage["Member"]):
    """A delivery of a share group.

    Attributes:
        broker_count: Deliveries of this record; ``delivery_count`` is of the message: with those of
            former copies, without those that no handler saw.
        is_seen: It is, or was, handed out.
    """

    __slots__ = ("broker_count", "is_seen")

    broker_count: int
    is_seen: bool

    @property
    def member(self) -> Member:
        return self.place

    @property
    def key_of_place(self) -> tuple[int, int, int]:
        """Return what names its record; in a topic that was created again it has another time."""
        place = self.message_id
        return place.partition, place.offset, self.timestamp_ms


class Batch(Protocol):
    """Who takes what a member fetched; called by its thread."""

    def arrived(self, member: Member, records: Sequence[Record], fetched_ms: int) -> int:
        """Records came; returns how many of them will get a verdict."""

    def look_after(self, member: Member) -> None:
        """Give back what cannot start in time, and give up what was held too long."""

    def came_late(self, messages: Sequence[ShareMessage]) -> None:
        """The broker did not take these verdicts."""

    def has_room(self) -> bool:
        """Return whether more may be fetched."""

    def failed(self, member: Member, error: BaseException) -> None:
        """It has ended by that."""


class Member:
    def __init__(
        self, settings: Mapping[str, object], topic: str, owner: Batch, *, number: int
    ) -> None:
        self._settings = dict(settings)
        self._topic = topic
        self._owner = owner
        self._verdicts: queue.SimpleQueue[tuple[ShareMessage, int, bool]] = queue.SimpleQueue()
        self._open: dict[PartitionOffset, ShareMessage] = {}
        self._unconfirmed: dict[PartitionOffset, ShareMessage] = {}
        self._closing = threading.Event()
        self._is_quiet = threading.Event()
        self._may_leave = threading.Event()
        self._client: Any = None
        self._failing_since_ms = 0
        self._fetched_ms = 0
        self._thread = threading.Thread(
            target=self._run, name=f"kafkamq-share-{number}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def add(self, message: ShareMessage) -> None:
        """It will get a verdict; by the member's thread, in ``arrived``."""
        self._open[_place_of(message)] = message

    def acknowledge(self, message: ShareMessage, kind: int, *, is_late: bool = False) -> None:
        """Acknowledge a message so, from any thread; ``is_late``: its lock has ended."""
        if not is_late:
            # From here on it waits for its answer, wherever it is meanwhile.
            self._unconfirmed[_place_of(message)] = message
        self._verdicts.put((message, kind, is_late))

    def messages(self) -> list[ShareMessage]:
        return list(self._open.values())

    @property
    def held_since_ms(self) -> int | None:
        """Since when it fetches nothing because its batch lacks verdicts; None: it may."""
        return self._fetched_ms if self._open else None

    @property
    def unconfirmed_count(self) -> int:
        return len(self._unconfirmed)

    def stop(self) -> None:
        """Fetch no more; ``await_quiet`` waits for that."""
        self._closing.set()

    def await_quiet(self, timeout_s: float) -> None:
        """After ``stop``: wait until it fetches no more.

        When all members of a process are there, each may leave: what one gives back would
        otherwise be fetched, given back and counted by the next one.
        """
        self._is_quiet.wait(timeout_s)

    def leave(self) -> None:
        """Give back what is held, and leave the group; ``join`` waits for that."""
        self._may_leave.set()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The thread.

    def _run(self) -> None:
        try:
            self._client = open_share_consumer(self._settings)
            self._client.set_acknowledgement_commit_callback(self._answered)
            self._client.subscribe([self._topic])
            while not self._closing.is_set():
                self._turn_or_wait()
        except BaseException as error:  # noqa: BLE001 - raised by receive
            self._owner.failed(self, _as_ours(error))
        finally:
            self._is_quiet.set()
            self._may_leave.wait(_LEAVE_S if self._closing.is_set() else 0.0)
            self._leave()

    def _turn_or_wait(self) -> None:
        """An error that may pass, as in an outage, does not end a member: its client goes on."""
        try:
            self._turn()
        except KafkaException as error:
            now_ms = monotonic_ms()
            self._failing_since_ms = self._failing_since_ms or now_ms
            lasts_s = (now_ms - self._failing_since_ms) / 1000
            # An outage may be of any length.
            is_outage = is_retriable(_as_ours(error))
            if is_fatal(kafka_error(error)) or (lasts_s > PATIENCE_S and not is_outage):
                raise
            _log.warning("a member of a share group goes on", extra={"error": str(error)})
            self._closing.wait(AGAIN_S)
        else:
            self._failing_since_ms = 0

    def _turn(self) -> None:
        if self._open:
            self._serve(_TURN_S)
            self._owner.look_after(self)
        elif self._owner.has_room():
            self._fetch()
        else:
            self._serve(_TURN_S)

    def _fetch(self) -> None:
        self._serve(0.0)
        # A lock is at least as long as from here.
        asked_ms = monotonic_ms()
        records = self._client.poll(_POLL_S)
        good: list[Record] = []
        failure: KafkaError | None = None
        for record in records:
            error = record.error()
            if error is None:
                good.append(record)
            else:
                failure = failure or error
        if good:
            fetched_ms = max(asked_ms, monotonic_ms() - int(_POLL_S * 1000))
            self._fetched_ms = monotonic_ms()
            self._owner.arrived(self, good, fetched_ms)
        if failure is not None:
            raise KafkaException(failure)

    def _serve(self, timeout_s: float) -> None:
        late: list[ShareMessage] = []
        count = 0
        try:
            item = (
                self._verdicts.get(timeout=timeout_s) if timeout_s else self._verdicts.get_nowait()
            )
            while True:
                message, kind, is_late = item
                if is_late:
                    late.append(message)
                else:
                    count += self._acknowledge(message, kind)
                item = self._verdicts.get_nowait()
        except queue.Empty:
            pass
        if count:
            self._commit()
        if late:
            # Each goes alone: the broker refuses what is sent together with one that is late.
            for message in late:
                self._acknowledge(message, AcknowledgeType.RELEASE, is_watched=False)
            self._commit()

    def _commit(self) -> None:
        """Send, and wait: while one commit is under way the broker refuses the next one."""
        self._client.commit_sync(_COMMIT_S)

    def _acknowledge(self, message: ShareMessage, kind: int, *, is_watched: bool = True) -> int:
        key = _place_of(message)
        if self._open.get(key) is not message:
            if self._unconfirmed.get(key) is message:
                del self._unconfirmed[key]
            return 0
        del self._open[key]
        try:
            self._client.acknowledge(message._record, kind)
        except KafkaException:
            self._unconfirmed.pop(key, None)
            if is_watched:
                self._owner.came_late((message,))
            return 0
        return 1

    def _answered(
        self, offsets: Mapping[TopicPartition, set[int]], error: KafkaException | None
    ) -> None:
        late = []
        for partition, found in offsets.items():
            for offset in found:
                message = self._unconfirmed.pop((partition.partition, offset), None)
                if message is not None and error is not None:
                    late.append(message)
        if late:
            _log.warning(
                "the broker refused verdicts: %s",
                error,
                extra={"count": len(late), "error": str(error)},
            )
            self._owner.came_late(late)

    def _leave(self) -> None:
        if self._client is None:
            return
        try:
            self._serve(0.0)
            for message in self.messages():
                self._acknowledge(message, AcknowledgeType.RELEASE, is_watched=False)
            self._commit()
            self._client.close()
        except BaseException as error:  # noqa: BLE001 - the locks end by themselves
            _log.warning("a member left in disorder", extra={"error": str(error)})


def _place_of(message: ShareMessage) -> PartitionOffset:
    place = message.message_id
    return place.partition, place.offset


def _as_ours(error: BaseException) -> BaseException:
    if isinstance(error, KafkaException):
        doing = "reading as a member of a share group"
        if meaning(kafka_error(error)) is Meaning.NO_GROUP:
            doing += " (if a consumer group has its name, give the queue another one by group=...)"
        found = broker_error(kafka_error(error), doing)
        found.__cause__ = error
        return found
    return error


def first_members(concurrency: int) -> int:
    """Return how many to begin with, for so many handlers at once; 0: unknown."""
    if not concurrency:
        return _UNKNOWN[0]
    return max(1, min(4, concurrency // _HANDLERS_OF_ONE))


def max_members(concurrency: int) -> int:
    """Return how many there may be, for so many handlers at once; 0: unknown."""
    if not concurrency:
        return _UNKNOWN[1]
    return max(1, min(MAX_MEMBERS, concurrency // _HANDLERS_AT_LEAST))


def members_to_add(
    held_since_ms: Sequence[int | None], *, first: int, maximum: int, now_ms: int
) -> int:
    """Return how many it takes until as many as at first may fetch.

    A partition is assigned to few members of a group. While all of these are held back nobody reads
    it, whoever else is there.
    """
    fetching = sum(since is None or now_ms - since < HELD_BACK_MS for since in held_since_ms)
    return max(0, min(first - fetching, maximum - len(held_since_ms)))
