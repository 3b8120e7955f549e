"""RC5: positions for a restart of a whole group of range claims, best effort."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kafkamq.config import ServiceConfig
from kafkamq.errors import KafkaMQError
from kafkamq.transport.commits import GroupOffsets, PendingCommit

_log = logging.getLogger(__name__)


class RangePositions:
    """Commits what is new; one owner thread."""

    def __init__(self, config: ServiceConfig, topic: str, group_id: str) -> None:
        self._topic = topic
        self._committed: dict[int, int] = {}
        self._begun: list[PendingCommit] = []
        self._offsets = GroupOffsets(config, group_id)

    def commit(self, positions: Mapping[int, int], *, is_last: bool) -> None:
        """By partition; the last ones are waited for, and written once more."""
        try:
            self._offsets.serve()  # its events must go somewhere
            self._hear()
            news = {
                number: at
                for number, at in positions.items()
                if at > (0 if is_last else self._committed.get(number, 0))
            }
            self._committed.update(news)
            places = {(self._topic, number): at for number, at in news.items()}
            if places and is_last:
                self._offsets.commit(places)
            elif places:
                self._begun.append(self._offsets.begin(places))
        except (KafkaMQError, RuntimeError):
            _log.debug("positions of ranges could not be committed")

    def _hear(self) -> None:
        """What was not committed is committed again."""
        for pending in self._begun:
            if pending.error is not None:
                for each in pending.offsets:
                    self._committed.pop(each.partition, None)
        self._begun = [each for each in self._begun if not each.is_answered]

    def close(self) -> None:
        """End the client."""
        self._offsets.close()
