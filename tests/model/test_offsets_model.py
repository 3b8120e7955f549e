"""The offset tracker against a model that recomputes everything from sets, over many restarts.

Commits go through the wire, so a restart has what the next owner of the partition would have.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.examples import examples

from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.parallel.wire.offsets import decode, encode

counts = st.integers(1, 12)


class OffsetTrackerMachine(RuleBasedStateMachine):
    """One partition's log with gaps; ``done`` holds what the present owner knows to be done."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []
        self.end = 0
        self.times: dict[int, int] = {}  # completions of each offset
        self.excused: set[int] = set()  # completions that no commit knows of when a crash comes

    @initialize(base=st.integers(0, 5) | st.integers(0, 1 << 40))
    def begin(self, base: int) -> None:
        self.start = self.end = base
        self.commit_offset, self.commit_metadata = base, ""
        self.committed_done: set[int] = set()
        self.restart()

    def restart(self) -> None:
        known = decode(self.commit_offset, self.commit_metadata)
        self.tracker = OffsetTracker(
            self.commit_offset, highest_seen=known.highest_seen, incompletes=known.incompletes
        )
        self.position = self.commit_offset
        self.holes = set(known.incompletes)  # not reached again yet
        self.map_end = max(known.highest_seen + 1, self.commit_offset)
        self.done = {o for o in range(self.commit_offset, self.map_end) if o not in self.holes}
        self.open: set[int] = set()

    # The log.

    @rule(gaps=st.lists(st.sampled_from([1, 1, 1, 1, 2, 5]), min_size=1, max_size=15))
    def write(self, gaps: list[int]) -> None:
        for gap in gaps:
            self.log.append(self.end + gap - 1)
            self.end += gap

    @precondition(lambda self: any(offset >= self.position for offset in self.log))
    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        ahead = [offset for offset in self.log if offset >= self.position]
        gone = data.draw(st.sets(st.sampled_from(ahead), max_size=4))
        self.log = [offset for offset in self.log if offset not in gone]

    # The owner.

    @rule(count=counts)
    def poll(self, count: int) -> None:
        offsets = [offset for offset in self.log if offset >= self.position][:count]
        if not offsets:
            return
        wanted = self.tracker.add(offsets)
        assert list(wanted) == [offset for offset in offsets if offset not in self.done]
        self.pass_to(offsets[-1] + 1)
        self.open.update(wanted)

    @rule()
    def reach_the_end(self) -> None:
        if all(offset < self.position for offset in self.log):
            self.tracker.advance(self.end)
            self.pass_to(max(self.end, self.position))

    def pass_to(self, position: int) -> None:
        self.position = position
        self.holes = {hole for hole in self.holes if hole >= position}

    @rule(count=counts)
    def poll_again(self, count: int) -> None:
        offsets = [o for o in self.log if self.commit_offset <= o < self.position][-count:]
        assert self.position == self.commit_offset or list(self.tracker.add(offsets)) == []

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        done = data.draw(st.lists(st.sampled_from(sorted(self.open)), unique=True, max_size=20))
        noise = data.draw(st.lists(st.integers(-1, 3).map(lambda n: self.position + n), max_size=2))
        self.tracker.complete(done + [offset for offset in noise if offset >= self.position])
        self.open.difference_update(done)
        self.done.update(done)
        for offset in done:
            self.times[offset] = self.times.get(offset, 0) + 1

    @rule()
    def commit(self) -> None:
        progress = self.tracker.progress()
        self.commit_offset = progress.committable_offset
        self.commit_metadata = (
            encode(self.commit_offset, progress.highest_succeeded, progress.incompletes)
            if progress.needs_map
            else ""
        )
        self.committed_done = set(self.done)

    @rule()
    def crash(self) -> None:
        """All that was done since the last commit may be repeated, and nothing else."""
        self.excused |= self.done - self.committed_done
        self.restart()

    @rule()
    def stop_and_start(self) -> None:
        self.commit()
        self.restart()

    @rule(data=st.data())
    def move_the_committed_offset(self, data: st.DataObject) -> None:
        """By hand, which drops the map."""
        offset = data.draw(st.integers(self.start, self.end))
        self.excused |= set(self.times)
        self.commit_offset, self.commit_metadata, self.committed_done = offset, "", set()
        self.log = [o for o in self.log if o >= offset]  # skipped on purpose: not our loss
        self.restart()

    # What must hold.

    @invariant()
    def nothing_open_is_committed(self) -> None:
        expected = min(self.open, default=self.position)
        assert self.tracker.committable_offset() == expected
        assert self.tracker.first_open() == min(self.open, default=None)

    @invariant()
    def the_map_says_what_is_done(self) -> None:
        progress = self.tracker.progress()
        highest = max([*self.done, self.map_end - 1, progress.committable_offset - 1])
        assert progress.highest_succeeded == highest
        unfinished = self.open | self.holes
        assert list(progress.incompletes) == sorted(o for o in unfinished if o <= highest)
        assert progress.needs_map == any(o >= progress.committable_offset for o in self.done)

    @invariant()
    def the_tracker_is_sound(self) -> None:
        self.tracker.check()
        assert self.tracker.open_count == len(self.open)

    @invariant()
    def nothing_is_done_twice_without_a_crash(self) -> None:
        assert all(times == 1 or o in self.excused for o, times in self.times.items())

    def teardown(self) -> None:
        if not hasattr(self, "tracker"):
            return
        self.stop_and_start()
        while any(offset >= self.position for offset in self.log):
            self.poll(1_000)
        missing = [o for o in self.log if o not in self.times and o not in self.open]
        assert not missing, "every record was done, or is handed out"


OffsetTrackerMachine.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None
)
TestOffsetTrackerModel = OffsetTrackerMachine.TestCase
