"""Handlers that run in processes of their own: importable there."""

from __future__ import annotations

import os
import time


def die_or_hang(body: str) -> None:
    """What the body says."""
    if body == "die":
        os._exit(7)
    if body == "hang":
        time.sleep(60)
