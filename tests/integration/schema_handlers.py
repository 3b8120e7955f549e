"""Handlers of schemas that run in processes of their own, and what they take."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

_FIELDS = """{"name": "id", "type": "long"}, {"name": "file", "type": "string", "default": ""},
    {"name": "raw", "type": "bytes"}, {"name": "price", "type":
        {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}}"""
FIRST = f"""{{"type": "record", "name": "Order", "fields": [{_FIELDS}]}}"""
SECOND = f"""{{"type": "record", "name": "Order", "fields": [{_FIELDS},
    {{"name": "note", "type": "string", "default": "none"}}]}}"""


@dataclass
class Order:
    id: int
    file: str = ""
    raw: bytes = b"\xff"
    price: Decimal = Decimal("1.50")


def write(order: Order) -> None:
    """Leaves a file."""
    Path(order.file).write_text(str(order.id))
