"""The audit as one HTML page: tables and plots, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kafkamq.spark.jobs.audit import Audit, QueueAudit

__all__ = ["bars", "render"]

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


def render(audit: Audit, *, made_ms: int) -> str:
    """The whole page.

    Args:
        audit: What it shows.
        made_ms: When it was computed, Unix time.
    """
    queues = "\n".join(_queue(queue, audit) for queue in audit.queues)
    span = (
        f"Attempts from {_time(audit.begin_ms)} to {_time(audit.end_ms)} (broker time)"
        if audit.begin_ms
        else "No attempts"
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Audit of {escape(audit.namespace)}</title><style>{_STYLE}</style></head><body>
<h1>Audit of {escape(audit.namespace)}</h1>
<p>{span}. Computed {_time(made_ms)}.</p>
{_summary(audit)}
{queues or "<p>No queue has been used.</p>"}
</body></html>
"""


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")


def _summary(audit: Audit) -> str:
    head = (
        "queue", "messages", "attempts", "acked", "nacked", "rejected", "leases lost",
        "late verdicts", "dead letters", "in flight", "wait p50 s", "wait p99 s", "took p50 s",
        "late p99 s",
    )  # fmt: skip
    rows = [
        (
            queue.queue_id, queue.messages, queue.attempts, queue.acked, queue.nacked,
            queue.rejected, queue.leases_lost, queue.late_verdicts,
            sum(queue.dead_letters.values()), sum(queue.in_flight.values()), queue.wait_p50_s,
            queue.wait_p99_s, queue.took_p50_s, queue.late_p99_s,
        )
        for queue in audit.queues
    ]  # fmt: skip
    return _table(head, rows)


def _queue(queue: QueueAudit, audit: Audit) -> str:
    from kafkamq.spark.jobs.audit import LATENESS_BOUNDS_S, MAX_ATTEMPT_BARS

    attempts = [queue.messages_by_attempts.get(n, 0) for n in range(1, MAX_ATTEMPT_BARS + 1)]
    names = [*map(str, range(1, MAX_ATTEMPT_BARS)), f"{MAX_ATTEMPT_BARS}+"]
    late = [*(f"≤{bound:g}s" for bound in LATENESS_BOUNDS_S), f">{LATENESS_BOUNDS_S[-1]:g}s"]
    times = [""] * len(queue.attempts_over_time)
    times[0], times[-1] = _time(audit.begin_ms)[11:19], _time(audit.end_ms)[11:19]
    shares = queue.consumers[:12]
    plots = (
        _plot("Messages by their number of attempts", attempts, names),
        _plot("Attempts over time", queue.attempts_over_time, times),
        _plot("Redeliveries by lateness: from the end of the lease", queue.lateness, late),
        _plot(
            "Attempts by consumer",
            [each["attempts"] for each in shares],
            [str(each["consumer_id"])[-8:] for each in shares],
        ),
    )
    consumers = _table(
        ("consumer", "attempts", "share %", "acked", "leases lost", "took p50 ms"),
        [
            (
                each["consumer_id"], each["attempts"], float(each["share"]), each["acked"],
                each["leases_lost"], each["took_ms"],
            )
            for each in queue.consumers
        ],
    )  # fmt: skip
    poison = _table(
        ("message", "attempts", "last outcome", "reason"),
        [(each["id"], each["attempts"], each["outcome"], each["reason"]) for each in queue.poison],
    )
    letters = _table(("dead letters", "messages"), sorted(queue.dead_letters.items()))
    states = _table(("in flight", "messages"), sorted(queue.in_flight.items()))
    return f"""<section><h2>{escape(queue.queue_id)}</h2>
<div class="plots">{"".join(plots)}</div>
<h3>Messages with the most attempts</h3>{poison}
<h3>Consumers</h3>{consumers}
<h3>Now</h3>{letters}{states}</section>"""


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
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
    if value is None:
        return "<td>-</td>"
    if isinstance(value, float):
        return f"<td class=n>{value:,.3f}</td>"
    if isinstance(value, int):
        return f"<td class=n>{value:,}</td>"
    return f"<td>{escape(str(value))}</td>"


def _plot(title: str, values: Sequence[int], names: Sequence[str]) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{bars(values, names)}</figure>"


def bars(values: Sequence[int], names: Sequence[str]) -> str:
    """A bar chart as SVG: a name below each bar, its value above while there is room."""
    if not any(values):
        return "<p>None.</p>"
    top = max(values)
    step = WIDTH / len(values)
    room = HEIGHT - _BOTTOM - _TOP
    parts = []
    for index, (value, name) in enumerate(zip(values, names, strict=True)):
        height = room * value / top
        x, y = index * step, _TOP + room - height
        middle = x + step / 2
        parts.append(
            f'<rect x="{x + step * 0.1:.1f}" y="{y:.1f}" width="{step * 0.8:.1f}" '
            f'height="{height:.1f}"><title>{escape(name)} {value:,}</title></rect>'
        )
        if value and step > 30:
            parts.append(
                f'<text x="{middle:.1f}" y="{y - 3:.1f}" text-anchor="middle">{value:,}</text>'
            )
        anchor = "start" if index == 0 else "end" if index == len(values) - 1 else "middle"
        place = x if index == 0 else x + step if anchor == "end" else middle
        if name:
            parts.append(
                f'<text x="{place:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">'
                f"{escape(name)}</text>"
            )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
