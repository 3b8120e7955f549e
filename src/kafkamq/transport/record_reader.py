"""Reads single records of a topic again, by their offsets (R18)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, KafkaMQError
from kafkamq.transport.follower import READER_GROUP, Follower
from kafkamq.transport.record import Place, Record

__all__ = ["MAX_READ_THROUGH", "RecordReader"]

MAX_READ_THROUGH = 280
"""Records between two wanted ones that are read and dropped; a wider gap is sought (R18)."""

_BATCH = 1000
_END_GRACE_S = 3.0  # a new leader may know less for a moment than the old one served
_END_MEMORY_S = 60.0
_WAIT_S = 0.5  # one wait for records
_FOR_EVER_S = 1e9


class RecordReader:
    """A read_committed reader of one topic; one owner thread.

    It never commits: of the group it needs the right to describe it.
    """

    def __init__(self, config: ServiceConfig, topic: str, *, group_id: str = READER_GROUP) -> None:
        self._config = config
        self._topic = topic
        self._group_id = group_id
        self._follower: Follower | None = None
        self._ends: dict[int, tuple[int, float]] = {}  # by partition: end, monotonic s

    def read(self, partition: int, offset: int, *, timeout_s: float = 30.0) -> Record | None:
        """The record at one offset, or None; also when it lies beyond the log's end."""
        if self._is_beyond(partition, offset):
            return None
        for _offset, message in self.stream(
            partition, (offset,), timeout_s=timeout_s, end_grace_s=_END_GRACE_S
        ):
            return message
        return None

    def _is_beyond(self, partition: int, offset: int) -> bool:
        """Whether the log did not come so far when that was waited for, and has not since."""
        end, seen_s = self._ends.get(partition, (1 << 62, 0.0))
        if offset < end or time.monotonic() - seen_s > _END_MEMORY_S:
            return False
        _, end = self._connected().bounds((self._topic, partition))
        return offset >= end

    def stream(
        self,
        partition: int,
        offsets: Sequence[int],
        *,
        timeout_s: float = 60.0,
        end_grace_s: float = _FOR_EVER_S,
    ) -> Iterator[tuple[int, Record | None]]:
        """The records at ``offsets`` (ascending, without repetition), in that order.

        An offset without a record (deleted, or aborted) comes with None. One beyond the log's end
        is waited for, because the caller has seen it: after a change of leaders the end may step
        back for a moment. ``end_grace_s`` ends that wait with None.

        Raises:
            BrokerError, DeadlineExceededError: Not all were read within ``timeout_s``.
        """
        if not offsets:
            return
        deadline_s = time.monotonic() + timeout_s
        scan = _Scan(offsets)
        place = (self._topic, partition)
        follower = self._connected()
        try:
            follower.place({place: offsets[0]})
            while scan.remains:
                if time.monotonic() > deadline_s:  # each seek takes its time, all together much
                    raise follower.deadline(timeout_s)
                records = follower.poll(_BATCH, _WAIT_S)
                for record in records:
                    yield from scan.take(record)
                yield from scan.pass_to(_known_end(follower, place, scan.target, records))
                if scan.is_far:
                    follower.place({place: scan.target})
                if not records and scan.waited_s() > end_grace_s:
                    self._ends[partition] = (scan.position, time.monotonic())
                    yield from scan.pass_to(1 << 62)
        except BrokerError:
            self.close()
            raise
        finally:
            follower.drop([place])  # otherwise it would go on fetching what nobody wants

    def _connected(self) -> Follower:
        if self._follower is None:
            self._follower = Follower(
                self._config,
                f"reading {self._topic}",
                group_id=self._group_id,
                enable_partition_eof=True,
                queued_min_messages=2 * _BATCH,
                queued_max_messages_kbytes=32_768,
            )
        return self._follower

    def prepare(self, partition: int = 0, *, timeout_s: float = 5.0) -> None:
        """Connect, so that the first ``stream`` need not; what fails is left to that one."""
        with contextlib.suppress(KafkaMQError):
            self._connected().bounds((self._topic, partition), timeout_s=timeout_s)

    def close(self) -> None:
        """End the client; idempotent."""
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()


def _known_end(follower: Follower, place: Place, target: int, records: Sequence[Record]) -> int:
    """Where the log continues, as the last poll tells; -1: it says nothing of that."""
    if place in follower.outside:  # deleted, or a leader that does not know the end yet
        low, high = follower.bounds(place)
        known = low if target < low else high
        follower.place({place: known})
        return known
    if place not in follower.ends:
        return -1
    behind = (records[-1].offset() or 0) + 1 if records else 0
    return max(follower.ends[place], behind)


class _Scan:
    """The wanted offsets of one stream against what the log gives."""

    def __init__(self, offsets: Sequence[int]) -> None:
        self._rest = iter(offsets)
        self.target = next(self._rest)
        self.position = self.target  # the log is known up to here
        self.remains = True
        self._end_s: float | None = None  # monotonic: since when the log ended before the target

    @property
    def is_far(self) -> bool:
        """Whether seeking the target is cheaper than reading up to it."""
        return self.remains and self.target - self.position > MAX_READ_THROUGH

    def take(self, record: Record) -> Iterator[tuple[int, Record | None]]:
        """A record: it is the target, or shows that targets before it are gone."""
        offset = record.offset()
        assert offset is not None, "records have an offset"
        self._end_s = None
        self.position = offset + 1
        while self.remains and self.target <= offset:
            found = record if self.target == offset else None
            yield self.target, found
            self._advance()

    def pass_to(self, position: int) -> Iterator[tuple[int, Record | None]]:
        """The log has nothing wanted before ``position`` (negative: nothing is known)."""
        if position < 0:
            return
        self.position = position
        while self.remains and self.target < position:
            yield self.target, None
            self._advance()
        if self.remains and self._end_s is None:
            self._end_s = time.monotonic()

    def waited_s(self) -> float:
        """How long the log has ended before the target."""
        return 0.0 if self._end_s is None else time.monotonic() - self._end_s

    def _advance(self) -> None:
        following = next(self._rest, None)
        if following is None:
            self.remains = False
        else:
            self.target = following
