"""Picks out of a broker's log what a person needs to see."""

from __future__ import annotations

import re

MAX_LINES = 15
MAX_LINE_LENGTH = 500
_RECORD = re.compile(r"(\S+ )?\[[^\]]+\] (TRACE|DEBUG|INFO|WARN|ERROR) |(ERROR) ")


def errors_in(text: str) -> str:
    """The last errors and the exceptions below them; the end of the log when it has none."""
    chosen: list[str] = []
    is_error = False
    for line in text.splitlines():
        record = _RECORD.match(line)
        if record is not None:
            is_error = "ERROR" in (record[2], record[3])
        if is_error and not line.startswith(("\t", "    at ")):  # no stack frames
            chosen.append(line)
    if not chosen:
        chosen = [line for line in text.splitlines() if line.strip()]
    return "\n".join(line[:MAX_LINE_LENGTH] for line in chosen[-MAX_LINES:])
