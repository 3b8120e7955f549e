"""States of claims that the seeds must reach, each at least once."""

from __future__ import annotations

from kafkamq.claims.rules.steps import End

_LINES = {
    "claims: a record could not be sent": "a coordination record could not be sent",
    "claims: offsets could not be looked up": "offsets of claimed partitions could not be looked",
    "claims: a position could not be committed": "a position could not be committed to Kafka",
    "claims: a former owner's output was refused": "an output may be missing",
    "claims: a message comes again": "a message comes again",
}
_ENDS = (End.TAKEN, End.EXPIRED, End.FENCED, End.BEHIND, End.STUCK, End.RELEASED, End.KEPT)
_OF_LEDGERS = (
    "claims: a partition or an offset has another owner",
    "claims: handed out again",
    "claims: a batch was lost",
    *(f"claims: {end.value}" for end in (*_ENDS, End.PAUSED)),
)
CLAIM_STATES = frozenset([*_LINES, *_OF_LEDGERS])


def of_claim_line(message: str) -> list[str]:
    """The states that a line of log tells of."""
    return [state for state, begin in _LINES.items() if message.startswith(begin)]
