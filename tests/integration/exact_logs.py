"""Judges an ``exactly_once`` queue by its markers alone."""

from __future__ import annotations

from dataclasses import dataclass

from tests.integration.queue_logs import MarkerRecord

from kafkamq.types import MarkerType, MessageId

__all__ = ["SecondStart", "second_starts"]


@dataclass(frozen=True)
class SecondStart:
    """A message that was STARTed while another consumer's START of it stood in the log."""

    message_id: MessageId
    first: MarkerRecord
    second: MarkerRecord


def second_starts(records: list[MarkerRecord]) -> list[SecondStart]:
    """STARTs of messages that had one already; a copy is another message, with its own START.

    With ``exactly_once`` there is none at all: a START is in the log only together with the offset
    behind its message, so no worker, alive or not, is given that message again.
    """
    found = []
    first: dict[MessageId, MarkerRecord] = {}
    for record in records:  # all markers of a message are in one partition, in their order
        marker = record.marker
        if marker.type is not MarkerType.START or marker.message_id is None:
            continue
        known = first.setdefault(marker.message_id, record)
        if known is not record:
            found.append(SecondStart(marker.message_id, known, record))
    return found
