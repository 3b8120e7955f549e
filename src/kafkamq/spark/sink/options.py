"""Options of ``format("kafkamq-sink")``, checked when a query is planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kafkamq.config import ServiceConfig, one_of
from kafkamq.errors import ConfigError
from kafkamq.spark.options import parse_service

_KNOWN = {"topic", "ledgertopic", "sinkid", "guarantee"}
_SPARKS = {"checkpointlocation", "path"}
_MAX_ID = 100


class Guarantee(Enum):
    """How often a row may be in the topic."""

    EXACTLY_ONCE = "exactly-once"
    AT_LEAST_ONCE = "at-least-once"  # each row with a header that readers can drop copies by


@dataclass(frozen=True, kw_only=True)
class SinkOptions:
    """Where and how a query writes."""

    config: ServiceConfig  # where, and Kafka's properties
    topic: str  # topic: of rows that name none; empty: every row names one
    ledger_topic: str  # ledgerTopic: whose committed offsets are the ledger
    sink_id: str = ""  # sinkId; empty: the id of the streaming query
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE  # guarantee


def parse_sink_options(
    options: Mapping[str, str], service: ServiceConfig | None, *, has_topics: bool
) -> SinkOptions:
    """Read the options of a query.

    Args:
        options: As Spark gives them, in any case.
        service: What was registered with the sink; options stand above it.
        has_topics: Whether the rows have a column ``topic``.

    Raises:
        ConfigError: An unknown option, a missing or an impossible value.
    """
    given = {name.lower(): value for name, value in options.items()}
    own = {name: value for name, value in given.items() if not name.startswith("kafka.")}
    unknown = sorted(set(own) - _KNOWN - _SPARKS)
    if unknown:
        raise ConfigError(
            f"unknown option {unknown[0]}: known are topic, ledgerTopic, sinkId, guarantee "
            "and Kafka's own properties as kafka.NAME"
        )
    config = parse_service(given, service)
    topic = own.get("topic", "")
    if not topic and not has_topics:
        raise ConfigError(
            "option topic is missing: name the topic, or give the rows a column `topic`"
        )
    ledger_topic = own.get("ledgertopic", "") or topic
    if not ledger_topic:
        raise ConfigError(
            "option ledgerTopic is missing: rows name their topics themselves, so name one "
            "existing topic whose committed offsets shall be the ledger"
        )
    sink_id = own.get("sinkid", "")
    if len(sink_id) > _MAX_ID or not all(each.isalnum() or each in "-_." for each in sink_id):
        raise ConfigError(
            f"sinkId is {sink_id!r}: it must be at most {_MAX_ID} letters, digits, '-', '_' and '.'"
        )
    return SinkOptions(
        config=config,
        topic=topic,
        ledger_topic=ledger_topic,
        sink_id=sink_id,
        guarantee=one_of(Guarantee, "guarantee", own.get("guarantee", "exactly-once")),
    )
