"""A marker is in the log when its own report says so, whatever became of its client."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Message as Record
from tests.unit.worker_parts import Parts, deliver, fail_for_good, record, starts_of
from tests.waiting import within

from kafkamq.errors import BrokerError, DeadlineExceededError
from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.state import MarkerWriter


class _Slow(logging.Handler):
    """A log handler that takes as long as the test wants: the window between swap and purge."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()

    def emit(self, line: logging.LogRecord) -> None:
        if "recreated" in line.getMessage():
            self.begun.set()
            self.may_end.wait(within(5))


@contextmanager
def swapped_by_another_thread(writer: MarkerWriter) -> Iterator[None]:
    """A fatal error, which another thread meets first; inside, that thread has made a client."""
    fail_for_good(writer)
    slow, log = _Slow(), logging.getLogger("kafkamq.transport.producer")
    log.addHandler(slow)

    def meet() -> None:
        with suppress(BrokerError):  # raised if it still held a marker
            writer.flush(within(5.0))

    thread = threading.Thread(target=meet)
    thread.start()
    try:
        assert slow.begun.wait(within(10))
        yield
    finally:
        slow.may_end.set()
        thread.join(within(10))
        log.removeHandler(slow)


def test_starts_that_went_with_their_client_are_not_committed_over() -> None:
    parts = Parts()
    parts.poll(*(record(offset) for offset in range(100, 110)))
    step = parts.starter.plan(10)
    assert step is not None
    parts.starter.write(step)
    with swapped_by_another_thread(parts.state.writer), suppress(BrokerError):
        parts.starter.wait(1.0)
    failed = parts.see()
    assert {each for start in failed for each in start.runs} == set(parts.pipeline.under_way())
    assert all(each.error is not None for each in failed)
    assert parts.pipeline.committable().runs == []
    (run,) = parts.pipeline.under_way()
    gone, position = parts.pipeline.give_up(run)
    parts.starter.give_up(gone)
    assert position == 100
    assert not parts.state.leases.open_count


def held(parts: Parts) -> MarkersMessage:
    """The one message that was polled, STARTed and committed."""
    deliver(*starts_of(parts.start()))
    parts.see()
    parts.pipeline.committing(parts.pipeline.committable())
    ((_, (message,)),) = parts.starter.finish(parts.pipeline.committed())
    return message


def test_verdicts_that_went_with_their_client_are_not_confirmed() -> None:
    parts = Parts()
    parts.poll(record(100))
    message = held(parts)
    message.ack()
    parts.ack_writer.serve()
    assert len(parts.state.writer) > 0
    with swapped_by_another_thread(parts.state.writer):
        pass
    parts.ack_writer.serve()  # it is written again
    with pytest.raises(DeadlineExceededError, match="confirming 1 verdicts"):
        parts.ack_writer.flush(0.3)


def test_a_verdict_whose_report_never_comes_is_written_again() -> None:
    """An interrupt that ends the report's callback does this."""
    parts = Parts()
    parts.poll(record(100))
    message = held(parts)
    written: list[bytes] = []
    reports: list[Callable[..., None]] = []

    class _Deaf:
        """Takes markers, and reports none."""

        watch = parts.state.writer.watch
        is_idle = True

        def __len__(self) -> int:
            return 0

        def write_many(self, _: int, markers: list[dict[str, Any]]) -> None:
            written.extend(marker["value"] for marker in markers)
            reports.extend(marker["callback"] for marker in markers)

        def write(self, value: bytes, _: bytes, __: int, report: Callable[..., None]) -> None:
            written.append(value)
            reports.append(report)

        def wait_for(self, is_known: Callable[[], bool], _: float) -> bool:
            return is_known()

        def flush(self, _: float) -> bool:
            return True

    parts.state.writer = _Deaf()  # type: ignore[assignment]
    message.ack()
    with pytest.raises(DeadlineExceededError):
        parts.ack_writer.flush(0.05)
    assert len(written) > 1
    assert len(set(written)) == 1
    reports[-1](None, Record(timestamp=(2, 6000)))
    parts.ack_writer.flush(1.0)


def test_a_batch_waits_for_its_own_reports_alone() -> None:
    """Not for ENDs that others give, nor for a marker partition without a leader."""
    parts = Parts()
    parts.poll(record(5))
    deliver(*starts_of(parts.start()))
    parts.state.writer.write(b"an END of another message", b"key", 3, lambda *_: None)
    done: list[bool] = []
    waits = threading.Thread(target=lambda: done.append(parts.starter.wait(60.0)))
    waits.daemon = True
    waits.start()
    waits.join(within(10))
    assert done == [None]
    assert not parts.see()
    assert parts.commit() == [(0, 5)]
    assert len(parts.state.writer) > 0


class _Trouble:
    """A writer whose client fails for good again and again, and what became of each marker."""

    SWAPS = 20

    def __init__(self, writer: MarkerWriter) -> None:
        self.writer = writer
        self.is_over = threading.Event()
        self.written: list[bytes] = []
        self.reported: list[Record] = []
        self.refused: list[bytes] = []
        self.raised: list[BaseException] = []

    def _report(self, _: object, marker: Record) -> None:
        # One call: after a fatal error reports run with it raised, and what follows fails.
        self.reported.append(marker)

    def write(self, name: bytes) -> None:
        """One by itself and two together, again and again."""
        count = 0
        while not self.is_over.wait(0.0005):
            one, *two = values = [b"%s/%d" % (name, count + more) for more in range(3)]
            many: list[dict[str, Any]] = [
                {"value": value, "key": b"key", "callback": self._report} for value in two
            ]
            self.written += values
            count += 3
            try:
                self.writer.write(one, b"key", 0, self._report)
            except BrokerError:
                self.refused.append(one)
            try:
                self.writer.write_many(1, many)
            except BrokerError:
                self.refused.extend(each["value"] for each in many if "_error" in each)

    def serve(self, call: Callable[[], object]) -> None:
        while not self.is_over.is_set():
            with suppress(BrokerError):  # that the client has failed: one of them is told
                call()

    def fail(self) -> None:
        """Let one client after the other fail, when markers were written to it."""
        failed: list[object] = []
        while len(failed) < self.SWAPS:
            with self.writer._serving:  # or its client could be gone meanwhile
                client = self.writer._client
                if client not in failed and len(client):
                    failed.append(client)
                    fail_for_good(self.writer)
        self.is_over.set()

    def watched(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test names it
            self.raised.append(error)
            self.is_over.set()


def test_each_marker_has_one_outcome_however_often_its_client_is_swapped() -> None:
    writer = Parts().state.writer
    trouble = _Trouble(writer)
    calls = [partial(trouble.write, b"%d" % number) for number in range(4)]
    calls += [partial(trouble.serve, call) for call in (partial(writer.flush, 0.01), writer.poll)]
    threads = [
        threading.Thread(target=trouble.watched, args=(call,)) for call in (*calls, trouble.fail)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within(100))
    writer.close()  # what is left is reported as failed
    assert not trouble.raised
    outcomes = Counter([*trouble.refused, *(each.value() or b"" for each in trouble.reported)])
    assert outcomes == Counter(trouble.written)
