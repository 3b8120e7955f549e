"""Handlers and workers that a command names as ``module:name``."""

from __future__ import annotations

import importlib
import sys

from kafkamq.errors import ConfigError


def load_named(name: str, what: str, *, form: str) -> object:
    """What stands in a module under a name, which may have dots."""
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise ConfigError(f"the {what} is {name!r}: name it as {form}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the folder that the command was given in, as with python -m
    try:
        found: object = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the {what} {name!r} cannot be loaded: {error}") from error
    return found
