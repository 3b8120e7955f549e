"""Commands print data on stdout, everything about it on stderr.

With ``--json`` a command prints one object, or one object per line for a list or a stream. Progress
bars show on a terminal only.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

MAX_CELL_CHARACTERS = 60
PIPE_COLUMNS = 500


def prepare_stdout() -> None:
    """Makes what cannot be written an OSError, and what has no character an escape."""
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if sys.stdout is None:
        # This refuses what is written.
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def output() -> Console:
    """Return the console for data; built at each use, because tests and pipes replace stdout.

    What is not read on a terminal is as wide as it needs to be.
    """
    is_terminal = sys.stdout.isatty()
    width = None if is_terminal else PIPE_COLUMNS
    return Console(file=sys.stdout, highlight=False, soft_wrap=not is_terminal, width=width)


def errors() -> Console:
    return Console(file=sys.stderr, highlight=False)


def note(text: str) -> None:
    """Says something about what happens, on stderr; a terminal wraps it where it must."""
    errors().print(Text(text), soft_wrap=True)


def refuse(error: Exception) -> None:
    """Says on stderr why a command ends, or a statement has no answer."""
    errors().print(Text.assemble(("kafkamq:", "red"), f" {error}"), soft_wrap=True)


def print_json(value: Mapping[str, Any]) -> None:
    """Prints one object on one line, and makes sure that a pipe has it."""
    is_ascii = "utf" not in sys.stdout.encoding.lower()
    sys.stdout.write(json.dumps(value, ensure_ascii=is_ascii, separators=(",", ":")) + "\n")
    sys.stdout.flush()


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    output().print(table_of(title, columns, rows))


def table_of(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    overflow: Literal["fold", "ellipsis"] = "fold",
) -> Table:
    table = Table(
        title=escape(title) if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for index, name in enumerate(columns):
        numeric = any(isinstance(row[index], int | float) for row in rows)
        table.add_column(Text(name), justify="right" if numeric else "left", overflow=overflow)
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row))
    return table


def cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def time_of(timestamp_ms: int) -> str:
    moment = datetime.fromtimestamp(timestamp_ms / 1000, tz=timezone.utc)
    return moment.strftime("%Y-%m-%d %H:%M:%SZ")


def text_of(data: bytes | None) -> str:
    """Get a payload, key or header value for a table's cell: text if it is text, else its size."""
    if data is None:
        return "null"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return f"<{len(data)} bytes>"
    if not text.isprintable():
        text = repr(text)[1:-1]
    if len(text) > MAX_CELL_CHARACTERS:
        return text[: MAX_CELL_CHARACTERS - 1] + "…"
    return text


def bytes_fields(name: str, data: bytes | None) -> dict[str, str | None]:
    """Return bytes for JSON: ``{name: text}``, or ``{name_base64: ...}`` when they are no UTF-8."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def headers_object(headers: Mapping[str, bytes | None]) -> dict[str, Any]:
    """Return headers for JSON: texts, or ``{"base64": ...}`` for what is no UTF-8."""
    result: dict[str, Any] = {}
    for name, value in headers.items():
        fields = bytes_fields("base64", value)
        result[name] = (
            fields["base64"] if "base64" in fields else {"base64": fields["base64_base64"]}
        )
    return result


@contextmanager
def progress(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yield what is told how much is done in all; it shows a bar where stderr is a terminal."""
    console = errors()
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(escape(title), total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Says on stderr what takes long: with the time that it takes on a terminal, else one line."""
    if errors().is_terminal:
        with progress(text, None):
            yield
    else:
        note(f"{text} ...")
        yield
