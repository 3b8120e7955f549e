"""How long the stages of a start take, for its log: a restart delays every redelivery by them."""

from __future__ import annotations

import logging
import time

_log = logging.getLogger(__name__)


class Stages:
    """The stages of one start, one after the other; begins when it is made."""

    def __init__(self) -> None:
        self._began_s = self._last_s = time.monotonic()
        self.took_s: dict[str, float] = {}

    def done(self, name: str) -> None:
        now_s = time.monotonic()
        self.took_s[name] = round(now_s - self._last_s, 2)
        self._last_s = now_s
        _log.debug("%s: done after %.2f s", name, now_s - self._began_s)
