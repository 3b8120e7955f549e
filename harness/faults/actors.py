"""Programs that play a part in a run and write down what they see: sender, worker, tracker.

Run as ``python -m harness.faults.actors ROLE '{...}'`` with the settings of that role as
JSON. They end on SIGTERM, cleanly. What a worker does with a message follows from the seed, the
message's id and its delivery count, so a run can be repeated.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from typing import Any

from harness.faults.part import POISON, Part
from kafkamq.config import Backoff, TrackerConfig
from kafkamq.dev.history import Recorder, digest
from kafkamq.errors import (
    ConfigError,
    DeadlineExceededError,
    FencedError,
    KafkaMQError,
    LeaseLostError,
)
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.message import Message
from kafkamq.queue.producer import Delivery
from kafkamq.queue.service import Service
from kafkamq.runtime.signals import stop_on_signals
from kafkamq.types import MessageId


def main(role: str, settings: str) -> None:
    _log_with_partitions()
    faulthandler.register(signal.SIGUSR1)  # what every thread is doing, into the log
    stop = threading.Event()
    stop_on_signals(stop.set, (signal.SIGTERM,))
    part = Part(**json.loads(settings))
    recorder = Recorder(part.folder, part.name)
    if part.clock_ahead_s:
        right = time.time
        time.time = lambda: right() + part.clock_ahead_s
    roles = {"sender": _send, "worker": _work, "tracker": _track}
    roles[role](part, recorder, stop)


def _log_with_partitions() -> None:
    """What is said, and of which partitions, where that is known."""
    handler = logging.StreamHandler()
    names = ("partition", "partitions")
    form = "%(asctime)s %(name)s %(message)s" + "".join(f" %({name})s" for name in names)
    handler.setFormatter(logging.Formatter(form, defaults=dict.fromkeys(names, "")))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _service(part: Part) -> Service:
    return Service(part.bootstrap_servers, part.namespace, kafka=part.kafka)


# ---- the sender


def _send(part: Part, recorder: Recorder, stop: threading.Event) -> None:
    chance = random.Random(part.seed)
    with _service(part) as service:
        producer = service.queue(part.queue_id).producer()
        open_ones: list[tuple[str, Delivery]] = []
        began_s = time.monotonic()
        for number in range(part.count):
            ahead_s = number / part.rate - (time.monotonic() - began_s)
            if ahead_s > 0:
                time.sleep(ahead_s)
            if stop.is_set():
                break
            id_ = f"{part.name}-{number}"
            is_poison = part.poison and number % round(1 / part.poison) == 0  # in every run
            payload = POISON if is_poison else b"%d" % number
            payload += bytes(max(0, part.payload_bytes - len(payload)))
            delay = 1.0 if chance.random() < part.delayed else 0.0
            recorder.record("send", id=id_, sha=digest(payload))
            try:
                open_ones.append((id_, producer.send(payload, id=id_, delay=delay)))
            except KafkaMQError as error:
                known = isinstance(error, ConfigError)
                recorder.record("unsent", id=id_, known=known, error=str(error))
            open_ones = _report_sends(open_ones, recorder)
        deadline_s = time.monotonic() + 120
        while open_ones and time.monotonic() < deadline_s:
            time.sleep(0.05)
            open_ones = _report_sends(open_ones, recorder)


def _report_sends(
    open_ones: list[tuple[str, Delivery]], recorder: Recorder
) -> list[tuple[str, Delivery]]:
    """Write down what is done; returns the rest."""
    left = []
    for id_, delivery in open_ones:
        if not delivery.done():
            left.append((id_, delivery))
            continue
        try:
            sent = delivery.result(0)
        except KafkaMQError as error:
            recorder.record("unsent", id=id_, known=False, error=str(error))
        else:
            place = {"topic": sent.topic, "partition": sent.partition, "offset": sent.offset}
            recorder.record("sent", id=id_, **place)
    return left


# ---- the worker


class _Worker:
    """One consumer, and what its history needs."""

    def __init__(self, part: Part, recorder: Recorder) -> None:
        self._part = part
        self._recorder = recorder
        self._given: list[tuple[int, int]] = []  # verdicts that are not confirmed
        self._confirmed_s = time.monotonic()

    def run(self, stop: threading.Event) -> None:
        part = self._part
        with _service(part) as service:
            queue = service.queue(
                part.queue_id,
                redelivery_timeout=part.redelivery_timeout,
                max_deliveries=part.max_deliveries,
                backoff=Backoff(first=0.2, max=1.0),
                exactly_once=part.exactly_once,
            )
            with queue.consumer(on_lease_lost=self._lost) as consumer:
                while not stop.is_set():
                    self._turn(consumer)
                self._confirm(consumer, timeout_s=20)

    def _turn(self, consumer: Consumer) -> None:
        try:
            messages = consumer.receive_many(self._part.batch, 0.2)
            self._recorder.record_all("received", map(_received, messages))
            for message in messages:
                self._handle(message)
            if time.monotonic() - self._confirmed_s > 0.5:
                self._confirm(consumer)
                self._confirmed_s = time.monotonic()
        except KafkaMQError as error:
            self._recorder.record("error", text=f"{type(error).__name__}: {error}")
            time.sleep(0.2)

    def _handle(self, message: Message) -> None:
        part, place = self._part, _place(message.message_id)
        if (message.payload or b"").startswith(POISON):
            os._exit(9)
        if part.work_s:
            time.sleep(part.work_s)
        outcome = self._choose(message)
        self._recorder.record("verdict", **_named(message), outcome=outcome)
        try:
            if outcome == "ack":
                message.ack()
            elif outcome == "nack":
                message.nack(delay=0.2, reason="try again")
            else:
                message.reject("no")
        except LeaseLostError:
            self._recorder.record("late", places=[place])
        else:
            self._given.append(place)

    def _choose(self, message: Message) -> str:
        part = self._part
        drawn = random.Random(f"{part.seed}/{message.id}/{message.delivery_count}").random()
        if message.delivery_count > 1:
            return "ack"
        if drawn < part.nacks:
            return "nack"
        return "reject" if drawn < part.nacks + part.rejects else "ack"

    def _confirm(self, consumer: Consumer, timeout_s: float = 5.0) -> None:
        given, self._given = self._given, []
        late: set[tuple[int, int]] = set()
        try:
            consumer.flush(timeout_s)
        except LeaseLostError as error:
            late = {_place(one) for one in error.messages if isinstance(one, MessageId)}
            self._recorder.record("late", places=sorted(late))
        except DeadlineExceededError as error:
            self._given = given + self._given
            self._recorder.record("error", text=str(error))
            return
        self._recorder.record("confirmed", places=[one for one in given if one not in late])

    def _lost(self, message: Message) -> None:
        self._recorder.record("late", places=[_place(message.message_id)])


def _place(message_id: MessageId) -> tuple[int, int]:
    return message_id.partition, message_id.offset


def _named(message: Message) -> dict[str, object]:
    partition, offset = _place(message.message_id)
    return {"id": message.id, "partition": partition, "offset": offset}


def _received(message: Message) -> dict[str, object]:
    sha = digest(message.payload)
    return {**_named(message), "count": message.delivery_count, "sha": sha}


def _work(part: Part, recorder: Recorder, stop: threading.Event) -> None:
    _Worker(part, recorder).run(stop)


# ---- the tracker


def _track(part: Part, recorder: Recorder, stop: threading.Event) -> None:
    """An engine that ends by an error is started again, as a supervisor would do."""
    settings = TrackerConfig(position_interval_ms=500, max_offsets_per_commit=part.max_actions)
    while not stop.is_set() and _track_once(part, settings, recorder, stop):
        stop.wait(0.5)


def _track_once(
    part: Part, settings: TrackerConfig, recorder: Recorder, stop: threading.Event
) -> bool:
    try:
        LocalTracker(part.config, settings).run(stop)
    except FencedError as error:
        recorder.record("error", text=f"fenced: {error}")
        return False
    except KafkaMQError as error:
        recorder.record("error", text=f"{type(error).__name__}: {error}")
    return True


if __name__ == "__main__":
    arguments: list[Any] = sys.argv[1:]
    main(*arguments)
