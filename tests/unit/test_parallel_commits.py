"""Maps that are too long to be committed whole."""

from __future__ import annotations

import random

from kafkamq.core.flow import FlowLimits
from kafkamq.core.offsets import OffsetTracker
from kafkamq.kafka.parallel.commits import _cut
from kafkamq.wire.offsets import decode, encode


def test_a_map_is_cut_to_what_fits() -> None:
    tracker = OffsetTracker(100)
    tracker.add(range(100, 60_100))
    chance = random.Random(3)
    tracker.complete([offset for offset in range(101, 60_100) if chance.random() < 0.5])
    progress = tracker.progress()
    whole = encode(100, progress.highest_succeeded, progress.incompletes)
    assert len(whole) > 4096
    cut, end = _cut(progress, len(whole), FlowLimits())
    assert 3000 < len(cut) <= 4096
    found = decode(100, cut)
    assert found.highest_seen == end < progress.highest_succeeded
    assert found.incompletes == tuple(each for each in progress.incompletes if each <= end)


def test_where_nothing_fits_there_is_no_map() -> None:
    tracker = OffsetTracker(0)
    tracker.add([0, 1, 2, 3])
    tracker.complete([3])
    limits = FlowLimits(max_free_map_chars=1, max_map_chars=1)
    assert _cut(tracker.progress(), 8, limits) == ("", -1)
