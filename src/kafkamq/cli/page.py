"""Pages that stand alone: tables and bar charts in HTML and inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kafkamq.cli import output

WIDTH, HEIGHT = 520, 150
_BOTTOM, _TOP = 24, 14
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em;color:#1c2733}
h1{font-size:1.5em}h2{border-top:1px solid #c9d3dc;padding-top:1em;margin-top:2em}
table{border-collapse:collapse;margin:.5em 0}th,td{padding:.2em .8em;text-align:left}
th{border-bottom:1px solid #8fa3b5}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
tr:nth-child(even) td{background:#f3f6f9}svg{display:block;max-width:100%}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(20em,1fr));gap:1em 2em}
figure{margin:0}figcaption{color:#4a5b6b}rect{fill:#2f6f9f}text{font-size:10px;fill:#4a5b6b}
@media(prefers-color-scheme:dark){body{background:#12181e;color:#dce5ec}
tr:nth-child(even) td{background:#1a232c}rect{fill:#5aa5d8}
text,figcaption{fill:#9db0c0;color:#9db0c0}}
"""


def document(title: str, body: str) -> str:
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
{body}
</body></html>
"""


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return "<p>None.</p>"
    numeric = [
        any(isinstance(row[index], int | float) for row in rows) for index in range(len(head))
    ]
    titles = "".join(
        f"<th{' class=n' if number else ''}>{escape(title)}</th>"
        for title, number in zip(head, numeric, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><tr>{titles}</tr>{body}</table>"


def _cell(value: object) -> str:
    kind = " class=n" if isinstance(value, int | float) else ""
    return f"<td{kind}>{escape(output.cell(value))}</td>"


def figure(title: str, values: Sequence[float | None], names: Sequence[str]) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{chart(values, names)}</figure>"


def chart(values: Sequence[float | None], names: Sequence[str]) -> str:
    """Return a bar chart as SVG: a name below each bar, its value above while there is room."""
    top = max((value for value in values if value is not None), default=0)
    if not top:
        return "<p>None.</p>"
    step = WIDTH / len(values)
    room = HEIGHT - _BOTTOM - _TOP
    parts = []
    for index, (value, name) in enumerate(zip(values, names, strict=True)):
        x = index * step
        if value is not None:
            parts.append(_bar(value, name, x=x, step=step, height=room * value / top, room=room))
        anchor = "start" if index == 0 else "end" if index == len(values) - 1 else "middle"
        if step > 30:
            anchor = "middle"
        place = {"start": x, "middle": x + step / 2, "end": x + step}[anchor]
        if name:
            parts.append(
                f'<text x="{place:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">'
                f"{escape(name)}</text>"
            )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _bar(value: float, name: str, *, x: float, step: float, height: float, room: float) -> str:
    y = _TOP + room - height
    shown = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    bar = (
        f'<rect x="{x + step * 0.1:.1f}" y="{y:.1f}" width="{step * 0.8:.1f}" '
        f'height="{height:.1f}"><title>{escape(name)} {shown}</title></rect>'
    )
    if value and step > 30:
        bar += f'<text x="{x + step / 2:.1f}" y="{y - 3:.1f}" text-anchor="middle">{shown}</text>'
    return bar
