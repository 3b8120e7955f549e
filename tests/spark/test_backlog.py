"""How the batches of a queue are cut: shares, last deliveries, what the driver reads."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import cast

import pytest

from kafkamq.spark.backlog import Backlog
from kafkamq.spark.queues.starting import Waiting
from kafkamq.transport.log_reader import LogRange, Record

CHUNK = 64
ROWS = 1000
LAST = 5  # deliveries


class _Record:
    def __init__(self, partition: int, offset: int, kind: str) -> None:
        self.partition = partition
        self._offset = offset
        self.kind = kind  # one of "own", "last", "other"

    def offset(self) -> int:
        return self._offset


class Topic:
    """Partitions as texts: o an own message, l a last delivery, x one of another queue."""

    def __init__(self, *logs: str) -> None:
        self.logs = logs
        self.read: Counter[tuple[int, int]] = Counter()
        self.backlog = Backlog("t", self._read, of=self._waiting, is_last=self._is_last)
        self.at = dict.fromkeys(range(len(logs)), 0)

    @staticmethod
    def _waiting(record: Record) -> Waiting | None:
        one = cast("_Record", record)
        if one.kind not in "ol":
            return None
        count = LAST if one.kind == "l" else 1
        return Waiting(one.partition, one.offset(), (b"", 0), 0, count, 0, False)

    @staticmethod
    def _is_last(one: Waiting) -> bool:
        return one.delivery_count == LAST

    def _read(self, wanted: LogRange) -> Iterator[list[Record]]:
        number = wanted.partition
        for first in range(wanted.start, wanted.end, CHUNK):
            offsets = range(first, min(first + CHUNK, wanted.end))
            self.read.update((number, offset) for offset in offsets)
            found = [_Record(number, offset, self.logs[number][offset]) for offset in offsets]
            yield cast("list[Record]", found)

    def batch(self, rows: int = ROWS) -> list[tuple[int, int]]:
        """The next one: its messages."""
        ends = {number: len(log) for number, log in enumerate(self.logs)}
        cuts = self.backlog.cut(self.at, ends, rows)
        before, self.at = self.at, cuts
        return [
            (number, offset)
            for number, log in enumerate(self.logs)
            for offset in range(before[number], cuts[number])
            if log[offset] in "ol"
        ]


def test_no_partition_waits_behind_anothers_last_deliveries() -> None:
    topic = Topic("l" * 300, *["o" * 5000] * 11)
    assert {number for number, _ in topic.batch()} == set(range(1, 12))
    assert topic.batch() == [(0, 0)]
    assert {number for number, _ in topic.batch()} == set(range(1, 12))
    assert topic.batch() == [(0, 1)]


def test_partitions_with_last_deliveries_take_turns() -> None:
    topic = Topic("l" * 9, "o", "l" * 9, "l" * 9)
    batches = [topic.batch() for _ in range(7)]
    assert batches == [[(1, 0)], [(0, 0)], [(2, 0)], [(3, 0)], [(0, 1)], [(2, 1)], [(3, 1)]]


def test_a_hot_partition_may_use_what_others_leave() -> None:
    topic = Topic("o" * 20_000, *["o"] * 47)
    found = Counter(number for number, _ in topic.batch())
    assert found.total() == ROWS
    assert found[0] == ROWS - 47
    assert len(topic.batch()) == ROWS


def test_every_partition_with_a_backlog_advances_and_shares_are_even() -> None:
    topic = Topic(*["o" * 5000] * 4)
    assert Counter(number for number, _ in topic.batch()) == dict.fromkeys(range(4), ROWS // 4)
    assert Counter(number for number, _ in topic.batch(2)) == dict.fromkeys(range(4), 1)


def test_other_queues_messages_alone_are_no_batch() -> None:
    topic = Topic("x" * 500, "xo" * 5)
    assert len(topic.batch()) == 5
    assert topic.at == {0: 0, 1: 10}
    assert topic.batch() == []
    assert topic.at == {0: 0, 1: 10}
    many = Topic("x" * 200_001)
    assert many.batch() == []
    assert many.at == {0: 200_001}


def test_a_log_that_was_replaced_is_looked_at_again() -> None:
    topic = Topic("o" * 10)
    assert len(topic.batch(4)) == 4
    topic.logs = ("xxxx" + "l" * 6,)
    topic.backlog.clear()
    assert topic.batch() == [(0, 4)]
    topic.at = {0: 0}
    assert topic.batch() == [(0, 4)], "at an earlier place, too"


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kept", [200_000, 100])
def test_each_message_is_in_one_batch_and_is_read_once(
    seed: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkamq.spark.backlog.MAX_KEPT", kept)
    chance = random.Random(seed)
    weights = [chance.random(), chance.random() ** 4, chance.random()]
    topic = Topic(
        *["".join(chance.choices("olx", weights, k=chance.randrange(700))) for _ in range(5)]
    )
    expected = {
        (number, offset)
        for number, log in enumerate(topic.logs)
        for offset, kind in enumerate(log)
        if kind in "ol"
    }
    done: list[tuple[int, int]] = []
    while batch := topic.batch(chance.choice((3, 40, 400))):
        kinds = Counter(topic.logs[number][offset] for number, offset in batch)
        assert kinds["l"] == 0 or len(batch) == 1, "R6"
        done += batch
    assert len(done) == len(set(done))
    assert set(done) == expected
    assert kept == 100 or set(topic.read.values()) <= {1}, "kept until it is in a batch"
