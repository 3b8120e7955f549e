"""An exception from outside (Ctrl-C, a signal's handler) at every line of ``receive`` and ``ack``.

Nothing may be held that nobody has, no message may be passed over, and a verdict is either written
or can be given again. Raised at the line events of kafkamq's own code, but not between the end of a
``with`` and its ``__exit__``: Python runs no signal handler there.
"""

from __future__ import annotations

import _thread
import dis
import random
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
from tests.waiting import wait_until

from kafkamq import Consumer, LeaseLostError, Message, Service, StateError
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.transport.memory.cluster import cluster_of, forget_cluster
from kafkamq.types import MarkerType, Outcome, expand

SENT = 3  # before each call that is interrupted
_with_exits: dict[CodeType, set[int]] = {}


class Kafka:
    """A cluster in memory with a queue in one partition, and a consumer of it."""

    def __init__(self, **queue: Any) -> None:
        self.name = uuid.uuid4().hex
        self.service = Service(f"memory://{self.name}", "n")
        self.service.create_topics(partitions=1, marker_partitions=1)
        settings = {"redelivery_timeout": 60.0, **queue}
        self.producer = self.service.queue("q").producer()
        self.consumer: Any = self.service.queue("q", **settings).consumer()
        self.sent = 0

    def send(self, count: int = SENT) -> None:
        for _ in range(count):
            self.producer.send(b"%d" % self.sent).result(30)
            self.sent += 1

    def receive(self, count: int) -> list[Message]:
        self.send(count)
        found: list[Message] = []
        wait_until(lambda: found.extend(self.consumer.receive_many(9, 0.1)) or len(found) == count)
        return found

    def ends(self) -> dict[int, set[Outcome]]:
        """What was said of each message, once all verdicts are written."""
        self.consumer.flush()
        (partition,) = cluster_of(f"memory://{self.name}").topics["n.markers"].partitions
        said: dict[int, set[Outcome]] = {}
        for record in filter(None, partition.records):
            for one in expand(decode_marker(record.value or b"")):
                if one.type is MarkerType.END and one.message_id is not None:
                    said.setdefault(one.message_id.offset, set()).add(one.outcome)
        return said


@pytest.fixture(params=[False, True], ids=["single", "batched"])
def kafka(request: pytest.FixtureRequest) -> Iterator[Kafka]:
    """``batched``: several messages share their START and their lease."""
    made = Kafka(batch_markers=request.param)
    yield made
    made.service.close()
    forget_cluster(made.name)


def _is_with_exit(frame: FrameType) -> bool:
    code = frame.f_code
    if code not in _with_exits:
        starts: dict[int, set[int]] = {}
        for each in dis.get_instructions(code):
            if each.opname == "BEFORE_WITH" and each.positions is not None:
                starts[each.positions.lineno or 0] = set()
        exits = set()
        for each in dis.get_instructions(code):
            line = each.positions.lineno if each.positions is not None else None
            if line in starts and each.opname in ("LOAD_CONST", "SWAP", "NOP"):
                exits.add(each.offset)
        _with_exits[code] = exits
    return frame.f_lasti in _with_exits[code]


def _interrupted(call: Callable[[], object], at: int) -> bool:
    """Call with an interrupt at the line event of that number; False: there are fewer."""
    left = at

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        name = frame.f_code.co_filename
        if "/kafkamq/" not in name or "/transport/memory/" in name:  # stands for librdkafka
            return None
        if event == "line" and not _is_with_exit(frame):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


RECEIVES: dict[str, Callable[[Consumer], list[Message]]] = {
    "receive": lambda consumer: [m for m in [consumer.receive(0.05)] if m is not None],
    "receive_many": lambda consumer: consumer.receive_many(2, 0.05),
    "iteration": lambda consumer: [next(_iterators.setdefault(consumer, iter(consumer)))],
}
_iterators: dict[Consumer, Iterator[Message]] = {}  # kept: closing one is another thing


def _receive_at(kafka: Kafka, name: str, at: int, again: int = -1) -> bool:
    """``again``: the line of the next receive where it is interrupted once more."""
    consumer = kafka.consumer
    first = kafka.sent
    kafka.send()
    handed: list[Message] = []

    def call() -> None:
        handed.extend(RECEIVES[name](consumer))

    was_hit = _interrupted(call, at)
    if was_hit and again >= 0:
        _interrupted(call, again)
    wait_until(lambda: handed.extend(consumer.receive_many(2, 0.05)) or len(handed) >= SENT)
    handed += consumer.receive_many(2, 0.0)
    assert sorted(message.offset for message in handed) == list(range(first, first + SENT)), at
    assert consumer.in_flight == SENT, at
    for message in handed:
        message.ack()
    wait_until(lambda: consumer.in_flight == 0)
    return was_hit


@pytest.mark.faults
@pytest.mark.parametrize("name", RECEIVES)
def test_an_interrupt_at_any_line_of_a_receive_leaves_nothing_behind(
    name: str, kafka: Kafka
) -> None:
    at = 0
    while _receive_at(kafka, name, at):
        at += 1
    assert at > 25  # that many lines
    assert kafka.ends() == {offset: {Outcome.ACK} for offset in range(kafka.sent)}


@pytest.mark.parametrize("name", RECEIVES)
def test_an_interrupt_of_a_receive_leaves_nothing_behind(name: str, kafka: Kafka) -> None:
    """At one line of three, by chance."""
    at, rng = 0, random.Random(name)
    while _receive_at(kafka, name, at):
        at += rng.randint(1, 5)
    assert at > 25
    assert kafka.ends() == {offset: {Outcome.ACK} for offset in range(kafka.sent)}


def test_a_second_interrupt_leaves_nothing_behind_either(kafka: Kafka) -> None:
    """The call behind the one that was broken off is broken off, too."""
    at, rng = 0, random.Random(2)
    while _receive_at(kafka, "iteration", at, again=rng.randint(0, 40)):
        at += rng.randint(1, 4)
    assert at > 25


def test_an_interrupt_as_an_iteration_goes_on_leaves_its_message_with_the_application(
    kafka: Kafka,
) -> None:
    """Python runs signal handlers where a frame begins, and where a generator goes on."""
    kafka.send()
    iterator = iter(kafka.consumer)
    given = next(iterator)

    # In C, so that the iterator is what goes on with the signal pending.
    going_on = zip(map(_thread.interrupt_main, [signal.SIGINT]), iterator, strict=False)
    with pytest.raises(KeyboardInterrupt):
        next(going_on)
    left: list[Message] = []
    wait_until(lambda: left.extend(kafka.consumer.receive_many(SENT, 0.1)) or len(left) == SENT - 1)
    assert given.offset not in {message.offset for message in left}
    given.ack()


VERDICTS: dict[str, tuple[Callable[[Message], object], Outcome]] = {
    "ack": (lambda message: message.ack(), Outcome.ACK),
    "ack and wait": (lambda message: message.ack(wait=True), Outcome.ACK),
    "nack": (lambda message: message.nack(delay=1.0), Outcome.NACK),
    "reject": (lambda message: message.reject("no"), Outcome.REJECT),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", VERDICTS)
def test_an_interrupt_of_a_verdict_takes_it_or_leaves_it(
    name: str, count: int, kafka: Kafka
) -> None:
    """And leaves the others of its START alone."""
    verdict, outcome = VERDICTS[name]
    at, was_hit = 0, True
    expected: dict[int, set[Outcome]] = {}
    while was_hit:
        message, *others = kafka.receive(count)
        was_hit = _interrupted(lambda m=message: verdict(m), at)
        assert all(each._lease.holds(each.offset) for each in others), at
        if message._lease.holds(message.offset):
            verdict(message)
        with pytest.raises(StateError):
            message.ack()
        expected[message.offset] = {outcome}
        assert kafka.ends() == expected, at
        for each in others:
            each.ack()
            expected[each.offset] = {Outcome.ACK}
        assert kafka.ends() == expected, at
        wait_until(lambda: kafka.consumer.in_flight == 0)
        at += 1
    assert at > 5


@pytest.mark.parametrize("count", [1, 3])
def test_an_interrupt_of_an_extension_leaves_one_lease_of_the_message(
    count: int, kafka: Kafka
) -> None:
    at, was_hit = 0, True
    expected: dict[int, set[Outcome]] = {}
    while was_hit:
        found = kafka.receive(count)
        was_hit = _interrupted(lambda m=found[0]: m.extend(60.0), at)
        assert kafka.consumer.in_flight == count, at
        found[0].extend(60.0)
        assert kafka.ends() == expected, at
        for each in found:
            assert each._lease.holds(each.offset), at
            each.ack()
            expected[each.offset] = {Outcome.ACK}
        assert kafka.ends() == expected, at
        wait_until(lambda: kafka.consumer.in_flight == 0)
        at += 1
    assert at > 10


def _is_refused(message: Message) -> None:
    with pytest.raises(LeaseLostError):
        message.ack()


def test_an_interrupt_as_a_lease_is_found_to_be_over_settles_nothing() -> None:
    """What was acked before is, what was not comes back, and nobody keeps that alive (R7)."""
    kafka = Kafka()
    at, was_hit = 0, True
    expected: dict[int, set[Outcome]] = {}
    while was_hit:
        acked, late, other = kafka.receive(3)
        acked.ack()
        expected[acked.offset] = {Outcome.ACK}
        late._lease.deadline_ms = other._lease.deadline_ms = 0
        was_hit = _interrupted(lambda m=late: _is_refused(m), at)
        _is_refused(late)
        _is_refused(other)
        kafka.send(1)
        (later,) = wait_for_one(kafka.consumer)
        later.ack()
        expected[later.offset] = {Outcome.ACK}
        try:
            found = kafka.ends()
        except LeaseLostError:  # found while the ACK was gathered
            found = kafka.ends()
        assert found == expected, at
        wait_until(lambda: kafka.consumer.in_flight == 0)
        at += 1
    assert at > 10
    kafka.service.close()
    forget_cluster(kafka.name)


def wait_for_one(consumer: Consumer) -> list[Message]:
    found: list[Message] = []
    wait_until(lambda: found.extend(consumer.receive_many(1, 0.1)) or found)
    return found
