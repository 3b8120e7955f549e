"""An earlier revision of this project, in a worktree and an environment of its own."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["python_of"]

_ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def python_of(revision: str) -> Iterator[str]:
    """The Python that imports kafkamq as of ``revision``; the worktree goes with the block.

    Making the environment takes a minute. Programs that run in both use public names alone, or
    names that both have.
    """
    with tempfile.TemporaryDirectory(prefix="kafkamq-before-") as folder:
        tree = Path(folder, "tree")
        _git("worktree", "add", "--quiet", "--detach", str(tree), revision)
        try:
            subprocess.run(["make", "--silent", "-C", str(tree), ".venv/.installed"], check=True)
            yield str(tree / ".venv/bin/python")
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> None:
    subprocess.run(["git", "-C", str(_ROOT), *arguments], check=True)
