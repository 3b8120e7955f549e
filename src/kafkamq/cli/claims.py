"""``claims``: who holds which partition; pauses and positions of live groups."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Annotated, Any

import typer

from kafkamq.claims import Admin, Claim, Cluster, RangeClaims, init_topic
from kafkamq.claims.audit import ClaimEventKind, ClaimHistory, range_logs, scan_topic
from kafkamq.claims.rules.ranges import RANGE_TOPIC
from kafkamq.claims.wire.marshal import COORDINATION_TOPIC, decode_value
from kafkamq.cli import claims_log, output
from kafkamq.cli.claims_log import Interval, Topic
from kafkamq.cli.options import (
    Json,
    MetricsPort,
    command_group,
    connected,
    serving_metrics,
    with_options,
    with_table,
)
from kafkamq.config import Options, ServiceConfig
from kafkamq.errors import ConfigError, LeaseLostError
from kafkamq.runtime.signals import stop_event
from kafkamq.transport.admin import require_brokers

_logger = logging.getLogger(__name__)
Group = Annotated[str, typer.Argument(metavar="GROUP", help="The group's id.")]
OnlyGroup = Annotated[str | None, typer.Option("--group", "-g", help="Show only this group.")]
Limit = Annotated[
    int | None,
    typer.Option(
        "--count",
        "-c",
        min=1,
        help="End after this many messages (at-most-once: after whole batches).",
    ),
]
Patience = Annotated[
    float | None,
    typer.Option("--timeout", min=0.0, help="End when no message came for this many seconds."),
]


def _log(
    *,
    topic: Topic = COORDINATION_TOPIC,
    interval: Interval = Options.heartbeat_interval.default,
    rules: Annotated[str, typer.Option(help=Options.rules.says)] = Options.rules.default,
) -> dict[str, Any]:
    return {"coordination_topic": topic, "heartbeat_interval": interval, "rules": rules}


_of_log = partial(with_options, name="log", make=_log)


def _cluster(config: ServiceConfig, log: dict[str, Any]) -> Cluster:
    require_brokers(config)
    cluster = Cluster(config.bootstrap_servers, kafka=config.kafka, **log)
    cluster.ready()
    return cluster


@connected
@_of_log
@with_table("replicas", Options.replication_factor)
def init(
    config: ServiceConfig,
    log: dict[str, Any],
    replicas: dict[str, Any],
    partitions: Annotated[
        int,
        typer.Option(min=1, help="Partitions of the coordination topic; fixed while it is in use."),
    ] = Options.partitions.default,
    retention: Annotated[
        float, typer.Option(help="How long the coordination topic keeps records, in seconds.")
    ] = 86_400.0,
    as_json: Json = False,
) -> None:
    """Create the coordination topic, or check the one that exists."""
    require_brokers(config)
    topic = log.pop("coordination_topic")
    created = init_topic(
        config.bootstrap_servers,
        topic,
        partitions=partitions,
        retention=retention,
        kafka=config.kafka,
        **replicas,
        **log,
    )
    if as_json:
        output.print_json({"topic": topic, "created": created})
    else:
        output.note(f"{topic} was created." if created else f"{topic} exists, and is fit.")


@connected
@_of_log
def state(
    config: ServiceConfig,
    log: dict[str, Any],
    group: OnlyGroup = None,
    as_json: Json = False,
) -> None:
    """Show who holds which partition, and where each group is."""
    with _cluster(config, log) as cluster:
        found = sorted(
            cluster.claims(group), key=lambda each: (each.group, each.topic, each.partition)
        )
        rows = [_claim_object(each, cluster.paused_until(each.group)) for each in found]
    if as_json:
        for row in rows:
            output.print_json(row)
        return
    columns = ("group", "partition", "state", "owner", "age_s", "offset", "token")
    table = [
        (
            row["group"],
            f"{row['topic']}[{row['partition']}]",
            row["state"] if row["paused_until"] is None else f"{row['state']}, paused",
            f"{row['client']}.{row['instance']}" if row["client"] else None,
            *(row[name] for name in columns[4:]),
        )
        for row in rows
    ]
    output.print_table("", columns, table)


def _claim_object(claim: Claim, paused_until: float) -> dict[str, Any]:
    return {
        "group": claim.group,
        "topic": claim.topic,
        "partition": claim.partition,
        "state": claim.state.value,
        "client": claim.client,
        "instance": claim.instance,
        "age_s": round(claim.age_s, 3) if claim.age_s < 1e9 else None,
        "offset": claim.offset,
        "token": claim.token if claim.client else None,
        "is_certain": claim.is_certain,
        "last_client": claim.last_client,
        "paused_until": _time_text(paused_until) if paused_until else None,
    }


def _time_text(epoch_s: float) -> str:
    return datetime.fromtimestamp(epoch_s, tz=timezone.utc).isoformat(timespec="seconds")


@connected
def watch(
    config: ServiceConfig,
    group: OnlyGroup = None,
    topic: Topic = COORDINATION_TOPIC,
    interval: Interval = Options.heartbeat_interval.default,
    heartbeats: Annotated[bool, typer.Option(help="Show renewals of claims, too.")] = False,
    follow: Annotated[bool, typer.Option(help="Follow the log until Ctrl-C.")] = True,
    as_json: Json = False,
) -> None:
    """Show how partitions change hands, from the topic's start on."""
    require_brokers(config)
    histories: dict[int, ClaimHistory] = {}
    for each in scan_topic(config, topic, decode_value, follow=follow):
        if each.record is None:
            continue
        history = histories.get(each.partition)
        if history is None:
            since_s = each.timestamp_ms / 1000 if each.offset else None
            history = histories[each.partition] = ClaimHistory(interval, since_s)
        event = history.apply(each.record, offset=each.offset, broker_time_ms=each.timestamp_ms)
        is_quiet = event.kind in (ClaimEventKind.RENEWED, ClaimEventKind.ANNOUNCED)
        if (is_quiet and not heartbeats) or (group is not None and each.record.group != group):
            continue
        row = {
            "time": _time_text(each.timestamp_ms / 1000),
            "event": event.kind.value,
            "group": each.record.group,
            "topic": each.record.topic,
            "partition": each.record.partition,
            "by": f"{each.record.client}.{each.record.instance}",
            "owner": event.client,
            "position": event.position,
            "silence_s": round(event.silence_s, 3),
        }
        if as_json:
            output.print_json(row)
        else:
            where = ""
            if each.record.topic:
                where = f" {row['topic']}[{row['partition']}] at {row['position']}"
            output.output().print(
                f"{row['time']} {row['event']:<12} {row['group']}{where} by {row['by']}",
                markup=False,
            )


@connected
@_of_log
def pause(
    config: ServiceConfig,
    log: dict[str, Any],
    group: Group,
    seconds: Annotated[
        float, typer.Option("--for", min=1, help="How long the group pauses, in seconds.")
    ],
    wait: Annotated[bool, typer.Option(help="Return only when no member holds a claim.")] = True,
    as_json: Json = False,
) -> None:
    """Let no member of a group hold a partition for a while."""
    with _cluster(config, log) as cluster:
        admin = Admin(cluster, group)
        until = admin.pause(seconds)
        if wait:
            admin.wait_until_free(2 * cluster.heartbeat_interval + 10)
    if as_json:
        output.print_json({"group": group, "paused_until": _time_text(until)})
    else:
        output.note(f"{group} is paused until {_time_text(until)}.")


@connected
@_of_log
def resume(config: ServiceConfig, log: dict[str, Any], group: Group, as_json: Json = False) -> None:
    """End the pause of a group."""
    with _cluster(config, log) as cluster:
        Admin(cluster, group).resume()
    if as_json:
        output.print_json({"group": group, "paused_until": None})
    else:
        output.note(f"{group} goes on.")


@connected
@_of_log
def set_position(
    config: ServiceConfig,
    log: dict[str, Any],
    group: Group,
    positions: Annotated[
        list[str],
        typer.Argument(
            metavar="TOPIC:PARTITION=WHERE...",
            help="New positions; WHERE is an offset, earliest, latest, or a time such as "
            "2030-01-31T12:00:00Z.",
        ),
    ],
    timeout: Annotated[
        float | None,
        typer.Option(min=0.1, help="How long claiming all partitions may take, in seconds."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Move positions of a live group, all or nothing."""
    wanted = parse_positions(positions)
    with _cluster(config, log) as cluster:
        moved = Admin(cluster, group).set_position(wanted, timeout=timeout)
    for (name, partition), offset in sorted(moved.items()):
        if as_json:
            output.print_json({"topic": name, "partition": partition, "offset": offset})
        else:
            output.note(f"{name}[{partition}] goes on at {offset}.")


def parse_positions(texts: Sequence[str]) -> dict[tuple[str, int], int | str | datetime]:
    """``topic:partition=where`` as ``Admin.set_position`` takes it."""
    found: dict[tuple[str, int], int | str | datetime] = {}
    for text in texts:
        place, equals, where = text.partition("=")
        name, colon, partition = place.rpartition(":")
        if not (equals and colon and name and partition.isdecimal()):
            raise ConfigError(f"position {text!r}: write it as TOPIC:PARTITION=WHERE")
        if (name, int(partition)) in found:
            raise ConfigError(f"position {text!r}: {place} is named twice")
        if where in ("earliest", "latest"):
            found[name, int(partition)] = where
        elif where.isdecimal():
            found[name, int(partition)] = int(where)
        else:
            try:
                at = datetime.fromisoformat(where.replace("Z", "+00:00"))
            except ValueError:
                raise ConfigError(
                    f"position {text!r}: {where!r} is no offset, earliest, latest or ISO time"
                ) from None
            found[name, int(partition)] = at if at.tzinfo else at.astimezone()
    return found


@connected
@_of_log
@with_table("settings", Options.delivery)
def consume(
    config: ServiceConfig,
    log: dict[str, Any],
    settings: dict[str, Any],
    group: Group,
    topics: Annotated[list[str], typer.Argument(metavar="WORK...", help="Topics to read.")],
    client: Annotated[
        str,
        typer.Option(
            help="Name of this member: unique in the group, and the same after a restart."
        ),
    ],
    mode: Annotated[
        str, typer.Option("--claims", help="Policy of claiming: balanced, greedy or topic.")
    ] = "balanced",
    max_claims: Annotated[int | None, typer.Option(help="Hold at most this many claims.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Messages of a batch, at most.")] = 500,
    limit: Limit = None,
    timeout: Patience = None,
    metrics_port: MetricsPort = None,
    as_json: Json = False,
) -> None:
    """Print the messages of the partitions that this process claims, until Ctrl-C or SIGTERM.

    What is held then is released, rather than left to go stale.
    """
    left = limit if limit is not None else 1 << 62
    with (
        stop_event() as stopping,
        serving_metrics(metrics_port),
        _cluster(config, log) as cluster,
        cluster.member(client, group).consumer(
            topics, claims=mode, max_claims=max_claims, batch=min(batch, left), **settings
        ) as consumer,
    ):
        last_s = time.monotonic()
        while left > 0 and not stopping.is_set():
            found = consumer.next_batch(0.5)
            if found is None:
                if timeout is not None and time.monotonic() - last_s >= timeout:
                    break
                continue
            last_s = time.monotonic()
            # At most once nobody gets the rest of the batch again: it is printed as well.
            is_once = settings["delivery"] == "at-most-once"
            for message in found.messages if is_once else found.messages[:left]:
                _print_message(message, as_json=as_json)
                if not is_once:
                    message.commit()
            left -= len(found)


RangeTopic = Annotated[str, typer.Option("--topic", "-t", help="The topic of range claims.")]


@connected
def ranges_state(
    config: ServiceConfig,
    group: OnlyGroup = None,
    topic: RangeTopic = RANGE_TOPIC,
    interval: Interval = 3.0,
    as_json: Json = False,
) -> None:
    """Show which ranges are held, or free, and how far each partition is done and claimed."""
    require_brokers(config)
    rows: list[dict[str, Any]] = []
    for log, now_s in range_logs(config, topic, interval_s=interval):
        if group is not None and log.group != group:
            continue
        for partition in log.partitions:
            free = {each.first for each in log.abandoned(partition, now_s=now_s)}
            row = {
                "group": log.group,
                "topic": log.topic,
                "partition": partition,
                "done_to": log.position(partition),
                "claimed_to": log.frontier(partition),
            }
            row["ranges"] = [
                {
                    "first": each.first,
                    "next": each.next,
                    "state": "free" if each.first in free else "held",
                    "client": each.owner[0],
                    "instance": each.owner[1],
                    "age_s": round(log.age_s(each, now_s=now_s), 3),
                    "token": each.token,
                }
                for each in log.open_ranges(partition)
            ]
            rows.append(row)
    if as_json:
        for row in rows:
            output.print_json(row)
        return
    table = [
        (
            row["group"],
            f"{row['topic']}[{row['partition']}]",
            row["done_to"],
            row["claimed_to"],
            *((f"{each['first']}-{each['next']}", each["state"]) if each else (None, None)),
            f"{each['client']}.{each['instance']}" if each else None,
            each["age_s"] if each else None,
        )
        for row in rows
        for each in row["ranges"] or [None]
    ]
    columns = ("group", "partition", "done to", "claimed to", "range", "state", "owner", "age_s")
    output.print_table("", columns, table)


@connected
@with_table("settings", Options.delivery)
def ranges_consume(
    config: ServiceConfig,
    settings: dict[str, Any],
    group: Group,
    work: Annotated[str, typer.Argument(metavar="WORK", help="Topic to read.")],
    client: Annotated[str, typer.Option(help="Name of this member.")],
    size: Annotated[int, typer.Option(min=1, help="Offsets of a range.")] = 1000,
    ahead: Annotated[int, typer.Option(min=0, help="Ranges claimed ahead of the work.")] = 1,
    limit: Limit = None,
    timeout: Patience = None,
    topic: RangeTopic = RANGE_TOPIC,
    interval: Interval = 3.0,
    metrics_port: MetricsPort = None,
    as_json: Json = False,
) -> None:
    """Print the messages of the ranges that this process claims, until Ctrl-C or SIGTERM.

    What is held then and not done is free for other members.
    """
    require_brokers(config)
    left = limit if limit is not None else 1 << 62
    is_once = settings["delivery"] == "at-most-once"
    last_s = time.monotonic()
    with (
        stop_event() as stopping,
        serving_metrics(metrics_port),
        RangeClaims(
            config.bootstrap_servers,
            work,
            client_id=client,
            group_id=group,
            size=size,
            ahead=ahead,
            range_topic=topic,
            heartbeat_interval=interval,
            kafka=config.kafka,
            **settings,
        ) as claims,
    ):

        def watch() -> None:
            # A range whose messages are not written yet waits for them.
            while not claims.is_stopped:
                is_idle = timeout is not None and time.monotonic() - last_s >= timeout
                if stopping.wait(0.1) or is_idle:
                    claims.stop()

        threading.Thread(target=watch, name="kafkamq-ranges", daemon=True).start()
        for claimed in claims:
            try:
                for batch in claimed.batches():
                    last_s = time.monotonic()
                    found = batch.messages if is_once else batch.messages[:left]
                    for message in found:
                        _print_message(message, as_json=as_json)
                    if not is_once:
                        claimed.done(found[-1].offset + 1)
                    left -= len(found)
                    if left <= 0:
                        return
            except LeaseLostError as error:  # noqa: PERF203 - of few ranges
                _logger.warning("%s; going on with the next range", error)


def _print_message(message: Any, *, as_json: bool) -> None:
    if as_json:
        output.print_json(
            {
                **{name: getattr(message, name) for name in ("topic", "partition", "offset")},
                "token": message.token,
                "timestamp_ms": message.timestamp_ms,
                **output.bytes_fields("key", message.key),
                **output.bytes_fields("payload", message.payload),
            }
        )
    else:
        where = f"{message.topic}[{message.partition}]@{message.offset}"
        output.output().print(f"{where} {output.text_of(message.payload)}", markup=False)


group = command_group(
    "Claims of partitions: Marshal's coordination protocol.",
    {
        "init": init,
        "state": state,
        "watch": watch,
        "pause": pause,
        "resume": resume,
        "set-position": set_position,
        "consume": consume,
        "decode": claims_log.decode_records,
        "doctor": claims_log.doctor,
    },
)
ranges = command_group(
    "Ranges of a partition that members share, on a topic of their own.",
    {"state": ranges_state, "consume": ranges_consume},
)
group.add_typer(ranges, name="ranges")
