"""What a tracker's committed position may not have behind it: entries that are open (R20)."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable

from kafkamq.testing.history import LogRecord, read_timelines


class OpenEntries:
    """Where the entries of a markers topic begin and end."""

    def __init__(self, markers: Iterable[LogRecord]) -> None:
        self._begins: dict[int, list[int]] = {}
        self._last: dict[int, list[tuple[int, int]]] = {}  # of all up to here, the latest end
        for partition, timeline in read_timelines(markers).items():
            entries: list[tuple[int, int]] = []
            for history in timeline.histories():
                if history.is_extra or history.begin == history.end:
                    continue  # R12: a START behind the END is no entry; an END alone never was
                end = timeline.offsets[history.end] if history.end >= 0 else sys.maxsize
                entries.append((timeline.offsets[history.begin], end))
            entries.sort()
            self._begins[partition] = [begin for begin, _ in entries]
            last, latest = [], (-1, -1)
            for begin, end in entries:
                latest = max(latest, (end, begin))
                last.append(latest)
            self._last[partition] = last

    def passed_over(self, partition: int, position: int, end: int) -> int | None:
        """Where an entry begins that begins before ``position`` and ends behind ``end``."""
        count = bisect_left(self._begins.get(partition, []), position)
        if not count:
            return None
        last_end, begin = self._last[partition][count - 1]
        return begin if last_end >= end else None
