"""A group's positions in the ledger: which count, and what is read behind them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from confluent_kafka import Message as Record
from harness.markers import encode_start

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError
from kafkamq.markers import positions as module
from kafkamq.markers.positions import AGAIN_S, LOOK_BACK_MS, MARGIN_MS, Positions
from kafkamq.markers.wire.marker_writer import encode_end
from kafkamq.markers.wire.records import (
    GroupPosition,
    decode_group_position,
    encode_group_position,
    position_prefix,
)
from kafkamq.transport.admin import TopicInfo
from kafkamq.types import MessageId, Outcome

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

    def _scan(
        self, _config: ServiceConfig, _topic: str, starts: dict[int, int], **_: object
    ) -> Iterator[Record]:
        for partition in starts:
            for log_ms, value in self._logs[partition]:
                if log_ms >= self._since_ms:
                    self.read.append(log_ms)
                    yield Record(partition=partition, value=value, timestamp=(2, log_ms))


class Brokers:
    """What they say of the only marker partition; ``asked_ms``: of which times they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, latest_ms: int) -> None:
        self.latest_ms = latest_ms
        self.asked_ms: list[int] = []
        monkeypatch.setattr(module, "Admin", lambda *_, **__: nullcontext(self))

    def require_topic(self, _: str) -> TopicInfo:
        return TopicInfo("kafkamq.markers", TOPIC_ID, 1, 1, {})

    def latest_times(self, _: str, partitions: list[int]) -> dict[int, int]:
        return dict.fromkeys(partitions, self.latest_ms)

    def offsets_for_times(self, _: str, times_ms: dict[int, int]) -> dict[int, int]:
        self.asked_ms += times_ms.values()
        return dict.fromkeys(times_ms, 0)

    def log_ends(self, _: str) -> dict[int, tuple[int, int]]:
        return {0: (40, 50)}


def end(partition: int, offset: int, outcome: Outcome) -> bytes:
    return encode_end(MessageId(partition, offset, TOPIC_ID, 1), outcome, consumer_id="c")


def test_what_a_former_owner_started_is_found_and_what_has_a_verdict_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = 30 * DAY_MS
    Markers(
        monkeypatch,
        [
            (began, start(0, 6)),  # committed
            (began, start(0, 7)),
            (began, start(0, 8)),
            (began, start(1, 7)),  # of a partition that is another's
            (began + 100, start(0, 7)),  # the first one counts
            (began + 200, end(0, 8, Outcome.ACK)),  # the position was set back behind it
            (began + 300, start(0, 9)),
            (began + 7400, start(0, 10)),
            (began + 7450, end(0, 10, Outcome.REDELIVERED)),
            (began + 7500, start(0, 8)),  # and nobody committed it again
        ],
    )
    brokers = Brokers(monkeypatch, latest_ms=began + 7400)
    found = positions().overtaken({0: 7}, began - 1)
    assert {of.offset: at_ms - began for of, (at_ms, _, _) in found.starts.items()} == {
        7: 0,
        9: 300,
        8: 7500,
    }
    assert MessageId(0, 10, TOPIC_ID, 1) in found.redelivered
    assert len(found.redelivered) == 1
    assert (found.is_whole, found.latest_ms) == (True, began + 7500)
    positions().overtaken({0: 7}, 0)
    assert brokers.asked_ms == [began - 1, began + 7400 - LOOK_BACK_MS]
    found = positions().overtaken({0: 7}, began + 7401)  # no marker is as young as the messages
    assert (found.starts, found.is_whole) == ({}, True)
    assert len(brokers.asked_ms) == 2


def test_r12_that_it_had_ended_takes_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A START behind an END that is older than what is read: nobody may START the message again."""
    log = [
        (1, end(0, 7, Outcome.REDELIVERED)),
        (2, start(0, 8)),
        (3, end(0, 7, Outcome.ALREADY_ENDED)),
        (3, end(0, 8, Outcome.ALREADY_ENDED)),
    ]
    Markers(monkeypatch, log)
    Brokers(monkeypatch, latest_ms=9)
    found = positions().overtaken({0: 7}, 1)
    assert [each.offset for each in found.starts] == [8]
    assert MessageId(0, 7, TOPIC_ID, 1) in found.redelivered


def test_of_markers_that_are_read_in_part_only_copies_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else what was acked, and is replayed, would be left out: its END was not read."""
    log = [(1, start(0, 7)), (1, start(0, 8)), (2, end(0, 8, Outcome.REDELIVERED))]

    def part(*_: object, ends: dict[int, int], until_s: float, **__: object) -> Iterator[Record]:
        assert (ends, until_s < math.inf) == ({0: 50}, True)
        for log_ms, value in log:
            yield Record(partition=0, value=value, timestamp=(2, log_ms))
        raise DeadlineExceededError("a transaction is open")

    Brokers(monkeypatch, latest_ms=9)
    monkeypatch.setattr(module, "scan", part)
    found = positions().overtaken({0: 7}, 1)
    assert (found.starts, found.is_whole, len(found.redelivered)) == ({}, False, 1)


def test_markers_that_cannot_be_read_keep_nobody_from_working(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BrokerError("not allowed", code="TOPIC_AUTHORIZATION_FAILED")

    monkeypatch.setattr(module, "Admin", refuse)
    with caplog.at_level("INFO"):
        found = positions().overtaken({0: 7}, 0)
    assert not found.is_whole
    assert not found.starts
    assert "cannot be read" in caplog.text


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
