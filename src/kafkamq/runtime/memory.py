"""Python's garbage collector and glibc's malloc, set for processes that hold much for a moment."""

from __future__ import annotations
