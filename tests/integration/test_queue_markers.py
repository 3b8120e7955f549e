"""R26: where the markers of a message are, on a topic with several partitions.

Clients write markers in batches per partition; one that loses its partition on the way would be
folded by another tracker than the rest of its message.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from tests.integration.queue_logs import markers, receive_all
from tests.waiting import within

from kafkamq.queue.service import Service
from kafkamq.queue.wire.keys import marker_partition
from kafkamq.types import MarkerType

PARTITIONS = 8
MARKER_PARTITIONS = 5


@pytest.mark.parametrize("exactly_once", [False, True])
def test_all_markers_of_a_message_are_in_its_partition(
    bootstrap: str, namespace: str, exactly_once: bool
) -> None:
    with Service(bootstrap, namespace) as service:
        service.create_topics(partitions=PARTITIONS, marker_partitions=MARKER_PARTITIONS)
        queue = service.queue("a", exactly_once=exactly_once)
        producer = queue.producer()
        for number in range(300):
            producer.send(b"%d" % number, key=b"%d" % number)  # without keys: one partition
        producer.flush()
        with queue.consumer() as consumer:
            messages = receive_all(consumer, 240)
            for message in messages[::3]:
                message.extend(60)
            for message in messages[::2]:
                message.ack()
            for message in messages[1::4]:
                message.nack(delay=600)
            for message in messages[3::4]:
                message.reject("for the test")
            consumer.flush()
            # More are STARTed ahead: close releases them.
            assert consumer.receive(within(30)) is not None
        written = markers(service.config)
    seen: defaultdict[str, set[int]] = defaultdict(set)
    for record in written:
        marker = record.marker
        if marker.message_id is None:  # a KEEPALIVE of the consumer
            continue
        place = marker.message_id
        wanted = marker_partition(place.partition, place.offset, MARKER_PARTITIONS)
        assert record.partition == wanted, record
        kind = marker.outcome if marker.type is MarkerType.END else marker.type
        seen[kind.name].add(record.partition)
    assert set(seen) == {"START", "KEEPALIVE", "ACK", "NACK", "REJECT", "RELEASE"}
    for kind_name, partitions in seen.items():
        if kind_name != "RELEASE":  # or there was no other place to be in
            assert len(partitions) > 1, kind_name
