"""Options of ``format("kafkamq")``, checked when a query is planned.

Kafka's own properties are given as ``kafka.NAME``, as in Spark's Kafka source. Values given as
options can be seen in query plans; secrets belong into ``register(spark, config)``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError

EARLIEST = "earliest"
LATEST = "latest"
Offsets = dict[str, dict[str, int]]
"""Topic -> partition (as text, for JSON) -> next offset."""

VIEWS = ("messages", "deliveries", "in_flight", "dead_letters", "markers")
"""What ``view`` may be: the topics of a namespace; without it a topic's records are read."""

_BOOTSTRAP = "kafka.bootstrap.servers"
_SPELLED = (
    "topic", "view", "mode", "namespace", "queue", "startingOffsets", "endingOffsets",
    "startingTimestamp", "endingTimestamp", "maxRowsPerTrigger", "maxOffsetsPerTrigger",
    "includeHeaders", "minPartitions", "partitions", "failOnDataLoss", "tasks", "acknowledge",
    "redeliveryTimeout", "maxDeliveries", "maxLease", "group", "batchMarkers",
)  # fmt: skip
_OF_READ_QUEUE = ("redeliveryTimeout", "maxDeliveries", "maxLease", "group", "batchMarkers")
_KNOWN = {name.lower() for name in _SPELLED}
_INTERNAL = {"mode", "tasks", "acknowledge"}
_SHOWN = sorted(name for name in _SPELLED if name not in _INTERNAL)
_ROWS = ("records", "blocks", *VIEWS)
_OF_QUEUES = ("messages", "deliveries", "in_flight")  # which option queue narrows


@dataclass(frozen=True, kw_only=True)
class AcknowledgeOptions:
    """How a stream that acknowledges STARTs what it hands out."""

    redelivery_timeout_ms: int = 60_000  # redeliveryTimeout, in s
    max_deliveries: int = 5  # maxDeliveries
    max_lease_ms: int = 43_200_000  # maxLease, in s
    group_id: str = ""  # group: whose positions it goes on from; empty: the queue's own
    batch_markers: bool = True  # batchMarkers: markers of many messages in one record (R28-R30)


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What a query reads."""

    config: ServiceConfig  # where, and Kafka's properties
    topic: str  # topic; of a view: the namespace's
    view: str = "records"  # view: what a row is (``spark/source/columns.py``)
    queue_id: str = ""  # queue: only its rows
    starting: str | Offsets | int = EARLIEST  # startingOffsets, or ms of startingTimestamp
    ending: str | Offsets | int = LATEST  # endingOffsets or endingTimestamp, of a batch
    max_rows: int | None = None  # maxRowsPerTrigger; maxOffsetsPerTrigger, as Spark has it
    include_headers: bool = False  # includeHeaders, of records
    min_partitions: int = 1  # minPartitions, of a batch: split large ranges
    partitions: frozenset[int] | None = None  # partitions: only these, as 0,3,5; None: all
    fail_on_data_loss: bool = True  # failOnDataLoss
    tasks: int = 1  # of blocks: shuffle partitions that the group keys are made for
    acknowledge: AcknowledgeOptions | None = None  # read_queue sets it

    @property
    def is_folded(self) -> bool:
        """Return whether rows follow from the whole log before them, not from one record each."""
        return self.view in ("deliveries", "in_flight")


def chosen_partitions(options: SourceOptions, count: int) -> list[int]:
    """Return which of a topic's ``count`` partitions a query reads."""
    if options.partitions is None:
        return list(range(count))
    if max(options.partitions, default=0) >= count:
        raise ConfigError(
            f"partitions is {sorted(options.partitions)}: {options.topic} has {count} partitions"
        )
    return sorted(options.partitions)


def parse_source_options(
    options: Mapping[str, str], service: ServiceConfig | None
) -> SourceOptions:
    """Read the options of a query."""
    given = {name.lower(): value for name, value in options.items()}
    given.pop("path", None)
    unknown = sorted(name for name in set(given) - _KNOWN if not name.startswith("kafka."))
    if unknown:
        raise ConfigError(
            f"unknown option {unknown[0]}: known are {', '.join(_SHOWN)} "
            "and Kafka's own properties as kafka.NAME"
        )
    config = parse_service(given, service)
    view = given.get("view", given.get("mode", "records"))
    if view not in _ROWS:
        raise ConfigError(
            f"view is {view!r}: it must be one of {', '.join(VIEWS)}; leave it out, and name a "
            "topic, to read a topic's records"
        )
    if given.get("queue") and view not in _OF_QUEUES:
        raise ConfigError(
            f"queue is {given['queue']!r}: it is for the views {', '.join(_OF_QUEUES)}; of others "
            "choose the rows by where()"
        )
    topic = given.get("topic") or _topic_of(config, view)
    if not topic:
        raise ConfigError(
            f"option topic is missing: name the topic to read, or a view ({', '.join(VIEWS)})"
        )
    return SourceOptions(
        config=config,
        topic=topic,
        view=view,
        queue_id=given.get("queue", ""),
        starting=_of_topic("startingOffsets", _place(given, "starting", EARLIEST), topic),
        ending=_of_topic("endingOffsets", _place(given, "ending", LATEST), topic),
        max_rows=_max_rows(given),
        include_headers=_headers(view, given),
        min_partitions=_number("minPartitions", given.get("minpartitions")) or 1,
        partitions=_numbers("partitions", given.get("partitions")),
        fail_on_data_loss=_flag("failOnDataLoss", given.get("failondataloss", "true")),
        tasks=_number("tasks", given.get("tasks")) or 1,
        acknowledge=_acknowledge(view, given),
    )


def parse_service(given: Mapping[str, str], service: ServiceConfig | None) -> ServiceConfig:
    """Cluster and namespace: what was registered, with the options above it."""
    kafka = {name[6:]: value for name, value in given.items() if name.startswith("kafka.")}
    namespace = given.get("namespace")
    servers = kafka.pop("bootstrap.servers", "")
    if service is None and not servers:
        raise ConfigError(
            f"option {_BOOTSTRAP} is missing: give host:port[,host:port...], or register the "
            "format with a ServiceConfig"
        )
    if namespace is not None or service is None:
        before = service or ServiceConfig(bootstrap_servers=servers)
        service = ServiceConfig(
            bootstrap_servers=before.bootstrap_servers,
            namespace=before.namespace if namespace is None else namespace,
            kafka=before.kafka,
        )
    return replace(
        service,
        bootstrap_servers=servers or service.bootstrap_servers,
        kafka={**service.kafka, **kafka},
    )


def _topic_of(config: ServiceConfig, view: str) -> str:
    return {
        "messages": config.message_topic,
        "dead_letters": config.dead_letter_topic,
        "markers": config.marker_topic,
        "deliveries": config.marker_topic,
        "in_flight": config.marker_topic,
    }.get(view, "")


def _max_rows(given: Mapping[str, str]) -> int | None:
    names = ("maxRowsPerTrigger", "maxOffsetsPerTrigger")
    named = [name for name in names if name.lower() in given]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} mean the same: give one of them")
    return _number(named[0], given[named[0].lower()]) if named else None


def _headers(view: str, given: Mapping[str, str]) -> bool:
    wanted = _flag("includeHeaders", given.get("includeheaders", "false"))
    if wanted and view in VIEWS:
        raise ConfigError(
            f"includeHeaders is for a topic's records: view {view} has its own columns"
        )
    return wanted


def _acknowledge(view: str, given: Mapping[str, str]) -> AcknowledgeOptions | None:
    if not _flag("acknowledge", given.get("acknowledge", "false")):
        if misplaced := [name for name in _OF_READ_QUEUE if name.lower() in given]:
            raise ConfigError(
                f"{misplaced[0]} is for queues that are acknowledged: use read_queue()"
            )
        return None
    if view != "messages" or not given.get("queue"):
        raise ConfigError("acknowledge is for view messages with a queue: use read_queue()")
    default = AcknowledgeOptions()
    timeout_ms = _milliseconds("redeliveryTimeout", given, default.redelivery_timeout_ms)
    max_lease_ms = _milliseconds("maxLease", given, default.max_lease_ms)
    if max_lease_ms < timeout_ms:
        raise ConfigError(
            f"maxLease is {max_lease_ms / 1000:g}: it must be at least redeliveryTimeout "
            f"({timeout_ms / 1000:g})"
        )
    return AcknowledgeOptions(
        redelivery_timeout_ms=timeout_ms,
        max_deliveries=_number("maxDeliveries", given.get("maxdeliveries"))
        or default.max_deliveries,
        max_lease_ms=max_lease_ms,
        group_id=given.get("group", ""),
        batch_markers=_flag("batchMarkers", given.get("batchmarkers", "true")),
    )


def _milliseconds(name: str, given: Mapping[str, str], default_ms: int) -> int:
    text = given.get(name.lower())
    if text is None:
        return default_ms
    try:
        result = round(float(text) * 1000)
    except (ValueError, OverflowError):
        result = 0
    if not 1000 <= result <= 366 * 86_400_000:
        raise ConfigError(f"{name} is {text!r}: it must be seconds, from 1 to a year's")
    return result


def _place(given: Mapping[str, str], end: str, default: str) -> str | Offsets | int:
    """``startingOffsets`` or ``startingTimestamp``; the same for ``ending``."""
    offsets, timestamp = given.get(f"{end}offsets"), given.get(f"{end}timestamp")
    if timestamp is None:
        return _offsets(f"{end}Offsets", default if offsets is None else offsets)
    if offsets is not None:
        raise ConfigError(f"{end}Timestamp and {end}Offsets exclude each other: give one of them")
    return parse_timestamp_ms(f"{end}Timestamp", timestamp)


def _of_topic(name: str, place: str | Offsets | int, topic: str) -> str | Offsets | int:
    """Return offsets of the topic that is read; those of another one would be passed over."""
    others = sorted(set(place) - {topic}) if isinstance(place, dict) else []
    if others:
        raise ConfigError(f"{name} names topic {others[0]!r}: the query reads {topic!r}")
    return place


def parse_timestamp_ms(name: str, text: str) -> int:
    """Return milliseconds since 1970, or a time in ISO 8601 (UTC unless it says otherwise)."""
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    except ValueError:
        raise ConfigError(
            f"{name} is {text!r}: write a time as 2026-01-31T12:00:00Z, or as milliseconds "
            "since 1970"
        ) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    return round(moment.timestamp() * 1000)


def _offsets(name: str, text: str) -> str | Offsets:
    if text in (EARLIEST, LATEST):
        return text
    wrong = ConfigError(
        f"{name} is {text!r}: give earliest, latest or JSON such as "
        '{"topic":{"0":23,"1":-2}}, where -2 is the earliest and -1 the latest offset'
    )
    try:
        parsed: object = json.loads(text)
    except ValueError:
        raise wrong from None
    if not isinstance(parsed, dict):
        raise wrong
    result: Offsets = {}
    for topic, places in parsed.items():
        if not isinstance(places, dict):
            raise wrong
        for partition, offset in places.items():
            if not partition.isdigit() or not isinstance(offset, int) or offset < -2:
                raise wrong
        result[topic] = places
    return result


def _number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{name} is {text!r}: it must be a whole number from 1")
    return int(text)


def _numbers(name: str, text: str | None) -> frozenset[int] | None:
    if text is None:
        return None
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise ConfigError(f"{name} is {text!r}: give the partitions to read, such as 0,3,5")
    return frozenset(map(int, numbers))


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"{name} is {text!r}: it must be true or false")
    return text.lower() == "true"
