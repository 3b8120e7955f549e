"""What was handed out under which claim, judged while it happens and by the logs at the end.

A message is known by the number in its value. Its owner is the one with the highest token: what is
handed out under a lower one, after that, had two owners at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.simulation.claims.draw import ClaimLimits, ClaimUse
from harness.simulation.cluster import SimulatedKafka
from kafkamq.claims.audit import ClaimAudit
from kafkamq.claims.consumer import ClaimedMessage
from kafkamq.claims.rules.steps import End
from kafkamq.claims.wire.marshal import COORDINATION_TOPIC, decode_value
from kafkamq.types import MarshalType

TOPIC, OUTPUTS, GROUP = "work", "outputs", "group"
_MAX_PROBLEMS = 20
_ORDERLY = {
    end.value for end in (End.RELEASED, End.KEPT, End.PAUSED, End.BEHIND, End.STUCK, End.SHARED)
}
_LINES = {
    "claims: a record could not be sent": "a record of claims could not be sent",
    "claims: offsets could not be looked up": "offsets of claimed partitions could not be looked",
    "claims: a position could not be committed": "a position could not be committed to Kafka",
    "claims: a former owner's output was refused": "an output may be missing",
    "claims: a message comes again": "a message comes again",
}
_ENDS = (End.TAKEN, End.EXPIRED, End.FENCED, End.BEHIND, End.STUCK, End.RELEASED, End.KEPT)
_OF_LEDGERS = (
    "claims: a partition or an offset has another owner",
    "claims: handed out again",
    "claims: a batch was lost",
    *(f"claims: {end.value}" for end in (*_ENDS, End.PAUSED)),
)
CLAIM_STATES = frozenset([*_LINES, *_OF_LEDGERS])


def number_of(value: bytes | None) -> int:
    """Return the message's, in its value or its output."""
    return int((value or b"").split(b" ")[1])


@dataclass(slots=True)
class _Owner:
    """The owner of a partition, or of an offset in a range."""

    token: int
    process: str


class ClaimLedger:
    """What one run did; everything here is one step for the simulated threads."""

    def __init__(self, kafka: SimulatedKafka, limits: ClaimLimits) -> None:
        self.problems: list[str] = []
        self.handed_out: Counter[int] = Counter()  # by number
        self.done: Counter[int] = Counter()  # commits that were taken
        self.settled: set[int] = set()  # that must not come again
        self.reported: set[int] = set()  # to be done; without an answer it may be so
        self.interruptions = 0  # claims that ended without a release
        self.reached: Counter[str] = Counter()
        self._kafka = kafka
        self._limits = limits
        self._owners: dict[tuple[int, ...], _Owner] = {}

    # ---- while it happens

    def hands_out(self, process: str, messages: Sequence[ClaimedMessage]) -> None:
        """The application has these from now on."""
        for message in messages:
            number = number_of(message.payload)
            is_range = self._limits.use is ClaimUse.RANGES
            place = (message.partition, message.offset) if is_range else (message.partition,)
            owner = self._owners.setdefault(place, _Owner(message.token, process))
            what = f"{TOPIC}[{message.partition}] {message.offset} for {process}: {message.token}"
            if message.token < owner.token:
                self._wrong(f"{what} is handed out after {owner.token} of {owner.process}")
            elif message.token == owner.token and process != owner.process:
                self._wrong(f"{what} is {owner.process}'s token as well")
            if message.token > owner.token:
                self.reached["claims: a partition or an offset has another owner"] += 1
                self._owners[place] = _Owner(message.token, process)
            if number in self.settled:
                self._wrong(f"{what} was done for good before")
            self.handed_out[number] += 1
            if self.handed_out[number] > 1:
                self.reached["claims: handed out again"] += 1
                if self._limits.use is ClaimUse.AT_MOST_ONCE:
                    self._wrong(f"{what} is handed out a second time")

    def finished(self, messages: Sequence[ClaimedMessage]) -> None:
        """Their commits were taken."""
        self.done.update(number_of(message.payload) for message in messages)

    def says(self, messages: Sequence[ClaimedMessage]) -> None:
        """Their range is said to be done."""
        self.reported.update(number_of(message.payload) for message in messages)

    def settles(self, partition: int, first: int, end: int) -> None:
        """These are done, and the log says so."""
        self.settled.update(number for _, number in self.numbers(partition, first, end))

    def lost(self, reason: str) -> None:
        """A member was told that a claim has ended."""
        self.reached[f"claims: {reason}"] += 1
        self.interruptions += reason not in _ORDERLY

    # ---- what the logs say

    def numbers(self, partition: int, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield offsets of messages in a log, and their numbers."""
        log = self._kafka.cluster.topics[TOPIC].partitions[partition]
        for offset in range(max(start, log.start), min(end, log.end)):
            record = log.records[offset - log.start]
            if record is not None:
                yield offset, number_of(record.value)

    def is_at_end(self, message: ClaimedMessage) -> bool:
        """Return whether nothing stands behind it."""
        log = self._kafka.cluster.topics[TOPIC].partitions[message.partition]
        return message.offset + 1 >= log.end

    def all_numbers(self) -> list[int]:
        count = range(len(self._kafka.cluster.topics[TOPIC].partitions))
        return [number for partition in count for _, number in self.numbers(partition, 0, 1 << 60)]

    def missing(self) -> list[int]:
        """Return what is in the logs and must still be handed out, or committed."""
        if self._limits.use is ClaimUse.AT_MOST_ONCE:
            return []
        if self._limits.use is ClaimUse.RANGES:  # the group's positions tell whether they are done
            return [number for number in self.all_numbers() if number not in self.reported]
        return [number for number in self.all_numbers() if not self.done[number]]

    def judge(self, *, is_calm: bool, restarts: int) -> None:
        """All that can be said when nothing happens any more."""
        missing = self.missing()
        if missing:
            self._wrong(f"{len(missing)} messages are not done: {missing[:10]}")
        if self._limits.use is ClaimUse.AT_MOST_ONCE:
            never = [number for number in self.all_numbers() if not self.handed_out[number]]
            most = self._limits.batch * (restarts + self.interruptions)
            self.reached["claims: a batch was lost"] += bool(never)
            if len(never) > most:
                self._wrong(f"{len(never)} messages were lost, and {most} might be: {never[:10]}")
        if is_calm:
            twice = sorted(number for number, count in self.handed_out.items() if count > 1)
            if twice:
                self._wrong(f"handed out twice, and nothing went wrong: {twice[:10]}")
        if self._limits.use is ClaimUse.FENCED:
            self._judge_outputs()
        if self._limits.use is not ClaimUse.RANGES:
            self._judge_coordination(is_calm=is_calm)

    def _judge_outputs(self) -> None:
        """Check that of a partition none under a lower token stands behind one under a higher
        token.
        """
        highest: dict[int, int] = {}
        for record in self._kafka.all_records(OUTPUTS):
            _, number, partition, token = (record.value or b"").split(b" ")
            if int(token) < highest.get(int(partition), -1):
                self._wrong(f"the output of {number!r} is of a former owner of {partition!r}")
            highest[int(partition)] = max(highest.get(int(partition), -1), int(token))

    def _judge_coordination(self, *, is_calm: bool) -> None:
        interval_s = self._limits.interval_ms / 1000
        audits: dict[int, ClaimAudit] = {}
        beats: dict[tuple[str, int, str], int] = {}  # the last one, by partition and instance
        for each in self._kafka.all_records(COORDINATION_TOPIC):
            record = decode_value(each.value)
            audit = audits.setdefault(each.partition, ClaimAudit(interval_s))
            audit.apply(record, offset=each.offset, broker_time_ms=each.timestamp_ms)
            place = (record.topic, record.partition, record.instance)
            if record.type is MarshalType.HEARTBEAT:
                gap_ms = each.timestamp_ms - beats.get(place, each.timestamp_ms)
                # One of a fenced member waits for its position's transaction, within its lease.
                is_prompt = is_calm and self._limits.use is not ClaimUse.FENCED
                if is_prompt and gap_ms > self._limits.interval_ms:
                    self._wrong(f"no heartbeat of {place} for {gap_ms} ms, and nothing went wrong")
                beats[place] = each.timestamp_ms
            elif record.type is MarshalType.RELEASING_PARTITION:
                beats.pop(place, None)
        for audit in audits.values():  # a late heartbeat of one that was paused is ignored by all
            for dual in audit.dual_claims if is_calm else ():
                self._wrong(f"two owners at once: {dual}")

    def _wrong(self, text: str) -> None:
        if len(self.problems) < _MAX_PROBLEMS and text not in self.problems:
            self.problems.append(text)


def of_claim_line(message: str) -> list[str]:
    """Return the states that a line of log tells of."""
    return [state for state, begin in _LINES.items() if message.startswith(begin)]
