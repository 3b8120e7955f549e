"""How the asyncio twins call what blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Runs it in a thread of the loop's pool; cancelling stops the wait, not the call."""
    return await asyncio.to_thread(function, *args, **kwargs)
