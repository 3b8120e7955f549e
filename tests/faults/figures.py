"""What a fault test saw, said in the summary at the end of the run, and kept where one asks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["MARK", "say"]

MARK = "figures: "
"""How lines begin that the summary repeats."""
_REPORT = os.environ.get("KAFKAMQ_FAULTS_REPORT", "")  # JSON lines, for evidence.md


def say(row: Mapping[str, object]) -> None:
    """Print one run's figures, its seed among them."""
    line = json.dumps(row)
    print(MARK + line)  # noqa: T201 - tests/conftest.py collects it
    if _REPORT:
        with Path(_REPORT).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
