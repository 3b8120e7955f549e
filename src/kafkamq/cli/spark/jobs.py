"""``sql``, ``replay`` and ``audit`` run Spark over the tables of a namespace, the audit as a
page; ``spark master`` and ``spark worker``: a standalone cluster from the installed PySpark.
"""

from __future__ import annotations

import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import date, datetime, timezone
from html import escape as escape_html
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kafkamq.cli import output
from kafkamq.cli.options import DryRun, Json, command_group, connected
from kafkamq.cli.output import time_of
from kafkamq.cli.page import document, figure, table
from kafkamq.cli.queues import warn_of_unused
from kafkamq.cli.spark.options import SparkChoice, with_spark
from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, KafkaMQError
from kafkamq.runtime.signals import python_interrupts
from kafkamq.transport.admin import Admin, require_brokers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kafkamq.spark.jobs.audit import Audit, QueueAudit
    from kafkamq.spark.jobs.sql import Tables

EXIT_FAILED = 1
_TIME_HELP = "2026-01-31T12:00:00Z, or milliseconds since 1970; broker time."
From = Annotated[
    str,
    typer.Option(
        "--from", metavar="TIME", help=f"Only what was written since this time: {_TIME_HELP}"
    ),
]
Until = Annotated[
    str,
    typer.Option(
        "--to", metavar="TIME", help=f"Only what was written before this time: {_TIME_HELP}"
    ),
]


def parse_moment(text: str, *, option: str) -> int | None:
    """Return a moment in milliseconds; None for an empty text."""
    from kafkamq.spark.options import parse_timestamp_ms

    return parse_timestamp_ms(option, text) if text else None


def _bounds(since: str, until: str) -> tuple[int | None, int | None]:
    begin, end = parse_moment(since, option="--from"), parse_moment(until, option="--to")
    if begin is not None and end is not None and end <= begin:
        raise ConfigError(f"--to is {until!r}: it must be later than --from, {since!r}")
    return begin, end


def require_namespace(config: ServiceConfig, topic: str = "") -> None:
    """Refuse brokers that are silent or lack the topic, else the markers, before Spark starts."""
    require_brokers(config)
    with Admin(config) as admin:
        admin.topic_id(topic or config.marker_topic)


@contextmanager
def view_tables(
    config: ServiceConfig, name: str, on: SparkChoice, *, topic: str = "", has_tables: bool = True
) -> Iterator[SparkSession]:
    """``view_session`` for a command that needs a topic, else the markers; says that Spark starts.

    Ctrl-C interrupts the block: Spark's own handler asks the JVM in the middle of another question.
    """
    from kafkamq.spark.session import check_packages

    check_packages()
    from kafkamq.spark.jobs.sql import view_session

    require_namespace(config, topic)
    with ExitStack() as stack:
        with output.working("Starting Spark"):
            opened = view_session(
                config,
                master=on.master,
                app_name=f"kafkamq {name}",
                settings=on.settings,
                has_tables=has_tables,
            )
            spark = stack.enter_context(opened)
        with python_interrupts():
            yield spark


@connected
@with_spark
def sql(
    config: ServiceConfig,
    on: SparkChoice,
    statement: Annotated[
        str,
        typer.Argument(
            help="SQL over the tables messages, deliveries, in_flight, dead_letters and markers. "
            "None: one session reads statements from stdin, each up to a semicolon at a line's end."
        ),
    ] = "",
    limit: Annotated[int, typer.Option(min=1, help="Print at most this many rows.")] = 1000,
    as_json: Json = False,
) -> None:
    """Query what happened to each message with SQL; the tables are read from the topics."""
    with view_tables(config, "sql", on, has_tables=False) as spark:
        from kafkamq.spark.jobs.sql import Tables

        tables = Tables(spark, config)
        if statement:
            _answer(tables, statement, limit, as_json=as_json)
            return
        failed = _converse(tables, limit, as_json=as_json, cancel=spark.sparkContext.cancelAllJobs)
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _converse(tables: Tables, limit: int, *, as_json: bool, cancel: Callable[[], None]) -> bool:
    """Statements from stdin until its end; whether one of them failed and nobody was there.

    A terminal gets a prompt, and goes on behind an error and behind a Ctrl-C.
    """
    is_terminal = sys.stdin.isatty()
    text, at_end, failed = "", False, False
    while not at_end:
        try:
            prompt = "... " if text.strip() else "sql> "
            line = _line(prompt) if is_terminal else sys.stdin.readline()
            at_end = not line
            if is_terminal and line.strip().rstrip(";").lower() in ("exit", "quit"):
                return False
            text += line
            if at_end or text.rstrip().endswith(";"):
                statement, text = text.strip().rstrip("; \n"), ""
                if statement:
                    _answer(tables, statement, limit, as_json=as_json)
        except KafkaMQError as error:  # noqa: PERF203 - one for each statement
            output.refuse(error)
            failed = not is_terminal
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            sys.stdout.write("\n")
            text = ""
            cancel()
    return failed


def _line(prompt: str) -> str:
    """Return a line of the terminal, with its end; empty: Ctrl-D."""
    with suppress(ImportError):
        import readline  # noqa: F401 - input() edits lines and remembers them with it
    try:
        return input(prompt) + "\n"
    except EOFError:
        sys.stdout.write("\n")
        return ""


def _answer(tables: Tables, statement: str, limit: int, *, as_json: bool) -> None:
    from pyspark.errors import PySparkException

    from kafkamq.spark.jobs.sql import sql_errors

    with output.working("Reading the topics"), sql_errors("SQL"):
        frame = tables.ask(statement)
        columns = frame.columns
        try:
            rows = frame.limit(limit + 1).collect()
            objects = [_json_row(columns, list(row)) for row in rows[:limit] if as_json]
            cells = [[_cell(each) for each in row] for row in rows[:limit] if not as_json]
        except (ArithmeticError, TypeError, ValueError) as error:
            if isinstance(error, KafkaMQError | PySparkException):
                raise
            raise ConfigError(
                f"SQL: Python has no such value ({error}): CAST the column to STRING"
            ) from error
    for each in objects:
        output.print_json(each)
    if not as_json:
        output.print_table("", columns, cells)
    if len(rows) > limit:
        output.note(f"There are more than {limit:,} rows: see --limit.")


def _json_row(names: list[str], values: list[Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in zip(names, values, strict=True):
        is_bytes = isinstance(value, bytes | bytearray)
        found = output.bytes_fields(name, value) if is_bytes else {name: _json_value(value)}
        if twice := found.keys() & result.keys():
            raise ConfigError(f"SQL: two columns are called {min(twice)}: name one of them with AS")
        result |= found
    return result


def _json_value(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return output.headers_object({"": bytes(value)})[""]
    if isinstance(value, datetime | date):
        return _text_of(value)
    if isinstance(value, float) and not math.isfinite(value):
        # As Spark's to_json writes them.
        return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    if hasattr(value, "asDict"):
        return {name: _json_value(each) for name, each in value.asDict().items()}
    if isinstance(value, dict):
        return {str(_json_value(name)): _json_value(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(each) for each in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _text_of(value: date) -> str:
    if isinstance(value, datetime):
        # Spark gives it in this machine's zone.
        moment = value.astimezone(timezone.utc)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return value.isoformat()


def _cell(value: Any) -> object:
    if isinstance(value, bytes | bytearray):
        return output.text_of(bytes(value))
    value = _json_value(value)
    return str(value) if isinstance(value, dict | list) else value


@connected
@with_spark
def replay(
    config: ServiceConfig,
    on: SparkChoice,
    where: Annotated[
        str,
        typer.Option(
            metavar="SQL",
            help="Only messages that meet this SQL condition on the table messages, for example "
            "\"queue_id = 'orders' AND id IN (SELECT id FROM deliveries WHERE outcome = "
            "'REJECT')\".",
        ),
    ] = "",
    since: From = "",
    until: Until = "",
    into: Annotated[
        str, typer.Option(metavar="QUEUE", help="Queue to send to; default: each message's own.")
    ] = "",
    rate: Annotated[float | None, typer.Option(help="Most messages a second.")] = None,
    name: Annotated[
        str, typer.Option(help="Name of this replay; the same name continues one that failed.")
    ] = "",
    everything: Annotated[
        bool,
        typer.Option(
            "--everything", help="Replay all messages; needed if no other option chooses."
        ),
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Send messages again, each once, under their own ids.

    They start again: first delivery, whole TTL. The header kafkamq-replayed-from names the copy.
    """
    from kafkamq.spark.session import check_packages

    check_packages()
    from kafkamq.spark.jobs.replay import Replay
    from kafkamq.spark.jobs.replay import replay as run_replay

    if not (where or since or until or everything or dry_run):
        raise ConfigError("choose with --where, --from or --to, or say --everything")
    begin, end = _bounds(since, until)
    wanted = Replay(
        name=name or f"replay-{uuid.uuid4().hex[:8]}",
        where=where or "true",
        from_ms=begin or 0,
        to_ms=end,
        into=into,
        rate=rate,
    )
    if not dry_run:
        output.note(f"This replay is called {wanted.name}: --name continues it after a failure.")
    with (
        view_tables(config, "replay", on) as spark,
        output.progress("Replaying", None) as on_progress,
    ):
        report = run_replay(spark, config, wanted, dry_run=dry_run, on_progress=on_progress)
    if as_json:
        output.print_json({**asdict(report), "dry_run": dry_run})
    elif dry_run:
        output.note(f"{report.selected:,} would be sent.")
    else:
        before = f", {report.sent_before:,} were before" if report.sent_before else ""
        output.note(f"{report.sent:,} sent{before}.")


@connected
@with_spark
def audit(
    config: ServiceConfig,
    on: SparkChoice,
    queue_id: Annotated[str, typer.Option("--queue", "-q", help="Only this queue.")] = "",
    since: From = "",
    until: Until = "",
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with plots, all in one file.")
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, max=1000, help="How many messages the ranking of poison lists.")
    ] = 10,
    as_json: Json = False,
) -> None:
    """Report on queues: lateness, attempts, the messages that fail most, who does the work."""
    from kafkamq.spark.session import check_packages

    check_packages()
    from kafkamq.spark.jobs.audit import STEPS
    from kafkamq.spark.jobs.audit import audit as run_audit

    bounds = zip(("from_ms", "to_ms"), _bounds(since, until), strict=True)
    given = {name: value for name, value in bounds if value is not None}
    if html is not None and not html.parent.is_dir():
        raise ConfigError(f"--html {html}: there is no folder {html.parent}")
    with (
        view_tables(config, "audit", on) as spark,
        output.progress("Auditing", len(STEPS)) as tell,
    ):
        steps = count(1)
        found = run_audit(
            spark, namespace=config.namespace, queue_id=queue_id, top=top,
            on_step=lambda: tell(next(steps)), **given,
        )  # fmt: skip
    if queue_id and not found.queues:
        warn_of_unused(config, queue_id)
    if html is not None:
        html.write_text(render(found, made_ms=round(time.time() * 1000)), encoding="utf-8")
        output.note(f"Written: {html}")
    if as_json:
        for queue in found.queues:
            output.print_json(asdict(queue))
        return
    _print_audit(found)


def _print_audit(found: Audit) -> None:
    if not found.queues:
        output.note("No attempt was found.")
        return
    for title, head, rows in _totals(found.queues):
        output.print_table(title, head, rows)
    for queue in found.queues:
        if queue.sent_again:
            output.note(
                f"{queue.queue_id}: {queue.sent_again:,} of the {queue.messages:,} messages were "
                "sent again under their ids (redriven, replayed, or by their sender); each of them "
                "counts as a message of its own."
            )
    for title, head, rows in _details(found.queues):
        if rows:
            output.print_table(title, head, rows)


_Shown = Iterator[tuple[str, tuple[str, ...], list[tuple[object, ...]]]]
"""Tables: title, heads and rows."""


def _totals(queues: Sequence[QueueAudit]) -> _Shown:
    head: tuple[str, ...] = (
        "queue", "messages", "attempts", "acked", "nacked", "rejected", "leases lost",
        "late verdicts", "dead letters", "in flight",
    )  # fmt: skip
    rows: list[tuple[object, ...]] = [
        (
            each.queue_id, each.messages, each.attempts, each.acked, each.nacked, each.rejected,
            each.leases_lost, each.late_verdicts, sum(each.dead_letters.values()),
            sum(each.in_flight.values()),
        )
        for each in queues
    ]  # fmt: skip
    yield "Attempts, and what is left", head, rows
    head = ("queue", "wait p50", "wait p99", "took p50", "took p99", "late p50", "late p99")
    rows = [
        (
            each.queue_id, each.wait_p50_s, each.wait_p99_s, each.took_p50_s, each.took_p99_s,
            each.late_p50_s, each.late_p99_s,
        )
        for each in queues
    ]  # fmt: skip
    yield "Seconds: waited, worked until the ack, redelivered late", head, rows


def _details(queues: Sequence[QueueAudit]) -> _Shown:
    head: tuple[str, ...] = ("queue", "id", "sent", "attempts", "last outcome", "reason")
    rows: list[tuple[object, ...]] = [
        (queue.queue_id, *(each[name] for name in ("id", "sent", "attempts", "outcome", "reason")))
        for queue in queues
        for each in queue.poison
    ]
    yield "Messages with the most attempts", head, rows
    head = ("queue", "consumer", "attempts", "share %", "acked", "leases lost", "took p50 ms")
    rows = [
        (
            queue.queue_id, each["consumer_id"], each["attempts"], float(each["share"]),
            each["acked"], each["leases_lost"], each["took_ms"],
        )
        for queue in queues
        for each in queue.consumers
    ]  # fmt: skip
    yield "Consumers", head, rows


def render(audit: Audit, *, made_ms: int) -> str:
    """Return one HTML page with tables and plots, nothing from elsewhere."""
    queues = "\n".join(_queue(queue, audit) for queue in audit.queues)
    span = (
        f"Attempts from {time_of(audit.begin_ms)} to {time_of(audit.end_ms)} (broker time)"
        if audit.begin_ms
        else "No attempts"
    )
    nothing = "<p>No queue has been used.</p>"
    body = f"""<p>{span}. Computed {time_of(made_ms)}.</p>
{_tables(_totals(audit.queues))}
{queues or nothing}"""
    return document(f"Audit of {audit.namespace}", body)


def _tables(shown: _Shown) -> str:
    return "".join(f"<h3>{title}</h3>{table(head, rows)}" for title, head, rows in shown)


def _queue(queue: QueueAudit, audit: Audit) -> str:
    from kafkamq.spark.jobs.audit import LATENESS_BOUNDS_S, MAX_ATTEMPT_BARS

    attempts = [queue.messages_by_attempts.get(n, 0) for n in range(1, MAX_ATTEMPT_BARS + 1)]
    names = [*map(str, range(1, MAX_ATTEMPT_BARS)), f"{MAX_ATTEMPT_BARS}+"]
    late = [*(f"≤{bound:g}s" for bound in LATENESS_BOUNDS_S), f">{LATENESS_BOUNDS_S[-1]:g}s"]
    times = [""] * len(queue.attempts_over_time)
    times[0], times[-1] = time_of(audit.begin_ms)[11:19], time_of(audit.end_ms)[11:19]
    shares = queue.consumers[:12]
    plots = (
        figure("Messages by their number of attempts", attempts, names),
        figure("Attempts over time", queue.attempts_over_time, times),
        figure("Redeliveries by lateness: from the end of the lease", queue.lateness, late),
        figure(
            "Attempts by consumer",
            [each["attempts"] for each in shares],
            [str(each["consumer_id"])[-8:] for each in shares],
        ),
    )
    letters = table(("dead letters", "messages"), sorted(queue.dead_letters.items()))
    states = table(("in flight", "messages"), sorted(queue.in_flight.items()))
    return f"""<section><h2>{escape_html(queue.queue_id)}</h2>
<div class="plots">{"".join(plots)}</div>
{_tables(_details([queue]))}
<h3>Now</h3>{letters}{states}</section>"""


Host = Annotated[str, typer.Option(help="Name or address of this machine, as the others reach it.")]


def _become(command: Sequence[str]) -> None:
    """This process goes on as that one: its signals and its exit code are the caller's."""
    from kafkamq.spark.cluster import daemon_environment

    os.execve(command[0], list(command), daemon_environment(os.environ))


def master(
    host: Host = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for workers and drivers.")
    ] = 7077,
    web_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the web pages.")] = 8080,
) -> None:
    """Run the master of a standalone cluster until Ctrl-C."""
    from kafkamq.spark.cluster import master_command

    command = master_command(host=host, port=port, web_port=web_port)
    output.note(f"Master at spark://{host}:{port}; workers join with 'kafkamq spark worker'.")
    _become(command)


def worker(
    master: Annotated[
        str, typer.Argument(metavar="spark://HOST:PORT", help="Address of the master.")
    ],
    cores: Annotated[int, typer.Option(min=1, help="Cores that executors may use.")] = 1,
    memory: Annotated[str, typer.Option(help="Memory that executors may use, such as 2g.")] = "1g",
    host: Host = "",
    work_folder: Annotated[
        str, typer.Option("--work-dir", help="Folder for logs and shipped files of executors.")
    ] = "",
) -> None:
    """Run a worker of a standalone cluster until Ctrl-C.

    Executors use this Python; PYSPARK_PYTHON names another one.
    """
    from kafkamq.spark.cluster import worker_command

    _become(worker_command(master, cores=cores, memory=memory, host=host, work_folder=work_folder))


cluster = command_group(
    "A standalone Spark cluster for --master, from the installed PySpark.",
    {"master": master, "worker": worker},
)
