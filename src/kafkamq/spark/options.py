"""Options of ``format("kafkamq")``, checked when a query is planned.

Kafka's own properties are given as ``kafka.NAME``, as in Spark's Kafka source. Values given as
options can be seen in query plans; secrets belong into ``register(spark, config)``.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

from kafkamq.config import Option, Options, QueueConfig, ServiceConfig, Value, options_of
from kafkamq.errors import ConfigError

EARLIEST = "earliest"
LATEST = "latest"
Offsets = dict[str, dict[str, int]]
"""Topic -> partition (as text, for JSON) -> next offset."""

VIEWS = ("messages", "deliveries", "in_flight", "dead_letters", "markers")
"""What ``view`` may be: the topics of a namespace; without it a topic's records are read."""

_BOOTSTRAP = "kafka.bootstrap.servers"


class QueueOptions:
    """What ``read_queue`` may say of its queue, whose leases have to last for whole batches."""

    redelivery_timeout = replace(Options.redelivery_timeout, default=60.0, least=1)
    max_deliveries = Options.max_deliveries
    max_lease = replace(Options.max_lease, least=1, most=366 * 86_400)
    group = Options.group
    batch_markers = Options.batch_markers


class _Own:
    max_rows_per_trigger = Option[int | None](int, None, most=1 << 63)
    max_offsets_per_trigger = Option[int | None](int, None, most=1 << 63)
    include_headers = Option(bool, False)
    min_partitions = Option(int, 1)
    fail_on_data_loss = Option(bool, True)
    tasks = Option(int, 1)
    acknowledge = Option(bool, False)


_OF_QUEUE = options_of(QueueOptions)


def _spelled(option: Option[Any]) -> str:
    first, *others = option.name.split("_")
    return first + "".join(map(str.capitalize, others))


_SPELLED = (
    "topic", "view", "mode", "namespace", "queue", "startingOffsets", "endingOffsets",
    "startingTimestamp", "endingTimestamp", "partitions",
    *map(_spelled, (*options_of(_Own), *_OF_QUEUE)),
)  # fmt: skip
_KNOWN = {name.lower() for name in _SPELLED}
_INTERNAL = {"mode", "tasks", "acknowledge"}
_SHOWN = sorted(name for name in _SPELLED if name not in _INTERNAL)
_ROWS = ("records", "blocks", *VIEWS)
_OF_QUEUES = ("messages", "deliveries", "in_flight")


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    config: ServiceConfig  # where, and Kafka's properties
    topic: str  # topic; of a view: the namespace's
    view: str = "records"  # view: what a row is (``spark/source/columns.py``)
    queue_id: str = ""  # queue: only its rows
    starting: str | Offsets | int = EARLIEST  # startingOffsets, or ms of startingTimestamp
    ending: str | Offsets | int = LATEST  # endingOffsets or endingTimestamp, of a batch
    max_rows: int | None = None  # maxRowsPerTrigger; maxOffsetsPerTrigger, as Spark has it
    include_headers: bool = _Own.include_headers.default  # of records
    min_partitions: int = _Own.min_partitions.default  # of a batch: split large ranges
    partitions: frozenset[int] | None = None  # partitions: only these, as 0,3,5; None: all
    fail_on_data_loss: bool = _Own.fail_on_data_loss.default
    tasks: int = _Own.tasks.default  # of blocks: shuffle partitions that group keys are made for
    acknowledge: QueueConfig | None = None  # read_queue sets it: how it STARTs what it hands out

    @property
    def is_folded(self) -> bool:
        """Return whether rows follow from the whole log before them, not from one record each."""
        return self.view in ("deliveries", "in_flight")


def chosen_partitions(options: SourceOptions, count: int) -> list[int]:
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
    if "topic" in given and view in VIEWS:
        raise ConfigError(
            f"topic is {given['topic']!r}: view {view} reads the namespace's own; to read a "
            "topic's records leave the view out"
        )
    if "minpartitions" in given and view in ("deliveries", "in_flight"):
        raise ConfigError(
            f"minPartitions means nothing to view {view}, whose partitions are folded whole: "
            "leave it out"
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
        starting=_place(given, "starting", EARLIEST, topic),
        ending=_place(given, "ending", LATEST, topic),
        max_rows=_max_rows(given),
        include_headers=_headers(view, given),
        min_partitions=_parsed(_Own.min_partitions, given),
        partitions=_partitions(given.get("partitions")),
        fail_on_data_loss=_parsed(_Own.fail_on_data_loss, given),
        tasks=_parsed(_Own.tasks, given),
        acknowledge=_acknowledge(view, given),
    )


def queue_options(max_rows: int, arguments: Mapping[str, object]) -> dict[str, str]:
    """Return what arguments of ``read_queue`` are as options; what is None is left out.

    Raises:
        ConfigError: Names the argument and its limits.
    """
    rows = _plain(max_rows)
    replace(_Own.max_rows_per_trigger, name="max_rows", default=1).check(rows)
    given = {"acknowledge": "true", _spelled(_Own.max_rows_per_trigger): str(rows)}
    for option in _OF_QUEUE:
        value = _plain(arguments[option.name])
        if value is not None:
            known = option.convert(value)
            text = str(known / 1000 if option.is_time else known)
            given[_spelled(option)] = text.lower() if option.kind is bool else text
    return given


def _plain(value: object) -> object:
    """Return numbers of any kind, such as numpy's, as Python's own."""
    if isinstance(value, int):
        return value
    if isinstance(value, Integral):
        return operator.index(value)
    return float(value) if isinstance(value, Real | Decimal) else value


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
    base = service or ServiceConfig(bootstrap_servers=servers)
    servers, kafka = servers or base.bootstrap_servers, {**base.kafka, **kafka}
    if namespace is not None:
        return ServiceConfig(bootstrap_servers=servers, namespace=namespace, kafka=kafka)
    return replace(base, bootstrap_servers=servers, kafka=kafka)


def _topic_of(config: ServiceConfig, view: str) -> str:
    return {
        "messages": config.message_topic,
        "dead_letters": config.dead_letter_topic,
        "markers": config.marker_topic,
        "deliveries": config.marker_topic,
        "in_flight": config.marker_topic,
    }.get(view, "")


def _max_rows(given: Mapping[str, str]) -> int | None:
    rows: int | None = _parsed(_Own.max_rows_per_trigger, given)
    offsets: int | None = _parsed(_Own.max_offsets_per_trigger, given)
    if rows and offsets:
        raise ConfigError(
            "maxRowsPerTrigger and maxOffsetsPerTrigger mean the same: give one of them"
        )
    return rows or offsets


def _headers(view: str, given: Mapping[str, str]) -> bool:
    wanted: bool = _parsed(_Own.include_headers, given)
    if wanted and view in VIEWS:
        raise ConfigError(
            f"includeHeaders is for a topic's records: view {view} has its own columns"
        )
    return wanted


def _acknowledge(view: str, given: Mapping[str, str]) -> QueueConfig | None:
    if not _parsed(_Own.acknowledge, given):
        names = [_spelled(each) for each in _OF_QUEUE]
        if misplaced := [name for name in names if name.lower() in given]:
            raise ConfigError(
                f"{misplaced[0]} is for queues that are acknowledged: use read_queue()"
            )
        return None
    if view != "messages" or not given.get("queue"):
        raise ConfigError("acknowledge is for view messages with a queue: use read_queue()")
    own = {each.field: _parsed(each, given) for each in _OF_QUEUE}
    timeout_s, max_lease_s = own["redelivery_timeout_ms"] / 1000, own["max_lease_ms"] / 1000
    if max_lease_s < timeout_s:
        raise ConfigError(
            f"maxLease is {max_lease_s:g}: it must be at least redeliveryTimeout ({timeout_s:g})"
        )
    return QueueConfig(queue_id=given["queue"], group_id=own.pop(Options.group.field), **own)


def _parsed(option: Option[Value], given: Mapping[str, str]) -> Any:
    """Return what settings have of an option's text, or of its default."""
    option = replace(option, name=_spelled(option))
    text = given.get(option.name.lower())
    if text is None:
        return option.convert(option.default)
    if option.kind is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{option.name} is {text!r}: it must be true or false")
        return text.lower() == "true"
    if option.kind is int and text.isascii() and text.isdigit():
        return option.convert(int(text))
    if option.is_time:
        with suppress(ValueError):
            return option.convert(float(text))
    option.check(text)
    return text


def _place(given: Mapping[str, str], end: str, default: str, topic: str) -> str | Offsets | int:
    """``startingOffsets`` or ``startingTimestamp``; the same for ``ending``."""
    offsets, timestamp = given.get(f"{end}offsets"), given.get(f"{end}timestamp")
    if timestamp is None:
        place = _offsets(f"{end}Offsets", default if offsets is None else offsets)
        if isinstance(place, dict) and (others := sorted(set(place) - {topic})):
            # They would be passed over.
            raise ConfigError(f"{end}Offsets names topic {others[0]!r}: the query reads {topic!r}")
        return place
    if offsets is not None:
        raise ConfigError(f"{end}Timestamp and {end}Offsets exclude each other: give one of them")
    return parse_timestamp_ms(f"{end}Timestamp", timestamp)


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


def _partitions(text: str | None) -> frozenset[int] | None:
    if text is None:
        return None
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise ConfigError(f"partitions is {text!r}: give the partitions to read, such as 0,3,5")
    return frozenset(map(int, numbers))
