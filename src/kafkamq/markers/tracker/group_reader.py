"""Reads the markers partitions that the group assigns to this process.

Two clients: one is only a member of the group and fetches nothing, the other reads the assigned
partitions from the places that their ledgers name. So a partition can be started again, or start
late, without any effect on the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kafkamq.config import ServiceConfig
from kafkamq.errors import DataLossError, KafkaMQError
from kafkamq.transport.errors import is_fatal
from kafkamq.transport.follower import Follower
from kafkamq.transport.group_consumer import COOPERATIVE, GroupConsumer
from kafkamq.transport.record import Place, Record

_BATCH = 5000
_NEW_PARTITIONS_MS = 30_000  # partitions that were added are found so soon
_SESSION_MS = 6_000  # a killed replica's partitions wait so long for their next owner
_STRATEGY = "partition.assignment.strategy"


def tracker_group(config: ServiceConfig) -> str:
    """The group through which replicas of the local tracker share the markers partitions."""
    return f"kafkamq.{config.marker_topic}.tracker"


class MarkerReader:
    """One member of the trackers' group and its reader; one owner thread.

    Args:
        config: Names the markers topic.
        on_assigned: Called inside ``poll`` with the numbers of partitions that are ours now.
        on_revoked: Called inside ``poll`` with those that are not ours any more.
    """

    def __init__(
        self,
        config: ServiceConfig,
        *,
        on_assigned: Callable[[list[int]], None],
        on_revoked: Callable[[list[int]], None],
    ) -> None:
        self._topic = config.marker_topic
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        # All replicas share partitions out in one way, whatever the user chose for queues.
        kafka = {name: value for name, value in config.kafka.items() if name != _STRATEGY}
        self._member = GroupConsumer(
            replace(config, kafka=kafka),
            self,
            [self._topic],
            group_id=tracker_group(config),
            strategy=COOPERATIVE,
            session_ms=_SESSION_MS,
            ignores=lambda error: not is_fatal(error),
            topic_metadata_refresh_interval_ms=_NEW_PARTITIONS_MS,
        )
        self._reader = Follower(
            config,
            f"reading {self._topic}",
            ignores=lambda error: not is_fatal(error),
            enable_partition_eof=True,
        )

    @property
    def is_member(self) -> bool:
        """Whether the group has taken this process in; any thread may ask."""
        return self._member.is_member

    def membership(self) -> bytes:
        """What fences this member's transactions when the group has gone on without it (R22)."""
        return self._member.membership()

    @property
    def ends(self) -> Mapping[int, int]:
        """Partitions that the last poll has read to their end, and that offset."""
        return {number: offset for (_, number), offset in self._reader.ends.items()}

    def begin(self, number: int, offset: int) -> None:
        """Read a partition from this offset."""
        self._reader.place({(self._topic, number): offset})

    def end(self, number: int) -> None:
        """Read it no more; records of it that were fetched already are dropped."""
        self._reader.drop([(self._topic, number)])

    def poll(self, timeout_s: float, *, is_full: bool = False) -> Sequence[Record]:
        """Serve the group, then return the records that there are.

        Waits up to ``timeout_s`` for the first record. ``is_full``: nothing is read now, and it
        waits as long.

        Raises:
            BrokerError: Credentials, or another error that waiting does not mend.
            DataLossError: A partition's records were deleted before they were read.
        """
        if not self._member.is_joined:  # not before somebody polls: members must
            self._member.join()
        # Rebalances happen in here; the member itself has nothing to read.
        self._member.poll(1, timeout_s if is_full else 0.0)
        if is_full:
            self._reader.ends.clear()
            return ()
        records = self._reader.poll(_BATCH, timeout_s)
        for place, position in self._reader.outside.items():
            raise self._data_loss(place, position)
        return records

    def _data_loss(self, place: Place, wanted: int) -> DataLossError:
        """Say how many records are gone, if the broker still tells."""
        where = f"{self._topic}[{place[1]}]"
        error_text = (
            f"{where}: the position {wanted} is not in the log: it was truncated or recreated"
        )
        try:
            first, _ = self._reader.bounds(place, timeout_s=5.0)
            if 0 <= wanted < first:
                error_text = (
                    f"{where}: up to {first - wanted} records were deleted before they were read"
                    f" ({wanted} to {first - 1}), and messages may be lost; the retention is too"
                    " short for this tracker"
                )
        except KafkaMQError:  # it does not tell
            pass
        return DataLossError(error_text, code="OFFSET_OUT_OF_RANGE")

    # The group, inside ``poll`` and ``close``.

    def assigned(self, places: Sequence[Place]) -> Mapping[Place, int]:
        """The member never fetches."""
        self._on_assigned([number for _, number in places])
        return {}

    def revoked(self, places: Sequence[Place], *, is_lost: bool) -> None:
        """Read these no more, whether they were lost or are given back."""
        self._reader.drop(places)
        self._on_revoked([number for _, number in places])

    def close(self) -> None:
        """Leave the group and end both clients."""
        self._member.close()  # revokes, which ends what is read
        self._reader.close()
