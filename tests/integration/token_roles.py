"""Holders and givers of verdicts by token, for tests that kill them.

Run: python -m tests.integration.token_roles hold|settle BOOTSTRAP NAMESPACE FOLDER SEED

Holders write each token as a line of FOLDER/tokens; givers write what they say and what they are
told to a file of their own there, each line before or after the call that it is about.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.waiting import within

from kafkamq import Queue, Service
from kafkamq.errors import BrokerError, DeadlineExceededError, LeaseLostError, StateError
from kafkamq.queue.message import Message
from kafkamq.types import Outcome

T = within(2.0)


class Journal:
    """A file that is added to, line by line; what was written survives SIGKILL."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def write(self, *words: object) -> None:
        """One line, in one call of the system."""
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


def _place(message: Message) -> str:
    one = message.message_id
    return f"{one.partition}:{one.offset}:{one.topic_id.hex()}:{one.leader_epoch}"


def hold(queue: Queue, folder: Path, rng: random.Random) -> None:
    """Half of what it gets it hands over, half it shares, and acks some of that itself."""
    tokens, said = Journal(folder / "tokens"), Journal(folder / f"said-{os.getpid()}")
    with queue.consumer() as consumer:
        while True:
            for message in consumer.receive_many(5, 0.5):
                place = _place(message)
                try:
                    if rng.random() < 0.5:
                        tokens.write(place, message.hold(rng.uniform(0.5, 3) * T))
                        continue
                    tokens.write(place, message.token)
                    if rng.random() < 0.3:
                        _say(said, place, Outcome.ACK, message.ack)
                except LeaseLostError:
                    continue


def settle(queue: Queue, folder: Path, rng: random.Random) -> None:
    """Takes any of the last tokens: others take the same."""
    said, path = Journal(folder / f"said-{os.getpid()}"), folder / "tokens"
    while True:
        lines = path.read_text().splitlines() if path.exists() else []
        if not lines:
            time.sleep(0.1)
            continue
        place, token = rng.choice(lines[-20:]).split(" ")
        outcome = rng.choice((Outcome.ACK, Outcome.ACK, Outcome.NACK, Outcome.REJECT))
        _say(said, place, outcome, partial(_give, queue, outcome, token))


def _give(queue: Queue, outcome: Outcome, token: str) -> None:
    if outcome is Outcome.ACK:
        queue.ack(token)
    elif outcome is Outcome.NACK:
        queue.nack(token, delay=0.5, reason="again")
    else:
        queue.reject(token, "no good")


def _say(said: Journal, place: str, outcome: Outcome, give: Callable[[], None]) -> None:
    said.write(place, outcome.name, "begins")
    try:
        give()
    except (StateError, LeaseLostError):
        said.write(place, outcome.name, "refused")
    except (BrokerError, DeadlineExceededError):
        return
    else:
        said.write(place, outcome.name, "counted")


def main(role: str, bootstrap: str, namespace: str, folder: str, seed: str) -> None:
    """Until it is killed."""
    with Service(bootstrap, namespace, kafka={"session.timeout.ms": "6000"}) as service:
        queue = service.queue("a", redelivery_timeout=T, max_deliveries=50)
        run = hold if role == "hold" else settle
        run(queue, Path(folder), random.Random(f"{role} {seed}"))


if __name__ == "__main__":
    main(*sys.argv[1:])
