"""A handler that is called in other processes."""

from __future__ import annotations

import os
from pathlib import Path

from kafkamq.kafka.parallel.record import PlainRecord


def double_check(record: PlainRecord) -> None:
    """Notes the offset in the file that is the key; dies once, at record 50."""
    path = Path((record.key or b"").decode())
    path.with_name(f"pid-{os.getpid()}").touch()
    died = path.with_name("died")
    if record.offset == 50 and not died.exists():
        died.touch()
        os._exit(1)
    with path.open("a") as file:
        file.write(f"{record.offset}\n")
