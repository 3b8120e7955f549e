"""A member of a group, classic (eager or cooperative) or of Kafka's newer protocol.

librdkafka gives partitions and takes them back inside ``poll``, ``consume`` and ``close``, when its
callbacks return. So the owner is told there, says where to read, and ends its work on what goes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from kafkamq.config import ServiceConfig
from kafkamq.transport.commits import GroupOffsets
from kafkamq.transport.errors import broker_error, is_retriable, kafka_error
from kafkamq.transport.follower import partitions_of, targets_of
from kafkamq.transport.record import Record, place_of
from kafkamq.transport.settings import is_new_protocol
from kafkamq.types import PartitionId

COOPERATIVE = "cooperative-sticky"
_SESSION_MS = 10_000
# Members that come and go are noticed within this.
_HEARTBEAT_MS = 1000
_log = logging.getLogger(__name__)


class Owner(Protocol):
    """Who is told of partitions that come and go, inside ``GroupConsumer.poll`` and ``close``."""

    def assigned(self, places: Sequence[PartitionId]) -> Mapping[PartitionId, int]:
        """These are ours from now on; returns where to read them, or ``COMMITTED``.

        Those that are missing there stand still until they are placed.
        """

    def revoked(self, places: Sequence[PartitionId], *, is_lost: bool) -> None:
        """These go when this returns; they are gone already, if they were lost."""


class GroupConsumer(GroupOffsets):
    """One owner thread has the member, which joins with ``join``."""

    def __init__(
        self,
        config: ServiceConfig,
        owner: Owner,
        topics: Sequence[str],
        *,
        group_id: str,
        strategy: str = COOPERATIVE,
        session_ms: int = _SESSION_MS,
        ignores: Callable[[KafkaError], bool] = is_retriable,
        **settings: object,
    ) -> None:
        if not is_new_protocol(config.kafka):
            settings = {
                "partition_assignment_strategy": strategy,
                "session_timeout_ms": session_ms,
                "heartbeat_interval_ms": _HEARTBEAT_MS,
                **settings,
            }
        doing = f"reading {', '.join(topics)}"
        super().__init__(config, group_id, doing, ignores=ignores, **settings)
        self._owner = owner
        self._topics = list(topics)
        self._is_eager = is_eager(self.settings)
        self._still: set[PartitionId] = set()
        self._is_leaving = False
        self.is_joined = False

    # The group.

    def join(self) -> None:
        try:
            self.client.subscribe(
                self._topics,
                on_assign=self._assigned,
                on_revoke=partial(self._take_back, is_lost=False),
                on_lost=partial(self._take_back, is_lost=True),
            )
        except KafkaException as error:
            raise broker_error(error, self._doing) from error
        self.is_joined = True

    def leave(self) -> None:
        """Be no member, from the next ``poll`` on, until ``join``."""
        self.is_joined = False
        self._unsubscribe()

    def _unsubscribe(self) -> None:
        with suppress(KafkaException):
            # The client has ended, and is no member; ``poll`` says of what.
            self.client.unsubscribe()

    @property
    def is_member(self) -> bool:
        """Return whether the group has taken this process in; any thread may ask."""
        try:
            return self.is_joined and bool(self.client.memberid())
        except RuntimeError:
            return False

    def close(self) -> None:
        """Leave the group, by way of ``Owner.revoked``, and end the client."""
        # Without it, librdkafka (2.16) closes a member that has no partitions without a word to
        # the group, which then waits for it until its session times out.
        if not self._is_moved:
            # The client wants all back that it has given.
            self._move(self._assigned_places())
        self._is_leaving = True
        self._unsubscribe()
        self.client.close()
        failure, self._failure = self._failure, None
        if failure is not None and not isinstance(failure, Exception):
            # An interrupt inside of ``revoked`` is raised by no poll any more.
            raise failure

    # Where it reads.

    @property
    def places(self) -> frozenset[PartitionId]:
        """Say what is assigned: as the client knows it, also where a callback was interrupted."""
        return frozenset(self._moving).union(self._assigned_places())

    def place(
        self,
        positions: Mapping[PartitionId, int],
        *,
        others: Mapping[PartitionId, int] | None = None,
    ) -> None:
        """Read these partitions from there, if they are still this member's.

        Args:
            others: Where other partitions are, as far as the owner knows better than the client: a
                member of an eager group can only be assigned everything again.
        """
        assigned = self.places
        ours = {place: at for place, at in positions.items() if place in assigned}
        if not ours:
            return
        for place in ours:
            self.ends.pop(place, None)
            self.outside.pop(place, None)
        if self._is_eager:
            rest = assigned - ours.keys()
            known = {place: at for place, at in (others or {}).items() if place in rest}
            self._placed |= ours
            self._assign(self.positions(rest) | known | ours)
        else:
            self._is_moved = False
            self._moving |= ours
            self._move(self._assigned_places())
        self.resume(self._still & ours.keys())
        self._still -= ours.keys()

    def _move(self, assigned: set[PartitionId]) -> None:
        there = assigned & self._moving.keys()
        if there:
            self.client.incremental_unassign(partitions_of(there))
        self._placed |= self._moving
        self._assign(self._moving)
        self._moving = {}
        self._is_moved = True

    def seek(self, positions: Mapping[PartitionId, int]) -> dict[PartitionId, int]:
        """Go on there; returns those where it cannot, as they are gone or stand still."""
        refused = {}
        for place, offset in positions.items():
            try:
                self.client.seek(TopicPartition(*place, offset))
            except KafkaException as error:  # noqa: PERF203 - one by one, as one may be gone
                refused[place] = offset
                _log.info(
                    "a partition could not be sought",
                    extra={"place": place, "code": kafka_error(error).name()},
                )
        return refused

    def _fetch(self, limit: int, timeout_s: float) -> Sequence[Record]:
        records = super()._fetch(limit, timeout_s)
        if self._still and records:
            # They were fetched before the client was told to pause.
            return [each for each in records if place_of(each) not in self._still]
        return records

    # Rebalances, inside calls of the client, which pass no exception on.

    def _assigned(self, _: object, partitions: list[TopicPartition]) -> None:
        if self._is_leaving:
            # A rebalance ended meanwhile; a client that ends asks nobody.
            return
        places = [(each.topic, each.partition) for each in partitions]
        try:
            found = self._owner.assigned(places)
        except BaseException as error:  # noqa: BLE001 - raised by ``poll``
            self._failure = error
            # The client assigns the partitions by itself, as where this is interrupted.
            return
        # Those that stand still get a place that needs no look-up.
        self._still.update(place for place in places if place not in found)
        targets = {place: found.get(place, 0) for place in places}
        if self._is_eager:
            self._placed.clear()
        self._placed |= targets
        self._assign(targets)

    def _assign(self, targets: Mapping[PartitionId, int]) -> None:
        if self._is_eager:
            self.client.assign(targets_of(targets))
        else:
            self.client.incremental_assign(targets_of(targets))
        still = self._still & targets.keys()
        if still:
            self.pause(still)

    def _take_back(self, _: object, partitions: Sequence[TopicPartition], *, is_lost: bool) -> None:
        places = [(each.topic, each.partition) for each in partitions]
        try:
            self._owner.revoked(places, is_lost=is_lost)
        except BaseException as error:  # noqa: BLE001 - raised by ``poll``
            self._failure = error
        self._forget(places)
        self._still -= set(places)


def is_eager(settings: Mapping[str, object]) -> bool:
    """Say whether a member that is set so gives up all its partitions before it gets new ones."""
    strategy = str(settings.get("partition.assignment.strategy", ""))
    return not is_new_protocol(settings) and "cooperative" not in strategy
