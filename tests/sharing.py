"""One thing that several processes use: whoever comes first makes it, and keeps it to the end."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["shared"]


@contextmanager
def shared(place: Path, make: Callable[[], str]) -> Iterator[str]:
    """Yield what ``make`` returns, for whoever comes first, and the same for all others.

    Who made it returns only when nobody uses it any more; it may then be made again.

    Args:
        place: Beside it, files say what was made, and who uses it.
        make: Called while nobody else has one.
    """
    making = place.with_suffix(".making").open("w")
    using = place.with_suffix(".using").open("w")
    with making, using:
        fcntl.flock(making, fcntl.LOCK_EX)
        try:
            fcntl.flock(using, fcntl.LOCK_SH)
            is_ours = not (place.exists() and place.read_text())
            if is_ours:
                place.write_text(make())
            made = place.read_text()
        finally:
            fcntl.flock(making, fcntl.LOCK_UN)
        try:
            yield made
        finally:
            if is_ours:
                fcntl.flock(using, fcntl.LOCK_EX)
                place.write_text("")
