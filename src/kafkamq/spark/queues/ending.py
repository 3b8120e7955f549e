"""``format("kafkamq").option("mode", "ack")``: rows with ack tokens become ENDs, and nothing else.

An END is idempotent: a repeated batch writes its ENDs again, and they change nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.spark.marker_log import marker_log
from kafkamq.spark.options import parse_service
from kafkamq.spark.queues.acks import (
    ACK_COLUMNS,
    AckSettings,
    check_columns,
    end_records,
    find_late,
    read_verdicts,
    report,
)

if TYPE_CHECKING:
    import pyarrow as pa

_KNOWN = {"mode", "namespace", "checkpointlocation", "path", "queryname"}
_log = logging.getLogger(__name__)


def parse_ack_options(options: Mapping[str, str], service: ServiceConfig | None) -> AckSettings:
    """Options of a query that writes verdicts."""
    given = {name.lower(): value for name, value in options.items()}
    if given.get("mode") != "ack":
        raise ConfigError(
            f"mode is {given.get('mode', '')!r}: to acknowledge it must be ack; to write rows "
            "leave it out, and name a topic or a queue"
        )
    unknown = sorted(name for name in given if name not in _KNOWN and not name.startswith("kafka."))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]}: known are mode, namespace and kafka.NAME")
    return AckSettings(config=parse_service(given, service))


def _rows_of(batch: pa.RecordBatch) -> list[dict[str, object]]:
    """The columns that matter of each row."""
    wanted = [name for name in batch.schema.names if name in ACK_COLUMNS]
    rows: list[dict[str, object]] = batch.select(wanted).to_pylist()
    return rows


def write_ends(
    batches: Iterable[pa.RecordBatch], settings: AckSettings
) -> Iterator[pa.RecordBatch]:
    """In a worker: ENDs without a transaction; writing them twice changes nothing."""
    ends = read_verdicts(row for batch in batches for row in _rows_of(batch))
    log = marker_log(settings.config)
    log.write(end_records(ends, settings, log))
    yield report(len(ends), find_late(log, ends))


@dataclass
class _Ended(WriterCommitMessage):
    late: int
    named: list[str]


def _write(iterator: Iterator[pa.RecordBatch], settings: AckSettings) -> _Ended:
    """The output of the query is written elsewhere and before."""
    (done,) = next(write_ends(iterator, settings)).to_pylist()
    return _Ended(done["late"], done["places"])


def _report(messages: Iterable[WriterCommitMessage | None]) -> None:
    done = [message for message in messages if isinstance(message, _Ended)]
    late = sum(message.late for message in done)
    if late:
        named = [place for message in done for place in message.named]
        _log.warning(
            "%d verdicts came after their leases' ends: these messages are delivered again "
            "(partition/offset: %s)",
            late,
            ", ".join(named),
        )


class StreamEndWriter(DataSourceStreamArrowWriter):
    def __init__(self, settings: AckSettings, schema: StructType) -> None:
        check_columns(schema)
        self._settings = settings

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _write(iterator, self._settings)

    def commit(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803 - Spark's
    ) -> None:
        _report(messages)


class BatchEndWriter(DataSourceArrowWriter):
    def __init__(self, settings: AckSettings, schema: StructType) -> None:
        check_columns(schema)
        self._settings = settings

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _write(iterator, self._settings)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _report(messages)
