"""What the demo shows: a live picture on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kafkamq.dev.demo.follow import Snapshot
from kafkamq.dev.demo.verdict import QueueResult, Verdict

PLAIN_INTERVAL_S = 2.0


class Show:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._began = time.monotonic()
        self._planned = 0
        self._last_line = 0.0
        self._fetched = 0

    def say(self, text: str) -> None:
        """Print one line, with the seconds since the start."""
        self._console.print(
            Text(f"{time.monotonic() - self._began:5.1f} s  ", style="dim") + Text(text),
            soft_wrap=True,
        )

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Show what takes seconds while the block runs."""
        self.say(text)
        if not self._console.is_terminal:
            yield
            return
        with self._console.status(Text(text)):
            yield

    def fetching(self, done: int, total: int) -> None:
        if done == 0 or done - self._fetched >= 10 or done == total:
            self._fetched = done
            self.say(f"Fetching Kafka's jars (only once): {done} of {total or '?'}")

    @contextmanager
    def live(self, planned: int) -> Iterator[None]:
        """Show the counts while messages flow in the block."""
        self._planned = planned
        self.say(f"Sending {planned:,} messages")
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, refresh_per_second=8, transient=True) as self._live:
            yield
        self._live = None

    def progress(self, seen: Snapshot, *, workers: int) -> None:
        if self._live is not None:
            self._live.update(self._picture(seen, workers))
            return
        now = time.monotonic()
        if seen.is_settled or now - self._last_line >= PLAIN_INTERVAL_S:
            self._last_line = now
            self.say(
                f"sent {seen.sent:,}  held {seen.held:,}  acked {seen.acked:,}  "
                f"redelivered {seen.redelivered:,}  delayed {seen.delayed:,}  "
                f"dead letters {seen.dead:,}"
            )

    def killed(self, name: str, *, pid: int, held: int) -> None:
        self.say(
            f"SIGKILL to {name} (pid {pid}) with {held:,} messages in its hands; nobody replaces it"
        )

    def _picture(self, seen: Snapshot, workers: int) -> Group:
        settled = seen.acked + seen.dead
        table = Table.grid(padding=(0, 2))
        for label, value, meaning in (
            ("sent", seen.sent, f"{seen.delayed:,} of them wait for their time"),
            ("held", seen.held, f"by {workers} workers; {seen.keepalives:,} KEEPALIVEs so far"),
            ("acked", seen.acked, "done"),
            ("redelivered", seen.redelivered, "copies, by the tracker"),
            ("dead letters", seen.dead, "given up, with a reason"),
        ):
            table.add_row(Text(label), Text(f"{value:,}", justify="right"), Text(meaning, "dim"))
        bar = ProgressBar(total=self._planned, completed=min(settled, self._planned), width=60)
        return Group(table, bar)

    def verdict(self, verdict: Verdict) -> None:
        """The table of the verdict, and one line that says it."""
        table = Table(title="What the logs say", title_justify="left")
        for name, title in _COLUMNS.items():
            table.add_column(title, justify="left" if name == "queue" else "right")
        for row in verdict.queues:
            table.add_row(*_cells(row, row.queue))
        table.add_section()
        table.add_row(*_cells(verdict.total, "all"), style="bold")
        self._console.print(table)
        self._console.print(Text(_LEGEND, "dim"))
        if verdict.is_ok:
            self._console.print(
                Text("ok", "bold green")
                + Text(
                    ": nothing lost, all poison in the dead letters, nothing redelivered that "
                    f"was acknowledged in time ({verdict.seconds:.0f} s)"
                ),
                soft_wrap=True,
            )
        for failure in verdict.failures:
            self._console.print(Text("failed", "bold red") + Text(f": {failure}"), soft_wrap=True)


_COLUMNS = {
    "queue": "queue",
    "sent": "sent",
    "acked": "acked",
    "redelivered": "redelivered",
    "dead_lettered": "dead letters",
    "lost": "lost",
    "duplicated": "done twice",
    "late_p50_s": "late p50",
    "late_p99_s": "late p99",
}


_LEGEND = (
    "late: from the end of a lease, a back-off or a delay until the copy is in its log. "
    "done twice: a handler had finished when its worker was killed, its ACK was not in the log yet."
)


def _cells(row: QueueResult, name: str) -> list[str]:
    cells = [name]
    for column in list(_COLUMNS)[1:]:
        value = getattr(row, column)
        if value is None:
            cells.append("-")
        else:
            cells.append(_seconds(value) if isinstance(value, float) else f"{value:,}")
    return cells


def _seconds(value: float) -> str:
    """Three digits, which fit in a column of a narrow terminal."""
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
