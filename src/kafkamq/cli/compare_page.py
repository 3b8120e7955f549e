"""What a comparison found: the rows of its table, and its page with plots."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from html import escape

from kafkamq.cli.page import document, figure, table
from kafkamq.dev.compare import Measured, Work

__all__ = ["render", "table_rows"]


def table_rows(found: Sequence[Measured]) -> list[tuple[str, ...]]:
    """A name, and what each contender has; a dash where nothing was measured."""
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
    """The page.

    Args:
        work: What was worked on.
        found: In the order of the columns.
        version: Of Kafka; empty: not known.
    """
    names = [each.contender for each in found]
    plots = "".join(figure(title, [pick(each) for each in found], names) for title, pick in _PLOTS)
    notes = "".join(
        f"<li>{escape(each.contender)}: {escape(note)}</li>"
        for each in found
        for note in each.notes
    )
    kafka = f"Kafka {version}. " if version else ""
    body = f"""<p>{escape(kafka)}{escape(_said(work))}</p>
{table(("", *names), table_rows(found))}
{f"<ul>{notes}</ul>" if notes else ""}
<div class="plots">{plots}</div>
<p>Workers, senders and this program ran on one machine with {os.cpu_count() or "?"} CPUs. Extra
records are those in the logs beside the messages themselves: markers, commits, state and copies;
bytes are those of keys, values and headers, before compression.</p>"""
    return document("kafkamq compare", body)


def _said(work: Work) -> str:
    low, high = work.handler_ms
    keys = f"{work.keys:,} keys" if work.keys else "no keys"
    return (
        f"{work.messages:,} messages of {work.payload_bytes:,} bytes with {keys}, handlers of "
        f"{low:g} to {high:g} ms, {work.processes} processes with {work.concurrency} handlers "
        f"each, {work.partitions} partitions; {work.failure:.1%} of the messages fail once; slow: "
        f"{work.slow.share:.1%} take {work.slow.ms:,} ms. A consumer group has one handler for "
        "each partition."
    )
