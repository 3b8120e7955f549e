"""A group's positions in the ledger: which count, and what is read behind them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import Message as Record

from kafkamq.config import ServiceConfig
from kafkamq.markers import positions as module
from kafkamq.markers.positions import AGAIN_S, MARGIN_MS, Positions
from kafkamq.markers.wire.markers import encode_start
from kafkamq.markers.wire.positions import (
    GroupPosition,
    decode_group_position,
    encode_group_position,
    position_prefix,
)
from kafkamq.types import MessageId

TOPIC_ID = b"t" * 16
DAY_MS = 86_400_000
CONFIG = ServiceConfig(bootstrap_servers="127.0.0.1:1")


def positions() -> Positions:
    return Positions(CONFIG, "g", "q")


def start(partition: int, offset: int) -> bytes:
    return encode_start(
        MessageId(partition, offset, TOPIC_ID, 1),
        b"q",
        b"payload",
        redeliver_after_ms=10_000,
        consumer_id="c",
        max_deliveries=5,
        max_lease_ms=60_000,
    )


class Markers:
    """Marker partitions as a scan reads them: one after the other, from a time on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *logs: list[tuple[int, bytes]]) -> None:
        self.read: list[int] = []
        self._logs = logs
        self._since_ms = 0
        monkeypatch.setattr(module, "scan", self._scan)
        monkeypatch.setattr(Positions, "_markers_since", self._markers_since)
        monkeypatch.setattr(Positions, "_with_messages", lambda _, found: found)

    def _markers_since(self, since_ms: int) -> dict[int, int]:
        self._since_ms = since_ms
        return dict.fromkeys(range(len(self._logs)), 0)

    def _scan(self, *_: object, **__: object) -> Iterator[Record]:
        for partition, log in enumerate(self._logs):
            for log_ms, value in log:
                if log_ms >= self._since_ms:
                    self.read.append(log_ms)
                    yield Record(partition=partition, value=value, timestamp=(2, log_ms))


def test_what_lies_between_the_times_of_two_positions_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One partition was quiet for weeks, and the namespace's other queues were not."""
    old, new = 1_000_000, 1_000_000 + 30 * DAY_MS
    between = [(old + day * DAY_MS, b"") for day in range(1, 30)]
    log = [(old + 1, start(0, 7)), *between, (new + 1, start(1, 9)), (new + 2, start(0, 8))]
    markers = Markers(monkeypatch, log)
    found = positions().started_since(
        {0: GroupPosition(TOPIC_ID, 7, old), 1: GroupPosition(TOPIC_ID, 9, new)}
    )
    assert all(MessageId(*each, TOPIC_ID, 1) in found for each in ((0, 7), (0, 8), (1, 9)))
    assert len(found) == 3
    assert len(markers.read) <= 4


def test_a_partition_is_read_until_the_latest_start_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A START in another partition moves the end behind what had been read."""
    at_ms = 1_000_000
    end_ms = at_ms + MARGIN_MS
    Markers(
        monkeypatch,
        [(end_ms + 1, b""), (end_ms + 2, b"")],
        [(end_ms - 1, start(0, 7)), (end_ms + MARGIN_MS, b""), (end_ms + MARGIN_MS, start(0, 8))],
    )
    found = positions().started_since({0: GroupPosition(TOPIC_ID, 7, at_ms)})
    assert [offset for offset in range(10) if MessageId(0, offset, TOPIC_ID, 1) in found] == [7, 8]


@pytest.mark.parametrize(("kept", "present"), [(TOPIC_ID, b""), (b"", TOPIC_ID), (b"", b"")])
def test_a_position_of_a_topic_that_may_be_another_one_is_none(
    monkeypatch: pytest.MonkeyPatch, kept: bytes, present: bytes
) -> None:
    """In a topic recreated it would pass over what nobody has read."""
    value = encode_group_position(GroupPosition(kept, 900_000, 1))
    ledger = [Record(key=position_prefix("g") + b"0", value=value)]
    monkeypatch.setattr(module, "scan", lambda *_, **__: iter(ledger))
    monkeypatch.setattr(Positions, "_ledger_starts", lambda *_: {0: 0})
    assert positions().find([0], present) == {}


class Ledger:
    """What producers write, in the order in which it arrives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.records: list[tuple[bytes, GroupPosition]] = []
        self.now_s = 1000.0
        monkeypatch.setattr("kafkamq.transport.producer.open_producer", lambda *_: self)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)

    def produce(self, _: str, value: bytes, key: bytes, *__: object, **___: object) -> None:
        self.records.append((key, decode_group_position(value)))

    def poll(self, _: float) -> int:
        return 0

    def flush(self, _: float) -> int:
        return 0


def test_a_former_owners_record_that_comes_late_does_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was paused, or out of reach, while the next owner finished all; then nothing changes."""
    ledger = Ledger(monkeypatch)
    former, owner = positions(), positions()
    former.note({0: 100}, TOPIC_ID)
    owner.note({0: 150}, TOPIC_ID)
    owner.write()
    former.write()
    assert [position.offset for _, position in ledger.records] == [150, 100]
    for _ in range(3):
        ledger.now_s += AGAIN_S / 2
        owner.write()
    assert [position.offset for _, position in ledger.records] == [150, 100, 150]
    owner.forget([0])
    ledger.now_s += AGAIN_S
    owner.write()
    ledger.now_s += AGAIN_S
    owner.write()
    assert len(ledger.records) <= 4, "another one owns it"


def test_a_position_is_as_new_as_the_starts_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst after a quiet night: what is STARTed next is looked for from the burst on."""
    ledger = Ledger(monkeypatch)
    worker = positions()
    worker.note({0: 100}, TOPIC_ID)
    worker.started(1_000)
    worker.note({0: 150}, TOPIC_ID)  # before it is told when these were STARTed
    worker.started(DAY_MS)
    worker.write()
    ((_, position),) = ledger.records
    assert (position.offset, position.at_ms) == (150, DAY_MS)
