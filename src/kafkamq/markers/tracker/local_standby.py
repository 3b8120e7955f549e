"""A local tracker that waits while an engine of another kind is active (R36).

Replicas of the local tracker are one engine and share the partitions (R22), so one that finds
another one active joins it; only Spark's tracker is waited for.
"""

from __future__ import annotations

import logging
import threading

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import FencedError
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.markers.tracker.partition import ENGINE
from kafkamq.markers.tracker.succession import Succession

_WAIT_S = 0.2
_log = logging.getLogger(__name__)


def run_standing_by(
    config: ServiceConfig, tracker: TrackerConfig | None, stop: threading.Event
) -> None:
    """Wait, track, and wait again when another engine has taken over, until ``stop`` is set.

    Raises:
        ConfigError: The topics cannot be used (R23, R25).
        KafkaMQError: As ``LocalTracker.run``, but for a later start of another engine.
    """
    while not stop.is_set():
        with Succession(config, engine=ENGINE, stands_by=True) as succession:
            succession.stand_by(ENGINE)
            _log.info("standing by", extra={"topic": config.marker_topic})
            while not succession.wait(_WAIT_S):
                if stop.is_set():
                    return
            succession.take_over(ENGINE)  # until it gives its own signs
            local = LocalTracker(config, tracker)
            for warning in local.warnings:
                _log.warning("topic check: %s", warning)
            try:
                local.run(stop)
            except FencedError as error:
                _log.warning("standing by again: %s", error)
