"""Columns of 64-bit integers beside a small JSON table, as one binary cell.

Cells live for one batch, between processes of the same release; they are no storage format.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from typing import Any

_HEAD = struct.Struct("<III")  # rows, columns, bytes of the table


def pack(columns: Sequence[Sequence[int]], table: object = None) -> bytes:
    """Columns of equal length, and a value that JSON can hold."""
    text = json.dumps(table, separators=(",", ":")).encode()
    parts = [_HEAD.pack(len(columns[0]), len(columns), len(text)), text]
    parts += [array("q", column).tobytes() for column in columns]
    return b"".join(parts)


def unpack(data: bytes) -> tuple[list[list[int]], Any]:
    rows, count, table_bytes = _HEAD.unpack_from(data)
    start = _HEAD.size + table_bytes
    table = json.loads(data[_HEAD.size : start])
    columns = []
    for _ in range(count):
        column = array("q")
        column.frombytes(data[start : start + 8 * rows])
        columns.append(column.tolist())
        start += 8 * rows
    return columns, table
