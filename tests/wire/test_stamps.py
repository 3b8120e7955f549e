"""R38: which headers are believed, in a topic that anybody writes to."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from kafkamq.queue.wire.headers import (
    WRITTEN_FOR,
    Origin,
    is_of_another_queue,
    log_id_of,
    read_stamped_headers,
    restored,
    split_headers,
    stamp_of,
    stamped,
    stamped_copy_headers,
    unstamped,
)
from kafkamq.types import Headers

TOPIC_ID = bytes(range(16))
STAMP = stamp_of(TOPIC_ID, "shop", "orders")
OTHER_QUEUE = stamp_of(TOPIC_ID, "shop", "bills")
LATER_TOPIC = stamp_of(bytes(16), "shop", "orders")
ORIGIN = Origin("orders", 1, 5, 1000)

names = st.sampled_from(
    (
        "a",
        "kafkamq-id",
        "kafkamq-delivery-count",
        "kafkamq-ttl-ms",
        "kafkamq-origin",
        "kafkamq-theirs-kafkamq-id",
        WRITTEN_FOR,
    )
)
values = st.none() | st.sampled_from(
    (b"7", b"x", b"orders/1/5/1000", OTHER_QUEUE, LATER_TOPIC, STAMP[:-1], STAMP + b"x")
)
senders = st.lists(st.tuples(names, values), max_size=6).map(tuple)


@given(senders)
def test_r38_nothing_is_believed_of_a_senders_headers(theirs: Headers) -> None:
    read = read_stamped_headers(theirs, STAMP)
    assert (read.id, read.delivery_count, read.ttl_ms, read.origin) == ("", 1, None, None)
    assert read.user == theirs


@given(senders, st.integers(1, 3))
def test_r38_every_copy_keeps_what_the_sender_wrote(theirs: Headers, copies: int) -> None:
    headers = theirs
    for count in range(2, 2 + copies):
        headers = stamped_copy_headers(headers, STAMP, delivery_count=count, origin=ORIGIN)
        read = read_stamped_headers(headers, STAMP)
        assert (read.delivery_count, read.origin, read.user) == (count, ORIGIN, theirs)
        assert sum(each == (WRITTEN_FOR, STAMP) for each in headers) == 1


@given(senders)
def test_r38_a_dead_letter_gives_the_sender_its_names_back(theirs: Headers) -> None:
    copy = stamped_copy_headers(theirs, STAMP, delivery_count=2, origin=ORIGIN)
    letter = unstamped(copy, STAMP)
    ours = [header for header in letter if header[0] in ("kafkamq-origin", WRITTEN_FOR)]
    assert ours == [("kafkamq-origin", ORIGIN.encode())]
    assert restored(unstamped(theirs, STAMP)) == theirs


def test_r38_what_the_producer_sends_is_believed() -> None:
    sent = stamped([("a", b"1")], STAMP, [("kafkamq-id", b"m1"), ("kafkamq-ttl-ms", b"500")])
    read = read_stamped_headers(sent, STAMP)
    assert (read.id, read.ttl_ms, read.user) == ("m1", 500, (("a", b"1"),))
    assert split_headers(sent, LATER_TOPIC) == (sent, ())


def test_r38_a_copy_for_another_queue_is_none_of_ours() -> None:
    copy = stamped_copy_headers((), OTHER_QUEUE, delivery_count=2, origin=ORIGIN)
    assert is_of_another_queue(copy, STAMP)
    assert not is_of_another_queue(copy, OTHER_QUEUE)
    # Sent by the other queue's producer: a message of both.
    assert not is_of_another_queue(stamped((), OTHER_QUEUE, [("kafkamq-id", b"m")]), STAMP)
    # Mirrored from another topic, or from this one before it was recreated: a message.
    mirrored = stamped_copy_headers((), LATER_TOPIC, delivery_count=2, origin=ORIGIN)
    assert not is_of_another_queue(mirrored, STAMP)
    # Our copy of a message that somebody took from the other queue, headers and all.
    ours = stamped_copy_headers(copy, STAMP, delivery_count=2, origin=ORIGIN)
    assert not is_of_another_queue(ours, STAMP)


def test_r37_each_queue_names_the_topic_otherwise() -> None:
    ids = {log_id_of(topic, queue) for topic in (TOPIC_ID, bytes(16)) for queue in ("a", b"b")}
    assert len(ids) == 4
    assert {len(each) for each in ids} == {16}
    assert log_id_of(b"", "a") == b""
