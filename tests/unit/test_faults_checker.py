"""Red controls of the histories' checker: each edit of a good run must be named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kafkamq.testing.faults import Event, HistoryError, Recorder, check_run, digest, read_histories
from kafkamq.testing.log import LogRecord
from kafkamq.types import MessageId, Outcome
from kafkamq.wire.markers import encode_end, encode_start

MESSAGES, MARKERS = "ns.messages", "ns.markers"


class Run:
    """A small good run: three messages, received and acked by two workers, positions committed."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.messages: list[LogRecord] = []
        self.markers: list[LogRecord] = []
        for number in range(3):
            self._message(number, f"worker{number % 2}")
        for offset in (1, 2, 3):
            here = {"group": "kafkamq/ns/a", "topic": MESSAGES, "partition": 0}
            self.event("observer", "position", **here, offset=offset)

    def _message(self, number: int, worker: str) -> None:
        id_, value = f"id{number}", b"%d" % number
        here = {"id": id_, "partition": 0, "offset": number}
        self.event("sender", "send", id=id_, sha=digest(value))
        self.event("sender", "sent", id=id_, topic=MESSAGES, partition=0, offset=number)
        self.event(worker, "received", **here, count=1, sha=digest(value))
        self.event(worker, "verdict", **here, outcome="ack")
        self.event(worker, "confirmed", places=[[0, number]])
        self.messages.append(
            LogRecord(
                MESSAGES, 0, number, 1000 + number, b"a", value, (("kafkamq-id", id_.encode()),)
            )
        )
        self.start(number)
        self.end(number, Outcome.ACK)

    def start(self, number: int) -> None:
        self.marker(
            encode_start(MessageId(0, number), b"a", b"%d" % number, redeliver_after_ms=3000)
        )

    def end(self, number: int, outcome: Outcome) -> None:
        self.marker(encode_end(MessageId(0, number), outcome))

    def event(self, process: str, op: str, **fields: object) -> None:
        self.events.append(Event(float(len(self.events)), process, op, dict(fields)))

    def marker(self, value: bytes) -> None:
        offset = len(self.markers)
        self.markers.append(LogRecord(MARKERS, 0, offset, 2000 + offset, None, value, ()))

    def first(self, op: str) -> int:
        return next(at for at, event in enumerate(self.events) if event.op == op)

    def edit(self, op: str, **fields: object) -> None:
        at = self.first(op)
        event = self.events[at]
        self.events[at] = replace(event, fields={**event.fields, **fields})

    def kinds(self) -> set[str]:
        report = check_run(
            self.events, messages=self.messages, markers=self.markers, dead_letters=[]
        )
        return set(report.violations)


def test_the_run_itself_is_good() -> None:
    assert Run().kinds() == set()


def drop_send(run: Run) -> None:
    del run.events[run.first("send")]


def other_payload(run: Run) -> None:
    run.edit("received", sha=digest(b"another"))


def other_count(run: Run) -> None:
    run.edit("received", count=2)


def received_twice(run: Run) -> None:
    run.events.append(replace(run.events[run.first("received")], time_s=1e3, process="worker9"))


def received_nowhere(run: Run) -> None:
    run.edit("received", offset=77)


def message_vanished(run: Run) -> None:
    del run.messages[0]


def messages_swapped(run: Run) -> None:
    first, second = run.messages[:2]
    run.messages[:2] = [replace(second, offset=0), replace(first, offset=1)]


def verdict_vanished(run: Run) -> None:
    run.markers = [one for one in run.markers if one.offset != 1]


def start_vanished(run: Run) -> None:
    run.markers = [one for one in run.markers if one.offset != 0]


def redelivered_after_the_ack(run: Run) -> None:
    run.end(0, Outcome.REDELIVERED)


def refused_and_there(run: Run) -> None:
    at = run.first("sent")
    run.events[at] = Event(run.events[at].time_s, "sender", "unsent", {"id": "id0", "known": True})


def position_goes_back(run: Run) -> None:
    run.event("o", "position", group="kafkamq/ns/a", topic=MESSAGES, partition=0, offset=1)


def position_passes_a_message(run: Run) -> None:
    """Committed before its START, and then its worker died."""
    run.markers = [one for one in run.markers if one.offset not in (4, 5)]
    run.events = [e for e in run.events if e.fields.get("offset") != 2 or e.op == "position"]


def two_holders(run: Run) -> None:
    """A copy is handed out while a live worker holds the message, with no fault anywhere."""
    verdict = run.first("verdict")
    late = replace(run.events[verdict], time_s=2e3)
    del run.events[verdict]
    copy = (("kafkamq-id", b"id0"), ("kafkamq-delivery-count", b"2"))
    run.messages.append(LogRecord(MESSAGES, 0, 3, 1500, b"a", b"0", copy))
    run.start(3)
    here = {"id": "id0", "partition": 0, "offset": 3, "count": 2, "sha": digest(b"0")}
    run.event("worker7", "received", **here)
    run.events.append(late)


def still_at_work(run: Run) -> None:
    run.events.insert(0, Event(-500.0, "test", "healed", {}))


@pytest.mark.parametrize(
    ("edit", "kind"),
    [
        (drop_send, "I7 phantom"),
        (other_payload, "I5 content"),
        (other_count, "I5 count"),
        (received_twice, "I2 duplicate"),
        (received_nowhere, "I7 phantom"),
        (message_vanished, "I1 lost"),
        (messages_swapped, "I5 content"),
        (verdict_vanished, "I1 lost"),
        (start_vanished, "I9 regress"),
        (redelivered_after_the_ack, "I2 duplicate"),
        (redelivered_after_the_ack, "I6 premature"),
        (refused_and_there, "I7 phantom"),
        (position_goes_back, "I9 regress"),
        (position_passes_a_message, "I9 regress"),
        (position_passes_a_message, "I1 lost"),
        (two_holders, "I3 overlap"),
        (still_at_work, "I8 stall"),
    ],
)
def test_an_edited_run_is_red(edit: Callable[[Run], None], kind: str) -> None:
    run = Run()
    edit(run)
    assert kind in run.kinds()


def test_histories_survive_a_kill_and_nothing_else(tmp_path: Path) -> None:
    """The last line may be cut short; any other broken line is an error."""
    recorder = Recorder(tmp_path, "one")
    recorder.record("send", id="a")
    recorder.record("sent", id="a")
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    path.write_text(whole + '{"t": 1, "proc')
    assert [event.op for event in read_histories(tmp_path)] == ["send", "sent"]
    path.write_text('{"t": 1, "proc\n' + whole)
    with pytest.raises(HistoryError):
        read_histories(tmp_path)
