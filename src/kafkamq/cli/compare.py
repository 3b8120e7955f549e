"""``compare``: the backends on the user's own work, measured."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kafkamq.cli import output
from kafkamq.cli.compare_page import render, table_rows
from kafkamq.cli.doctor import kafka_version
from kafkamq.cli.options import Json, connected_if_named
from kafkamq.config import ServiceConfig
from kafkamq.dev.broker import LocalKafka
from kafkamq.dev.compare import Contender, Measured, Work, parse_range, parse_slow
from kafkamq.dev.environment import cache_dir_from, java_from
from kafkamq.errors import ConfigError
from kafkamq.transport.admin import Admin
from kafkamq.transport.reaching import require_brokers

__all__ = ["register"]


@connected_if_named
def compare(
    config: ServiceConfig | None,
    *,
    messages: Annotated[int, typer.Option(help="Of each phase.")] = 5000,
    handler_ms: Annotated[
        str, typer.Option(metavar="LOW-HIGH", help="How long handlers take, uniform.")
    ] = "0-5",
    slow: Annotated[
        str, typer.Option(metavar="SHARE%:MS", help="Those that block others, in one phase.")
    ] = "1%:1000",
    failure_rate: Annotated[
        float, typer.Option(help="Share of messages whose first delivery fails.")
    ] = 0.0,
    keys: Annotated[int, typer.Option(help="How many, dealt in turn; 0: none.")] = 1000,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    concurrency: Annotated[int, typer.Option(help="Handlers at once in each.")] = 100,
    partitions: Annotated[int, typer.Option(help="Of the topics.")] = 8,
    payload: Annotated[int, typer.Option(help="Bytes of a message.")] = 100,
    lease: Annotated[
        float, typer.Option(help="s: redelivery timeout, and session timeout of groups.")
    ] = 10.0,
    order: Annotated[
        bool, typer.Option("--order/--no-order", help="Let each keep the order that it can.")
    ] = True,
    only: Annotated[
        str | None, typer.Option(metavar="NAME[,...]", help="Of the five, those to measure.")
    ] = None,
    limit: Annotated[float, typer.Option(help="s for one phase of one of them.")] = 60.0,
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

    work = Work(
        messages=messages,
        handler_ms=parse_range(handler_ms),
        slow=parse_slow(slow),
        failure=failure_rate,
        keys=keys,
        processes=workers,
        concurrency=concurrency,
        partitions=partitions,
        payload_bytes=payload,
        lease_s=lease,
        keeps_order=order,
        limit_s=limit,
    )
    contenders = _chosen(only)
    with _ends_by_sigterm(), _cluster(config) as (where, version):
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
def _ends_by_sigterm() -> Iterator[None]:
    """SIGTERM removes all that was made, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _cluster(config: ServiceConfig | None) -> Iterator[tuple[ServiceConfig, str]]:
    """The user's, or one that ends with the block; and its version."""
    if config is not None:
        require_brokers(config)
        with Admin(config) as admin:
            cluster = admin.cluster()
        yield config, kafka_version(config, cluster)
        return
    output.note("No brokers are named (-b): starting a local one")
    with LocalKafka(cache_dir=cache_dir_from(os.environ), java=java_from(os.environ)) as broker:
        yield ServiceConfig(bootstrap_servers=broker.bootstrap_servers), broker.version


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(compare)
