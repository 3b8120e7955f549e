"""How a local tracker becomes the owner of a marker partition (R17, R22, R23)."""

from __future__ import annotations

import logging
import secrets
import threading
import time

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import FencedError
from kafkamq.markers.tracker.ledger import (
    Ledger,
    LedgerKey,
    OpenLedgers,
    newest_start,
    require_own,
)
from kafkamq.markers.tracker.partition import ENGINE, Started
from kafkamq.markers.tracker.position import require_inside, told_positions
from kafkamq.markers.wire.ledger import Position
from kafkamq.transport.admin import Admin
from kafkamq.transport.errors import TransactionAbortedError

_log = logging.getLogger(__name__)

_END_GRACE_S = 5.0  # a new leader may know less for a moment than the old one served


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
        self._admin = Admin(config, kept_groups={self._key(0).transactional_id})  # of every start
        self._partitions = partitions
        self._ledgers = ledgers
        self._lock = threading.Lock()
        self._choosing = threading.Lock()
        self._telling = threading.Lock()
        self._told_positions: dict[int, int] | None = None  # as told before this process; read once
        self._epoch = 0  # of this process; 0: it has not started any partition yet

    def close(self) -> None:
        """End the client that the starts share; idempotent."""
        self._admin.close()

    def start(self, number: int, old: Ledger | None) -> Started | None:
        """Own a partition; None: not yet, ask again soon.

        Args:
            number: Of the partition.
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
            self._partitions = max(self._partitions, number + 1)  # partitions may be added
        epoch = self._choose(number)
        if not epoch:
            return None
        ledger = Ledger(
            self._config, self._key(number), engine=ENGINE, epoch=epoch, admin=self._admin
        )
        try:
            ledger.fence()
            last = ledger.last
            if _is_foreign(last, epoch):
                ledger.close()  # somebody was quicker: choose again
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
        """The epoch to start with; 0: wait for the owner of partition 0."""
        keys = [self._key(0)]
        with self._lock:
            own = self._epoch
            if number == 0:  # its owner is the one that chooses
                keys += [self._key(other) for other in range(1, self._partitions)]
        with self._choosing:  # one after the other, all through one consumer
            newest = newest_start(self._admin, keys)
        if newest is not None and newest.engine == ENGINE:
            return newest.epoch
        if own:
            if newest is None or newest.epoch < own:
                return own  # the ledgers were lost meanwhile; nobody else has started
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
        """Where to read from; never jumps (R23)."""
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
        """Where the last tracker was, for a partition without a position in its ledger."""
        with self._telling:
            if self._told_positions is None:
                self._told_positions = told_positions(self._config)
            return self._told_positions.get(number, default)


def _is_foreign(last: Position | None, epoch: int) -> bool:
    """Whether a ledger holds a later start than ours, or another engine's of the same epoch."""
    if last is None:
        return False
    return last.epoch > epoch or (last.epoch == epoch and last.engine != ENGINE)
