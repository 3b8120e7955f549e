"""Members that share one partition by ranges, in a small world: one log, one broker's clock; they
read late, die, leave and start again, some of them in the log's middle.

It moves records and time, and keeps account of what was worked on, so that tests can check that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kafkamq.claims.rules.ranges import HeldRange, RangeLog, RangeMember, RangeWrite
from kafkamq.types import RangeRecord, RangeType

INTERVAL_S = 60
WINDOW_INTERVALS = 6
GROUP, TOPIC = "gr", "t"
SIZE, END = 10, 40


@dataclass
class Process:
    """One process of a member."""

    name: str
    log: RangeLog
    member: RangeMember
    next_offset: int
    in_flight: deque[RangeWrite] = field(default_factory=deque)
    ending: list[RangeWrite] = field(default_factory=list)  # RangeDones that are not read back

    def held(self) -> list[HeldRange]:
        return [each for _, each in self.member.held([0])]


class RangeWorld:
    def __init__(self) -> None:
        self.now_s = 10_000.0
        self.skew_s = 0.0  # of the broker's clock
        self.records: list[tuple[float, RangeRecord]] = []
        self.truth = RangeLog(GROUP, TOPIC, INTERVAL_S)  # reads everything at once
        self.processes: dict[str, Process] = {}
        self.started = 0
        self.crashes = 0
        self.worked: set[int] = set()
        self.handed_out: set[int] = set()  # as at-most-once does: what a RangeDone has ended

    @property
    def ms(self) -> int:
        return round(self.now_s * 1000)

    def broker_s(self) -> float:
        return self.now_s + self.skew_s

    # ---- processes

    def start(self, name: str, *, reads_all: bool) -> None:
        self.started += 1
        first, since_s = 0, None
        if not reads_all and self.records:
            since_s = self.records[-1][0] - WINDOW_INTERVALS * INTERVAL_S
            later = (i for i, (at_s, _) in enumerate(self.records) if at_s >= since_s)
            first = next(later, len(self.records))
        log = RangeLog(GROUP, TOPIC, INTERVAL_S, since_s=since_s if first else None)
        member = RangeMember(
            log, client=name, instance=f"{name}{self.started}",
            size=SIZE, ahead=0, interval_ms=INTERVAL_S * 1000,
        )  # fmt: skip
        self.processes[name] = Process(name, log, member, first)
        self.read(self.processes[name])

    def crash(self, process: Process) -> None:
        self.crashes += 1
        del self.processes[process.name]

    def leave(self, process: Process) -> None:
        process.member.leave()
        process.in_flight.extend(process.member.tell([0], self.ms, self.broker_s()))
        for each in process.held():
            place = (0, each.first, each.next)
            process.in_flight.append(process.member.end(RangeType.FREE, place, self.ms))
        while process.in_flight:
            self.land(process)
        del self.processes[process.name]

    # ---- the log

    def plan(self, process: Process) -> None:
        writes = process.member.plan(self.ms, self.broker_s(), ends={0: END}, bases={0: 0})
        process.in_flight.extend(writes)

    def land(self, process: Process) -> None:
        """The oldest write under way arrives."""
        if process.in_flight:
            write = process.in_flight.popleft()
            offset = len(self.records)
            self.records.append((self.broker_s(), write.record))
            self.truth.apply(write.record, offset=offset, broker_time_s=self.broker_s())
            self.truth.check()
            process.member.on_written(write, offset)

    def read(self, process: Process) -> None:
        for offset in range(process.next_offset, len(self.records)):
            at_s, record = self.records[offset]
            if process.log.apply(record, offset=offset, broker_time_s=at_s):
                process.member.on_ended(record)
        process.next_offset = len(self.records)
        process.log.check()
        process.member.observe([0])
        for write in [each for each in process.ending if each.has_ended]:
            process.ending.remove(write)
            found = set(range(write.record.first, write.record.next))
            assert not found & self.handed_out, f"handed out twice: {found & self.handed_out}"
            self.handed_out |= found

    def turn(self, process: Process) -> None:
        """All that a process does while nothing is wrong."""
        for _ in range(2):
            self.plan(process)
            while process.in_flight:
                self.land(process)
            self.read(process)

    # ---- work

    def live(self, process: Process) -> list[HeldRange]:
        return [each for each in process.held() if process.member.is_live(0, each, self.ms)]

    def work(self, process: Process, count: int = SIZE) -> None:
        """Some offsets of the first range that it may work on; done when it is through."""
        live = self.live(process)
        if not live:
            return
        first, end = live[0].first, live[0].next
        done = min(first + count, end)
        self.worked.update(range(first, done))
        write = process.member.end(RangeType.DONE, (0, first, done), self.ms)
        if done < end:
            process.member.shorten(0, (first, end), done)
        process.in_flight.append(write)
        if all(each.record.first != first for each in process.ending):  # it waits for one
            process.ending.append(write)

    # ---- what must hold

    def check(self) -> None:
        owned: dict[int, str] = {}
        for process in self.processes.values():
            for each in self.live(process):
                for offset in range(each.first, each.next):
                    other = owned.setdefault(offset, process.name)
                    assert other == process.name, f"two work on offset {offset}"
        frontier = self.truth.frontier(0)
        open_ = self.truth.abandoned(0, now_s=1e9)
        missing = {offset for each in open_ for offset in range(each.first, each.next)}
        assert set(range(max(0, frontier))) <= self.worked | missing, "done, and nobody worked"

    def settle(self) -> None:
        """Faults stop: everything is worked on."""
        if not self.processes:
            self.start("z", reads_all=False)
        for _ in range(120):
            self.now_s += 10
            for process in self.processes.values():
                self.turn(process)
                self.work(process)
                self.turn(process)
                self.check()
            if self.worked >= set(range(END)):
                return
        raise AssertionError(f"{sorted(set(range(END)) - self.worked)} are lost")
