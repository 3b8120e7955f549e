"""Judges a run from its histories and its topics alone; it never asks what it judges.

- I1 ``lost``: what was confirmed to its sender is acked, a dead letter, or (before the end) open;
  what was confirmed to its worker is in the log, and no verdict is there that no worker gave.
- I2 ``duplicate``: what was sent once stands in the log once, a copy is handed out once, and none
  follows an ACK that was confirmed in time.
- I3 ``overlap``: nobody gets a copy while a live worker, out of reach of every fault, holds the one
  before. Not so where one of the two was STARTed twice: its first worker may have lost it before
  its offset was committed, and its next reader does not know of the copy.
- I5 ``count``, ``content``: as the log says; each copy counts one more, and is what was sent.
- I6 ``premature``: no copy and no dead letter without a reason in the log before it; ``late``: none
  much later than it was due, where the run says how late that is.
- I7 ``phantom``: nothing is received that nobody sent.
- I8 ``stall``: after the faults work goes on.
- I9 ``regress``: positions never go back; a queue's never pass a message that nobody STARTed, a
  tracker's never one that is open: a restart there finds all of them.

A run in which nothing was sent, handed out, confirmed or committed proves nothing, and is told so:
``nothing``.

I4 (order) does not hold for queues with markers, by design; I10 (Spark against local) is a property
test of the trackers. I5's reasons, I6 and much of I1 are `check_logs`'.

Histories say, a line before the deed that it announces and after the one that it reports:

| op | of | says |
| --- | --- | --- |
| send | sender | it will send ``id``; ``sha`` of the payload |
| sent | sender | confirmed: ``id`` stands at ``topic``, ``partition``, ``offset`` |
| unsent | sender | failed; ``known``: it cannot be in the log, else perhaps |
| received | worker | handed out: ``id``, ``partition``, ``offset``, ``count``, ``sha`` |
| verdict | worker | it will give ``outcome`` on ``partition``, ``offset`` |
| confirmed | worker | the verdicts on ``places`` are in the log, in time as far as it was told |
| late | worker | it was told that those on ``places`` came too late, or that it lost them |
| position | observer | ``offset`` of ``group`` in ``topic``, ``partition``; ``end`` of the log |
| fault | test | ``kind`` happened to ``target``; only ``felt_by`` felt it; without: everybody may |
| healed | test | all faults are over |
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kafkamq.dev.history import Event, digest
from kafkamq.errors import WireError
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.queue.wire.keys import split_key
from kafkamq.testing.checker import CheckFailedError, Verdict, check_logs
from kafkamq.testing.history import LogRecord, read_timelines
from kafkamq.types import DeadLetterReason, Marker, MarkerType, Outcome, PartitionOffset, expand

_LOG_KINDS = {
    "lost": "I1 lost",
    "count": "I5 count",
    "content": "I5 content",
    "reason": "I5 reason",
    "dead letter": "I5 dead letter",
    "unexplained": "I6 premature",
}
_MAX_SHOWN = 15
_EVERYBODY = ""
_OF_TRACKERS = (Outcome.REDELIVERED, Outcome.DEAD_LETTERED)
_OF_HANDLERS = (Outcome.ACK, Outcome.NACK, Outcome.REJECT)


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken invariant."""

    kind: str  # I1 lost, I2 duplicate, ...
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(slots=True)
class Report:
    """What a run came to."""

    verdict: Verdict
    sent: int = 0  # confirmed to their senders
    unsure: int = 0  # neither confirmed nor known to have failed
    received: int = 0
    confirmed: int = 0  # verdicts that their workers took for final
    told_late: int = 0
    second_starts: int = 0  # of one copy
    innocent_dead: int = 0  # handed out, neither rejected nor poison nor told late; dead letters
    late_untold: int = 0  # ACKs behind a second START of their message: R9's second limit
    lateness_p99_ms: int = 0  # from deadline to redelivery, by the log's clock
    faults: Counter[str] = field(default_factory=Counter)
    longest_gap_s: float = 0.0  # between two messages handed out, anywhere
    recovery_s: float = 0.0  # from the end of the faults to the last message handed out
    findings: list[Finding] = field(default_factory=list)

    @property
    def violations(self) -> Counter[str]:
        """Return how many findings of each kind."""
        return Counter(finding.kind for finding in self.findings)

    def require_ok(self, context: str = "") -> None:
        """Raise when an invariant was broken.

        Raises:
            CheckFailedError: with ``context`` and the first findings.
        """
        if self.findings:
            shown = "\n".join(map(str, self.findings[:_MAX_SHOWN]))
            raise CheckFailedError(f"{context}{dict(self.violations)}\n{shown}")

    def row(self) -> dict[str, object]:
        """Return the figures, for tables."""
        return {
            "sent": self.sent,
            "received": self.received,
            "acked": self.verdict.acked,
            "redelivered": self.verdict.redelivered,
            "dead_lettered": self.verdict.dead_lettered,
            "confirmed": self.confirmed,
            "told_late": self.told_late,
            "late_untold": self.late_untold,
            "processed_twice": self.verdict.processed_twice,
            "extra_copies": self.verdict.extra_copies,
            "second_starts": self.second_starts,
            "lateness_p99_ms": self.lateness_p99_ms,
            "faults": dict(self.faults),
            "longest_gap_s": round(self.longest_gap_s, 1),
            "recovery_s": round(self.recovery_s, 1),
            "violations": dict(self.violations),
        }


def check_run(
    events: Sequence[Event],
    *,
    messages: Iterable[LogRecord],
    markers: Iterable[LogRecord],
    dead_letters: Iterable[LogRecord],
    max_recovery_s: float = 60.0,
    max_lateness_s: float | None = None,
    must_be_settled: bool = True,
    judge_logs: bool = True,
) -> Report:
    """Judge one run.

    Args:
        events: Of all processes, by time.
        messages: All committed records of the messages topic.
        markers: Of the markers topic.
        dead_letters: Of the dead letters topic.
        max_recovery_s: How long after the faults messages may still be on their way (I8).
        max_lateness_s: How long after its deadline what is due may come back, by the log's clock,
            99 of 100 times (I6); None: as late as the faults make it.
        must_be_settled: False: the run was cut short: open messages are no loss, and what has not
            happened yet is no fault.
        judge_logs: False: only what histories show; for logs that `check_logs` cannot read.
    """
    run = _Run(list(events), list(messages), list(markers), list(dead_letters))
    run.check(must_be_settled=must_be_settled, judge_logs=judge_logs)
    run.check_times(max_recovery_s=max_recovery_s, max_lateness_s=max_lateness_s)
    return run.report


class _Run:
    """One run, indexed."""

    def __init__(
        self,
        events: list[Event],
        messages: list[LogRecord],
        markers: list[LogRecord],
        dead_letters: list[LogRecord],
    ) -> None:
        self._messages, self._markers, self._letters = messages, markers, dead_letters
        self._events: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            self._events[event.op].append(event)
        self._by_place = {(one.partition, one.offset): one for one in messages}
        self._starts: Counter[PartitionOffset] = Counter()
        self._ends: dict[PartitionOffset, list[Marker]] = defaultdict(list)
        for marker in _decoded(markers):
            if marker.message_id is None or marker.of_schedule:
                continue
            place = (marker.message_id.partition, marker.message_id.offset)
            if marker.type is MarkerType.START:
                self._starts[place] += 1
            elif marker.type is MarkerType.END:
                self._ends[place].append(marker)
        self._late = {tuple(place) for event in self._events["late"] for place in event["places"]}
        self.report = Report(Verdict())

    def check(self, *, must_be_settled: bool, judge_logs: bool) -> None:
        report = self.report
        report.sent = len(self._events["sent"])
        known = {event["id"] for op in ("sent", "unsent") for event in self._events[op]}
        report.unsure = len({event["id"] for event in self._events["send"]} - known)
        report.received = len(self._events["received"])
        report.told_late = len(self._late)
        report.second_starts = sum(count - 1 for count in self._starts.values())
        report.innocent_dead = sum(map(self._is_innocent, self._letters))
        report.faults = Counter(event["kind"] for event in self._events["fault"])
        if judge_logs:
            self._check_logs(must_be_settled)
            self._check_open_entries()
        self._check_sends()
        self._check_received()
        self._check_overlaps()
        self._check_verdicts()
        self._check_confirmed()
        self._check_positions()
        if must_be_settled:
            self._check_that_it_happened()

    def _find(self, kind: str, text: str) -> None:
        self.report.findings.append(Finding(kind, text))

    def _is_innocent(self, letter: LogRecord) -> bool:
        """Return whether its worker did all it should in the last delivery, and it died all the
        same.

        Not so when no worker got it: its START was in the log, but a rebalance that outlasts the
        lease kept the offset from being committed.
        """
        headers = read_message_headers(letter.headers)
        last = [
            _place(event)
            for event in self._events["verdict"]
            if event["id"] == headers.id and event["outcome"] == "ack"
        ]
        counts = {
            _place(event): event["count"]
            for event in self._events["received"]
            if event["id"] == headers.id
        }
        return any(
            counts.get(place) == headers.delivery_count and place not in self._late
            for place in last
        )

    def _check_logs(self, must_be_settled: bool) -> None:
        confirmed = {
            (event["topic"], event["partition"], event["offset"]) for event in self._events["sent"]
        }
        verdict = check_logs(
            messages=self._messages,
            markers=self._markers,
            dead_letters=self._letters,
            confirmed=confirmed,
            must_be_settled=must_be_settled,
        )
        self.report.verdict = verdict
        for problem in verdict.problems:
            self._find(_LOG_KINDS.get(problem.kind, problem.kind), str(problem))

    def _check_that_it_happened(self) -> None:
        """What did not happen cannot have gone wrong, either."""
        for op, text in (
            ("sent", "no send was confirmed"),
            ("received", "no message was handed out"),
            ("confirmed", "no verdict was confirmed"),
        ):
            if not self._events[op]:
                self._find("nothing", text)
        seen = {event["topic"] for event in self._events["position"]}
        for topic in {record.topic for record in (*self._messages, *self._markers)} - seen:
            self._find("nothing", f"nobody saw a position in {topic}")
        if self._events["fault"] and not self._events["healed"]:
            self._find("nothing", "the faults never ended: how it goes on was not seen")

    def _check_sends(self) -> None:
        """I1, I2, I7: what failed for certain is nowhere, what was sent once is there once."""
        refused = {event["id"] for event in self._events["unsent"] if event["known"]}
        sent = Counter(event["id"] for event in self._events["send"])
        firsts: Counter[str] = Counter()
        for record in self._messages:
            headers = read_message_headers(record.headers)
            if headers.id in refused:
                self._find("I7 phantom", f"{headers.id} failed for certain and is in the log")
            firsts[headers.id] += headers.origin is None
        for id_, times in sent.items():
            if firsts[id_] > times:
                text = f"{id_} was sent {times} times and stands {firsts[id_]} times in the log"
                self._find("I2 duplicate", text)

    def _check_received(self) -> None:
        """I2, I5, I7: against what was sent, and what the log holds."""
        sent = {event["id"]: event["sha"] for event in self._events["send"]}
        first: dict[PartitionOffset, Event] = {}
        for event in self._events["received"]:
            place = _place(event)
            at = f"{event['id']} at {place} in {event.process}"
            if event["id"] not in sent:
                self._find("I7 phantom", f"{at}: nobody sent it")
            elif sent[event["id"]] != event["sha"]:
                self._find("I5 content", f"{at}: its payload is another one")
            before = first.setdefault(place, event)
            if before is not event:
                self._find("I2 duplicate", f"{at}: it was handed out to {before.process} already")
            record = self._by_place.get(place)
            if record is None:
                self._find("I7 phantom", f"{at}: the log has no such message")
                continue
            headers = read_message_headers(record.headers)
            if (headers.id, digest(record.value)) != (event["id"], event["sha"]):
                self._find("I5 content", f"{at}: the log has another message there")
            if headers.delivery_count != event["count"]:
                text = f"{at}: count {event['count']}, the log says {headers.delivery_count}"
                self._find("I5 count", text)
            if not self._starts[place]:
                self._find("I9 regress", f"{at}: handed out without a START")

    def _check_overlaps(self) -> None:
        """I3: with no fault near, the holder before has given its verdict."""
        done = {_place(e): e.time_s for e in self._events["verdict"]}
        faults = self._disturbances()
        holders: dict[str, Event] = {}
        for event in self._events["received"]:
            before = holders.get(event["id"])
            holders[event["id"]] = event
            if before is None:
                continue
            place, here = _place(before), _place(event)
            if done.get(place, float("inf")) <= event.time_s or place in self._late:
                continue
            if self._starts[place] > 1 or self._starts[here] > 1:
                continue
            near = (*faults[before.process], *faults[_EVERYBODY])
            if not any(a <= event.time_s and b >= before.time_s for a, b in near):
                text = f"{event['id']}: to {event.process} while {before.process} held it"
                self._find("I3 overlap", text)

    def _disturbances(self) -> dict[str, list[tuple[float, float]]]:
        """Return from when to when some fault was there, by the process that felt it.

        One that only some processes felt (killed, paused, cut off) is there from the last line of
        each on: it may be told of later than it happened.
        """
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        healed = [event.time_s for event in self._events["healed"]]
        lines: dict[str, list[float]] = defaultdict(list)
        for op, events in self._events.items():
            for event in events if op not in ("fault", "healed", "position") else ():
                lines[event.process].append(event.time_s)
        for fault in self._events["fault"]:
            end_s = next((at_s for at_s in healed if at_s >= fault.time_s), float("inf"))
            felt_by = fault.fields.get("felt_by")
            if felt_by is None:
                found[_EVERYBODY].append((fault.time_s, end_s))
            for process in felt_by or ():
                known = [at_s for at_s in lines[process] if at_s <= fault.time_s]
                found[process].append((max(known, default=fault.time_s), end_s))
        return found

    def _check_verdicts(self) -> None:
        """I1: no message is done by a verdict that no worker gave."""
        given = {(*_place(e), e["outcome"]) for e in self._events["verdict"]}
        for place in self._ends.keys() & self._by_place.keys():
            for end in self._ends[place]:
                is_own = end.reason == DeadLetterReason.EXPIRED.value  # R10: its consumer's
                if end.outcome not in _OF_HANDLERS or is_own:
                    continue
                if (*place, end.outcome.name.lower()) not in given:
                    text = f"{place} has an END {end.outcome.name}, and nobody gave that verdict"
                    self._find("I1 lost", text)

    def _check_confirmed(self) -> None:
        """I1, I2: verdicts that their workers took for final."""
        given = {_place(e): e["outcome"] for e in self._events["verdict"]}
        for event in self._events["confirmed"]:
            for partition, offset in event["places"]:
                place = (partition, offset)
                if place in self._late or place not in given:
                    continue
                self.report.confirmed += 1
                outcome, ends = Outcome[given[place].upper()], self._ends.get(place, [])
                if all(end.outcome is not outcome for end in ends):
                    text = f"the confirmed {given[place]} of {place} is not in the log"
                    self._find("I1 lost", text)
                if outcome is Outcome.ACK and any(end.outcome in _OF_TRACKERS for end in ends):
                    if self._starts[place] > 1:
                        self.report.late_untold += 1  # R9's second limit
                    else:
                        text = f"{place} was acked, not told late, and delivered again"
                        self._find("I2 duplicate", text)

    def _check_positions(self) -> None:
        """I9: no way back, and nothing passed over."""
        last: dict[tuple[str, str, int], int] = {}
        for event in self._events["position"]:
            key = (event["group"], event["topic"], event["partition"])
            if event["offset"] < last.get(key, -1):
                self._find("I9 regress", f"{key} went from {last[key]} to {event['offset']}")
            last[key] = event["offset"]
        for (group, topic, partition), position in last.items():
            queue_id = group.rsplit("/", 1)[-1]  # kafkamq/NS/QUEUE; a tracker's have no slash
            for record in self._messages:
                if (record.topic, record.partition) != (topic, partition):
                    continue
                if record.offset >= position or _queue_of(record) != queue_id:
                    continue
                if not self._starts[record.partition, record.offset]:
                    text = f"{group} passed {topic}[{partition}]@{record.offset}, nobody STARTed it"
                    self._find("I9 regress", text)

    def _check_open_entries(self) -> None:
        """I9: what a tracker's position has behind it is ended, by what stood in the log then."""
        open_entries = OpenEntries(self._markers)
        for event in self._events["position"]:
            if "end" not in event.fields:
                continue
            offset = open_entries.passed_over(event["partition"], event["offset"], event["end"])
            if offset is not None:
                at = f"{event['topic']}[{event['partition']}]"
                text = f"{event['group']} is at {event['offset']}, and {at}@{offset} is open"
                self._find("I9 regress", text)

    def check_times(self, *, max_recovery_s: float, max_lateness_s: float | None) -> None:
        """I6, I8: how late redeliveries were, and how long the end took."""
        report, times = self.report, [event.time_s for event in self._events["received"]]
        if times:
            report.longest_gap_s = max((b - a for a, b in pairwise(times)), default=0.0)
        if self._events["healed"] and times:
            healed_s = self._events["healed"][-1].time_s
            report.recovery_s = max(0.0, times[-1] - healed_s)
            if report.recovery_s > max_recovery_s:
                self._find("I8 stall", f"{report.recovery_s:.0f} s after the faults still at work")
        if late := report.verdict.lateness_ms:
            report.lateness_p99_ms = late[(99 * len(late) - 1) // 100]
            if max_lateness_s is not None and report.lateness_p99_ms > 1000 * max_lateness_s:
                text = f"1 in 100 comes {report.lateness_p99_ms} ms after its deadline, or later"
                self._find("I6 late", text)


def _place(event: Event) -> PartitionOffset:
    return event["partition"], event["offset"]


def _queue_of(record: LogRecord) -> str:
    return split_key(record.key)[0].decode("utf-8", "replace") if record.key else ""


def _decoded(markers: Iterable[LogRecord]) -> Iterable[Marker]:
    for record in markers:
        try:
            yield from expand(decode_marker(record.value))
        except WireError:  # noqa: PERF203 - hostile ones are part of some runs
            continue


class OpenEntries:
    """It finds where the entries of a markers topic begin and end."""

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
        """Return where an entry begins that begins before ``position`` and ends behind ``end``."""
        count = bisect_left(self._begins.get(partition, []), position)
        if not count:
            return None
        last_end, begin = self._last[partition][count - 1]
        return begin if last_end >= end else None
