"""The fold of one marker partition over several starts of the engine; no Spark, no Kafka."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kafkamq.markers.rules.delivery import Carry, Settle
from kafkamq.spark.blocks import decode_actions, encode_block
from kafkamq.spark.tracker.folding import FoldSettings, PartitionFold
from kafkamq.types import Marker, MarkerType, MessageId

ID = MessageId(0, 7, b"t" * 16, 1)


class State:
    """Spark's: what a batch left behind, for the next one or for the batch that is repeated."""

    def __init__(self) -> None:
        self.index: tuple[Any, ...] | None = None
        self.chunks: dict[tuple[str], tuple[bytes]] = {}

    def fold(self, settings: FoldSettings) -> PartitionFold:
        def update(value: tuple[Any, ...]) -> None:
            self.index = value

        chunks = SimpleNamespace(
            getValue=self.chunks.get,
            updateValue=self.chunks.__setitem__,
            removeKey=lambda key: self.chunks.pop(key, None),
        )
        return PartitionFold(
            settings, SimpleNamespace(get=lambda: self.index, update=update), chunks
        )


def settings() -> FoldSettings:
    """Of a start of the engine: its first, or one after Kafka has forgotten what came before."""
    return FoldSettings(
        engine="spark-1",
        epoch=1,
        max_lease_ms=3_600_000,
        carry_after_ms=3_600_000,
        max_actions=100,
    )


def tick(of: FoldSettings) -> Marker:
    return Marker(MarkerType.TICK, consumer_id=of.token, engine_epoch=of.epoch)


def actions(
    fold: PartitionFold, first: int, rows: Sequence[tuple[int, Marker]]
) -> list[Settle | Carry]:
    """What a batch asks for; its rows are times and markers, from an offset on."""
    block = encode_block([(first + n, at_ms, marker) for n, (at_ms, marker) in enumerate(rows)])
    cell = ("markers", 0, first, first + len(rows), first, block)
    return decode_actions(fold.fold([cell])[1])


def test_a_batch_that_a_later_start_repeats_fires_nothing_before_the_tick_of_that_start() -> None:
    """R17, also where the epochs begin again: what the batch asked for may be done."""
    state = State()
    begun = settings()
    first = state.fold(begun)
    start = Marker(MarkerType.START, ID, redeliver_after_ms=1000, consumer_id="c")
    assert actions(first, 0, [(0, start), (1, tick(begun))]) == []
    before = state.index, dict(state.chunks)
    passed = [(at, Marker(MarkerType.TICK)) for at in (301, 601, 901, 1201)]
    assert len(actions(first, 2, passed)) == 1
    state.index, state.chunks = before
    again = settings()
    later = state.fold(again)
    assert actions(later, 2, passed) == []
    assert len(actions(later, 6, [(1202, tick(again))])) == 1
