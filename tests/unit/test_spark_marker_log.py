"""Markers that Spark writes are tried as long as those of other workers, and no longer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from confluent_kafka import Producer

from kafkamq.clients.settings import connect
from kafkamq.config import ServiceConfig
from kafkamq.spark.marker_log import MarkerLog


def test_a_start_is_not_tried_for_longer_than_ended_ids_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Mapping[str, Any]] = []

    def keep(make: Any, settings: Mapping[str, Any], *known: Any) -> Any:
        if make is Producer:
            made.append(settings)
        return connect(make, settings, *known)

    monkeypatch.setattr("kafkamq.spark.marker_log.connect", keep)
    config = ServiceConfig(bootstrap_servers="127.0.0.1:1", kafka={"message.timeout.ms": "120000"})
    MarkerLog(config)
    assert [int(each["message.timeout.ms"]) for each in made] == [30_000]
