"""Options of ``format("kafkamq")``, checked when a query is planned.

Kafka's own properties are given as ``kafka.NAME``, as in Spark's Kafka source. Values given as
options can be seen in query plans; secrets belong into ``register_source(spark, config)``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError

__all__ = [
    "EARLIEST",
    "LATEST",
    "Offsets",
    "SourceOptions",
    "chosen_partitions",
    "parse_source_options",
]

EARLIEST = "earliest"
LATEST = "latest"
Offsets = dict[str, dict[str, int]]
"""Topic -> partition (as text, for JSON) -> next offset."""

_BOOTSTRAP = "kafka.bootstrap.servers"
_KNOWN = {
    "topic", "mode", "startingoffsets", "endingoffsets", "maxrowspertrigger", "includeheaders",
    "minpartitions", "partitions", "tasks",
}  # fmt: skip
MODES = ("records", "messages", "dead_letters", "markers", "blocks")


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What a query reads."""

    config: ServiceConfig  # where, and Kafka's properties
    topic: str  # topic
    mode: str = "records"  # mode: what a row is, see columns.py
    starting: str | Offsets = EARLIEST  # startingOffsets: earliest, latest or JSON
    ending: str | Offsets = LATEST  # endingOffsets, of a batch: latest or JSON
    max_rows: int | None = None  # maxRowsPerTrigger
    include_headers: bool = False  # includeHeaders, of mode records
    min_partitions: int = 1  # minPartitions, of a batch: split large ranges
    partitions: frozenset[int] | None = None  # partitions: only these, as 0,3,5; None: all
    tasks: int = 1  # tasks, of mode blocks: shuffle partitions that the group keys are made for


def chosen_partitions(options: SourceOptions, count: int) -> list[int]:
    """Which of a topic's ``count`` partitions a query reads.

    Raises:
        ConfigError: One that was chosen does not exist.
    """
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
    """Read the options of a query.

    Args:
        options: Names in lower case, as Spark gives them.
        service: What was registered with the source; options stand above it.

    Raises:
        ConfigError: An unknown option, a missing or an impossible value.
    """
    given = {name.lower(): value for name, value in options.items()}
    given.pop("path", None)
    kafka = {name[6:]: value for name, value in given.items() if name.startswith("kafka.")}
    unknown = sorted(set(given) - _KNOWN - {f"kafka.{name}" for name in kafka})
    if unknown:
        raise ConfigError(
            f"unknown option {unknown[0]}: known are {', '.join(sorted(_KNOWN))} "
            "and Kafka's own properties as kafka.NAME"
        )
    servers = kafka.pop("bootstrap.servers", "")
    if service is None and not servers:
        raise ConfigError(f"option {_BOOTSTRAP} is missing: give host:port[,host:port...]")
    config = service or ServiceConfig(bootstrap_servers=servers)
    config = replace(
        config,
        bootstrap_servers=servers or config.bootstrap_servers,
        kafka={**config.kafka, **kafka},
    )
    if not given.get("topic"):
        raise ConfigError("option topic is missing: name the topic to read")
    mode = given.get("mode", "records")
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}: it must be one of {', '.join(MODES)}")
    return SourceOptions(
        config=config,
        topic=given["topic"],
        mode=mode,
        starting=_offsets("startingOffsets", given.get("startingoffsets", EARLIEST)),
        ending=_offsets("endingOffsets", given.get("endingoffsets", LATEST)),
        max_rows=_number("maxRowsPerTrigger", given.get("maxrowspertrigger")),
        include_headers=_flag("includeHeaders", given.get("includeheaders", "false")),
        min_partitions=_number("minPartitions", given.get("minpartitions")) or 1,
        partitions=_numbers("partitions", given.get("partitions")),
        tasks=_number("tasks", given.get("tasks")) or 1,
    )


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
