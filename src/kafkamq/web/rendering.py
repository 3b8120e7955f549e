"""Templates, and how times, numbers and texts are written in them; everything is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Path(__file__).with_name("templates")
STATIC = Path(__file__).with_name("static")
_CHART_HEIGHT = 48.0


@cache
def environment() -> Environment:
    """Make the templates' environment, which escapes whatever the name of a template is."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "time": time_of,
        "moment": moment_of,
        "number": number_of,
        "duration": duration_of,
        "size": size_of,
        "bars": bars,
        "spark": spark,
        "short": short,
        "url": url_of,
        "filtered": lambda path, chosen, **more: url_of(path, **chosen, **more),
    }
    return made


def render(template: str, values: Mapping[str, Any]) -> str:
    return environment().get_template(template).render(values)


def time_of(at_ms: int) -> str:
    try:
        moment = datetime.fromtimestamp(at_ms / 1000, tz=timezone.utc)
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"
    return moment.strftime("%Y-%m-%d %H:%M:%S.") + f"{at_ms % 1000:03}"


def moment_of(at_ms: int) -> str:
    """Return a time as fields of forms have it; empty: there is none."""
    return time_of(at_ms).replace(" ", "T") if at_ms else ""


def number_of(value: int | None) -> str:
    return "\u2013" if value is None else f"{value:,}".replace(",", "\u202f")


def duration_of(value_ms: int) -> str:
    """Write the two largest units of a duration: ``2 h 05 min``."""
    sign, seconds = ("-", -value_ms / 1000) if value_ms < 0 else ("", value_ms / 1000)
    if seconds < 60:
        return f"{sign}{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{sign}{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{sign}{hours} h {minutes:02} min"
    return f"{sign}{hours // 24} d {hours % 24:02} h"


def size_of(value: int) -> str:
    if value < 1024:
        return f"{value} B"
    amount = float(value)
    for unit in ("KiB", "MiB"):
        amount /= 1024
        if amount < 1024:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1024:.1f} GiB"


def bars(values: list[int]) -> list[tuple[int, float, float]]:
    """Return number, top and height of each bar of a chart that is 48 high."""
    most = max(values, default=0) or 1
    heights = [round(_CHART_HEIGHT * value / most, 2) for value in values]
    return [
        (number, round(_CHART_HEIGHT - height, 2), max(height, 1.0))
        for number, height in enumerate(heights)
        if values[number]
    ]


def spark(values: list[int]) -> str:
    """Return the same bars as one path, which is short where a page has many charts."""
    return "".join(f"M{at} 48v-{height:g}h1v{height:g}z" for at, _, height in bars(values))


def short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def url_of(path: str, **query: Any) -> str:
    """Return an address of this server; what is empty is left out of the query."""
    kept = {name: value for name, value in query.items() if value not in ("", None, 0)}
    return quote(path) + (f"?{urlencode(kept)}" if kept else "")
