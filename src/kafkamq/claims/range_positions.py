"""RC5: positions for a restart of a whole group of range claims, best effort."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kafkamq.config import ServiceConfig
from kafkamq.errors import KafkaMQError
from kafkamq.transport.group_consumer import GroupOffsets, lost_commits
from kafkamq.transport.record import Place

_log = logging.getLogger(__name__)


class RangePositions:
    """Commits what is new; one owner thread."""

    def __init__(self, config: ServiceConfig, topic: str, group_id: str) -> None:
        self._topic = topic
        self._committed: dict[int, int] = {}
        self._offsets = GroupOffsets(config, group_id, on_commit=lost_commits(self._forget))

    def commit(self, positions: Mapping[int, int], *, is_last: bool) -> None:
        """By partition; the last ones are waited for, and written once more."""
        news = {
            number: at
            for number, at in positions.items()
            if at > (0 if is_last else self._committed.get(number, 0))
        }
        self._committed.update(news)
        places = {(self._topic, number): at for number, at in news.items()}
        try:
            self._offsets.serve()  # its events must go somewhere
            if places and is_last:
                self._offsets.commit(places)
            elif places:
                self._offsets.commit_soon(places)
        except (KafkaMQError, RuntimeError):
            _log.debug("positions of ranges could not be committed")

    def _forget(self, partition: Place) -> None:
        """It was not committed: the next ``commit`` does it again."""
        self._committed.pop(partition[1], None)

    def close(self) -> None:
        """End the client."""
        self._offsets.close()
