"""Kafka as a Spark source without connector jars: ``format("kafkamq")``, batch and streaming.

    register_source(spark, config)
    spark.read.format("kafkamq").option("topic", "orders").load()
    spark.readStream.format("kafkamq").option("topic", "orders").load()

Options are in ``options.py``, the columns of each mode in ``columns.py``. Readers are
``read_committed`` and assigned (no consumer group takes part); a position outside a log is an
error, never a jump (R23).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from kafkamq.clients.quarantine import Quarantine
from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, DataLossError, WireError
from kafkamq.spark.blocks import encode_block
from kafkamq.spark.columns import arrow_columns, columns_of, fold_rows
from kafkamq.spark.grouping import group_key
from kafkamq.spark.options import (
    LATEST,
    Offsets,
    SourceOptions,
    chosen_partitions,
    parse_source_options,
)
from kafkamq.spark.reading import LogRange, LogReader, Record, log_reader, shared_out
from kafkamq.wire.headers import Origin

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

__all__ = ["KafkaSource", "register_source"]

_TOPOLOGY_S = 5.0  # how often a stream looks for added partitions


def register_source(
    spark: SparkSession, config: ServiceConfig | None = None, *, name: str = "kafkamq"
) -> str:
    """Make ``format(name)`` known to a session; returns the name.

    Args:
        spark: The session.
        config: Cluster and Kafka's properties for every query of this format. They travel inside
            the pickled class and appear in no plan, option or log: this is where secrets go.
        name: What ``format`` is given.
    """
    given, format_name = config, name

    class RegisteredSource(KafkaSource):
        service = given

        @classmethod
        def name(cls) -> str:
            return format_name

    spark.dataSource.register(RegisteredSource)
    return name


class KafkaSource(DataSource):
    """The data source; ``register_source`` makes one with its cluster inside."""

    service: ClassVar[ServiceConfig | None] = None

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return "kafkamq"

    def schema(self) -> str:
        """The columns of the mode."""
        options = parse_source_options(self.options, self.service)
        columns = columns_of(options.mode, options.include_headers)
        return ", ".join(f"{name} {kind}" for name, kind in columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """For ``spark.read``."""
        return _BatchReader(self._checked(schema), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """For ``spark.readStream``."""
        return _StreamReader(self._checked(schema), schema)

    def _checked(self, schema: StructType) -> SourceOptions:
        options = parse_source_options(self.options, self.service)
        names = [name for name, _ in columns_of(options.mode, options.include_headers)]
        if schema.fieldNames() != names:
            raise ConfigError(
                f"mode {options.mode} has the columns {', '.join(names)}: leave .schema() out"
            )
        return options


class _RangePartition(InputPartition):
    """One task: one range of one partition."""

    def __init__(self, wanted: LogRange) -> None:
        super().__init__(wanted)
        self.wanted = wanted


def _read(
    partition: InputPartition, options: SourceOptions, schema: StructType
) -> Iterator[pa.RecordBatch]:
    """Runs in a worker: the range's records as Arrow batches."""
    from pyspark.sql.pandas.types import to_arrow_schema

    if not isinstance(partition, _RangePartition):
        return  # Spark's placeholder for "no partitions"
    wanted = partition.wanted
    arrow_schema = to_arrow_schema(schema, timezone="UTC")
    if options.mode == "blocks":
        yield from _read_blocks(wanted, options, arrow_schema)
    else:
        for records in log_reader(options.config).read(wanted):
            yield arrow_columns(options.mode, records, arrow_schema)


def _read_blocks(
    wanted: LogRange, options: SourceOptions, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """One row for some thousand markers; one without markers when there are none in the range."""
    import pyarrow as pa

    key = group_key(wanted.topic, wanted.partition, options.tasks)

    def batch(first_offset: int, block: bytes) -> pa.RecordBatch:
        row = (key, wanted.topic, wanted.partition, wanted.start, wanted.end, first_offset, block)
        arrays = [
            pa.array([cell], type=field.type) for cell, field in zip(row, schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    quarantine = _quarantine(options.config)
    is_empty = True
    for records in log_reader(options.config).read(wanted):
        is_empty = False
        rows = fold_rows(records, partial(_refuse, quarantine))
        quarantine.flush()
        yield batch(rows[0][0], encode_block(rows))
    if is_empty:
        yield batch(wanted.start, encode_block([]))


def _refuse(quarantine: Quarantine, record: Record, error: WireError) -> None:
    """A record that is no marker: kept in the quarantine, passed by the tracker (R21)."""
    place = Origin(record.topic(), record.partition(), record.offset(), record.timestamp()[1])
    quarantine.put(place, key=record.key(), value=record.value(), error=error.reason)


_quarantines: dict[tuple[int, str], Quarantine] = {}


def _quarantine(config: ServiceConfig) -> Quarantine:
    """This process's; a worker reads many ranges in its life."""
    key = (os.getpid(), config.quarantine_topic)
    found = _quarantines.get(key)
    if found is None:
        found = _quarantines[key] = Quarantine(config)
    return found


class _BatchReader(DataSourceReader):
    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Ranges between the offsets that hold now; large ones split into ``minPartitions``."""
        options = self._options
        reader = log_reader(options.config)
        numbers = chosen_partitions(options, reader.partition_count(options.topic))
        starts = _resolve(reader, options.topic, numbers, options.starting)
        ends = _resolve(reader, options.topic, numbers, options.ending)
        total = sum(max(0, ends[number] - starts[number]) for number in numbers)
        size = max(1, -(-total // options.min_partitions))
        return [
            _RangePartition(LogRange(options.topic, number, start, min(start + size, ends[number])))
            for number in numbers
            for start in range(starts[number], ends[number], size)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a worker."""
        return _read(partition, self._options, self._schema)


def _resolve(
    reader: LogReader, topic: str, numbers: Sequence[int], wanted: str | Offsets
) -> dict[int, int]:
    """Offsets for names and for JSON; partitions that the JSON leaves out begin with the log."""
    if wanted == LATEST:
        return reader.log_ends(topic, numbers)
    given = {} if isinstance(wanted, str) else wanted.get(topic, {})
    found = {number: int(given.get(str(number), -2)) for number in numbers}
    if -2 in found.values():
        starts = reader.log_starts(topic, numbers)
        found = {number: starts[number] if at == -2 else at for number, at in found.items()}
    if -1 in found.values():
        ends = reader.log_ends(topic, numbers)
        found = {number: ends[number] if at == -1 else at for number, at in found.items()}
    return found


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in one Python process beside the driver for as long as the query runs.

    Offsets are ``{topic: {partition: next offset}}``. A partition that is added later begins at
    offset 0.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._count = 0
        self._looked_s = 0.0  # monotonic; when the partitions were counted
        self._known_ends: dict[int, int] = {}
        self._final_ends: dict[int, int] | None = None  # of Trigger.AvailableNow

    def initialOffset(self) -> dict[str, dict[str, int]]:  # noqa: N802
        """Where a new query begins."""
        options = self._options
        reader = log_reader(options.config)
        numbers = chosen_partitions(options, reader.partition_count(options.topic))
        return self._offsets(_resolve(reader, options.topic, numbers, options.starting))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """``maxRowsPerTrigger``, else everything."""
        limit = self._options.max_rows
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def latestOffset(  # noqa: N802
        self, start: Mapping[str, Mapping[str, int]], limit: ReadLimit
    ) -> dict[str, dict[str, int]]:
        """Where the next batch ends."""
        topic = self._options.topic
        reader = log_reader(self._options.config)
        ends = self._final_ends
        if ends is None:
            ends = reader.log_ends(topic, self._partitions(reader))
        self._known_ends = ends
        starts = {number: start.get(topic, {}).get(str(number), 0) for number in ends}
        for number, end in ends.items():
            if end < starts[number]:
                raise DataLossError(
                    f"{topic}[{number}] ends at {end}, below the position {starts[number]}: the "
                    "topic was made anew or truncated; nothing was skipped. Start with a new "
                    "checkpoint if that was meant",
                    code="OFFSET_OUT_OF_RANGE",
                )
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return self._offsets(shared_out(starts, ends, rows))

    def _partitions(self, reader: LogReader) -> list[int]:
        now = time.monotonic()
        if not self._count or now - self._looked_s > _TOPOLOGY_S:
            self._count = reader.partition_count(self._options.topic)
            self._looked_s = now
        return chosen_partitions(self._options, self._count)

    def _offsets(self, found: Mapping[int, int]) -> dict[str, dict[str, int]]:
        return {self._options.topic: {str(number): at for number, at in sorted(found.items())}}

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:  # noqa: N802
        """For the query's progress: how far the log reaches."""
        return self._offsets(self._known_ends) if self._known_ends else None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Nothing that is written from now on belongs to this run."""
        reader = log_reader(self._options.config)
        numbers = self._partitions(reader)
        self._final_ends = reader.log_ends(self._options.topic, numbers)

    def partitions(
        self, start: Mapping[str, Mapping[str, int]], end: Mapping[str, Mapping[str, int]]
    ) -> Sequence[InputPartition]:
        """One task for each partition with news."""
        topic = self._options.topic
        begins = start.get(topic, {})
        return [
            _RangePartition(LogRange(topic, int(number), begins.get(number, 0), until))
            for number, until in end.get(topic, {}).items()
            if until > begins.get(number, 0)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a worker."""
        return _read(partition, self._options, self._schema)
