"""How a local tracker becomes a marker partition's owner (R17, R22), and where it begins (R23).

The ledger says where. Kafka drops it when nobody has committed there for
``offsets.retention.minutes``; then the last tracker's status (R24) is all that is known. It is no
place to begin at: the topic may be another one by now. But a log that starts behind it has lost
records that nobody read.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from contextlib import closing

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import BrokerError, DataLossError, FencedError
from kafkamq.markers.tracker.ledger import (
    Ledger,
    LedgerKey,
    OpenLedgers,
    newest_start,
    read_ledgers,
    require_own,
)
from kafkamq.markers.tracker.partition import ENGINE, Started
from kafkamq.markers.tracker.records import StatusReader
from kafkamq.markers.wire.records import Position
from kafkamq.transport.admin import Admin
from kafkamq.transport.errors import Meaning, TransactionAbortedError, meaning

_log = logging.getLogger(__name__)

# A new leader may know less for a moment than the old one served.
_END_GRACE_S = 5.0


class PartitionStarter:
    """Opens the ledgers of partitions for one process; thread-safe.

    Replicas are one engine, so they must agree on its epoch without talking to each other: the
    owner of partition 0 chooses it, when the latest epoch is another engine's, and writes it there
    first; the others wait until they read it (R22).
    """

    def __init__(
        self,
        config: ServiceConfig,
        tracker: TrackerConfig,
        *,
        partitions: int,
        ledgers: OpenLedgers,
    ) -> None:
        self._config = config
        self._takeover = tracker.takeover
        # It keeps the connection to the group of every start.
        self._admin = Admin(config, kept_groups={self._key(0).transactional_id})
        self._partitions = partitions
        self._ledgers = ledgers
        self._lock = threading.Lock()
        self._choosing = threading.Lock()
        self._telling = threading.Lock()
        self._told_positions: dict[int, int] | None = None
        # Of this process; 0: it has not started any partition yet.
        self._epoch = 0

    def close(self) -> None:
        self._admin.close()

    def start(self, number: int, old: Ledger | None) -> Started | None:
        """Own a partition; None: not yet, ask again soon.

        Args:
            old: What this process held of it before; is closed.

        Raises:
            FencedError: Another engine started after this one: stop.
            ConfigError: Another engine is the latest, and ``takeover`` is False.
            DataLossError: The position lies outside the log.
            BrokerError, DeadlineExceededError: Not reached.
        """
        if old is not None:
            self._ledgers.close(old)
        with self._lock:
            # Partitions may be added.
            self._partitions = max(self._partitions, number + 1)
        epoch = self._choose(number)
        if not epoch:
            return None
        ledger = Ledger(
            self._config, self._key(number), engine=ENGINE, epoch=epoch, admin=self._admin
        )
        try:
            ledger.fence()
            last = ledger.last
            if ledger.is_anothers:
                # Somebody was quicker: the epoch is chosen again.
                ledger.close()
                return None
            position = self._checked_position(number, last)
            if not ledger.is_last(ENGINE, epoch):
                ledger.adopt(epoch, position)
        except (FencedError, TransactionAbortedError):
            ledger.close()
            return None
        except BaseException:
            ledger.close()
            raise
        with self._lock:
            self._epoch = max(self._epoch, epoch)
        self._ledgers.keep(ledger)
        _log.info(
            "tracking a partition",
            extra={"partition": number, "epoch": epoch, "position": position},
        )
        return Started(ledger, position, f"{ENGINE}-{secrets.token_hex(8)}")

    def _choose(self, number: int) -> int:
        """Return the epoch to start with; 0: wait for the owner of partition 0."""
        keys = [self._key(0)]
        with self._lock:
            own = self._epoch
            if number == 0:
                # The owner of partition 0 chooses.
                keys += [self._key(other) for other in range(1, self._partitions)]
        # They go one after the other, all through one consumer.
        with self._choosing:
            newest = newest_start(self._admin, keys)
        if newest is not None and newest.engine == ENGINE:
            return newest.epoch
        if own:
            if newest is None or newest.epoch < own:
                # The ledgers were lost meanwhile; nobody else has started.
                return own
            raise FencedError(
                f"engine {newest.engine!r} (epoch {newest.epoch}) took over "
                f"{self._config.marker_topic} from this one (epoch {own}); stop it first, then "
                "start this one again",
                code="LATER_START",
                is_fatal=True,
            )
        if not self._takeover:
            require_own(newest, ENGINE)
        if number != 0:
            return 0
        return 1 if newest is None else newest.epoch + 1

    def _key(self, number: int) -> LedgerKey:
        return LedgerKey.of_markers(self._config, number)

    def _checked_position(self, number: int, last: Position | None) -> int:
        """Return where to read from; never jumps (R23)."""
        topic = self._config.marker_topic
        deadline_s = time.monotonic() + _END_GRACE_S
        first, end = self._admin.log_bounds(topic, [number])[number]
        position = self._told(number, first) if last is None else last.position
        while position > end and time.monotonic() < deadline_s:
            time.sleep(0.2)
            first, end = self._admin.log_bounds(topic, [number])[number]
        require_inside(self._key(number), position, first, end)
        return first if last is None else position

    def _told(self, number: int, default: int) -> int:
        """Return where the last tracker was, for a partition without a position in its ledger."""
        with self._telling:
            if self._told_positions is None:
                self._told_positions = told_positions(self._config)
            return self._told_positions.get(number, default)


def told_positions(config: ServiceConfig) -> dict[int, int]:
    """Return by marker partition where its last tracker would begin, as its status tells.

    Empty, with a warning, for a tracker that may not read the statuses.

    Raises:
        BrokerError, DeadlineExceededError: No answer.
    """
    try:
        with closing(StatusReader(config)) as reader:
            statuses = reader.read_to_end().values()
    except BrokerError as error:
        if meaning(error) is not Meaning.FORBIDDEN:
            raise
        _log.warning(
            "the tracker has no committed position, and may not read where the last one was: "
            "markers that were deleted unread would go unnoticed",
            extra={"topic": config.tracker_topic, "error": str(error)},
        )
        return {}
    return {
        # With nothing open, what was read last may be control records, which need no reading.
        each.partition: each.committable_offset if each.entries else each.position
        for each in statuses
        if each.topic == config.marker_topic
    }


def require_inside(key: LedgerKey, position: int, first: int, end: int) -> None:
    """Refuse to begin where the log has lost what comes next; never jumps.

    Args:
        position: From where on its records are needed.

    Raises:
        DataLossError: Says how many records are gone, and how to go on without them.
    """
    where = f"{key.topic}[{key.partition}]: the tracker's position is {position}, but the log"
    reset = (
        "to go on without them, stop all trackers and set the position: kafka-consumer-groups "
        f"--group {key.transactional_id} --topic {key.topic}:{key.partition} "
        "--reset-offsets --to-earliest --execute"
    )
    if position < first:
        raise DataLossError(
            f"{where} starts at {first}: up to {first - position} records were deleted before "
            f"they were read, and messages may be lost; {reset}",
            code="OFFSET_OUT_OF_RANGE",
        )
    if position > end:
        raise DataLossError(
            f"{where} ends at {end}: the topic was truncated or recreated; {reset}",
            code="OFFSET_OUT_OF_RANGE",
        )


def require_unbroken(config: ServiceConfig, partitions: int) -> None:
    """Refuse a start without state, where a log has lost records that nobody read.

    Raises:
        DataLossError: As ``require_inside``.
        BrokerError, DeadlineExceededError: No answer.
    """
    keys = [LedgerKey.of_markers(config, number) for number in range(partitions)]
    with Admin(config) as admin:
        known = read_ledgers(admin, keys, stable=False)
        told = told_positions(config) if len(known) < len(keys) else {}
        bounds = admin.log_bounds(config.marker_topic, range(partitions))
    for key in keys:
        first, end = bounds[key.partition]
        position = known[key].position if key in known else told.get(key.partition, first)
        require_inside(key, position, first, end)
