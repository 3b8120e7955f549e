"""Waiting for a state, in tests."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_until"]


def wait_until(
    condition: Callable[[], object], what: str = "the state", timeout_s: float = 60.0
) -> None:
    """Return when it holds; how soon says how busy the machine is."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.005)
