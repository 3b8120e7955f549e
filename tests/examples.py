"""How much of what repeats is tried: `make check` tries a part, `make test` all of it."""

from __future__ import annotations

import os

__all__ = ["IS_QUICK", "examples"]

IS_QUICK = bool(os.environ.get("QUICK_TESTS"))
"""Set by `make check`."""

_PART = 5


def examples(count: int) -> int:
    """So many examples, seeds or steps of a test; a part of them where it is to be quick."""
    return -(-count // _PART) if IS_QUICK else count
