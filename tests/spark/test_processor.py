"""The fold of one marker partition over several starts of the engine; no Spark, no Kafka."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kafkamq.markers.rules.delivery import Carry, Settle
from kafkamq.spark.blocks import decode_actions, encode_block
from kafkamq.spark.tracker.processor import FoldProcessor, FoldSettings
from kafkamq.types import Marker, MarkerType, MessageId

pytestmark = pytest.mark.spark

ID = MessageId(0, 7, b"t" * 16, 1)


class State:
    """Spark's: what a batch left behind, for the next one or for the batch that is repeated."""

    def __init__(self) -> None:
        self.index: tuple[Any, ...] | None = None
        self.chunks: dict[tuple[str], tuple[bytes]] = {}

    def getValueState(self, name: str, schema: str) -> Any:  # noqa: N802 - Spark's
        return SimpleNamespace(get=lambda: self.index, update=partial_set(self))

    def getMapState(self, name: str, key: str, value: str) -> Any:  # noqa: N802 - Spark's
        return SimpleNamespace(
            getValue=self.chunks.get,
            updateValue=self.chunks.__setitem__,
            removeKey=lambda key: self.chunks.pop(key, None),
        )


def partial_set(state: State) -> Any:
    def update(value: tuple[Any, ...]) -> None:
        state.index = value

    return update


def started(state: State) -> FoldProcessor:
    """A start of the engine: its first, or one after Kafka has forgotten what came before."""
    made = FoldProcessor(
        FoldSettings(
            engine="spark-1",
            epoch=1,
            max_lease_ms=3_600_000,
            carry_after_ms=3_600_000,
            longest_ms=7_200_000,
            max_actions=100,
        )
    )
    made.init(cast("Any", state))
    return made


def tick(fold: FoldProcessor) -> Marker:
    settings = fold._settings
    return Marker(MarkerType.TICK, consumer_id=settings.token, engine_epoch=settings.epoch)


def actions(
    fold: FoldProcessor, first: int, rows: Sequence[tuple[int, Marker]]
) -> list[Settle | Carry]:
    """What a batch asks for; its rows are times and markers, from an offset on."""
    block = encode_block([(first + n, at_ms, marker) for n, (at_ms, marker) in enumerate(rows)])
    cell = ("markers", 0, first, first + len(rows), first, block)
    return decode_actions(fold._fold([cell])[5])


def test_a_batch_that_a_later_start_repeats_fires_nothing_before_the_tick_of_that_start() -> None:
    """R17, also where the epochs begin anew: what the batch asked for may be done."""
    state = State()
    first = started(state)
    start = Marker(MarkerType.START, ID, redeliver_after_ms=1000, consumer_id="c")
    assert actions(first, 0, [(0, start), (1, tick(first))]) == []
    before = state.index, dict(state.chunks)
    passed = [(at, Marker(MarkerType.TICK)) for at in (301, 601, 901, 1201)]
    assert len(actions(first, 2, passed)) == 1
    state.index, state.chunks = before
    later = started(state)
    assert actions(later, 2, passed) == []
    assert len(actions(later, 6, [(1202, tick(later))])) == 1
