"""Two stages of workers that end in every way, and what their histories prove.

A worker of the first stage sends each message on and then acks it; one of the second stage only
acks. Both nack and reject some, die, close early with messages in hand, and are late. What becomes
of a message follows from its number, so that a rejected one is rejected by everybody.

Run as ``python -m tests.faults.chain '{...}'``, with a ``Chain`` as JSON; it ends on SIGTERM.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter as Count
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.faults import Event, Recorder, read_histories

from kafkamq import Consumer, LeaseLostError, Message, Queue, Service
from kafkamq.config import Backoff, ServiceConfig
from kafkamq.queue.dead_letters import read_dead_letters
from kafkamq.queue.producer import Producer
from kafkamq.runtime.signals import stop_on_signals
from kafkamq.types import DeadLetterReason, MessageId

__all__ = ["Chain", "Key", "Progress", "body", "is_rejected", "judge", "queue_of", "service_of"]

SENT = "chain-sent"
NACKS, REJECTS = 0.03, 0.02
BATCH = 200
TIMES = 5  # that a stage's workers die, close early, or are late, each; about
Key = tuple[int, str]
"""A message's number, and which send of it it is; nothing for the test's own."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """One run, and whose part in it."""

    bootstrap_servers: str
    namespace: str
    folder: str
    backend: str
    count: int
    stage: int = 0
    name: str = "test"
    is_careless: bool = False  # acks before it has sent


def body(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest() * (1 + number % 8)


def is_rejected(number: int, stage: int) -> bool:
    return random.Random(f"{number} rejected at {stage}").random() < REJECTS


def queue_of(service: Service, chain: Chain, stage: int) -> Queue:
    """Stages are 1 and 2."""
    options: dict[str, Any] = {}
    if chain.backend != "share":
        options["backoff"] = Backoff(first=0.2, max=1.0)
        options["redelivery_timeout"] = 6.0
    return service.queue(f"stage{stage}", backend=chain.backend, max_deliveries=50, **options)


def service_of(chain: Chain) -> Service:
    kafka = {"session.timeout.ms": "6000"} if chain.backend == "offsets" else {}
    return Service(chain.bootstrap_servers, chain.namespace, kafka=kafka)


# ---- the worker


class Worker:
    """One process of one stage."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._recorder = Recorder(chain.folder, chain.name)
        self._chance = random.Random(chain.name)
        self._who = ""  # one of its consumers
        self._serial = 0
        self._keys: dict[tuple[int, int], Key] = {}  # by place, of what the consumer has had
        self._given: list[Key] = []  # acked or rejected, and not confirmed
        self._flushed_s = 0.0

    def run(self, stop: threading.Event) -> None:
        """Consumers one after the other: each but the last is closed early."""
        chain = self._chain
        with service_of(chain) as service:
            queue = queue_of(service, chain, chain.stage)
            producer = queue_of(service, chain, 2).producer() if chain.stage == 1 else None
            while not stop.is_set():
                self._serial += 1
                self._who = f"{chain.name}.{self._serial}"
                self._keys, self._given = {}, []
                consumer = queue.consumer(on_lease_lost=self._lost)
                is_early = False
                while not stop.is_set() and not is_early:
                    is_early = self._turn(consumer, producer)
                if is_early:
                    self._say("closing")
                try:
                    self._confirm(consumer)
                    consumer.close(20)
                except LeaseLostError as error:
                    self._late(error)
                if not is_early:
                    self._say("ended")

    def _turn(self, consumer: Consumer, producer: Producer | None) -> bool:
        """Whether to close early."""
        messages = consumer.receive_many(BATCH, 0.2)
        got = [(key_of(message), message) for message in messages]
        for key, message in got:
            place = message.message_id
            self._keys[place.partition, place.offset] = key
        if got:
            bad = [key for key, message in got if message.payload != body(key[0])]
            self._say("got", items=[[*key, each.delivery_count] for key, each in got], bad=bad)
        outcomes = [self._outcome(key, message) for key, message in got]
        chosen = list(zip(got, outcomes, strict=True))
        acked = [key for (key, _), outcome in chosen if outcome == "ack"]
        if self._chain.is_careless:
            self._give(chosen)
            self._confirm(consumer)
            if acked and self._chance.random() < 0.2:
                os._exit(9)
        if producer is not None:
            self._send(producer, acked)
        if self._is_time(len(got)):
            os._exit(9)  # between send and ack
        if self._is_time(len(got)):
            time.sleep(8.0 if self._chain.backend == "markers" else 0.5)
        is_early = self._is_time(len(got))
        if not self._chain.is_careless:
            self._give(chosen[: len(chosen) // 2] if is_early else chosen)
        if not got or time.monotonic() - self._flushed_s > 0.5:
            self._confirm(consumer)
        return is_early

    def _is_time(self, count: int) -> bool:
        return self._chance.random() < min(0.2, count * TIMES / self._chain.count)

    def _outcome(self, key: Key, message: Message) -> str:
        if is_rejected(key[0], self._chain.stage):
            return "reject"
        is_nack = message.delivery_count == 1 and self._chance.random() < NACKS
        return "nack" if is_nack else "ack"

    def _send(self, producer: Producer, keys: Sequence[Key]) -> None:
        nonce = f"{self._who}-{time.monotonic_ns()}"
        if keys:
            self._say("sends", items=[[number, nonce] for number, _ in keys])
        sent = [
            producer.send(body(number), id=str(number), headers={SENT: nonce.encode()})
            for number, _ in keys
        ]
        for each in sent:
            each.result(60)

    def _give(self, chosen: Sequence[tuple[tuple[Key, Message], str]]) -> None:
        for outcome in ("ack", "nack", "reject"):
            keys = [key for (key, _), chose in chosen if chose == outcome]
            if keys:
                self._say("gives", outcome=outcome, items=keys)
        for (key, message), outcome in chosen:
            self._give_one(key, message, outcome)

    def _give_one(self, key: Key, message: Message, outcome: str) -> None:
        try:
            if outcome == "ack":
                message.ack()
            elif outcome == "nack":
                message.nack(reason="again")
            else:
                message.reject("no")
        except LeaseLostError:
            self._say("late", items=[key])
        else:
            if outcome != "nack":
                self._given.append(key)

    def _confirm(self, consumer: Consumer) -> None:
        self._flushed_s = time.monotonic()
        given, self._given = self._given, []
        try:
            consumer.flush(60)
        except LeaseLostError as error:
            late = self._late(error) or given  # of claims: nobody knows which
            self._say("late", items=late)
            given = [key for key in given if key not in late]
        if given:
            self._say("confirmed", items=given)

    def _lost(self, message: Message) -> None:
        self._say("late", items=[key_of(message)])

    def _late(self, error: LeaseLostError) -> list[Key]:
        ids = [each for each in error.messages if isinstance(each, MessageId)]
        late = [self._keys[each.partition, each.offset] for each in ids]
        self._say("late", items=late)
        return late

    def _say(self, op: str, **fields: object) -> None:
        self._recorder.record(op, who=self._who, stage=self._chain.stage, **fields)


def key_of(message: Message) -> Key:
    return int(message.id), (message.headers.get(SENT) or b"").decode()


# ---- the test's side


class Progress:
    """Which numbers have an end, by stage: a verdict, or a dead letter for too many deliveries."""

    def __init__(self, chain: Chain) -> None:
        self._folder = Path(chain.folder)
        self._config = ServiceConfig(
            bootstrap_servers=chain.bootstrap_servers, namespace=chain.namespace
        )
        self._read: dict[Path, int] = {}
        self.done: dict[int, set[int]] = {1: set(), 2: set()}
        self.dead: dict[int, set[int]] = {1: set(), 2: set()}

    def look(self) -> int:
        """How many ends of either stage there are; reads what histories have more."""
        for path in self._folder.glob("stage*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                said = json.loads(line)
                if said["op"] == "gives" and said["outcome"] != "nack":
                    self.done[said["stage"]].update(number for number, _ in said["items"])
        # What is a dead letter of the first stage does not come to the second one.
        gone = {number for number in self.dead[1] if not is_rejected(number, 1)}
        second = self.done[2] | self.dead[2] | gone
        return len(self.done[1] | self.dead[1]) + len(second)

    def look_at_letters(self) -> None:
        """The dead letters that no verdict asked for."""
        for letter in read_dead_letters(self._config):
            if letter.reason != DeadLetterReason.REJECTED.value:
                stage = int(letter.queue_id.removeprefix("stage"))
                self.dead[stage].add(int(letter.id))


@dataclass(slots=True)
class _Delivery:
    who: str
    count: int
    outcome: str = ""
    is_late: bool = False
    is_confirmed: bool = False


class _Run:
    """What histories tell."""

    def __init__(self, folder: Path) -> None:
        self.deliveries: dict[tuple[int, Key], list[_Delivery]] = defaultdict(list)
        self.sends: set[Key] = set()
        self.ended: set[str] = set()  # consumers that were not closed early
        self.wrong: list[str] = []
        self.figures: Count[str] = Count()
        self._latest: dict[tuple[str, Key], _Delivery] = {}
        for event in read_histories(folder):
            self.figures[event.op] += 1 if event.op in ("ended", "closing") else len(event["items"])
            self._apply(event)

    def _apply(self, event: Event) -> None:
        who, stage = event["who"], event["stage"]
        if event.op == "got":
            self.wrong += [f"{key} at stage {stage} has another body" for key in event["bad"]]
            for number, nonce, count in event["items"]:
                found = self._latest[who, (number, nonce)] = _Delivery(who, count)
                self.deliveries[stage, (number, nonce)].append(found)
        elif event.op == "sends":
            self.sends.update((number, nonce) for number, nonce in event["items"])
        elif event.op == "ended":
            self.ended.add(who)
        elif event.op != "closing":
            for number, nonce in event["items"]:
                delivery = self._latest[who, (number, nonce)]
                delivery.outcome = event.fields.get("outcome", delivery.outcome)
                delivery.is_late |= event.op == "late"
                delivery.is_confirmed |= event.op == "confirmed"


def judge(
    folder: Path, count: int, dead: Mapping[int, set[int]], *, counts_add_up: bool
) -> tuple[list[str], dict[str, int]]:
    """What was wrong, and figures; ``dead``: of each stage, the numbers of dead letters."""
    run = _Run(folder)
    wrong, sends, figures = run.wrong, run.sends, run.figures
    verdicts = {stage: set(numbers) for stage, numbers in dead.items()}
    figures["dead"] = sum(map(len, dead.values()))
    for (stage, key), found in run.deliveries.items():
        if stage == 2 and key not in sends:
            wrong.append(f"{key} at stage 2 was sent by nobody")
        verdicts[stage] |= {key[0] for each in found if each.outcome in ("ack", "reject")}
        figures["again"] += len(found) - 1
        wrong += _again(stage, key, found, counts_add_up=counts_add_up)
        for each in found:
            is_known = each.is_confirmed or each.is_late or each.outcome == "nack"
            if each.who in run.ended and not is_known:
                wrong.append(f"{key} at stage {stage}: {each} is neither confirmed nor late")
    goes_on = {number for number in range(count) if not is_rejected(number, 1)}
    due = goes_on - (dead[1] - verdicts[2])
    wrong += [f"{number} has no verdict at stage 1" for number in set(range(count)) - verdicts[1]]
    wrong += [f"{number} has no verdict at stage 2" for number in due - verdicts[2]]
    sent = {number for number, _ in sends}
    wrong += [f"{number} is rejected, and goes on" for number in sent - goes_on]
    figures["sent twice"] = len(sends) - len(sent)
    return wrong, dict(figures)


def _again(stage: int, key: Key, found: Sequence[_Delivery], *, counts_add_up: bool) -> list[str]:
    """A message comes again only if who had it nacked it, was late, or ended without knowing."""
    wrong = []
    for before, after in pairwise(found):
        if before.is_confirmed and not before.is_late and before.outcome != "nack":
            wrong.append(f"{key} at stage {stage} comes again: {before}, {after}")
        if (counts_add_up or before.who == after.who) and after.count <= before.count:
            wrong.append(f"{key} at stage {stage}: its count does not rise: {before}, {after}")
    return wrong


def main(settings: str) -> None:
    stop = threading.Event()
    stop_on_signals(stop.set, (signal.SIGTERM,))
    Worker(Chain(**json.loads(settings))).run(stop)


if __name__ == "__main__":
    main(sys.argv[1])
