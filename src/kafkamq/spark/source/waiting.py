"""The stream reader of the tracker's query, whose batches follow each other without a pause.

While there is nothing to read it waits for the first record in a fetch that the broker holds, as a
consumer does, instead of asking again and again where the log ends. A batch has few tasks: for a
small one, each costs more than what it reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from kafkamq.spark.source.rows import RangePartition
from kafkamq.spark.source.streaming import StreamOffsets, StreamReader
from kafkamq.transport.follower import Follower
from kafkamq.transport.log_reader import LogRange

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.streaming.datasource import ReadLimit

_WAIT_S = 0.5  # then Spark asks again: it may have been stopped


@dataclass
class _Ranges(InputPartition):
    """What a task reads, one range after the other."""

    wanted: Sequence[LogRange]


class WaitingReader(StreamReader):
    """Waits for records while there are none; reads as many partitions in a task as it folds."""

    _log: Follower | None = None

    def latestOffset(  # noqa: N802
        self, start: StreamOffsets, limit: ReadLimit
    ) -> dict[str, dict[str, int | str]]:
        topic = self.options.topic
        found = super().latestOffset(start, limit)
        if found[topic] == dict(start[topic]) and self._waited(found[topic]):
            found = super().latestOffset(start, limit)
        return found

    def _waited(self, ends: dict[str, int | str]) -> bool:
        """Whether something has come behind these ends."""
        if self._log is None:
            self._log = Follower(
                self.options.config,
                f"waiting for {self.options.topic}",
                fetch_wait_max_ms=round(1000 * _WAIT_S),
                queued_min_messages=1,
                fetch_message_max_bytes=1024,
            )
        log = self._log
        places = {(self.options.topic, int(number)): int(end) for number, end in ends.items()}
        if log.outside or log.places != places.keys():
            log.drop(log.places)
            log.place(places)
        has_come = bool(log.poll(1, _WAIT_S)) or bool(log.outside)
        if has_come:  # what was fetched is read by the batch
            log.drop(log.places)
        return has_come

    def partitions(self, start: StreamOffsets, end: StreamOffsets) -> Sequence[InputPartition]:
        self._require_own(end)
        tasks = defaultdict[int, list[LogRange]](list)
        for wanted in self._ranges(start, end):
            tasks[wanted.partition % self.options.tasks].append(wanted)
        return [_Ranges(each) for each in tasks.values()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Ranges), "what partitions() made"
        for wanted in partition.wanted:
            yield from super().read(RangePartition(wanted))
