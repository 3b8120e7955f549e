"""Hypothesis strategies for what travels: markers, headers and hostile bytes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tests.examples import examples

from kafkamq.markers.wire import markers_pb2 as pb
from kafkamq.markers.wire.marker_writer import MAX_DURATION_MS
from kafkamq.types import Headers, Marker, MarkerType, MessageBatch, MessageId, Outcome

bounded = settings(
    deadline=None, max_examples=examples(300), suppress_health_check=[HealthCheck.too_slow]
)

INT64 = 2**63 - 1
INT32 = 2**31 - 1

counts = st.integers(0, 300) | st.integers(0, INT32)
times = st.integers(0, 20_000) | st.integers(0, INT64)
durations = st.integers(0, 20_000) | st.integers(0, MAX_DURATION_MS)
texts = st.text(st.characters(codec="utf-8"), max_size=40)
blobs = st.binary(max_size=200)

message_ids = st.builds(
    MessageId,
    partition=counts,
    offset=times,
    topic_id=st.just(b"") | st.binary(min_size=16, max_size=16),
    leader_epoch=counts,
)

chunks = st.builds(replace, message_ids, offset=st.integers(0, 9) | st.integers(0, INT64 // 4096))
members = (
    st.integers(1, 2**4096 - 1)
    | st.sets(st.integers(0, 4095), min_size=1, max_size=20).map(lambda at: sum(1 << i for i in at))
    | st.tuples(st.integers(0, 4095), st.integers(1, 4096)).map(
        lambda run: ((1 << run[1]) - 1 << run[0]) % (1 << 4096)
    )
)


@st.composite
def batch_lists(draw: st.DrawFn) -> tuple[MessageBatch, ...]:
    """At most one batch of each chunk; ``base_offset`` is anywhere below the first message."""
    batches = []
    for chunk in draw(st.lists(chunks, min_size=1, max_size=4, unique=True)):
        bits = draw(members)
        first = draw(st.integers(0, (bits & -bits).bit_length() - 1))
        begin = chunk.offset * 4096 + first
        batches.append(
            MessageBatch(chunk.partition, chunk.topic_id, chunk.leader_epoch, begin, bits >> first)
        )
    return tuple(batches)


def header_lists() -> st.SearchStrategy[Headers]:
    return st.lists(st.tuples(texts, st.none() | blobs), max_size=5).map(tuple)


starts = st.builds(
    Marker,
    type=st.just(MarkerType.START),
    message_id=message_ids,
    redeliver_after_ms=durations,
    key=blobs,
    value=st.none() | blobs,
    delivery_count=st.integers(1, 300) | st.integers(1, INT32),
    headers=header_lists(),
    expires_at_ms=times,
    consumer_id=texts,
    message_timestamp_ms=times,
    max_deliveries=counts,
    max_lease_ms=durations,
)
topic_starts = st.builds(
    replace, starts, message_topic=st.text("aZ09._-", min_size=3, max_size=249)
)
starts_by_reference = st.builds(
    Marker,
    type=st.just(MarkerType.START),
    message_id=message_ids,
    redeliver_after_ms=durations,
    key=blobs,
    headers=header_lists(),
    by_reference=st.just(True),
)


def _end(
    message_id: MessageId, outcome: Outcome, delay_ms: int, who: str, why: str, schedule: bool
) -> Marker:
    return Marker(
        MarkerType.END,
        message_id,
        redeliver_after_ms=delay_ms if outcome is Outcome.NACK else 0,
        outcome=outcome,
        consumer_id=who,
        reason="" if outcome is Outcome.ACK else why,
        of_schedule=schedule,
    )


ends = st.builds(
    _end, message_ids, st.sampled_from(Outcome), durations, texts, texts, st.booleans()
)
keepalives = st.builds(
    Marker,
    type=st.just(MarkerType.KEEPALIVE),
    message_id=st.none() | message_ids,
    redeliver_after_ms=durations,
    consumer_id=texts.filter(bool),
)
schedules = st.builds(
    Marker,
    type=st.just(MarkerType.SCHEDULE),
    redeliver_after_ms=durations,
    key=blobs,
    value=st.none() | blobs,
    headers=header_lists(),
    expires_at_ms=times,
    consumer_id=texts,
)
carried_schedules = st.builds(
    Marker,
    type=st.just(MarkerType.SCHEDULE),
    message_id=message_ids,
    redeliver_after_ms=durations,
    key=blobs,
    carried_forward=st.just(True),
)
ticks = st.builds(Marker, type=st.just(MarkerType.TICK), consumer_id=texts, engine_epoch=times)

single_markers = (
    starts
    | topic_starts
    | starts_by_reference
    | ends
    | keepalives
    | schedules
    | carried_schedules
    | ticks
)
batch_starts = st.builds(
    Marker,
    type=st.just(MarkerType.START),
    redeliver_after_ms=durations,
    key=blobs,
    consumer_id=texts,
    by_reference=st.just(True),
    max_deliveries=counts,
    max_lease_ms=durations,
    batches=batch_lists(),
)
batch_topic_starts = st.builds(
    replace, batch_starts, message_topic=st.text("aZ09._-", min_size=3, max_size=249)
)
batch_markers = (
    batch_starts
    | batch_topic_starts
    | st.builds(replace, ends | keepalives, message_id=st.none(), batches=batch_lists())
)
markers = single_markers | batch_markers


@st.composite
def damaged(draw: st.DrawFn, source: st.SearchStrategy[bytes]) -> bytes:
    """Bytes of ``source`` with a few of them changed, cut out or put in."""
    data = bytearray(draw(source))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        until = draw(st.integers(at, min(len(data), at + 8)))
        data[at:until] = draw(st.binary(max_size=8))
    return bytes(data)


def varint(value: int) -> bytes:
    """Write a number as protobuf does."""
    return pb.Marker(expires_at_ms=value).SerializeToString()[2:] or b"\0"
