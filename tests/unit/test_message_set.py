"""Sets of messages as bits: of which log, from which offset on, until where."""

from __future__ import annotations

from kafkamq.markers.rules.batching import MessageSet
from kafkamq.markers.rules.hold import CHUNK_OFFSETS
from kafkamq.types import MessageBatch, MessageId

A, B = b"a" * 16, b"b" * 16


def test_a_message_of_another_topic_or_epoch_is_another_one() -> None:
    messages = MessageSet()
    assert messages.add(MessageBatch(0, A, 1, CHUNK_OFFSETS + 3, 0b101))
    third, fifth = CHUNK_OFFSETS + 3, CHUNK_OFFSETS + 5
    assert MessageId(0, third, A, 1) in messages
    assert MessageId(0, fifth, A, 1) in messages
    assert len(messages) == 2
    others = [
        MessageId(0, third + 1, A, 1),
        MessageId(0, 3, A, 1),
        MessageId(1, third, A, 1),
        MessageId(0, third, B, 1),
        MessageId(0, third, A, 2),
        MessageId(0, third),
    ]
    assert not any(each in messages for each in others)
    assert (messages.end(0), messages.end(1)) == (fifth + 1, 0)


def test_what_is_taken_out_is_in_it_no_more() -> None:
    messages = MessageSet()
    messages.add(MessageBatch(0, A, 1, 10, 0b1111))
    messages.discard(MessageBatch(0, A, 1, 12, 0b1001))
    messages.discard(MessageBatch(0, B, 1, 10, 0b1))
    assert [offset for offset in range(30) if MessageId(0, offset, A, 1) in messages] == [
        10,
        11,
        13,
    ]
    messages.discard(MessageBatch(0, A, 1, 8, 0b111111))
    assert not messages


def test_of_a_batch_that_begins_before_an_offset_the_rest_is_taken() -> None:
    messages = MessageSet()
    assert messages.add(MessageBatch(0, A, 1, 10, 0b1111), 12)
    assert not messages.add(MessageBatch(0, A, 1, 20, 0b1), 21)
    assert [offset for offset in range(30) if MessageId(0, offset, A, 1) in messages] == [12, 13]
