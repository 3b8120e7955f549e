"""Verdicts by token on a real broker: one counts, the others are told; holds outlive processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone

import pytest
from tests.integration.queue_logs import ends, make_service, tracked
from tests.waiting import wait_until, within

from kafkamq import Message, Service
from kafkamq.errors import ConfigError, LeaseLostError, StateError
from kafkamq.queue.consumer import Consumer
from kafkamq.types import Outcome

T = within(2.0)


def _receive(consumer: Consumer) -> Message:
    message = consumer.receive(within(30))
    assert message is not None
    return message


@contextmanager
def _namespace(bootstrap: str, namespace: str) -> Iterator[Service]:
    with make_service(bootstrap, namespace, partitions=1) as service, tracked(service.config):
        yield service


@pytest.mark.slow
def test_tokens_give_verdicts_from_elsewhere(bootstrap: str, namespace: str) -> None:
    """The smoke test: each verdict, a hold that outlives its consumer, refusals."""
    with _namespace(bootstrap, namespace) as service, Service(bootstrap, namespace) as elsewhere:
        queue = service.queue("a", redelivery_timeout=T)
        there = elsewhere.queue("a", redelivery_timeout=T)
        producer = queue.producer()
        for number in range(5):
            producer.send(b"%d" % number, id=str(number)).result(within(30))
        with queue.consumer() as consumer:
            messages = {one.id: one for one in (_receive(consumer) for _ in range(5))}
            held = messages["0"].hold(60)
            assert consumer.in_flight == 4
            with pytest.raises(StateError, match="handed over"):
                messages["0"].ack()
            there.ack(messages["1"].token)
            with pytest.raises(StateError, match="acked at"):
                there.reject(messages["1"].token, "no")
            with pytest.raises(StateError, match="acked at"):
                messages["1"].nack()
            there.reject(messages["2"].token, "bad")
            there.nack(messages["3"].token, delay=0.1, reason="again")
            over = messages["4"].hold(until=datetime.now(timezone.utc) + timedelta(seconds=1))
            copies = [_receive(consumer), _receive(consumer)]
            assert {(one.id, one.delivery_count) for one in copies} == {("3", 2), ("4", 2)}
            with pytest.raises(LeaseLostError, match="ended before"):
                there.ack(over)
            wait_until(lambda: consumer.in_flight == 2)  # what was settled elsewhere takes no room
        there.extend(held, 120)
        there.extend(held, 0.1)  # never for less than what is left
        time.sleep(1.5 * T)
        there.ack(held)  # its consumer ended long ago
        assert len(ends(service.config, Outcome.ACK)) == 3  # with the late one
        with Service(bootstrap, f"{namespace}x") as another:
            for name, other in (("b", elsewhere), ("a", another)):
                with pytest.raises(ConfigError, match="token is of"):
                    other.queue(name).ack(held)
        with pytest.raises(ConfigError, match="damaged"):
            there.ack(held[:-1] + ("A" if held[-1] != "A" else "B"))
