"""Two readings of the rules that share no code: the checker's, message by message, and the naive
model's, record by record. On random logs they must tell the same life of each message.
"""

from __future__ import annotations

import pytest
from harness.naive import Identity, NaiveState, State
from harness.random_markers import MarkerRecord, random_markers

from kafkamq.markers.rules.delivery import DueCause
from kafkamq.markers.wire.markers import encode_marker
from kafkamq.testing.history import Ending, LogRecord, Timeline, Why, read_timelines
from kafkamq.types import Marker, MarkerType, MessageId

CAUSES = {
    Why.LEASE_ENDED: DueCause.LEASE_ENDED,
    Why.MAX_LEASE: DueCause.MAX_LEASE,
    Why.NACKED: DueCause.NACKED,
    Why.RELEASED: DueCause.RELEASED,
    Why.REJECTED: DueCause.REJECTED,
    Why.SCHEDULED: DueCause.SCHEDULED,
}
MAX_LEASE_MS = 43_200_000


def as_log(records: list[MarkerRecord], partition: int) -> list[LogRecord]:
    """The markers topic that these records make."""
    return [
        LogRecord(
            "markers",
            partition,
            record.offset,
            record.timestamp_ms,
            None,
            b"" if record.marker is None else encode_marker(record.marker),
        )
        for record in records
    ]


def first_histories(timeline: Timeline) -> dict[Identity, tuple[DueCause, int, int]]:
    """Of each identity's first history: why, where and from which deadline it fell due."""
    found = {}
    for of_schedule, message_id in timeline.of_message:
        histories = timeline.histories_of(message_id, of_schedule)
        if histories and histories[0].why is not None:
            history = histories[0]
            assert history.why is not None
            offset = timeline.offsets[history.due]
            found[of_schedule, message_id] = (CAUSES[history.why], offset, history.deadline_ms)
    return found


def naive_histories(
    records: list[MarkerRecord], partition: int
) -> dict[Identity, tuple[DueCause, int, int]]:
    state = NaiveState(partition, MAX_LEASE_MS, None)
    found: dict[Identity, tuple[DueCause, int, int]] = {}
    ended: set[Identity] = set()
    for record in records:
        before = dict(state.entries)
        state.fold(record.offset, record.timestamp_ms, record.marker)
        for identity, entry in before.items():  # also what fell due with the END of a tracker
            if entry.state is State.DUE and identity not in found and identity not in ended:
                offset = record.offset
                found[identity] = (entry.cause, offset, entry.deadline_ms)
        ended |= before.keys() - state.entries.keys()
        for identity, entry in state.entries.items():
            if entry.state is State.DUE and identity not in found and identity not in ended:
                found[identity] = (entry.cause, record.offset, entry.deadline_ms)
        ended |= {one for _, ones in state.ended.values() for one in ones}
    return found


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_histories_as_the_naive_model_tells_them(first: int) -> None:
    compared = 0
    for seed in range(first, first + 40):
        partition = seed % 3
        records = random_markers(seed, 250, partition=partition)
        timeline = read_timelines(as_log(records, partition))[partition]
        histories = first_histories(timeline)
        expected = naive_histories(records, partition)
        assert timeline.clocks[-1] == fold_clock(records)
        assert histories == expected, f"seed {seed}"
        compared += len(histories)
    assert compared > 400


def fold_clock(records: list[MarkerRecord]) -> int:
    state = NaiveState(0, MAX_LEASE_MS, None)
    for record in records:
        state.fold(record.offset, record.timestamp_ms, record.marker)
    return state.now_ms


def test_a_history_without_a_start_was_acked() -> None:
    end = Marker(MarkerType.END, MessageId(0, 5))
    timeline = read_timelines(as_log([MarkerRecord(0, 1000, end)], 0))[0]
    (history,) = timeline.histories()
    assert history.ending is Ending.ACKED
    assert history.why is None
