"""``claims decode`` and ``claims doctor``: what stands in a coordination topic, and is it well."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from kafkamq.claims.audit import TopicAudit, audit_topic, scan_topic
from kafkamq.claims.log_engine import find_topic, topic_findings
from kafkamq.claims.wire.marshal import COORDINATION_TOPIC, decode, decode_value
from kafkamq.cli import output
from kafkamq.cli.options import Json, connected, connected_if_named
from kafkamq.config import Options, ServiceConfig
from kafkamq.errors import ConfigError, WireError
from kafkamq.queue.topics import Finding
from kafkamq.transport.admin import Admin, require_brokers
from kafkamq.types import MarshalRecord

_MAX_SKEW_S = 2.0
_SHOWN = 20
Topic = Annotated[str, typer.Option("--topic", "-t", help="The coordination topic.")]
Interval = Annotated[
    float,
    typer.Option(
        "--interval",
        "-i",
        min=Options.heartbeat_interval.least,
        help=Options.heartbeat_interval.says,
    ),
]


@connected_if_named
def decode_records(
    config: ServiceConfig | None,
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]...", help="File of records; - reads stdin."),
    ] = None,
    topic: Topic = COORDINATION_TOPIC,
    as_json: Json = False,
) -> None:
    """Decode records, given as text or all that stand in the topic."""
    del as_json
    if texts:
        lines = (line.rstrip("\n") for line in sys.stdin) if texts == ["-"] else iter(texts)
        for line in lines:
            try:
                output.print_json(_record_object(decode(line)))
            except WireError as error:  # noqa: PERF203 - each line for itself
                output.print_json({"malformed": error.reason})
        return
    if config is None:
        raise ConfigError("nothing to decode: give texts, or name a broker")
    require_brokers(config)
    for each in scan_topic(config, topic, decode_value):
        body = {"malformed": each.reason} if each.record is None else _record_object(each.record)
        place = {
            "coordination_partition": each.partition,
            "coordination_offset": each.offset,
            "broker_time_ms": each.timestamp_ms,
        }
        output.print_json({**place, **body})


def _record_object(record: MarshalRecord) -> dict[str, Any]:
    return {name: getattr(value, "value", value) for name, value in asdict(record).items()}


@connected
def doctor(
    config: ServiceConfig,
    topic: Topic = COORDINATION_TOPIC,
    interval: Interval = Options.heartbeat_interval.default,
    as_json: Json = False,
) -> None:
    """Check the topic and what stands in it; exit code 1 when claims cannot rest on it."""
    require_brokers(config)
    with Admin(config) as admin:
        info = find_topic(admin, topic)
    findings = list(topic_findings(info, rules="safe", interval_ms=round(interval * 1000)))
    audit = audit_topic(config, topic, interval_s=interval)
    findings += _of_records(audit, topic, interval)
    is_bad = any(finding.level == "refuse" for finding in findings)
    if as_json:
        output.print_json(
            {
                "ok": not is_bad,
                "records": audit.records,
                "malformed": dict(audit.malformed),
                "impossible": sum(part.impossible for part in audit.partitions.values()),
                "dual_claims": [
                    asdict(each)
                    for part in audit.partitions.values()
                    for each in part.dual_claims[:_SHOWN]
                ],
                "findings": [asdict(finding) for finding in findings],
            }
        )
    else:
        output.print_table(
            f"{topic}: {audit.records} records",
            ("", "found"),
            [(finding.level, finding.text) for finding in findings] or [("ok", "nothing wrong")],
        )
    if is_bad:
        raise typer.Exit(1)


def _of_records(audit: TopicAudit, topic: str, interval: float) -> Iterator[Finding]:
    warn = partial(Finding, "warn", topic)
    for reason, count in audit.malformed.most_common(_SHOWN):
        yield warn(f"{count} malformed records: {reason}")
    if audit.gaps:
        yield warn(
            f"{audit.gaps} offsets have no record: somebody writes transactions, or it was"
            " compacted"
        )
    intervals = {ms for ms in audit.intervals_ms if ms}
    if intervals - {round(interval * 1000)}:
        found = ", ".join(f"{ms / 1000:g} s" for ms in sorted(intervals))
        yield warn(f"clients go by other heartbeat intervals: {found}")
    if audit.intervals_ms.get(0):
        yield warn(
            f"{audit.intervals_ms[0]} records do not say their interval: Go clients (60 s) take"
            " part; use rules='peer'"
        )
    for part in audit.partitions.values():
        if part.impossible:
            yield warn(f"{part.impossible} records of impossible partitions")
        if part.steps_back:
            yield warn(f"the brokers' clock stepped back {part.steps_back} times")
        for dual in part.dual_claims[:_SHOWN]:
            yield Finding(
                "refuse",
                topic,
                f"two owners at once of {dual.topic}[{dual.partition}] in {dual.group}:"
                f" {'.'.join(dual.first)} and {'.'.join(dual.second)}, at offset {dual.offset}",
            )
    for (group, client), seen in audit.clients().items():
        if max(seen.most_skew_s, -seen.least_skew_s) > _MAX_SKEW_S:
            yield warn(
                f"the clock of {client} in {group} is off by {seen.least_skew_s:+.1f} to"
                f" {seen.most_skew_s:+.1f} s"
            )
        if seen.returns:
            yield warn(
                f"several processes use the client id {client} in {group} at a time: each needs"
                " its own"
            )
