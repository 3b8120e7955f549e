"""What givers of verdicts by token were told (R34)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kafkamq.errors import BrokerError, DeadlineExceededError, LeaseLostError, StateError
from kafkamq.types import MessageId, Outcome


@dataclass(slots=True)
class Said:
    """A verdict that somebody gave on a message whose token was passed on."""

    message_id: MessageId
    outcome: Outcome
    counted: bool | None = None  # as its giver was told; None: it was not


def say(
    told: list[Said], message_id: MessageId, outcome: Outcome, give: Callable[[], None]
) -> None:
    """Give a verdict, and note what its giver was told."""
    said = Said(message_id, outcome)
    told.append(said)  # first: who is killed inside was told nothing
    try:
        give()
    except (StateError, LeaseLostError):
        said.counted = False
    except (BrokerError, DeadlineExceededError):
        return
    else:
        said.counted = True
