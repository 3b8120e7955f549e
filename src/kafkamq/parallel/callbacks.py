"""Calls functions of the user's that only want to know: what they raise is logged."""

from __future__ import annotations

import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)


def tell(name: str, hook: Callable[..., object] | None, *facts: object) -> object:
    """What the hook returns; None also where there is none, or it failed."""
    if hook is None:
        return None
    try:
        return hook(*facts)
    except BaseException:  # noqa: BLE001 - whatever it is, the work goes on
        _log.exception("a hook failed", extra={"hook": name})
        return None
