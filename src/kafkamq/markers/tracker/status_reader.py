"""Reads the status of every marker partition off its compacted topic (R24), and signs of life."""

from __future__ import annotations

import time
from collections import deque

from kafkamq.config import ServiceConfig
from kafkamq.errors import WireError
from kafkamq.markers.wire.signs import Sign, decode_sign, is_sign_key
from kafkamq.markers.wire.status import TrackerStatus, decode_status, decode_status_key
from kafkamq.transport.admin import Admin
from kafkamq.transport.errors import is_fatal
from kafkamq.transport.follower import Follower
from kafkamq.transport.record import Record

_BATCH = 1000
_MAX_SIGNS = 1000  # that nobody has asked for: the newest


class StatusReader:
    """The latest status per (topic, partition) of a namespace; one owner thread.

    Attributes:
        latest: What was read so far.
        malformed: Records that were passed because they are neither status nor sign (R36).
    """

    def __init__(self, config: ServiceConfig, *, timeout_s: float = 30.0) -> None:
        self.malformed = 0
        self.latest: dict[tuple[str, int], TrackerStatus] = {}
        self._signs: deque[Sign] = deque(maxlen=_MAX_SIGNS)
        topic = config.tracker_topic
        with Admin(config, timeout_s=timeout_s) as admin:
            bounds = admin.log_bounds(topic, range(admin.require_topic(topic).partitions))
        self._left = {
            (topic, number): end for number, (first, end) in bounds.items() if first < end
        }
        self._follower = Follower(
            config,
            f"reading {topic}",
            ignores=lambda error: not is_fatal(error),
            enable_partition_eof=True,
        )
        self._follower.place({(topic, number): first for number, (first, _) in bounds.items()})

    def read_to_end(self, *, timeout_s: float = 10.0) -> dict[tuple[str, int], TrackerStatus]:
        """Read up to what was there when this reader was made, and return ``latest``.

        Raises:
            DeadlineExceededError: The broker did not answer in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while self._left:
            self.poll(0.2)
            if time.monotonic() > deadline_s:
                raise self._follower.deadline(timeout_s)
        return self.latest

    def poll(self, timeout_s: float = 0.1) -> list[TrackerStatus]:
        """New statuses since the last call, oldest first; malformed ones are passed, counted.

        Raises:
            BrokerError: Reading is not possible any more.
            DataLossError: Statuses were deleted before they were read.
        """
        records = self._follower.poll(_BATCH, timeout_s)
        self._follower.require_inside()
        found = [self._fold(record) for record in records]
        if self._left:
            reached = self._follower.positions(self._left) | self._follower.ends
            self._left = {
                place: end for place, end in self._left.items() if reached.get(place, 0) < end
            }
        return [status for status in found if status is not None]

    def take_signs(self) -> list[Sign]:
        """Signs of life that were read since the last call, oldest first."""
        signs = list(self._signs)
        self._signs.clear()
        return signs

    def _fold(self, record: Record) -> TrackerStatus | None:
        try:
            if is_sign_key(record.key()):
                if record.value() is not None:  # no tombstone
                    self._signs.append(decode_sign(record.value()))
                return None
            key = decode_status_key(record.key())
            value = record.value()
            if value is None:  # a tombstone
                self.latest.pop(key, None)
                return None
            status = decode_status(value)
        except WireError:
            self.malformed += 1
            return None
        self.latest[key] = status
        return status

    def close(self) -> None:
        """End the reader; idempotent."""
        self._follower.close()
