"""What is in order with what: the choices of a parallel consumer."""

from __future__ import annotations

from enum import Enum


class Ordering(Enum):
    """What stays in order."""

    UNORDERED = "unordered"
    KEY = "key"
    PARTITION = "partition"


class NullKeys(Enum):
    """How records without a key are handed out by key."""

    SERIAL = "serial"  # as if they had one key in common
    PARALLEL = "parallel"  # in no order
