"""Markers and ledgers as tests, faults and benchmarks write and read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kafkamq.config import ServiceConfig
from kafkamq.markers.tracker.ledger import LedgerKey, read_ledgers
from kafkamq.markers.wire.markers import encode_marker
from kafkamq.markers.wire.records import Position
from kafkamq.transport.admin import Admin
from kafkamq.types import Marker, MarkerType, MessageId


def encode_start(message_id: MessageId, key: bytes, value: bytes | None, **facts: Any) -> bytes:
    """Return a START of one message; ``facts`` are other fields of a ``Marker``."""
    return encode_marker(Marker(MarkerType.START, message_id, key=key, value=value, **facts))


def read_positions(config: ServiceConfig, keys: Sequence[LedgerKey]) -> dict[LedgerKey, Position]:
    """Return what the ledgers hold; a key without a commit is absent."""
    with Admin(config) as admin:
        return read_ledgers(admin, keys)
