"""Markers in bulk: one binary cell carries thousands of decoded markers through the JVM.

The source decodes markers where it reads them and packs what a tracker folds into columns of
integers; Spark shuffles a few cells instead of every marker, and payloads never leave the reader
(R18). A cell belongs to one marker partition and holds its markers in offset order. Actions travel
the same way from the fold to the driver. Cells live for one batch, between processes of the same
release; they are no storage format. They are marshalled and not pickled:
to read one calls nothing that it names.
"""

from __future__ import annotations

import marshal
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from kafkamq.markers.rules.delivery import Carry, DueCause, Settle
from kafkamq.types import Marker, MarkerType, MessageBatch, MessageId, Outcome

FoldRow = tuple[int, int, "Marker | None"]
"""(offset, LogAppendTime in ms or -1, marker or None for an undecodable record)."""

_UNDECODABLE = -1
_OF_SCHEDULE = 256
_OUTCOMES = tuple(Outcome)
_KINDS = {int(kind): kind for kind in MarkerType}
_NO_MARKER = Marker(MarkerType.TICK)
_NO_ID = MessageId(-1, 0)
_ALL_BITS = (1 << 64) - 1
_CARRY = -1


_Logs = dict[tuple[bytes, int], int]
"""Numbers for (topic id, leader epoch); a cell has few of them."""


def _number(logs: _Logs, one: MessageId | MessageBatch) -> int:
    return logs.setdefault((one.topic_id, one.leader_epoch), len(logs))


def encode_block(rows: Sequence[FoldRow]) -> bytes:
    """Pack rows; what a tracker does not fold (keys, payloads, headers, reasons) is left out."""
    markers = [_NO_MARKER if row[2] is None else row[2] for row in rows]
    ids = [_NO_ID if marker.message_id is None else marker.message_id for marker in markers]
    consumers: dict[str, int] = {}
    logs: _Logs = {}
    columns: list[list[int]] = [
        [row[0] for row in rows],
        [row[1] for row in rows],
        [_UNDECODABLE if row[2] is None else int(row[2].type) for row in rows],
        [message_id.partition for message_id in ids],
        [message_id.offset for message_id in ids],
        [_number(logs, message_id) for message_id in ids],
        [marker.redeliver_after_ms for marker in markers],
        [marker.max_lease_ms for marker in markers],
        [consumers.setdefault(marker.consumer_id, len(consumers)) for marker in markers],
        [marker.outcome + _OF_SCHEDULE * marker.of_schedule for marker in markers],
        [marker.engine_epoch for marker in markers],
    ]
    batches = [
        [at, each.partition, _number(logs, each), each.base_offset, each.bits]
        for at, marker in enumerate(markers)
        for each in marker.batches
    ]
    return pack(columns, (list(consumers), list(logs), batches))


class Block:
    def __init__(self, data: bytes) -> None:
        self._columns, (self._consumers, self._logs, batches) = unpack(data)
        self._batches: dict[int, tuple[MessageBatch, ...]] = {}
        for at, partition, log, base_offset, bits in batches:
            topic_id, leader_epoch = self._logs[log]
            one = MessageBatch(partition, topic_id, leader_epoch, base_offset, bits)
            self._batches[at] = (*self._batches.get(at, ()), one)

    def __len__(self) -> int:
        return len(self._columns[0])

    def count(self, outcome: Outcome) -> int:
        """Return messages and SCHEDULEs that have an END with this outcome."""
        outcomes = self._columns[9]
        more = sum(
            sum(each.bits.bit_count() for each in batches) - 1
            for at, batches in self._batches.items()
            if outcomes[at] & 0xFF == outcome
        )
        return outcomes.count(outcome) + outcomes.count(outcome + _OF_SCHEDULE) + more

    def __iter__(self) -> Iterator[FoldRow]:
        logs, consumers, batches = self._logs, self._consumers, self._batches
        for at, (
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
        ) in enumerate(zip(*self._columns, strict=True)):
            if kind == _UNDECODABLE:
                yield offset, timestamp_ms, None
                continue
            yield (
                offset,
                timestamp_ms,
                Marker(
                    _KINDS[kind],
                    None if partition < 0 else MessageId(partition, message_offset, *logs[log]),
                    redeliver_after_ms,
                    consumer_id=consumers[consumer],
                    outcome=_OUTCOMES[outcome & 0xFF],
                    max_lease_ms=max_lease_ms,
                    of_schedule=outcome >= _OF_SCHEDULE,
                    engine_epoch=engine_epoch,
                    batches=batches.get(at, ()),
                ),
            )


def encode_actions(actions: Sequence[Settle | Carry]) -> bytes:
    """Pack what a tracker planned; in the same order again from ``decode_actions``. None: b""."""
    if not actions:
        return b""
    logs: _Logs = {}
    rows = [
        (
            action.start_offset,
            action.message_id.partition,
            action.message_id.offset,
            _number(logs, action.message_id),
            *(
                (_CARRY, 1, action.remaining_ms, 0, 0, 0, 1)
                if isinstance(action, Carry)
                else (
                    action.cause,
                    int(action.of_schedule),
                    action.begin_ms,
                    action.clock_ms,
                    action.deadline_ms,
                    action.verdict_offset,
                    _signed(action.bits),
                )
            ),
        )
        for action in actions
    ]
    return pack(list(zip(*rows, strict=True)), list(logs))


def decode_actions(data: bytes) -> list[Settle | Carry]:
    if not data:
        return []
    columns, logs = unpack(data)
    actions: list[Settle | Carry] = []
    for start, partition, offset, log, cause, of_schedule, *numbers in zip(*columns, strict=True):
        message_id = MessageId(partition, offset, *logs[log])
        if cause == _CARRY:
            actions.append(Carry(start, message_id, numbers[0]))
            continue
        settle = Settle(start, message_id, bool(of_schedule), DueCause(cause), *numbers)
        settle.bits &= _ALL_BITS
        actions.append(settle)
    return actions


def _signed(bits: int) -> int:
    """64 bits in a column of signed integers."""
    return bits - (_ALL_BITS + 1) if bits >> 63 else bits


def pack(columns: Sequence[Sequence[int]], table: Any = None) -> bytes:
    return marshal.dumps(([array("q", column).tobytes() for column in columns], table))


def unpack(data: bytes) -> tuple[list[list[int]], Any]:
    columns, table = marshal.loads(data)
    return [array("q", column).tolist() for column in columns], table
