"""Markers in bulk: one binary cell carries thousands of decoded markers through the JVM.

The source decodes markers where it reads them and packs what a tracker folds into columns of
integers; Spark shuffles a few cells instead of every marker, and payloads never leave the reader
(R18). A cell belongs to one marker partition and holds its markers in offset order.

Cells live for one batch, between processes of the same release; they are no storage format.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterator, Sequence

from kafkamq.types import Marker, MarkerType, MessageId, Outcome

__all__ = ["FoldRow", "decode_block", "encode_block"]

FoldRow = tuple[int, int, "Marker | None"]
"""(offset, LogAppendTime in ms or -1, marker or None for an undecodable record)."""

_HEAD = struct.Struct("<II")  # rows, bytes of the tables
_UNDECODABLE = -1
_COLUMNS = 11
_OF_SCHEDULE = 256
_OUTCOMES = tuple(Outcome)
_NO_MARKER = Marker(MarkerType.TICK)  # fills the columns of a record that could not be decoded
_NO_ID = MessageId(-1, 0)


def encode_block(rows: Sequence[FoldRow]) -> bytes:
    """Pack rows; what a tracker does not fold (keys, payloads, headers, reasons) is left out."""
    markers = [_NO_MARKER if row[2] is None else row[2] for row in rows]
    ids = [_NO_ID if marker.message_id is None else marker.message_id for marker in markers]
    consumers: dict[str, int] = {}
    logs: dict[tuple[bytes, int], int] = {}
    columns: list[list[int]] = [
        [row[0] for row in rows],
        [row[1] for row in rows],
        [_UNDECODABLE if row[2] is None else int(row[2].type) for row in rows],
        [message_id.partition for message_id in ids],
        [message_id.offset for message_id in ids],
        [logs.setdefault((one.topic_id, one.leader_epoch), len(logs)) for one in ids],
        [marker.redeliver_after_ms for marker in markers],
        [marker.max_lease_ms for marker in markers],
        [consumers.setdefault(marker.consumer_id, len(consumers)) for marker in markers],
        [marker.outcome + _OF_SCHEDULE * marker.of_schedule for marker in markers],
        [marker.engine_epoch for marker in markers],
    ]
    tables = json.dumps(
        [list(consumers), [[topic_id.hex(), epoch] for topic_id, epoch in logs]]
    ).encode()
    parts = [_HEAD.pack(len(rows), len(tables)), tables]
    parts += [array("q", column).tobytes() for column in columns]
    return b"".join(parts)


def decode_block(data: bytes) -> Iterator[FoldRow]:
    """Unpack what ``encode_block`` packed, in the same order."""
    count, table_bytes = _HEAD.unpack_from(data)
    start = _HEAD.size + table_bytes
    consumers, log_rows = json.loads(data[_HEAD.size : start])
    logs = [(bytes.fromhex(topic_id), int(epoch)) for topic_id, epoch in log_rows]
    columns = []
    for _ in range(_COLUMNS):
        column = array("q")
        column.frombytes(data[start : start + 8 * count])
        columns.append(column.tolist())
        start += 8 * count
    kinds = {int(kind): kind for kind in MarkerType}
    for (
        offset,
        timestamp_ms,
        kind,
        partition,
        message_offset,
        log,
        redeliver_after_ms,
        max_lease_ms,
        consumer,
        outcome,
        engine_epoch,
    ) in zip(*columns, strict=True):
        if kind == _UNDECODABLE:
            yield offset, timestamp_ms, None
            continue
        yield (
            offset,
            timestamp_ms,
            Marker(
                kinds[kind],
                None if partition < 0 else MessageId(partition, message_offset, *logs[log]),
                redeliver_after_ms,
                consumer_id=consumers[consumer],
                outcome=_OUTCOMES[outcome & 0xFF],
                max_lease_ms=max_lease_ms,
                of_schedule=outcome >= _OF_SCHEDULE,
                engine_epoch=engine_epoch,
            ),
        )
