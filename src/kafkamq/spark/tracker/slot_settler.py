"""Settles the rows of the fold for some marker partitions, each batch once (R15, R22).

Copies, dead letters, ENDs and position of a partition are one transaction (or several with a count
of rows done, R16), whose ledger tells which batch it was: what is repeated is not written twice,
whoever repeats it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import KafkaMQError, StateError
from kafkamq.markers.rules.delivery import Carry, Settle
from kafkamq.markers.tracker.ledger import Ledger
from kafkamq.markers.tracker.settlement import Settler
from kafkamq.markers.tracker.ticker import Ticker
from kafkamq.markers.wire.status import decode_status
from kafkamq.spark.blocks import decode_actions
from kafkamq.spark.tracker.lateness import lateness_text
from kafkamq.spark.tracker.partition_ledgers import PartitionLedgers
from kafkamq.transport.patience import GRACE_S

SETTLE_S = 2 * GRACE_S + 10.0  # for two searches in one attempt: for logs, then for offsets


@dataclass(frozen=True, kw_only=True)
class SettleSettings:
    """What the driver tells the workers when a query starts; travels inside the pickled class."""

    config: ServiceConfig
    tracker: TrackerConfig
    engine: str
    epoch: int
    slots: int  # processes that share the partitions of a machine


class SlotSettler:
    """Settles the rows of one slot: readers, ledgers, times of positions; one caller at once."""

    def __init__(self, settings: SettleSettings, ticker: Ticker, ledgers: PartitionLedgers) -> None:
        self.settings = settings
        self._ledgers = ledgers
        self._settler = Settler(settings.config, settings.tracker, waits=True)
        self._ticker = ticker
        self._written_s: dict[int, float] = {}  # monotonic; when a position was written
        self._first: dict[int, tuple[int, int, str]] = {}  # not written: position, batch, source
        self._prepared: set[int] = set()  # ... or soon

    def settle(self, row: Mapping[str, object], batch: int) -> int | None:
        """Settle one row of the fold; returns the number of its actions, None: not all yet."""
        partition, position = integer(row["partition"]), integer(row["position"])
        actions = decode_actions(_bytes(row["actions"]))
        source = str(row["range_end"])
        began_s = time.monotonic()
        if actions or self._is_position_due(partition):
            if not self._write(partition, actions, position, batch, source):
                return None
        elif partition not in self._written_s:
            self._written_s[partition] = time.monotonic()
            self._first[partition] = position, batch, source
        status = replace(
            decode_status(_bytes(row["status"])),
            batch=batch,
            lateness=lateness_text(actions, time.monotonic() - began_s),
        )
        self._ticker.publish(status)
        self._ticker.poll()
        return len(actions)

    def _write(
        self,
        partition: int,
        actions: Sequence[Settle | Carry],
        position: int,
        batch: int,
        source: str,
    ) -> bool:
        """Actions, if any, and the position; whether nothing is left to be done."""
        self._first.pop(partition, None)
        with self._ledgers.using(partition) as own:
            self._check(own, batch, source)
            report = self._settler.settle(
                own,
                actions,
                position=position,
                batch=batch,
                source_hash=source,
                timeout_s=SETTLE_S,
            )
        self._written_s[partition] = time.monotonic()
        return not report.left

    def wants_preparing(self, partition: int) -> bool:
        """Whether it is to be prepared; nobody is told so twice."""
        wants = partition not in self._prepared
        self._prepared.add(partition)
        return wants

    def prepare(self, partition: int) -> None:
        """Connect before something is due: the first one would be late by that.

        The position is written, too. Spark ends processes that rest, so in a namespace with little
        to do each batch may meet a new one, which knows of no position that is due.
        """
        with suppress(KafkaMQError):  # whoever settles first meets it again
            self._settler.prepare()
            first = self._first.pop(partition, None)
            if first is not None:
                self._write(partition, (), *first)
            else:
                with self._ledgers.using(partition):
                    pass  # it is open

    def _is_position_due(self, partition: int) -> bool:
        """Where partitions share open ledgers, each writes so many times as seldom."""
        interval_s = self._ledgers.turns() * self.settings.tracker.position_interval_ms / 1000
        now_s = time.monotonic()
        return now_s - self._written_s.get(partition, now_s) >= interval_s

    def _check(self, own: Ledger, batch: int, source: str) -> None:
        """The ledger is not ahead of this batch."""
        last, key = own.last, own.key
        if last is None or last.engine != self.settings.engine:
            return
        is_other = last.batch == batch and last.source_hash not in ("", source)
        if last.batch > batch or is_other:
            raise StateError(
                f"checkpoint older than its ledger: {key.topic}[{key.partition}] is settled up to "
                f"batch {last.batch} (source {last.source_hash}), the query is at batch {batch} "
                f"(source {source}); restore the newest checkpoint, or start with an empty one"
            )


def epoch_of(row: Mapping[str, object]) -> int:
    """Of the start that has folded a row; 0: it stands by."""
    return decode_status(_bytes(row["status"])).epoch


def integer(value: object) -> int:
    """A value out of a row."""
    assert isinstance(value, int), "a column of integers"
    return value


def _bytes(value: object) -> bytes:
    assert isinstance(value, bytes), "a column of bytes"
    return value
