"""How much of what repeats is tried, and whether it is the same each time.

`make test` tries the same examples each time, so that what it finds is of the change. `make check`
tries a part of them; `make test-faults` more, and others each time.
"""

from __future__ import annotations

import os

__all__ = ["IS_FRESH", "IS_QUICK", "examples"]

IS_QUICK = bool(os.environ.get("QUICK_TESTS"))
"""Set by `make check`."""

IS_FRESH = bool(os.environ.get("FRESH_EXAMPLES"))
"""Set by `make test-faults`."""

_PART = 5
_MORE = 5


def examples(count: int) -> int:
    """So many examples, seeds or steps of a test; fewer or more where the run is to be so."""
    if IS_FRESH:
        return _MORE * count
    return -(-count // _PART) if IS_QUICK else count
