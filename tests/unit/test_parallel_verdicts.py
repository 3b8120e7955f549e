"""Odd verdicts: each is a failure of its record, and nobody else's trouble."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from tests.unit.parallel_handlers import SpeechlessError
from tests.unit.test_parallel_work_queue import Placed, Room
from tests.waiting import wait_until, within

from kafkamq import Ack, BrokerError, ConfigError, Nack, Reject
from kafkamq.config import Backoff
from kafkamq.parallel.config import OnExhausted
from kafkamq.parallel.failure_policy import FailurePolicy, ParallelDeadLetters
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.results import Handling, outgoing
from kafkamq.queue.sure_writer import Written
from kafkamq.runtime.steps import take, take_async
from kafkamq.runtime.thread_executor import ThreadExecutor
from kafkamq.runtime.verdicts import is_verdict, understood
from kafkamq.runtime.work_queue import HandlerCall
from kafkamq.transport.clock import monotonic_ms
from kafkamq.types import DeadLetterReason


class Array:
    """Its == is no bool, as numpy's and pandas's are not."""

    def __eq__(self, other: object) -> object:  # type: ignore[override]
        raise ValueError("the truth value of an array is ambiguous")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError("no text")


async def later() -> None:
    raise AssertionError("nobody awaits it")


async def later_by_itself() -> AsyncIterator[None]:
    yield


class Office:
    """A failure policy whose dead letters are kept here."""

    def __init__(self, **settings: object) -> None:
        settings.setdefault("backoff", Backoff(first=60.0, max=60.0, jitter=0.0))
        self.room = Room(**settings)
        self.failures: list[BaseException] = []
        self.letters: list[tuple[int, DeadLetterReason, str]] = []
        self.policy = FailurePolicy(
            self.room.queue.config,
            self.room.stats,
            self.write,
            self.failures.append,
            pytest.fail,
        )

    def apply(self, record: ParallelRecord, outcome: object) -> int | None:
        return take(self.policy.apply(record, outcome))

    def write(self, record: ParallelRecord, reason: DeadLetterReason, said: str) -> Written:
        self.letters.append((record.offset, reason, said))
        written = Written()
        written.end(None)
        return written


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Nack(delay=math.nan), "delay"),
        (Nack(delay=math.inf), "delay"),
        (Nack(delay="soon"), "delay"),  # type: ignore[arg-type]
        (Nack(delay=10**400), "delay"),
        (Nack, "return Nack()"),
        (Ack, "return Ack()"),
        (Reject, "return Reject()"),
        (SpeechlessError(), "SpeechlessError"),
        (ValueError("\udcff"), "ValueError: ?"),
    ],
)
def test_what_cannot_be_understood_is_a_failure_of_its_record(outcome: object, said: str) -> None:
    office = Office(max_attempts=2, dead_letter_topic="dead")
    record = Placed(0, "a")
    due_ms = office.apply(record, outcome)
    assert due_ms is not None
    assert due_ms > monotonic_ms() + 30_000  # with the back-off
    assert (record.attempt, office.letters) == (2, [])
    assert asyncio.run(take_async(office.policy.apply(record, outcome))) is None
    ((offset, reason, text),) = office.letters
    assert (offset, reason) == (0, DeadLetterReason.MAX_DELIVERIES)
    assert said in text
    text.encode()
    assert office.failures == []


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (later, "async def"),
        (lambda: (each for each in ()), "without yield"),
        (later_by_itself, "without yield"),
        (Future, "return its result()"),
    ],
)
def test_work_that_a_handler_returns_ends_the_consumer(
    outcome: Callable[[], object], said: str
) -> None:
    """So does each record's, and nobody would do it."""
    office = Office(max_attempts=2, dead_letter_topic="dead")
    assert office.apply(Placed(0, "a"), outcome()) is not None
    (failure,) = office.failures
    assert said in str(failure)
    assert office.letters == []


def test_a_future_is_no_result() -> None:
    """One that is done can be iterated over, and has nothing in it."""
    loop = asyncio.new_event_loop()
    done = loop.create_future()
    done.set_result(None)
    with pytest.raises(ConfigError, match="takes OutgoingRecord"):
        outgoing(done)
    loop.close()


@pytest.mark.parametrize("outcome", [Array(), [Array()], {"a": 1}, "text", 5, False, Ack()])
def test_what_is_no_verdict_is_done(outcome: object) -> None:
    office = Office()
    assert office.apply(Placed(0, "a"), outcome) is None
    assert is_verdict(outcome) == isinstance(outcome, Ack)


@pytest.mark.parametrize("delay", [5, 5.0, timedelta(seconds=5)])
def test_a_delay_is_a_number_of_seconds_or_a_timedelta(delay: object) -> None:
    office = Office()
    due_ms = office.apply(Placed(0, "a"), Nack(delay=delay))  # type: ignore[arg-type]
    assert due_ms is not None
    assert 0 < due_ms - monotonic_ms() <= 5000


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (ValueError("no use"), "ValueError: no use"),
        (SpeechlessError(), "SpeechlessError"),
        (Array(), "Array"),
        (5, "5"),
        ("\udcff", "?"),
    ],
)
def test_a_reason_is_whatever_can_be_told_of_it(reason: object, text: str) -> None:
    for verdict in (Reject(reason), Nack(None, reason)):  # type: ignore[arg-type]
        found, error = understood(verdict)
        assert error is None
        assert not isinstance(found, Ack)
        assert found.reason == text


@pytest.mark.parametrize("told", [math.nan, "soon", None, Array()])
def test_a_function_of_the_back_off_that_says_nothing_means_a_second(told: object) -> None:
    office = Office(backoff=lambda record: told)
    due_ms = office.apply(Placed(0, "a"), ValueError())
    assert due_ms is not None
    assert 500 < due_ms - monotonic_ms() <= 1000


@pytest.mark.parametrize("told", [Nack(delay=math.nan), Reject, Array()])
def test_an_odd_verdict_of_a_hook_is_a_nack(told: Any) -> None:
    office = Office(hooks={"on_failure": lambda record, error: told})
    assert office.apply(Placed(0, "a"), ValueError()) is not None
    assert office.failures == []


def test_a_rejection_without_a_place_for_it_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A default is nobody's wish to lose it."""
    office = Office()
    due_ms = office.apply(Placed(0, "a"), Reject("no use"))
    assert due_ms is not None
    assert "dead_letter_topic" in caplog.text
    assert office.room.stats.skipped == 0
    office = Office(on_exhausted=OnExhausted.SKIP)
    assert office.apply(Placed(0, "a"), Reject("no use")) is None
    assert office.room.stats.skipped == 1


def test_dead_letters_that_are_asked_for_need_a_topic() -> None:
    with pytest.raises(ConfigError, match="on_exhausted='dead-letter' needs a dead_letter_topic"):
        Office(on_exhausted=OnExhausted.DEAD_LETTER)
    with pytest.raises(ConfigError, match="max_attempts needs a dead_letter_topic"):
        Office(max_attempts=3)


def work_off(office: Office, handler: Callable[..., object], keys: str) -> None:
    """In one thread, until nothing is ready."""
    room = office.room
    pool = ThreadExecutor(Handling(room.queue, office.policy), HandlerCall(function=handler), 1)
    pool.start()
    room.add(keys)
    wait_until(lambda: not (room.queue.scheduler.has_ready or room.queue.in_flight_count()))
    room.queue.stop()
    assert pool.join(within(30))


def test_the_others_go_on() -> None:
    office = Office()

    def handle(record: ParallelRecord) -> object:
        return Nack(delay=math.nan) if record.offset == 0 else None

    work_off(office, handle, "abc")
    assert office.failures == []
    assert office.room.partition.tracker.progress().incompletes == (0,)


def test_a_letter_gives_its_record_up_when_it_is_written_or_goes_with_its_partition() -> None:
    """Nobody waits for it: it is written in its time, unless there is no need any more."""
    room = Room(dead_letter_topic="dead")
    letters = ParallelDeadLetters(room.queue.config, room.queue, room.stats)
    room.add("abcd")
    room.speed_up()
    worker, _ = room.workers
    records = [record for run in room.queue.take(worker) for record in run.records]
    first, second, third = [Written(partial(letters.is_open, each)) for each in records[:3]]
    for record, written in zip(records, (first, second, third), strict=False):
        letters.hold(record, DeadLetterReason.REJECTED, written)
    first.first.set_exception(BrokerError("no rights", code="X"))
    letters.tend()
    assert (room.committable, room.stats.dead_lettered) == (0, 0)
    first.end(None)
    second.end(None)
    letters.tend()
    assert (room.committable, room.stats.dead_lettered) == (2, 2)
    assert not third.drop_if_unwanted()
    room.queue.scheduler.close(room.partition)
    assert third.drop_if_unwanted()
    third.end(None)  # too late: whoever has the partition decides again
    letters.tend()
    assert room.stats.dead_lettered == 2


def test_no_letter_is_written_for_a_record_that_was_done_meanwhile() -> None:
    """Also while its worker has taken nothing else since."""
    room = Room(dead_letter_topic="dead")
    letters = ParallelDeadLetters(room.queue.config, room.queue, room.stats)
    room.add("a")
    worker, _ = room.workers
    ((record,),) = [run.records for run in room.queue.take(worker)]
    refused = Written(partial(letters.is_open, record))
    letters.hold(record, DeadLetterReason.MAX_LEASE, refused)
    assert not refused.drop_if_unwanted(), "its handler is at it"
    assert room.work(worker, 2) == [0]
    assert room.queue.take(worker) == []
    assert room.committable == 1
    assert refused.drop_if_unwanted()
    letters.tend()
    assert room.stats.dead_lettered == 0
