"""The text of a verdict: what the user's code raised or gave, made fit for a header."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from kafkamq.errors import LeaseLostError, StateError
from kafkamq.queue.wire.headers import cut_text
from kafkamq.types import Outcome

if TYPE_CHECKING:
    from kafkamq.markers.message import Message

__all__ = ["clean", "reason_of", "settle_at_exit"]

_log = logging.getLogger(__name__)


def clean(reason: object) -> str:
    """A reason as it can be written: at most 4096 bytes, without lone surrogates."""
    return cut_text(reason if isinstance(reason, str) else repr(reason))


def reason_of(error: BaseException) -> str:
    """The kind of an error and what it says; never raises."""
    try:
        return clean(f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001 - of the user's own __str__: the verdict matters more
        return type(error).__name__


def settle_at_exit(
    settle: Callable[..., None], message: Message, error: BaseException | None
) -> None:
    """The verdict that leaving ``with message:`` is: an ack, or a nack when it raised."""
    if error is None:
        settle(message, Outcome.ACK)
        return
    try:
        settle(message, Outcome.NACK, reason=reason_of(error))
    except (LeaseLostError, StateError) as refusal:  # the handler's own error goes on
        _log.warning(
            "a failed message could not be given back",
            extra={"queue": message.queue_id, "said": str(refusal)},
        )
