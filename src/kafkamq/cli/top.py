"""``top`` shows queues, or one of them, in a terminal, from the JSON of ``kafkamq web``."""

from __future__ import annotations

import base64
import json
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode, urlsplit
from urllib.request import Request, urlopen

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kafkamq.cli import output
from kafkamq.cli.options import connected_if_named
from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, KafkaMQError, StateError
from kafkamq.runtime.signals import stop_on_signals

TURN_S = 1.0
_ANSWER_S = 10.0
_MAX_ANSWER_BYTES = 16 << 20
Ask = Callable[..., "dict[str, Any] | None"]
"""Called with the name of an answer and its query; None: there is no such thing."""


class Sort(str, Enum):
    """It says what comes first, by the pages' own names."""

    QUEUE = "queue"
    WAITING = "waiting"
    IN_FLIGHT = "in_flight"
    DELAYED = "delayed"
    DUE = "due"
    LETTERS = "letters"
    OLDEST = "oldest"
    RATE = "rate"


@connected_if_named
def top(
    config: ServiceConfig | None,
    queue: Annotated[str, typer.Argument(help="One queue; without it all of them.")] = "",
    url: Annotated[
        str, typer.Option(help="Address of a 'kafkamq web'; without it the topics are read here.")
    ] = "",
    sort: Annotated[Sort, typer.Option(help="What comes first.")] = Sort.WAITING,
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
    user: Annotated[
        str, typer.Option(envvar="KAFKAMQ_WEB_USER", help="User of that address.")
    ] = "",
    password: Annotated[
        str,
        typer.Option(envvar="KAFKAMQ_WEB_PASSWORD", help="Password; better by the variable."),
    ] = "",
) -> None:
    """Show what waits, is in flight, delayed and dead, each second, until Ctrl-C."""
    if not url and config is None:
        raise ConfigError("say where: --url of a 'kafkamq web', or --bootstrap-servers")
    stopping = threading.Event()
    stop_on_signals(stopping.set)
    with _asking_index(config) if config and not url else _asking_pages(url, user, password) as ask:
        while once and not stopping.is_set() and not _is_read(ask):
            stopping.wait(TURN_S / 4)
        if once:
            output.output().print(frame(ask, queue, sort.value))
            return
        with Live(console=output.output(), screen=True, auto_refresh=False) as live:
            while not stopping.is_set():
                try:
                    live.update(frame(ask, queue, sort.value), refresh=True)
                except KafkaMQError as error:
                    live.update(Text(f"{error}", "red"), refresh=True)
                stopping.wait(TURN_S)


def _is_read(ask: Ask) -> bool:
    state = ask("state") or {}
    return bool(state.get("is_caught_up") or state.get("error"))


@contextmanager
def _asking_index(config: ServiceConfig) -> Iterator[Ask]:
    from kafkamq.web.index.follower import Index, IndexOptions
    from kafkamq.web.views import Views

    with tempfile.TemporaryDirectory(prefix="kafkamq-top-") as folder:
        index = Index(config, IndexOptions(path=Path(folder) / "index"))
        views = Views(index)
        answers: Mapping[str, Callable[..., dict[str, Any] | None]] = {
            "state": views.state,
            "queues": views.overview,
            "queue": views.queue,
        }

        def ask(what: str, **query: str) -> dict[str, Any] | None:
            if what != "state" and not views.state()["made_ms"]:
                return {}
            try:
                return answers[what](**query)
            except sqlite3.Error as error:
                raise StateError(f"the index cannot be read: {error}") from error

        index.start()
        try:
            yield ask
        finally:
            index.close()


@contextmanager
def _asking_pages(url: str, user: str, password: str) -> Iterator[Ask]:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"--url is {url!r}: it must begin with http:// or https://")
    headers = {}
    if user:
        pair = base64.b64encode(f"{user}:{password}".encode()).decode()
        headers["authorization"] = f"Basic {pair}"

    def ask(what: str, **query: str) -> dict[str, Any] | None:
        address = f"{url.rstrip('/')}/api/{what}?{urlencode(query)}"
        try:
            with urlopen(Request(address, headers=headers), timeout=_ANSWER_S) as answer:
                found = json.loads(answer.read(_MAX_ANSWER_BYTES))
        except HTTPError as error:
            if error.code == 404 and what != "state":
                return None
            if error.code == 401:
                raise ConfigError(f"{url} wants a user: --user and KAFKAMQ_WEB_PASSWORD") from error
            raise StateError(f"{url} answers {error.code} {error.reason}") from error
        except (URLError, HTTPException, OSError, ValueError) as error:
            raise StateError(f"{url} does not answer as 'kafkamq web' does: {error}") from error
        if not isinstance(found, dict):
            raise StateError(f"{url} does not answer as 'kafkamq web' does")
        return found

    yield ask


def frame(ask: Ask, queue: str, sort: str) -> Group:
    state = ask("state") or {}
    title = Text(f"{state.get('namespace', '')}  {time.strftime('%H:%M:%S')}", "bold")
    if state.get("error"):
        title.append(f"  {_shown(state['error'])}", "red")
    elif not state.get("is_caught_up"):
        title.append(f"  reading the topics: {state.get('behind', 0):,} records are left", "yellow")
    if queue:
        found = ask("queue", name=queue)
        if found is None:
            return Group(title, Text(f"no message of queue {_shown(queue)} was seen"))
        return Group(title, *_queue(found, state.get("now_ms", 0)))
    found = ask("queues", sort=sort) or {}
    return Group(title, *_queues(found, state.get("now_ms", 0)))


_NUMBERS = ("waiting", "in_flight", "delayed", "due", "letters")
_NAMES = ("waiting", "in flight", "delayed", "due", "dead")


def _queues(found: Mapping[str, Any], now_ms: int) -> Iterator[Table | Text]:
    totals = found.get("totals", {})
    yield Text(
        "  ".join(f"{totals.get(n, 0):,} {t}" for n, t in zip(_NUMBERS, _NAMES, strict=True))
    )
    names = ("queue", *_NAMES, "sent/min", "acked/min", "oldest")
    rows = [
        (
            row["queue"],
            *(row[name] for name in (*_NUMBERS, "sent_per_minute", "acked_per_minute")),
            _age(now_ms - row["oldest_ms"]) if row["oldest_ms"] else "-",
        )
        for row in found.get("queues", ())
    ]
    yield _table(names, rows)
    if found.get("pages", 1) > 1:
        yield Text(f"{len(rows)} of {found['count']:,} queues", "dim")


def _queue(found: Mapping[str, Any], now_ms: int) -> Iterator[Table | Text]:
    if not found:
        return
    named = zip(_NUMBERS, _NAMES, strict=True)
    counts = "  ".join(f"{found[name]:,} {text}" for name, text in named)
    yield Text(f"{_shown(found['queue'])}: {counts}")
    rows = [
        (
            row["id"] or row["where"],
            row["state"],
            row["consumer"] or "-",
            row["attempt"],
            _age(row["left_ms"]),
            _age(now_ms - row["begin_ms"]),
        )
        for row in found["open"]
    ]
    yield _table(("message", "state", "held by", "attempt", "ends in", "for"), rows)
    failures = [
        (row["form"], row["reason"], row["letters"] - row["redriven"], row["redriven"])
        for row in found["failures"]
    ]
    if failures:
        yield _table(("error", "reason", "dead", "redriven"), failures)


def _table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    shown = [[_shown(each) if isinstance(each, str) else each for each in row] for row in rows]
    return output.table_of("", names, shown, "ellipsis")


def _shown(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]


def _age(value_ms: int) -> str:
    seconds = value_ms / 1000
    if seconds < 0:
        return "over"
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"
