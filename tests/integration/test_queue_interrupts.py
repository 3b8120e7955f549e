"""Ctrl-C at random moments of receive and ack, on a real broker."""

from __future__ import annotations

import _thread
import random
import threading
import time
from contextlib import suppress

import pytest
from tests.integration.queue_logs import ends, make_service, starts
from tests.waiting import deadline_after, within

from kafkamq.errors import StateError
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.message import Message
from kafkamq.queue.service import Service
from kafkamq.types import Outcome

INTERRUPTS = 60


class _Interrupter:
    """Interrupts the main thread; the next time when that one has dealt with it."""

    def __init__(self, seed: int) -> None:
        self.may_interrupt = threading.Event()
        self.count = 0
        self._rng = random.Random(seed)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for _ in range(INTERRUPTS):
            self.may_interrupt.wait()
            time.sleep(self._rng.choice((0.0, 0.0005, 0.005, 0.05)) * self._rng.random())
            self.may_interrupt.clear()
            self.count += 1
            _thread.interrupt_main()

    def join(self) -> None:
        while self._thread.is_alive():
            with suppress(KeyboardInterrupt):
                self.may_interrupt.set()
                self._thread.join(0.1)


def _feed(service: Service, interrupter: _Interrupter, sent: list[None]) -> None:
    """Send a few at a time, so that there are many receives, as long as there are interrupts."""
    producer = service.queue("a").producer()
    while interrupter.count < INTERRUPTS:
        for _ in range(7):
            producer.send(b"x").result(within(30))
            sent.append(None)
        time.sleep(0.005)


def acknowledge(consumer: Consumer, handed: list[Message]) -> None:
    """Receive, and ack what has no verdict; where it is interrupted it goes on the next time."""
    handed.extend(consumer.receive_many(7, 0.2))
    for message in handed:
        if message._lease.holds(message.offset):
            message.ack()


def test_interrupts_at_random_moments_leave_nothing_that_nobody_has(
    bootstrap: str, namespace: str
) -> None:
    with make_service(bootstrap, namespace) as service:
        interrupter = _Interrupter(seed=1)
        sent: list[None] = []
        feeder = threading.Thread(target=_feed, args=(service, interrupter, sent))
        feeder.start()
        consumer = service.queue("a", redelivery_timeout=300.0).consumer()
        handed: list[Message] = []
        deadline_s = deadline_after(120.0)
        try:
            while feeder.is_alive() or len(handed) < len(sent):
                assert time.monotonic() < deadline_s
                # Python wraps one that comes inside of another call of confluent_kafka's than those
                # that are made again and again.
                with suppress(KeyboardInterrupt, SystemError):
                    interrupter.may_interrupt.set()
                    acknowledge(consumer, handed)
        finally:
            interrupter.join()
        acknowledge(consumer, handed)
        assert interrupter.count == INTERRUPTS
        places = [message.message_id for message in handed]
        assert len(set(places)) == len(places) == len(sent)
        for message in handed:  # each has its verdict, once
            with pytest.raises(StateError):
                message.ack()
        consumer.flush(within(60.0))
        assert consumer.in_flight == 0
        consumer.close()
        assert {each for each in ends(service.config, Outcome.ACK) if each} == set(places)
        assert len(starts(service.config)) >= len(sent)
