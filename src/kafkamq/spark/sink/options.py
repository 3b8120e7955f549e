"""Options of a query that writes to topics or into a queue, checked when it is planned."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kafkamq.config import ServiceConfig, one_of
from kafkamq.errors import ConfigError
from kafkamq.queue.wire.keys import join_key
from kafkamq.spark.options import parse_service
from kafkamq.spark.sink.rows import check_columns, check_message_columns

_KNOWN = {"topic", "queue", "namespace", "ledgertopic", "sinkid", "guarantee"}
_SPARKS = {"checkpointlocation", "path", "queryname"}
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
    queue_id: str = ""  # queue: whose messages the rows are
    ledger_topic: str = ""  # ledgerTopic: whose committed offsets are the ledger
    sink_id: str = ""  # sinkId; empty: the id of the streaming query
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE  # guarantee


def sink_name(sink_id: str, queue_id: str) -> str:
    """What a sink is called in its ledger: queues share one, and a query may send to several."""
    if not queue_id:
        return sink_id
    return f"{sink_id}-{hashlib.blake2b(queue_id.encode(), digest_size=6).hexdigest()}"


def parse_sink_options(
    options: Mapping[str, str], service: ServiceConfig | None, types: Mapping[str, str]
) -> SinkOptions:
    """Read the options of a query, and check its columns.

    Args:
        options: As Spark gives them, in any case.
        service: What was registered with the format; options stand above it.
        types: The rows' columns, as Spark names their types.

    Raises:
        ConfigError: An unknown option, a missing or an impossible value or column.
    """
    given = {name.lower(): value for name, value in options.items()}
    own = {name: value for name, value in given.items() if not name.startswith("kafka.")}
    unknown = sorted(set(own) - _KNOWN - _SPARKS)
    if unknown:
        raise ConfigError(
            f"unknown option {unknown[0]}: known are topic, queue, namespace, ledgerTopic, "
            "sinkId, guarantee and Kafka's own properties as kafka.NAME"
        )
    config = parse_service(given, service)
    topic, queue_id = own.get("topic", ""), own.get("queue", "")
    guarantee = one_of(Guarantee, "guarantee", own.get("guarantee", "exactly-once"))
    if not (topic or queue_id or "topic" in types):
        raise ConfigError(
            "option topic is missing: name the topic, or give the rows a column `topic`; or name "
            "the queue to send to; or acknowledge, with mode = ack"
        )
    if queue_id:
        join_key(queue_id)
        if topic or guarantee is not Guarantee.EXACTLY_ONCE:
            raise ConfigError("queue excludes topic, and is always written exactly once")
        check_message_columns(types)
    else:
        check_columns(types)
    ledger_topic = own.get("ledgertopic", "") or (config.ledger_topic if queue_id else topic)
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
        queue_id=queue_id,
        ledger_topic=ledger_topic,
        sink_id=sink_id,
        guarantee=guarantee,
    )
