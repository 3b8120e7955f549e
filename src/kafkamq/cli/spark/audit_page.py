"""The audit as one HTML page: tables and plots, nothing from elsewhere."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from kafkamq.cli.output import time_of
from kafkamq.cli.page import document, figure, table

if TYPE_CHECKING:
    from kafkamq.spark.jobs.audit import Audit, QueueAudit


def render(audit: Audit, *, made_ms: int) -> str:
    """The whole page."""
    queues = "\n".join(_queue(queue, audit) for queue in audit.queues)
    span = (
        f"Attempts from {time_of(audit.begin_ms)} to {time_of(audit.end_ms)} (broker time)"
        if audit.begin_ms
        else "No attempts"
    )
    nothing = "<p>No queue has been used.</p>"
    body = f"""<p>{span}. Computed {time_of(made_ms)}.</p>
{_summary(audit)}
{queues or nothing}"""
    return document(f"Audit of {audit.namespace}", body)


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
    return table(head, rows)


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
    consumers = table(
        ("consumer", "attempts", "share %", "acked", "leases lost", "took p50 ms"),
        [
            (
                each["consumer_id"], each["attempts"], float(each["share"]), each["acked"],
                each["leases_lost"], each["took_ms"],
            )
            for each in queue.consumers
        ],
    )  # fmt: skip
    poison = table(
        ("message", "sent", "attempts", "last outcome", "reason"),
        [
            (each["id"], each["sent"], each["attempts"], each["outcome"], each["reason"])
            for each in queue.poison
        ],
    )
    letters = table(("dead letters", "messages"), sorted(queue.dead_letters.items()))
    states = table(("in flight", "messages"), sorted(queue.in_flight.items()))
    return f"""<section><h2>{escape(queue.queue_id)}</h2>
<div class="plots">{"".join(plots)}</div>
<h3>Messages with the most attempts</h3>{poison}
<h3>Consumers</h3>{consumers}
<h3>Now</h3>{letters}{states}</section>"""
