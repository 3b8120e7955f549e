"""Here are ``dlq ls``, ``dlq peek`` and ``dlq redrive``."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Annotated

import typer

from kafkamq.cli import output
from kafkamq.cli.options import DryRun, Json, command_group, connected
from kafkamq.cli.queues import warn_of_unused
from kafkamq.cli.spark.jobs import view_tables
from kafkamq.cli.spark.options import SparkChoice, with_spark
from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.queue.dead_letters import (
    DeadLetter,
    RedriveReport,
    Selection,
    read_dead_letters,
    redrive,
)
from kafkamq.transport.admin import require_brokers
from kafkamq.types import DeadLetterReason

QueueOption = Annotated[str, typer.Option("--queue", "-q", help="Only dead letters of this queue.")]
ReasonOption = Annotated[
    str,
    typer.Option(
        help="Only dead letters with this reason: "
        f"{', '.join(reason.value for reason in DeadLetterReason)}."
    ),
]
IdOption = Annotated[
    list[str] | None,
    typer.Option("--id", help="Only the dead letter of this message; may be repeated."),
]


def _selection(queue_id: str, reason: str, ids: list[str] | None) -> Selection:
    known = [item.value for item in DeadLetterReason]
    if reason and reason not in known:
        raise ConfigError(f"--reason is {reason!r}: it must be one of {', '.join(known)}")
    return Selection(queue_id=queue_id, reason=reason, ids=frozenset(ids or ()))


@dataclass(slots=True)
class _Group:
    open: int = 0
    redriven: int = 0
    oldest_ms: int = 0
    newest_ms: int = 0

    def add(self, letter: DeadLetter) -> None:
        if letter.is_redriven:
            self.redriven += 1
        else:
            self.open += 1
        self.oldest_ms = min(self.oldest_ms or letter.timestamp_ms, letter.timestamp_ms)
        self.newest_ms = max(self.newest_ms, letter.timestamp_ms)


@connected
def ls(
    config: ServiceConfig,
    queue_id: QueueOption = "",
    reason: ReasonOption = "",
    identity: IdOption = None,
    as_json: Json = False,
) -> None:
    """Count dead letters, per queue and reason."""
    selection = _selection(queue_id, reason, identity)
    require_brokers(config)
    groups: defaultdict[tuple[str, str], _Group] = defaultdict(_Group)
    with output.progress("Reading dead letters", None) as tell:
        for number, letter in enumerate(read_dead_letters(config), start=1):
            tell(number)
            if letter in selection:
                groups[letter.queue_id, letter.reason].add(letter)
    if queue_id and not groups:
        warn_of_unused(config, queue_id)
    if as_json:
        for (queue, why), group in sorted(groups.items()):
            output.print_json({"queue_id": queue, "reason": why, **asdict(group)})
        return
    output.print_table(
        "Dead letters",
        ("queue", "reason", "open", "redriven", "oldest", "newest"),
        [
            (
                queue,
                why,
                group.open,
                group.redriven,
                output.time_of(group.oldest_ms),
                output.time_of(group.newest_ms),
            )
            for (queue, why), group in sorted(groups.items())
        ],
    )


@connected
def peek(
    config: ServiceConfig,
    queue_id: QueueOption = "",
    reason: ReasonOption = "",
    identity: IdOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many.")] = 10,
    include_redriven: Annotated[
        bool, typer.Option("--all", help="Show dead letters that were redriven, too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Look at dead letters; nothing changes."""
    selection = _selection(queue_id, reason, identity)
    require_brokers(config)
    chosen = (
        letter
        for letter in read_dead_letters(config)
        if letter in selection and (include_redriven or not letter.is_redriven)
    )
    letters = list(islice(chosen, limit))
    if queue_id and not letters:
        warn_of_unused(config, queue_id)
    if as_json:
        for letter in letters:
            output.print_json(_as_json(letter))
        return
    output.print_table(
        "",
        ("queue", "id", "reason", "deliveries", "when", "error", "payload"),
        [
            (
                letter.queue_id,
                letter.id,
                letter.reason + (" (redriven)" if letter.is_redriven else ""),
                letter.delivery_count,
                output.time_of(letter.timestamp_ms),
                output.text_of(letter.error.encode()),
                output.text_of(letter.payload),
            )
            for letter in letters
        ],
    )


def _as_json(letter: DeadLetter) -> dict[str, object]:
    return {
        "id": letter.id,
        "queue_id": letter.queue_id,
        **output.bytes_fields("payload", letter.payload),
        **output.bytes_fields("key", letter.user_key),
        "headers": output.headers_object(dict(letter.headers)),
        "reason": letter.reason,
        "error": letter.error,
        "delivery_count": letter.delivery_count,
        "timestamp_ms": letter.timestamp_ms,
        "partition": letter.partition,
        "offset": letter.offset,
        "origin": None if letter.origin is None else letter.origin.encode().decode(),
        "redriven_from": letter.redriven_from or None,
        "is_redriven": letter.is_redriven,
    }


@connected
@with_spark
def redrive_command(
    config: ServiceConfig,
    on: SparkChoice,
    queue_id: QueueOption = "",
    reason: ReasonOption = "",
    identity: IdOption = None,
    where: Annotated[
        str,
        typer.Option(
            metavar="SQL",
            help="Only dead letters that meet this SQL condition on the table dead_letters "
            "(see 'kafkamq sql'), which Spark evaluates: \"error LIKE '%timeout%' AND timestamp > "
            "'2026-01-31'\".",
        ),
    ] = "",
    everything: Annotated[
        bool,
        typer.Option(
            "--everything", help="Redrive all dead letters; needed if no other option chooses some."
        ),
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Send at most this many.")] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Send dead letters back into their queues, each once however often this is run.

    A message keeps its id, key, payload and headers, and starts with its first delivery. The dead
    letter stays, marked as redriven. One that is too large for its topic by now, or has none,
    is named, and the exit code is 1; the others are sent.
    """
    if not (queue_id or reason or identity or where or everything or dry_run):
        raise ConfigError("choose with --queue, --reason, --id or --where, or say --everything")
    selection = _selection(queue_id, reason, identity)
    require_brokers(config)
    if where:
        with (
            view_tables(config, "redrive", on, topic=config.dead_letter_topic) as spark,
            output.working("Choosing dead letters"),
        ):
            from kafkamq.spark.jobs.sql import chosen_letters

            selection = replace(selection, places=chosen_letters(spark, where))
    with output.progress("Redriving", limit) as on_progress:
        report = redrive(config, selection, limit=limit, dry_run=dry_run, on_progress=on_progress)
    if queue_id and not (report.selected or report.already_redriven):
        warn_of_unused(config, queue_id)
    if as_json:
        output.print_json({**asdict(report), "dry_run": dry_run})
    else:
        _say_redriven(report, dry_run=dry_run)
    if report.refused:
        raise typer.Exit(1)


def _say_redriven(report: RedriveReport, *, dry_run: bool) -> None:
    verb = "would be redriven" if dry_run else "redriven"
    output.note(
        f"{report.selected if dry_run else report.redriven:,} {verb}, "
        f"{report.already_redriven:,} were before."
    )
    if report.payload_lost:
        output.note(f"{report.payload_lost:,} cannot be: their payload is gone.")
    if report.headers_unreadable:
        output.note(
            f"{report.headers_unreadable:,} cannot be: names of their headers are not UTF-8,"
            " and a copy would lose them."
        )
    if report.queue_unknown:
        output.note(f"{report.queue_unknown:,} cannot be: nothing says which queue was theirs.")
    for each in report.refusals:
        output.note(f"{each.topic}[{each.partition}]@{each.offset} cannot be: {each.error}.")
    if report.refused > len(report.refusals):
        output.note(f"{report.refused - len(report.refusals):,} more cannot be.")


group = command_group(
    "Dead letters: count them, look at them, send them back.",
    {"ls": ls, "peek": peek, "redrive": redrive_command},
)
