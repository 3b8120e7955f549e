"""``compare`` measures the backends on the user's own work: a table, and a page with plots."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from html import escape
from pathlib import Path
from typing import Annotated

import typer

from kafkamq.cli import output
from kafkamq.cli.options import Json, connected_if_named, ends_by_sigterm, with_fields
from kafkamq.cli.page import document, figure, table
from kafkamq.config import ServiceConfig
from kafkamq.dev.broker import LocalKafka
from kafkamq.dev.compare.plan import Contender, Measured, Work
from kafkamq.dev.environment import cache_dir_from, java_from
from kafkamq.errors import ConfigError
from kafkamq.markers.overview import kafka_version
from kafkamq.transport.admin import Admin, require_brokers

_ONLY = f"Measure only these: {', '.join(each.value for each in Contender)}."


@connected_if_named
@partial(with_fields, name="work", kind=Work)
def compare(
    config: ServiceConfig | None,
    work: Work,
    *,
    only: Annotated[str | None, typer.Option(metavar="NAME[,...]", help=_ONLY)] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write the result as a page.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep topics, groups, histories and logs.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure the four backends and a plain consumer group on the same work.

    On your own cluster (-b), or on a local broker that it starts. It makes topics and groups of its
    own there and deletes them at the end. Real worker processes run, and one of each is killed.
    """
    from kafkamq.dev.compare.run import compare as run

    contenders = _chosen(only)
    with ends_by_sigterm(), _cluster(config) as (where, version):
        found = run(where, work, contenders, say=output.note, keep=keep)
    if report is not None:
        _write(report, render(work, found, version=version))
    if as_json:
        output.print_json({"kafka": version, "contenders": [each.as_json() for each in found]})
    else:
        _show(found)


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report {path}: cannot write it ({error.strerror})") from None
    output.note(f"The report is {path}")


def _show(found: Sequence[Measured]) -> None:
    heads = ("", *(each.contender for each in found))
    output.print_table("The same work on each", heads, table_rows(found))
    for each in found:
        for note in each.notes:
            output.note(f"{each.contender}: {note}")


def _chosen(only: str | None) -> Sequence[Contender]:
    if only is None:
        return tuple(Contender)
    known = {each.value: each for each in Contender}
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"--only {name!r}: it must be one of {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


@contextmanager
def _cluster(config: ServiceConfig | None) -> Iterator[tuple[ServiceConfig, str]]:
    """Yield the user's, or one that ends with the block; and its version."""
    if config is not None:
        require_brokers(config)
        with Admin(config) as admin:
            cluster = admin.cluster()
        yield config, kafka_version(config, cluster)
        return
    output.note("No brokers are named (-b): starting a local one")
    with LocalKafka(cache_dir=cache_dir_from(os.environ), java=java_from(os.environ)) as broker:
        yield ServiceConfig(bootstrap_servers=broker.bootstrap_servers), broker.version


# The table and the page.


def table_rows(found: Sequence[Measured]) -> list[tuple[str, ...]]:
    """Return a name, and what each contender has; a dash where nothing was measured."""
    return [(name, *(tell(each) or "-" for each in found)) for name, tell in _ROWS]


def _number(pick: Callable[[Measured], float | None], form: str) -> Callable[[Measured], str]:
    def tell(each: Measured) -> str:
        value = pick(each)
        return "" if value is None else format(value, form)

    return tell


def _order(each: Measured) -> str:
    if each.keys is None or each.keys_in_order is None:
        return ""
    answer = "yes" if each.keys_in_order == each.keys else "no"
    return f"{answer}: {each.keys_in_order} of {each.keys}"


def _share_in_order(each: Measured) -> float | None:
    if not each.keys or each.keys_in_order is None:
        return None
    return 100 * each.keys_in_order / each.keys


_ROWS: tuple[tuple[str, Callable[[Measured], str]], ...] = (
    ("order asked for", lambda each: each.ordering),
    ("messages/s", _number(lambda each: each.per_second, ",.0f")),
    ("s for the work", _number(lambda each: each.seconds, ".2f")),
    ("... at best", _number(lambda each: each.ideal_s, ".2f")),
    ("end to end p50 ms", _number(lambda each: each.latency_p50_ms, ".1f")),
    ("end to end p99 ms", _number(lambda each: each.latency_p99_ms, ".1f")),
    ("s with slow messages", _number(lambda each: each.blocking_s, ".2f")),
    ("... at best", _number(lambda each: each.blocking_ideal_s, ".2f")),
    ("wait of the others p99 ms", _number(lambda each: each.blocked_p99_ms, ",.0f")),
    ("s from SIGKILL until all was done", _number(lambda each: each.recovery_s, ".1f")),
    ("keys in order", _order),
    ("runs a message", _number(lambda each: each.runs, ".3f")),
    ("lost", _number(lambda each: each.lost, "d")),
    ("extra records a message", _number(lambda each: each.extra_records, ".3f")),
    ("extra bytes a message", _number(lambda each: each.extra_bytes, ".1f")),
)

_PLOTS: tuple[tuple[str, Callable[[Measured], float | None]], ...] = (
    ("Messages a second", lambda each: each.per_second),
    ("End to end, p50 in ms", lambda each: each.latency_p50_ms),
    ("End to end, p99 in ms", lambda each: each.latency_p99_ms),
    ("Seconds with slow messages among them", lambda each: each.blocking_s),
    ("How long the others wait then, p99 in ms", lambda each: each.blocked_p99_ms),
    ("Seconds from SIGKILL until all was done", lambda each: each.recovery_s),
    ("Keys in order, %", _share_in_order),
    ("Extra bytes a message in the logs", lambda each: each.extra_bytes),
)


def render(work: Work, found: Sequence[Measured], *, version: str = "") -> str:
    names = [each.contender for each in found]
    plots = "".join(figure(title, [pick(each) for each in found], names) for title, pick in _PLOTS)
    notes = "".join(
        f"<li>{escape(each.contender)}: {escape(note)}</li>"
        for each in found
        for note in each.notes
    )
    kafka = f"Kafka {version}. " if version else ""
    body = f"""<p>{escape(kafka)}{escape(_description(work))}</p>
{table(("", *names), table_rows(found))}
{f"<ul>{notes}</ul>" if notes else ""}
<div class="plots">{plots}</div>
<p>Workers, senders and this program ran on one machine with {os.cpu_count() or "?"} CPUs. Extra
records are those in the logs beside the messages themselves: markers, commits, state and copies;
bytes are those of keys, values and headers, before compression.</p>"""
    return document("kafkamq compare", body)


def _description(work: Work) -> str:
    low, high = work.handler_ms
    keys = f"{work.keys:,} keys" if work.keys else "no keys"
    return (
        f"{work.messages:,} messages of {work.payload_bytes:,} bytes with {keys}, handlers of "
        f"{low:g} to {high:g} ms, {work.processes} processes with {work.concurrency} handlers "
        f"each, {work.partitions} partitions; {work.failure:.1%} of the messages fail once; slow: "
        f"{work.slow.share:.1%} take {work.slow.ms:,} ms. A consumer group has one handler for "
        "each partition."
    )
