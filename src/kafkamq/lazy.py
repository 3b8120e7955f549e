"""Names of a package that load when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def loader(package: str, homes: Mapping[str, tuple[str, ...]]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package; ``homes`` has the names that each module gives."""
    home = {name: module for module, names in homes.items() for name in names}

    def load(name: str) -> object:
        module = home.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    return load
