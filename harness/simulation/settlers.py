"""Verdicts by token in a simulation: who gives them, and whether what they were told is true (R34).

A settler is a process without a consumer, as one behind a web hook is: workers pass it tokens, some
of them to several settlers. ``untrue`` judges by the logs alone, with no code of what it judges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafkamq.errors import BrokerError, DeadlineExceededError, LeaseLostError, StateError
from kafkamq.queue.service import Service
from kafkamq.testing.history import Ending, MessageHistory, Timeline, Why
from kafkamq.types import MarkerType, MessageId, Outcome, PartitionOffset

if TYPE_CHECKING:
    from harness.simulation.processes import QueueWorld
    from harness.simulation.scheduler import Process
    from kafkamq.queue.service import Queue

_OUTCOMES = (Outcome.ACK, Outcome.ACK, Outcome.NACK, Outcome.REJECT)


class SettlerProcess:
    """A process that gives verdicts by the tokens that workers pass it."""

    def __init__(self, world: QueueWorld, open_queue: Callable[[Service], Queue]) -> None:
        self.is_closing = False
        self._world = world
        self._open_queue = open_queue

    def main(self, _: Process) -> None:
        """Run until it is told to close."""
        world, rng = self._world, self._world.rng
        with Service(world.servers, world.namespace) as service:
            queue = self._open_queue(service)
            while not self.is_closing:
                if not world.tokens:
                    world.sleep(0.1)
                    continue
                at = rng.randrange(len(world.tokens))
                message_id, token = world.tokens[at]
                if rng.random() < 0.7:  # else another one has it, too, or this one again
                    world.tokens.pop(at)
                world.sleep(rng.uniform(0, 1))
                self._settle(queue, message_id, token)

    def _settle(self, queue: Queue, message_id: MessageId, token: str) -> None:
        world, rng = self._world, self._world.rng
        timeout_s = world.limits.worker.redelivery_timeout_ms / 1000
        if rng.random() < 0.2:
            try:
                queue.extend(token, rng.uniform(0.1, 2) * timeout_s)
            except (StateError, LeaseLostError, BrokerError, DeadlineExceededError):
                return
        outcome = rng.choice(_OUTCOMES)

        def give() -> None:
            if outcome is Outcome.ACK:
                queue.ack(token)
            elif outcome is Outcome.NACK:
                queue.nack(token, delay=rng.uniform(0, 2), reason="again")
            else:
                queue.reject(token, "no good")

        say(world.told.reported, message_id, outcome, give)


# ---- the judge


def untrue(
    reported: Sequence[Reported], timelines: Mapping[int, Timeline], *, excuses: bool
) -> Iterator[tuple[PartitionOffset, str]]:
    """Yield what givers of verdicts were told and the log has otherwise; places, and texts.

    ``excuses``: clocks were set, or else nobody knows whether a lease had ended; as where a message
    has two STARTs, of which a giver knows one.
    """
    by_message: dict[MessageId, list[Reported]] = {}
    for each in reported:
        by_message.setdefault(each.message_id, []).append(each)
    for message_id, given in by_message.items():
        place = message_id.partition, message_id.offset
        found = [
            (timeline, history)
            for timeline in timelines.values()
            for history in timeline.histories_of(message_id)
        ]
        starts = sum(_count(timeline, message_id) for timeline in timelines.values())
        if excuses or starts != 1:
            continue
        counted = [each.outcome for each in given if each.counted]
        for outcome in Outcome:
            if counted.count(outcome) > 1:
                yield place, f"{counted.count(outcome)} verdicts were told to count: {outcome.name}"
            if outcome in counted and not any(_has(*each, outcome) for each in found):
                yield place, f"a verdict was told to count that does not: {outcome.name}"
        if Outcome.REJECT in counted and len(counted) > 1:
            yield place, "a rejection was told to count, and another verdict"
        if all(each.counted is False for each in given):
            for outcome in (Outcome.ACK, Outcome.NACK, Outcome.REJECT):
                if any(_has(*each, outcome) for each in found):
                    yield (
                        place,
                        f"all were told that they do not count, and one does: {outcome.name}",
                    )


def _has(timeline: Timeline, history: MessageHistory, outcome: Outcome) -> bool:
    """Return whether a verdict with this outcome counted."""
    if outcome is Outcome.ACK:
        return history.ending is Ending.ACKED
    if outcome is Outcome.REJECT:
        return history.why is Why.REJECTED
    if outcome is not Outcome.NACK or history.why not in (None, Why.NACKED):
        return False
    own = timeline.of_message[False, history.message_id]
    return any(
        timeline.marker(at).type is MarkerType.END and timeline.marker(at).outcome is outcome
        for at in own
        if history.begin < at < history.end
    )


def _count(timeline: Timeline, message_id: MessageId) -> int:
    own = timeline.of_message.get((False, message_id), ())
    return sum(timeline.marker(at).type is MarkerType.START for at in own)


@dataclass(slots=True)
class Reported:
    """A verdict that somebody gave on a message whose token was passed on."""

    message_id: MessageId
    outcome: Outcome
    counted: bool | None = None  # as its giver was told; None: it was not


def say(
    told: list[Reported], message_id: MessageId, outcome: Outcome, give: Callable[[], None]
) -> None:
    """Give a verdict, and note what its giver was told."""
    reported = Reported(message_id, outcome)
    told.append(reported)  # first: who is killed inside was told nothing
    try:
        give()
    except (StateError, LeaseLostError):
        reported.counted = False
    except (BrokerError, DeadlineExceededError):
        return
    else:
        reported.counted = True
