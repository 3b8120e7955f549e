"""The stream reader of ``format("kafkamq")`` says where batches begin and end.

It lives in one Python process beside the driver for as long as the query runs. While there is
nothing to read, that of the tracker's query waits for a record in a fetch that the broker holds.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from kafkamq.errors import ConfigError, DataLossError
from kafkamq.spark.options import SourceOptions, chosen_partitions
from kafkamq.spark.source.planning import resolve, shared_out, topic_id
from kafkamq.spark.source.rows import RangePartition, read_rows
from kafkamq.transport.follower import Follower
from kafkamq.transport.log_reader import LogRange, LogReader, log_reader

if TYPE_CHECKING:
    import pyarrow as pa

TOPOLOGY_S = 5.0
# Then Spark asks again: it may have been stopped.
_WAIT_S = 1.0
_log = logging.getLogger(__name__)

StreamOffsets = Mapping[str, Mapping[str, "int | str"]]
"""``{topic: {partition: next offset}}``, and under names that no topic can have (``_TOPIC_ID``,
``_BEGIN``) what else the checkpoint remembers."""
_TOPIC_ID = ":topic-id"
_BEGIN = ":begin"


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in one Python process beside the driver for as long as the query runs.

    Offsets are ``StreamOffsets``. A partition that is added later begins at offset 0; one that the
    offsets name is never forgotten, whatever a broker with old metadata says.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self.options = options
        self._schema = schema
        self._is_checked = False
        self._count = 0
        # Empty: no broker has told it yet.
        self._topic_id = ""
        self._looked_s = 0.0
        self._known_ends: dict[int, int] = {}
        self._final_ends: dict[int, int] | None = None

    def initialOffset(self) -> dict[str, dict[str, int | str]]:  # noqa: N802
        reader = log_reader(self.options.config)
        numbers = self._partitions(reader, {})
        found = resolve(reader, self.options.topic, numbers, self.options.starting)
        if isinstance(self.options.starting, dict):
            # It knows more than a broker's old metadata.
            named = self.options.starting.get(self.options.topic, {})
            found = {int(number): at for number, at in named.items() if at >= 0} | found
        return self._offsets(found, {str(number): at for number, at in found.items()})

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        limit = self.options.max_rows
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def latestOffset(  # noqa: N802
        self, start: StreamOffsets, limit: ReadLimit
    ) -> dict[str, dict[str, int | str]]:
        self._require_own(start)
        self._require_same_claims(start)
        topic = self.options.topic
        reader = log_reader(self.options.config)
        numbers = self._partitions(reader, start)
        ends = reader.log_ends(topic, numbers) if self._final_ends is None else self._final_ends
        self._known_ends = ends
        starts = self._starts(reader, start, ends)
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        found = self._cut(starts, ends, rows)
        if not self._is_same(start):
            return self._offsets(found, {})
        # What the broker did not tell of stands still: left out, it would begin at 0 again.
        untold = {int(number): int(at) for number, at in start.get(topic, {}).items()}
        self._topic_id = self._topic_id or self._id_of(start)
        return self._offsets(untold | found, start.get(_BEGIN, {}))

    def _require_own(self, offsets: StreamOffsets) -> None:
        """Refuse the checkpoint of something else: its position says nothing of ours."""
        topic = self.options.topic
        if topic not in offsets:
            known = ", ".join(name for name in offsets if not name.startswith(":"))
            raise of_another("topic", known, topic)

    def _require_same_claims(self, start: StreamOffsets) -> None:
        """Refuse the checkpoint of other partitions, and one that others have gone on from."""
        options, topic = self.options, self.options.topic
        if options.partitions is None or self._is_checked:
            return
        known, wanted = (
            ",".join(map(str, sorted(numbers)))
            for numbers in (map(int, start.get(topic, {})), options.partitions)
        )
        if known != wanted:
            # One that it does not name would be read from offset 0.
            raise of_another("partitions", known, wanted)
        # A queue begins where its group is, wherever that is.
        starting = None if options.acknowledge else options.starting
        claimed = starting.get(topic, {}) if isinstance(starting, dict) else {}
        for number, at in start[topic].items():
            if int(at) < claimed.get(number, 0):
                raise ConfigError(
                    f"the checkpoint ends at {at} in {topic}[{number}], startingOffsets are at "
                    f"{claimed[number]}: others have read it meanwhile; name another folder"
                )
        self._is_checked = True

    def _cut(
        self, starts: dict[int, int], ends: dict[int, int], rows: int | None
    ) -> dict[int, int]:
        """Admission control: how far a batch reads."""
        return shared_out(starts, ends, rows)

    def _is_same(self, start: StreamOffsets) -> bool:
        known = self._id_of(start)
        return not known or not self._topic_id or known == self._topic_id

    def _id_of(self, offsets: StreamOffsets) -> str:
        """Return the topic that offsets are of; empty: no broker has told it."""
        return str(offsets.get(_TOPIC_ID, {}).get(self.options.topic, ""))

    def _starts(
        self, reader: LogReader, start: StreamOffsets, ends: Mapping[int, int]
    ) -> dict[int, int]:
        topic, known = self.options.topic, start.get(self.options.topic, {})
        starts = {number: int(known.get(str(number), 0)) for number in ends}
        beyond = [number for number, end in ends.items() if end < starts[number]]
        if self._is_same(start) and not beyond:
            return starts
        if beyond and self._is_same(start):
            number = beyond[0]
            what = f"{topic}[{number}] ends at {ends[number]}, below the position {starts[number]}"
            cause = "the topic was recreated or truncated"
        else:
            what, cause = f"topic {topic} is not the one of the checkpoint", "it was recreated"
        if self.options.fail_on_data_loss:
            raise DataLossError(
                f"{what}: {cause}; nothing was skipped. Start with a new checkpoint if that was "
                "meant, or set failOnDataLoss to false to go on where the new log begins",
                code="OFFSET_OUT_OF_RANGE",
            )
        _log.warning("a log was replaced; reading it from its beginning", extra={"topic": topic})
        begins = reader.log_starts(topic, list(ends))
        return {
            number: begins[number] if number in beyond or not self._is_same(start) else at
            for number, at in starts.items()
        }

    def _partitions(self, reader: LogReader, start: StreamOffsets) -> list[int]:
        """Get the chosen ones that a broker tells of: some may lag behind, and tell of too few."""
        topic = self.options.topic
        now = time.monotonic()
        if not self._count or now - self._looked_s > TOPOLOGY_S:
            self._count = reader.partition_count(topic)
            self._topic_id = topic_id(self.options) or self._topic_id
            self._looked_s = now
        known = start.get(topic, {}) if self._is_same(start) else {}
        count = max([self._count, *(int(number) + 1 for number in known)])
        chosen = chosen_partitions(self.options, count)
        return [number for number in chosen if number < self._count]

    def _offsets(
        self, found: Mapping[int, int], begins: Mapping[str, int | str]
    ) -> dict[str, dict[str, int | str]]:
        topic = self.options.topic
        result: dict[str, dict[str, int | str]] = {
            topic: {str(number): at for number, at in sorted(found.items())},
            _TOPIC_ID: {topic: self._topic_id},
        }
        if self.options.is_folded:
            result[_BEGIN] = dict(begins)
        return result

    def reportLatestOffset(self) -> dict[str, dict[str, int | str]] | None:  # noqa: N802
        """Return for the query's progress how far the log reaches."""
        return self._offsets(self._known_ends, {}) if self._known_ends else None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Nothing that is written from now on belongs to this run."""
        reader = log_reader(self.options.config)
        numbers = self._partitions(reader, {})
        self._final_ends = reader.log_ends(self.options.topic, numbers)

    def partitions(self, start: StreamOffsets, end: StreamOffsets) -> Sequence[InputPartition]:
        self._require_own(end)
        self._require_same_claims(start)
        return [self._task(wanted, end) for wanted in self._ranges(start, end)]

    def _ranges(self, start: StreamOffsets, end: StreamOffsets) -> list[LogRange]:
        topic = self.options.topic
        known, ends = start.get(topic, {}), end.get(topic, {})
        before, after = self._id_of(start), self._id_of(end)
        if before and after and before != after:
            known = {}
        result = []
        for number, until in ends.items():
            begin = int(known.get(number, 0))
            begin = 0 if begin > int(until) else begin
            if int(until) > begin:
                result.append(LogRange(topic, int(number), begin, int(until)))
        return result

    def _task(self, wanted: LogRange, end: StreamOffsets) -> RangePartition:
        if not self.options.is_folded:
            return RangePartition(wanted)
        begin = int(end.get(_BEGIN, {}).get(str(wanted.partition), 0))
        return RangePartition(wanted, min(begin, wanted.start), self._id_of(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_rows(partition, self.options, self._schema)


def of_another(kind: str, known: str, wanted: str) -> ConfigError:
    return ConfigError(
        f"the checkpoint is of {kind} {known}, the query reads {wanted}: name another folder"
    )


@dataclass
class _Ranges(InputPartition):
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
        """Return whether something has come behind these ends."""
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
        if has_come:
            # What was fetched is read by the batch.
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
