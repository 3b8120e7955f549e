"""A redelivery tracker with the log that it folds, for tests that tell one sequence of records.

Times are timestamps of the broker in ms; each method appends one record and returns its offset.
Questions are answered on copies of the tracker, from outside.
"""

from __future__ import annotations

import copy

from kafkamq.markers.rules.delivery import Carry, Settle
from kafkamq.markers.rules.hold import DUE
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.types import Marker, MarkerType, MessageBatch, MessageId, Outcome

T = 3000
"""The timeout of START unless a test says otherwise; T/3 and T/4 are whole."""

START_MS = 100_000_000
"""Where the tests' clocks begin."""


def message(offset: int) -> MessageId:
    return MessageId(0, offset)


class Fold:
    def __init__(self, next_offset: int = 0, **options: object) -> None:
        self.tracker = RedeliveryTracker(next_offset, **options)  # type: ignore[arg-type]
        self.offset = next_offset
        self.records: list[tuple[int, int, Marker | None]] = []

    def record(self, at_ms: int, marker: Marker | None) -> int:
        offset = self.offset
        self.records.append((offset, at_ms, marker))
        self.tracker.apply(offset, at_ms, marker)
        self.tracker.check()
        self.offset += 1
        return offset

    # ---- what a worker writes

    def start(
        self,
        at_ms: int,
        of: int | MessageId = 1,
        *,
        by: str = "a",
        timeout: int = T,
        max_lease: int = 0,
    ) -> int:
        return self.record(
            at_ms,
            Marker(
                MarkerType.START,
                _id(of),
                timeout,
                b"queue",
                b"payload",
                consumer_id=by,
                max_lease_ms=max_lease,
            ),
        )

    def keepalive(
        self, at_ms: int, of: int | MessageId | None = None, *, by: str = "a", timeout: int = 0
    ) -> int:
        message_id = None if of is None else _id(of)
        return self.record(at_ms, Marker(MarkerType.KEEPALIVE, message_id, timeout, consumer_id=by))

    def end(
        self,
        at_ms: int,
        outcome: Outcome,
        of: int | MessageId = 1,
        *,
        by: str = "a",
        delay: int = 0,
        of_schedule: bool = False,
    ) -> int:
        return self.record(
            at_ms,
            Marker(
                MarkerType.END,
                _id(of),
                delay,
                consumer_id=by,
                outcome=outcome,
                of_schedule=of_schedule,
            ),
        )

    def ack(self, at_ms: int, of: int | MessageId = 1, *, by: str = "a") -> int:
        return self.end(at_ms, Outcome.ACK, of, by=by)

    def nack(self, at_ms: int, of: int | MessageId = 1, *, delay: int = 0) -> int:
        return self.end(at_ms, Outcome.NACK, of, delay=delay)

    def schedule(self, at_ms: int, delay: int, *, first: int | None = None) -> int:
        message_id = None if first is None else MessageId(self.tracker.partition, first)
        return self.record(
            at_ms,
            Marker(
                MarkerType.SCHEDULE,
                message_id,
                delay,
                b"queue",
                b"later",
                carried_forward=first is not None,
            ),
        )

    def batch(self, at_ms: int, kind: MarkerType, *, by: str, first: int, bits: int) -> int:
        named = (MessageBatch(0, b"", 0, first, bits),)
        return self.record(at_ms, Marker(kind, None, T, consumer_id=by, batches=named))

    # ---- what a tracker writes

    def redelivered(self, at_ms: int, of: int | MessageId = 1) -> int:
        return self.end(at_ms, Outcome.REDELIVERED, of, by="engine")

    def tick(self, at_ms: int, *, engine: str = "other", epoch: int = 0) -> int:
        return self.record(at_ms, Marker(MarkerType.TICK, consumer_id=engine, engine_epoch=epoch))

    # ---- questions, answered on a copy

    def plan(self) -> list[Settle | Carry]:
        """What would be planned; nothing is asked for."""
        return list(copy.deepcopy(self.tracker).plan())

    def due(self) -> set[int]:
        """Offsets of the due messages."""
        return {
            action.message_id.offset
            for action in self.plan()
            if isinstance(action, Settle) and not action.of_schedule
        }

    def settle(self, of: int | MessageId = 1, *, of_schedule: bool = False) -> Settle:
        """The one action that settles the message."""
        (action,) = [
            action
            for action in self.plan()
            if isinstance(action, Settle)
            and (action.message_id, action.of_schedule) == (_id(of), of_schedule)
        ]
        return action

    def state(self, of: int | MessageId = 1, *, of_schedule: bool = False) -> str:
        """The message's column in the table of the rules."""
        probe = copy.deepcopy(self.tracker)
        message_id = _id(of)
        if message_id not in (probe.scheduled() if of_schedule else probe.in_progress()):
            kind = MarkerType.SCHEDULE if of_schedule else MarkerType.START
            probe.apply(self.offset, -1, Marker(kind, message_id, T))
            hold = probe.hold_of(message_id, of_schedule=of_schedule)
            return "ended" if hold is not None and hold.flags & DUE else "unknown"
        if any(
            isinstance(action, Settle) and action.message_id == message_id
            for action in probe.plan()
        ):
            return "due"
        if of_schedule:
            return "waiting"
        reject = Marker(MarkerType.END, message_id, outcome=Outcome.REJECT)
        probe.apply(self.offset, -1, reject)
        return "held" if probe.plan() else "waiting"

    def lease_end(self, of: int | MessageId = 1, *, of_schedule: bool = False) -> int:
        """Its deadline: where it falls due when the time goes in steps too small for a grace."""
        probe = copy.deepcopy(self.tracker)
        at_ms = probe.clock.last_ms
        for offset in range(self.offset, self.offset + 100_000):
            for action in probe.plan():
                if not isinstance(action, Settle):
                    continue
                if (action.message_id, action.of_schedule) == (_id(of), of_schedule):
                    return action.deadline_ms
            at_ms += 100
            probe.apply(offset, at_ms, Marker(MarkerType.TICK))
        raise AssertionError("it never falls due")

    def crawl(self, from_ms: int, to_ms: int, step_ms: int = 500) -> None:
        """TICKs from one time to another, in steps too small for a grace."""
        for at_ms in (*range(from_ms, to_ms, step_ms), to_ms):
            self.tick(at_ms)


def _id(of: int | MessageId) -> MessageId:
    return message(of) if isinstance(of, int) else of
