"""One member of a group: what it asks of claims, and its consumers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial

from kafkamq.claims.consumer import Consumer, ConsumerConfig
from kafkamq.claims.coordination_log import check_intervals
from kafkamq.claims.engine import Engine
from kafkamq.claims.hold import Hold
from kafkamq.claims.partition_claims import PartitionClaims, PartitionClaimsConfig
from kafkamq.claims.rules.log import Claim
from kafkamq.claims.rules.policy import ClaimMode
from kafkamq.claims.rules.steps import Delivery
from kafkamq.claims.topic import require_work
from kafkamq.config import one_of
from kafkamq.errors import ConfigError, StateError

_MAX_ID_CHARACTERS = 249
_READY_S = 60.0


def check_id(name: str, value: str) -> None:
    """See that an id can stand in a record."""
    if not 0 < len(value) <= _MAX_ID_CHARACTERS or "/" in value or not value.isprintable():
        raise ConfigError(
            f"{name} is {value!r}: it must be 1-{_MAX_ID_CHARACTERS} printable characters without"
            " '/', which separates the fields of a record"
        )


class Member:
    """One client of one group; ``Cluster.member`` makes it. Thread-safe."""

    def __init__(self, engine: Engine, client_id: str, group_id: str) -> None:
        self.client_id = client_id
        self.group_id = group_id
        self.instance_id = uuid.uuid4().hex[:8]  # new at each start
        self._engine = engine
        self._holders: list[Consumer | Hold] = []

    def __repr__(self) -> str:
        return f"Member({self.client_id}, {self.group_id})"

    def claim_of(self, topic: str, partition: int) -> Claim:
        """What is known of a partition's claim in this group."""
        engine = self._engine
        with engine.lock:
            log = engine.log.logs[engine.partition_of(topic)]
            now_s = engine.log.clock.now_s()
            return log.claim(self.group_id, topic, partition, now_s=now_s)

    def claimed(self, topic: str, partition: int) -> bool:
        """Whether somebody in this group holds a partition."""
        return self.claim_of(topic, partition).is_valid

    def consumer(
        self,
        topics: str | Sequence[str],
        *,
        delivery: str = "at-least-once",
        claims: str = "balanced",
        max_claims: int | None = None,
        reclaim: bool = True,
        release_if_behind: bool = True,
        batch: int = 500,
        queue: int = 1000,
        fenced: bool = False,
        on_data_loss: str = "raise",
        on_claim: Callable[[str, int, int], None] | None = None,
        on_lost: Callable[[str, int, str], None] | None = None,
    ) -> Consumer:
        """A consumer that claims partitions and reads what it holds.

        Args:
            topics: What to claim.
            delivery: ``at-least-once``: messages come one by one or in batches, are committed, and
                come again after a crash if no heartbeat said so. ``at-most-once``: messages come
                by ``batches()`` only, are never handed out twice and cannot be committed.
            claims: ``balanced``: a few partitions a round, so that members share. ``greedy``:
                everything free, at once. ``topic``: whole topics as a unit.
            max_claims: The most partitions (``topic``: topics) to hold; None: no limit.
            reclaim: After a restart, take up at once what the same client held.
            release_if_behind: Give a partition up when this member is too slow for it.
            batch: The most messages of a batch.
            queue: How many messages are read ahead, about.
            fenced: A transactional producer for each partition, so that no former owner can commit
                or produce through ``transaction``. At most once always has it.
            on_data_loss: ``raise``, or ``skip`` with a warning, when the position lies outside
                the log.
            on_claim: Told topic, partition and fencing token of each claim; must not block.
            on_lost: Told topic, partition and reason of each claim that ends; must not block.

        Raises:
            ConfigError: A setting cannot work, or the group goes by another heartbeat interval.
            BrokerError: A topic does not exist.
            DeadlineExceededError: The coordination topic could not be read.
        """
        if batch < 1 or queue < 1:
            raise ConfigError(f"batch is {batch} and queue {queue}: they must be >= 1")
        if on_data_loss not in ("raise", "skip"):
            raise ConfigError(f"on_data_loss is {on_data_loss!r}: it must be 'raise' or 'skip'")
        config = ConsumerConfig(
            batch=batch, queue=queue, on_data_loss=on_data_loss, on_claim=on_claim, on_lost=on_lost
        )
        begin = self._begin(
            topics, claims, max_claims, reclaim, release_if_behind, fenced, delivery=delivery
        )
        consumer = Consumer(self._engine, begin, config)
        self._holders.append(consumer)
        return consumer

    def hold(
        self,
        topics: str | Sequence[str],
        *,
        claims: str = "balanced",
        max_claims: int | None = None,
        reclaim: bool = True,
        release_if_behind: bool = False,
        fenced: bool = False,
        on_claim: Callable[[str, int, int], None] | None = None,
        on_lost: Callable[[str, int, str], None] | None = None,
    ) -> Hold:
        """Claims without messages, for who reads by other means; see ``consumer``.

        Raises:
            As ``consumer``.
        """
        begin = self._begin(
            topics, claims, max_claims, reclaim, release_if_behind, fenced, shares=False
        )
        hold = Hold(self._engine, begin, on_claim=on_claim, on_lost=on_lost)
        self._holders.append(hold)
        return hold

    def _begin(
        self,
        topics: str | Sequence[str],
        claims: str,
        max_claims: int | None,
        reclaim: bool,
        release_if_behind: bool,
        fenced: bool,
        *,
        delivery: str = Delivery.AT_LEAST_ONCE.value,
        shares: bool = True,
    ) -> partial[PartitionClaims]:
        """Be ready to claim; what is called with a listener makes the claims."""
        config = PartitionClaimsConfig(
            topics=_topics(topics),
            delivery=one_of(Delivery, "delivery", delivery),
            mode=one_of(ClaimMode, "claims", claims),
            max_claims=_limit(max_claims),
            reclaim=reclaim,
            release_if_behind=release_if_behind,
            is_fenced=fenced,
            shares=shares,
        )
        engine = self._engine
        if any(not holder.is_closed for holder in self._holders):
            raise StateError(
                "this member holds claims already: close its consumer, or make another member with"
                " another client_id"
            )
        engine.open_writer()  # it connects while the claims are read
        counts = {name: require_work(engine.admin, name) for name in config.topics}
        engine.wait_until(lambda: engine.is_ready, _READY_S, "reading the claims")
        with engine.lock:
            check_intervals(engine.log, self.group_id, engine.interval_ms)
        engine.offset_service.open(self.group_id)
        # A client that comes back within one process is another instance, as after a restart.
        self.instance_id = uuid.uuid4().hex[:8]
        return partial(
            PartitionClaims,
            engine,
            client=self.client_id,
            instance=self.instance_id,
            group=self.group_id,
            config=config,
            counts=counts,
        )

    def close(self, timeout: float = 30.0) -> None:
        """Close its consumers and holds. Idempotent."""
        deadline_s = time.monotonic() + timeout
        for holder in self._holders:
            holder.close(timeout=max(0.5, deadline_s - time.monotonic()))


def _topics(topics: str | Sequence[str]) -> tuple[str, ...]:
    names = (topics,) if isinstance(topics, str) else tuple(dict.fromkeys(topics))
    if not names:
        raise ConfigError("topics is empty: name at least one")
    for name in names:
        check_id("topic", name)
    return names


def _limit(max_claims: int | None) -> int:
    if max_claims is not None and max_claims < 1:
        raise ConfigError(f"max_claims is {max_claims}: it must be >= 1, or None for no limit")
    return max_claims or 0
