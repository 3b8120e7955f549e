"""Claims for Spark: which partitions this driver may read, and the coordination log as a table.

    hold = member.hold("orders", claims="greedy")          # kafkamq.claims
    hold.wait_for_claims(1)
    assign = claimed_assign(hold, "orders")
    frame = spark.readStream.format("kafkamq").options(**assign.options).load()
    with assign.guard(frame.writeStream.format("...").start()) as guard:
        guard.wait()                                       # LeaseLostError when a claim is lost

Spark assigns partitions itself and knows no group; a claim says that no other driver reads them. A
query that lost a claim is stopped; a batch that was under way may still write. So give the sink
the fencing token, or let it be exactly once.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from kafkamq.claims.audit import ClaimAudit, ClaimHistory
from kafkamq.claims.wire.marshal import COORDINATION_TOPIC, decode_value
from kafkamq.config import ServiceConfig, milliseconds, wait_seconds
from kafkamq.errors import LeaseLostError, WireError
from kafkamq.spark.formats import register_source

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from kafkamq.claims import Hold

_LOOK_S = 0.2
_COMMIT_S = 30.0
_log = logging.getLogger(__name__)


def claimed_assign(held: Hold, topic: str) -> ClaimedAssign:
    """Return what is held of a topic now, for one streaming query."""
    claims, positions = held.claims, held.positions()
    tokens = {
        number: token
        for (name, number), token in claims.items()
        if name == topic and (name, number) in positions
    }
    if not tokens:
        raise LeaseLostError(
            f"no partition of {topic} is held: wait for claims first, with wait_for_claims()"
        )
    starts = {number: positions[topic, number] for number in tokens}
    return ClaimedAssign(held, topic, tokens, starts)


@dataclass(frozen=True, eq=False)
class ClaimedAssign:
    _held: Hold
    topic: str
    tokens: Mapping[int, int]
    starts: Mapping[int, int]

    @property
    def options(self) -> dict[str, str]:
        """Return for ``format("kafkamq")`` the partitions, and where a *new* checkpoint begins."""
        return {
            "topic": self.topic,
            "partitions": ",".join(map(str, sorted(self.tokens))),
            "startingOffsets": self._json(self.starts),
        }

    @property
    def jvm_options(self) -> dict[str, str]:
        """Return the same for Spark's own ``format("kafka")``."""
        return {
            "assign": json.dumps({self.topic: sorted(self.tokens)}),
            "startingOffsets": self._json(self.starts),
        }

    def _json(self, offsets: Mapping[int, int]) -> str:
        return json.dumps({self.topic: {str(number): at for number, at in offsets.items()}})

    def lost(self) -> list[int]:
        """Return partitions that are not held any more under the same token."""
        return [
            number
            for number, token in sorted(self.tokens.items())
            if not self._held.is_held(self.topic, number, token)
        ]

    def check(self) -> None:
        if lost := self.lost():
            raise LeaseLostError(
                f"claims of {self.topic} {lost} are lost: another driver may read them"
            )

    def commit_progress(self, query: StreamingQuery) -> None:
        """Make the end of the query's last batch the position of the claims.

        Raises:
            LeaseLostError: One of them is not held any more.
        """
        progress = query.lastProgress
        if progress is None:
            return
        for source in progress["sources"]:
            ends = source["endOffset"]
            found = json.loads(ends) if isinstance(ends, str) else ends
            for partition, offset in ((found or {}).get(self.topic) or {}).items():
                if int(partition) in self.tokens:
                    try:
                        self._held.commit_position(self.topic, int(partition), int(offset))
                    except LeaseLostError:
                        self.check()
                        raise

    def guard(self, query: StreamingQuery) -> ClaimGuard:
        """Stop the query when a claim is lost, and commit its progress until then."""
        return ClaimGuard(self, query)


class ClaimGuard:
    """Watches a query and its claims; context manager: leaving the block stops the query."""

    def __init__(self, assign: ClaimedAssign, query: StreamingQuery) -> None:
        self._assign = assign
        self._query = query
        self._failure: Exception | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kafkamq-guard", daemon=True)
        self._thread.start()

    def __enter__(self) -> ClaimGuard:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait for the query's end, and raise what it failed with; False: it goes on."""
        timeout_s = math.inf if timeout is None else wait_seconds(timeout, may_be_endless=True)
        ends = time.monotonic() + timeout_s
        while self._query.isActive and not self._is_over.is_set():
            left_s = ends - time.monotonic()
            if left_s <= 0:
                return False
            self._is_over.wait(min(_LOOK_S, left_s))
        if self._failure is None and (own := self._query.exception()) is not None:
            # The guard may still wait for Kafka.
            raise own
        self._thread.join(_COMMIT_S)
        if self._failure is not None:
            raise self._failure
        return True

    def stop(self) -> None:
        """Stop the query, commit what it did, and watch no more. Idempotent."""
        self._query.stop()
        self._thread.join(_COMMIT_S)

    def _run(self) -> None:
        assign, query = self._assign, self._query
        try:
            while query.isActive:
                assign.check()
                assign.commit_progress(query)
                self._is_over.wait(_LOOK_S)
            assign.commit_progress(query)
        except Exception as error:  # noqa: BLE001 - a query that nobody guards must not go on
            self._failure = error
            try:
                try:
                    self._failure = query.exception() or error
                finally:
                    query.stop()
            except Exception:  # noqa: BLE001 - py4j raises anything when the JVM is gone
                _log.debug("Spark does not say how the query ended, or stop it", exc_info=True)
        finally:
            self._is_over.set()


COORDINATION_COLUMNS = (
    ("coordination_partition", "INT"),
    ("coordination_offset", "BIGINT"),
    ("timestamp", "TIMESTAMP"),  # the broker's
    ("type", "STRING"),  # null: malformed, see error
    ("error", "STRING"),
    ("client", "STRING"),
    ("instance", "STRING"),
    ("group", "STRING"),
    ("topic", "STRING"),
    ("partition", "BIGINT"),
    ("position", "BIGINT"),  # as the record says
    ("skew_s", "DOUBLE"),  # the sender's time minus the broker's
    ("paused_until_s", "BIGINT"),  # ReleaseGroup
    ("event", "STRING"),  # what the record did, by the safe rules
    ("owner_client", "STRING"),  # after it; empty: nobody
    ("owner_instance", "STRING"),
    ("token", "BIGINT"),  # of the owner; -1: nobody
    ("silence_s", "DOUBLE"),  # since the former owner's last sign of life
    ("is_gap", "BOOLEAN"),  # that was longer than a heartbeat interval
    ("is_dual", "BOOLEAN"),  # the record shows two owners at once
)
"""Columns of ``coordination_frame``, as (name, Spark type)."""


def _rows(records: pd.DataFrame, interval_s: float) -> Iterator[tuple[object, ...]]:
    history: ClaimHistory | None = None
    audit = ClaimAudit(interval_s)
    columns = (records["partition"], records["offset"], records["timestamp"], records["value"])
    for partition, offset, timestamp, value in zip(*columns, strict=True):
        at_ms = timestamp.value // 1_000_000
        if history is None:
            history = ClaimHistory(interval_s, at_ms / 1000 if offset else None)
        place = (partition, offset, timestamp)
        try:
            record = decode_value(None if value is None else bytes(value))
        except WireError as error:
            yield (*place, None, error.reason, *[None] * 15)
            continue
        event = history.apply(record, offset=offset, broker_time_ms=at_ms)
        known = len(audit.dual_claims)
        audit.apply(record, offset=offset, broker_time_ms=at_ms)
        yield (
            *place,
            record.type.value,
            None,
            record.client,
            record.instance,
            record.group,
            record.topic,
            record.partition,
            record.offset,
            record.time_s - at_ms / 1000,
            record.expires_at_s,
            event.kind.value,
            event.client,
            event.instance,
            event.token,
            event.silence_s,
            event.silence_s > interval_s,
            len(audit.dual_claims) > known,
        )


def coordination_frame(
    spark: SparkSession,
    config: ServiceConfig,
    *,
    topic: str = COORDINATION_TOPIC,
    heartbeat_interval: float | timedelta = 60.0,
) -> DataFrame:
    """Every record of a coordination topic with what it did: owners, gaps, two owners at once.

    Read when the query runs, each coordination partition by one task; columns are those of
    ``COORDINATION_COLUMNS``.

    Raises:
        ConfigError: The interval is no duration above 0.
    """
    interval_s = milliseconds(heartbeat_interval, name="heartbeat_interval", minimum=1) / 1000
    schema = ", ".join(f"`{name}` {kind}" for name, kind in COORDINATION_COLUMNS)
    name = register_source(spark, config)
    records = spark.read.format(name).option("topic", topic).load()

    def fold(partition: pd.DataFrame) -> pd.DataFrame:
        """Runs in a worker: one coordination partition, as a whole."""
        import pandas as pd

        rows = list(_rows(partition.sort_values("offset"), interval_s))
        return pd.DataFrame(rows, columns=[name for name, _ in COORDINATION_COLUMNS])

    return records.groupBy("partition").applyInPandas(fold, schema)
