"""An exception from outside (Ctrl-C, a signal's handler) at every line of ``receive`` and ``ack``.

Nothing may be held that nobody has, no message may be passed over, and a verdict is either written
or can be given again. Raised at the line events of kafkamq's own code, but not between the end of a
``with`` and its ``__exit__``: Python runs no signal handler there.
"""

from __future__ import annotations

import _thread
import atexit
import dis
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from confluent_kafka import Message as Record
from tests.unit.worker_parts import LOG_APPEND_TIME, FixedNamespace, poll_into

from kafkamq.config import QueueConfig
from kafkamq.errors import LeaseLostError, StateError
from kafkamq.markers.consumer import MarkersConsumer
from kafkamq.markers.last_delivery import process_gate
from kafkamq.markers.rules.fetch_buffer import FetchBuffer
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.message import Message
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import ErrorWatch
from kafkamq.transport.offset_commits import Commit
from kafkamq.types import MarkerType, Outcome, expand

COUNT = 7
EXPIRED = 4
NOW_MS = time.time_ns() // 1_000_000  # when all was sent, and a little later it is STARTed
_with_exits: dict[CodeType, set[int]] = {}


class _Writer:
    """A markers topic: what is written is in the log, and reported, once somebody waits."""

    topic = "markers"
    watch = ErrorWatch("nowhere")

    def __init__(self) -> None:
        self.log: list[bytes] = []
        self.late_waits = 0  # so often a wait ends without reports
        self._under_way: list[tuple[bytes, Callable[..., None]]] = []

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def is_idle(self) -> bool:
        return not self._under_way

    def write(self, value: bytes, _: bytes, __: int, report: Callable[..., None]) -> None:
        self._under_way.append((value, report))

    def write_many(self, _: int, markers: list[dict[str, Any]]) -> None:
        self._under_way.extend((each["value"], each["callback"]) for each in markers)

    def wait_for(self, is_known: Callable[[], bool], _: float = 0.0) -> bool:
        self.late_waits -= 1
        if self.late_waits < 0:
            self.flush()
        return is_known()

    def flush(self, _: float = 0.0) -> None:
        while self._under_way:
            value, report = self._under_way.pop(0)
            self.log.append(value)
            report(None, Record(value=value, timestamp=(LOG_APPEND_TIME, NOW_MS + len(self.log))))

    poll = flush


class _Reader:
    """One partition: what is polled, and where the group is."""

    is_skipping, is_idle = False, True  # so every receive tends, too

    def __init__(
        self,
        _: object,
        __: object,
        buffer: FetchBuffer[Message],
        consumer: MarkersConsumer,
        ___: object,
    ) -> None:
        self._buffer = buffer
        self.positions = MagicMock()
        self._ack_writer = consumer._ack_writer
        self._writer = consumer._state.writer
        self.position = self.committed = 0
        self.waits_to_commit = 0  # so often a commit is under way when it is asked for
        self._committing: dict[int, int] | None = None
        self.fails = False  # ... the next time, in the end
        self._ahead = 0  # polls meanwhile: before and behind the STARTs of the next batch
        self.has_begun_next = False

    def poll(self, wanted: int, _: float) -> None:
        if self._buffer.held:
            self._writer.poll()  # as the lease renewer does
            return
        first = self.position
        self.position = min(COUNT, first + max(2, wanted))
        read = [self._record(offset) for offset in range(first, self.position)]
        if read:
            poll_into(self._buffer, self._ack_writer, read)

    def _record(self, offset: int) -> Record:
        headers = [("kafkamq-ttl-ms", b"1")] if offset == EXPIRED else []
        return Record(
            topic="messages",
            partition=0,
            offset=offset,
            key=b"q",
            value=b"payload",
            headers=headers,
            timestamp=(LOG_APPEND_TIME, NOW_MS - 100),
            leader_epoch=0,
        )

    def poll_ahead(self, wanted: int) -> None:
        self._ahead += self._committing is not None
        self.has_begun_next |= self._ahead > 1
        self.poll(wanted, 0.0)

    def commit(self, _: float) -> Commit:
        if self._committing is None:
            self._committing = self._buffer.committable()
            if self.waits_to_commit:
                self.waits_to_commit -= 1
                return Commit.PENDING
        offsets, self._committing, self._ahead = self._committing, None, 0
        if self.fails:
            self.fails = False
            return Commit.FAILED
        self.committed = offsets.get(0, self.committed)
        self._buffer.committed(offsets)
        return Commit.DONE

    def seek_back(self, partitions: object = None) -> None:
        for offset in self._buffer.rewind(None).values():
            self.position = offset

    def hold(self, late: dict[int, int]) -> None:
        self._buffer.hold(late)

    def give_up_commit(self) -> None:
        self._committing = None

    def go_on(self, partitions: list[int]) -> None:
        for offset in self._buffer.go_on(partitions).values():
            self.position = offset

    def read_again(self) -> None:
        self._buffer.revoked([0])
        self.position = self.committed
        self._committing = None

    def tend(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _without_kafka(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A consumer without threads and clients."""
    monkeypatch.setattr("kafkamq.markers.state.MarkerWriter", lambda _: _Writer())
    monkeypatch.setattr("kafkamq.markers.consumer.MessageReader", _Reader)
    monkeypatch.setattr("kafkamq.markers.consumer.LeaseRenewer", MagicMock())
    made: list[MarkersConsumer] = []
    monkeypatch.setattr(f"{__name__}._made", made)
    yield
    for consumer in made:
        consumer._forget_gauge()
        process_gate.leave(consumer._state.leases)
        atexit.unregister(consumer._flush_at_exit)


_made: list[MarkersConsumer] = []


def _state(is_batched: bool = True, **settings: int) -> MarkersConsumer:
    namespace = FixedNamespace()
    namespace.broker_clock.reported(NOW_MS, monotonic_ms())
    queue = QueueConfig(queue_id="q", batch_markers=is_batched, **settings)
    consumer = MarkersConsumer(namespace, queue)  # type: ignore[arg-type]
    _made.append(consumer)
    return consumer


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
        if "/kafkamq/" not in frame.f_code.co_filename:
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


def _run(
    receive: Callable[[MarkersConsumer], list[Message]],
    at: int,
    late_waits: int = 0,
    again: int = -1,
    waits_to_commit: int = 0,
    calls: int = 1,
    is_batched: bool = True,  # several messages share their START and their lease
) -> bool:
    """``again``: the line of the next receive where it is interrupted once more."""
    consumer = _state(is_batched)
    consumer._reader.waits_to_commit = waits_to_commit  # type: ignore[attr-defined]
    consumer._state.writer.late_waits = late_waits  # type: ignore[attr-defined]
    writer, reader = consumer._state.writer, consumer._reader
    handed: list[Message] = []

    def call() -> None:
        for _ in range(calls):
            handed.extend(receive(consumer))

    was_hit = _interrupted(call, at)
    if was_hit and again >= 0:
        _interrupted(call, again)
    left = 3  # receives in a row without a message
    while left:
        found = consumer.receive_many(3, 0.0)
        handed.extend(found)
        left = 3 if found else left - 1
    offsets = [message.offset for message in handed]
    assert len(offsets) == len(set(offsets)), at
    leases = consumer._state.leases
    assert sorted(o for lease in leases.open() for o in lease.held) == sorted(offsets), at
    holding = {lease for lease in leases.open() if lease.held}
    assert {message._lease for message in handed} == holding, at
    started: dict[int, set[str]] = {}
    for value in writer.log:  # type: ignore[attr-defined]
        marker = decode_marker(value)
        for one in expand(marker) if marker.type is MarkerType.START else ():
            if one.message_id is not None:
                started.setdefault(one.message_id.offset, set()).add(marker.consumer_id)
    assert set(started) == set(range(COUNT)), at
    assert reader.committed == COUNT, at  # type: ignore[attr-defined]
    ended = {EXPIRED}
    for offset in set(range(COUNT)) - set(offsets) - ended:  # given up: it is renewed by nobody
        assert leases.consumer_id not in started[offset], at
    for message in handed:
        message.ack()
    consumer._ack_writer.flush(1.0)
    assert not leases.open_count, at
    return was_hit


_iterators: dict[MarkersConsumer, Iterator[Message]] = {}  # kept: closing one is another thing
RECEIVES: dict[str, Callable[[MarkersConsumer], list[Message]]] = {
    "receive": lambda consumer: [m for m in [consumer.receive(0.0)] if m is not None],
    "receive_many": lambda consumer: consumer.receive_many(3, 0.0),
    "iteration": lambda consumer: [next(_iterators.setdefault(consumer, iter(consumer)))],
}


@pytest.mark.faults
@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("name", RECEIVES)
def test_an_interrupt_at_any_line_of_a_receive_leaves_nothing_behind(
    name: str, is_batched: bool
) -> None:
    at = 0
    while _run(RECEIVES[name], at, is_batched=is_batched):
        at += 1
    assert at > 100  # that many lines


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("name", RECEIVES)
def test_an_interrupt_of_a_receive_leaves_nothing_behind(name: str, is_batched: bool) -> None:
    """At one line of five, by chance."""
    at, rng = 0, random.Random(name)
    while _run(RECEIVES[name], at, is_batched=is_batched):
        at += rng.randint(1, 9)
    assert at > 100


def test_a_second_interrupt_leaves_nothing_behind_either() -> None:
    """As the call that mends what the first one broke off is broken off."""
    at, rng = 0, random.Random(2)
    while _run(RECEIVES["iteration"], at, again=rng.randint(0, 60)):
        at += rng.randint(1, 4)
    assert at > 100


def test_an_interrupt_as_the_next_batch_sets_out_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each batch is committed slowly, and the next one STARTed meanwhile, or committed, too."""
    monkeypatch.setattr("kafkamq.markers.batches.AHEAD_COUNT", 1)
    monkeypatch.setattr("kafkamq.markers.batches.AHEAD_MS", 1 << 40)
    begun, committing = list[bool](), list[bool]()

    def receive(consumer: MarkersConsumer) -> list[Message]:
        found = consumer.receive_many(2, 0.0)
        reader: Any = consumer._reader
        begun.append(reader.has_begun_next)
        committing.append(bool(found) and reader._committing is not None)
        return found

    at, rng = 0, random.Random(3)
    while _run(receive, at, waits_to_commit=9, calls=8):
        at += rng.randint(1, 15)
    assert at > 100
    assert any(begun) and any(committing)


def test_a_commit_that_fails_gives_up_what_was_started_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kafkamq.markers.batches.AHEAD_COUNT", 1)
    monkeypatch.setattr("kafkamq.markers.batches.AHEAD_MS", 1 << 40)

    def receive(consumer: MarkersConsumer) -> list[Message]:
        found = consumer.receive_many(2, 0.0)
        reader: Any = consumer._reader
        if reader.has_begun_next and not failed:
            reader.fails = True
            failed.append(consumer)
        return found

    failed: list[MarkersConsumer] = []
    _run(receive, 1 << 40, waits_to_commit=9, calls=8)
    assert failed


@pytest.mark.parametrize("name", RECEIVES)
def test_an_interrupt_as_late_starts_are_set_aside_leaves_nothing_behind(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one line of five, by chance."""
    monkeypatch.setattr("kafkamq.markers.starts.PATIENCE_MS", 0)
    at = 0
    rng = random.Random(name)

    def receive(consumer: MarkersConsumer) -> list[Message]:
        return next(filter(None, iter(lambda: RECEIVES[name](consumer), None)))

    while _run(receive, at, 1):
        at += rng.randint(1, 9)
    assert at > 200


def test_an_interrupt_as_an_iteration_goes_on_leaves_its_message_with_the_application() -> None:
    """Python runs signal handlers where a frame begins, and where a generator goes on."""
    consumer = _state()
    iterator = iter(consumer)
    given = next(iterator)

    # In C, so that the iterator is what goes on with the signal pending.
    going_on = zip(map(_thread.interrupt_main, [signal.SIGINT]), iterator, strict=False)
    with pytest.raises(KeyboardInterrupt):
        next(going_on)
    assert given.offset not in {message.offset for message in consumer.receive_many(COUNT, 0.0)}
    given.ack()


VERDICTS: dict[str, tuple[Callable[[Message], object], Outcome]] = {
    "ack": (lambda message: message.ack(), Outcome.ACK),
    "ack and wait": (lambda message: message.ack(wait=True), Outcome.ACK),
    "nack": (lambda message: message.nack(delay=1.0), Outcome.NACK),
    "reject": (lambda message: message.reject("no"), Outcome.REJECT),
}


def _received_again(consumer: MarkersConsumer, count: int) -> list[Message]:
    """The same messages from the log's start, whose markers are all that is written."""
    reader, writer = cast("Any", (consumer._reader, consumer._state.writer))
    reader.position = reader.committed = 0
    consumer._buffer.revoked([0])
    found = next(filter(None, iter(lambda: consumer.receive_many(count, 0.0), None)))
    writer.log.clear()
    assert len(found) == count
    return found


def _ends(consumer: MarkersConsumer) -> dict[int, set[Outcome]]:
    """What was said of each message, once all verdicts are written."""
    consumer._ack_writer.flush(1.0)
    said: dict[int, set[Outcome]] = {}
    log: list[bytes] = cast("Any", consumer._state.writer).log
    for one in (one for value in log for one in expand(decode_marker(value))):
        if one.type is MarkerType.END and one.message_id is not None:
            said.setdefault(one.message_id.offset, set()).add(one.outcome)
    return said


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", VERDICTS)
def test_an_interrupt_of_a_verdict_takes_it_or_leaves_it(name: str, count: int) -> None:
    """And leaves the others of its START alone."""
    verdict, outcome = VERDICTS[name]
    consumer = _state(max_in_flight=2 * count)  # nothing is STARTed ahead
    at, was_hit = 0, True
    while was_hit:
        message, *others = _received_again(consumer, count)
        was_hit = _interrupted(lambda m=message: verdict(m), at)
        assert all(each._lease.holds(each.offset) for each in others), at
        if message._lease.holds(message.offset):
            verdict(message)
        with pytest.raises(StateError):
            message.ack()
        assert _ends(consumer) == {message.offset: {outcome}}, at
        for each in others:
            each.ack()
        assert _ends(consumer).keys() == {each.offset for each in (message, *others)}, at
        assert not consumer._state.leases.open(), at
        at += 1
    assert at > 10


@pytest.mark.parametrize("count", [1, 3])
def test_an_interrupt_of_an_extension_leaves_one_lease_of_the_message(count: int) -> None:
    consumer = _state(max_in_flight=2 * count)  # nothing is STARTed ahead
    at, was_hit = 0, True
    while was_hit:
        found = _received_again(consumer, count)
        was_hit = _interrupted(lambda m=found[0]: m.extend(60.0), at)
        assert consumer._state.leases.open_count == count, at
        found[0].extend(60.0)
        assert not _ends(consumer), at
        for each in found:
            assert each._lease.holds(each.offset), at
            each.ack()
        assert _ends(consumer) == {each.offset: {Outcome.ACK} for each in found}, at
        assert not consumer._state.leases.open(), at
        at += 1
    assert at > 10


def _is_refused(message: Message) -> None:
    with pytest.raises(LeaseLostError):
        message.ack()


def test_an_interrupt_as_a_lease_is_found_to_be_over_settles_nothing() -> None:
    """What was acked before is, what was not comes back, and nobody keeps that alive (R7)."""
    consumer = _state(max_in_flight=6)  # nothing is STARTed ahead
    leases = consumer._state.leases
    at, was_hit = 0, True
    while was_hit:
        acked, late, other = _received_again(consumer, 3)
        acked.ack()
        holder = leases.consumer_id
        late._lease.deadline_ms = 0
        was_hit = _interrupted(lambda m=late: _is_refused(m), at)
        _is_refused(late)
        _is_refused(other)
        assert _ends(consumer) == {acked.offset: {Outcome.ACK}}, at
        assert leases.id_is_spent or leases.consumer_id != holder, at
        lost = {offset for lease in leases.expire(0) for offset in lease.lost}
        assert lost == {late.offset, other.offset}, at
        consumer._state.renew_id()
        at += 1
    assert at > 10
