"""The commands of the program ``kafkamq``; they hold no rule of a queue."""

from __future__ import annotations

import sys

__all__ = ["main"]

_EXTRA = ("typer", "rich")


def main() -> None:
    """Runs the program, or says in a line which extra it needs."""
    try:
        from kafkamq.cli.app import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        sys.exit(f"kafkamq: the command needs {error.name}: pip install 'kafkamq[cli]'")
    run()
