"""kafka-mq-go's workers under our tracker: their STARTs name queue, payload and timeout only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.tracker_logs import Logs
from tests.waiting import wait_until

from kafkamq.config import TrackerConfig
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.markers.wire.interop import encode_go_marker
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.types import Marker, MarkerType, MessageId, Outcome

USER = (("trace", b"1"), ("empty", None), ("trace", b"2"))
LIMIT = 3
ENDS = (Outcome.REDELIVERED, Outcome.DEAD_LETTERED)


@pytest.fixture
def tracked(bootstrap: str, namespace: str) -> Iterator[Logs]:
    logs = Logs(bootstrap, namespace, partitions=1, marker_partitions=1)
    with LocalTracker(logs.config, TrackerConfig(max_deliveries=LIMIT)).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
        yield logs


def foreign_start(logs: Logs, *ids: MessageId, value: bytes = b"payload") -> None:
    """Write a START as their consumer does."""
    for id_ in ids:
        start = Marker(MarkerType.START, id_, 300, b"queue", value)
        logs.marker(id_, encode_go_marker("queue", start).value)


def test_their_copies_keep_id_headers_and_count(tracked: Logs) -> None:
    (place,) = tracked.send(headers=(*USER, ("kafkamq-id", b"order-42")))
    for delivery in range(2, LIMIT + 1):  # each worker dies
        foreign_start(tracked, place)
        wait_until(lambda: place in tracked.ends(*ENDS))  # noqa: B023 - waited for here
        copy = tracked.copies()[-1]
        assert (copy.delivery_count, copy.user) == (delivery, USER)
        assert copy.origin is not None
        assert (copy.origin.offset, copy.origin.timestamp_ms) == (0, tracked.sent[MessageId(0, 0)])
        place = MessageId(0, copy.offset)
    foreign_start(tracked, place)
    wait_until(tracked.dead_letters)
    ((letter, headers),) = tracked.dead_letters()
    assert headers["kafkamq-reason"] == b"max-deliveries"
    known = read_message_headers(letter.headers())
    assert (known.id, known.delivery_count) == ("order-42", LIMIT)
    assert len(tracked.copies()) == LIMIT - 1


def test_a_message_that_is_not_the_one_of_the_start_adds_nothing(tracked: Logs) -> None:
    (another,) = tracked.send(value=b"of somebody else", headers=USER)
    foreign_start(tracked, another)
    wait_until(lambda: another in tracked.ends(*ENDS))
    (copy,) = tracked.copies()
    assert (copy.value, copy.user, copy.delivery_count) == (b"payload", (), 2)
