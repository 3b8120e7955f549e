"""Red controls of the histories' checker: each edit of a good run must be named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from harness.faults import Event, HistoryError, Recorder, check_run, digest, read_histories
from harness.markers import encode_start

from kafkamq.markers.wire.marker_writer import encode_end, encode_tick
from kafkamq.testing.history import LogRecord
from kafkamq.types import MessageId, Outcome

MESSAGES, MARKERS = "ns.messages", "ns.markers"
KEPT = ("sent", "position")


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
        self.tracker_is_at(2, end=2)
        self.tracker_is_at(6, end=6)

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

    def tracker_is_at(self, offset: int, *, end: int) -> None:
        here = {"group": "kafkamq.ns.markers.0", "topic": MARKERS, "partition": 0}
        self.event("observer", "position", **here, offset=offset, end=end)

    def edit_last(self, op: str, **fields: object) -> None:
        self.events.reverse()
        self.edit(op, **fields)
        self.events.reverse()

    def drop(self, op: str) -> None:
        self.events = [event for event in self.events if event.op != op]

    def copy(self, worker: str) -> None:
        """The first message's worker, worker0, gives no verdict; another one gets a copy."""
        verdict = self.first("verdict")
        late = replace(self.events[verdict], time_s=2e3)
        del self.events[verdict]
        copy = (("kafkamq-id", b"id0"), ("kafkamq-delivery-count", b"2"))
        self.messages.append(LogRecord(MESSAGES, 0, 3, 1500, b"a", b"0", copy))
        self.start(3)
        here = {"id": "id0", "partition": 0, "offset": 3, "count": 2, "sha": digest(b"0")}
        self.event(worker, "received", **here)
        self.events.append(late)

    def fault(self, felt_by: list[str] | None) -> None:
        """Just before the last hand-out, and over behind it."""
        at = max(at for at, event in enumerate(self.events) if event.op == "received")
        time_s = self.events[at].time_s
        felt = {} if felt_by is None else {"felt_by": felt_by}
        fields = {"kind": "kill", "target": "x", **felt}
        self.events.insert(at, Event(time_s - 0.5, "test", "fault", fields))
        self.events.insert(at + 2, Event(time_s + 0.5, "test", "healed", {}))

    def kinds(self, **options: float) -> set[str]:
        report = check_run(
            self.events, messages=self.messages, markers=self.markers, dead_letters=[], **options
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
    run.copy("worker7")


def two_holders_and_a_fault_elsewhere(run: Run) -> None:
    run.copy("worker7")
    run.fault(["worker1"])


def two_holders_and_a_fault_long_before(run: Run) -> None:
    run.events.insert(0, Event(-2.0, "test", "fault", {"kind": "cut", "target": "broker"}))
    run.events.insert(1, Event(-1.0, "test", "healed", {}))
    run.copy("worker7")


def stands_twice(run: Run) -> None:
    """A producer that is not idempotent wrote it again."""
    run.messages.append(replace(run.messages[0], offset=3))


def nack_vanished(run: Run) -> None:
    run.edit("verdict", outcome="nack")


def acked_though_nobody_was_given_it(run: Run) -> None:
    run.events = [e for e in run.events if e.fields.get("offset") != 1 or e.op in KEPT]


def nacked_by_nobody(run: Run) -> None:
    run.end(1, Outcome.NACK)


def tracker_passed_an_open_entry(run: Run) -> None:
    """It committed 6 when the log was not longer than 5: the last message was open."""
    run.edit_last("position", end=5)


def tracker_went_back(run: Run) -> None:
    run.tracker_is_at(2, end=6)


def nobody_sent(run: Run) -> None:
    run.drop("sent")


def nobody_received(run: Run) -> None:
    run.drop("received")


def nobody_confirmed(run: Run) -> None:
    run.drop("confirmed")


def nobody_watched(run: Run) -> None:
    run.drop("position")


def never_healed(run: Run) -> None:
    run.fault(None)
    run.drop("healed")


def nothing_at_all(run: Run) -> None:
    run.__dict__.update(events=[], messages=[], markers=[])


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
        (two_holders_and_a_fault_elsewhere, "I3 overlap"),
        (two_holders_and_a_fault_long_before, "I3 overlap"),
        (stands_twice, "I2 duplicate"),
        (nack_vanished, "I1 lost"),
        (acked_though_nobody_was_given_it, "I1 lost"),
        (nacked_by_nobody, "I1 lost"),
        (tracker_passed_an_open_entry, "I9 regress"),
        (tracker_went_back, "I9 regress"),
        (nobody_sent, "nothing"),
        (nobody_received, "nothing"),
        (nobody_confirmed, "nothing"),
        (nobody_watched, "nothing"),
        (never_healed, "nothing"),
        (nothing_at_all, "nothing"),
        (still_at_work, "I8 stall"),
    ],
)
def test_an_edited_run_is_red(edit: Callable[[Run], None], kind: str) -> None:
    run = Run()
    edit(run)
    assert kind in run.kinds()


@pytest.mark.parametrize("felt_by", [None, ["worker0"]])
def test_who_felt_a_fault_may_have_lost_its_lease(felt_by: list[str] | None) -> None:
    run = Run()
    run.copy("worker7")
    run.fault(felt_by)
    assert "I3 overlap" not in run.kinds()


def test_what_was_started_twice_may_be_there_beside_its_copy() -> None:
    run = Run()
    run.copy("worker7")
    run.start(0)
    assert "I3 overlap" not in run.kinds()


def test_what_comes_back_late_is_named_where_the_run_has_a_bound() -> None:
    run = Run()
    run.markers = [one for one in run.markers if one.offset != 1]  # the first one's ACK
    tick = encode_tick("engine", 1)
    for at_ms in (9_000, 20_000):  # due at 5 s, at most
        offset = run.markers[-1].offset + 1
        run.markers.append(LogRecord(MARKERS, 0, offset, at_ms, None, tick, ()))
    end = encode_end(MessageId(0, 0), Outcome.REDELIVERED)
    run.markers.append(LogRecord(MARKERS, 0, run.markers[-1].offset + 1, 20_001, None, end, ()))
    assert "I6 late" in run.kinds(max_lateness_s=5.0)
    assert "I6 late" not in run.kinds(max_lateness_s=15.0)
    assert "I6 late" not in run.kinds()


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
