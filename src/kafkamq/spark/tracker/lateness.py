"""How late a batch of the tracker was, from its workers to the metrics of the driver.

The text of a status is ``seconds:count,seconds:count``, seconds being bounds of the histogram.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from kafkamq.markers.rules.delivery import Carry, Settle
from kafkamq.metrics.catalog import LATENESS


def lateness_text(actions: Iterable[Settle | Carry], took_s: float) -> str:
    """Of what a batch settled.

    Args:
        actions: What was done.
        took_s: From the plan until it was in the log.
    """
    bounds = (*LATENESS.buckets, 2 * LATENESS.buckets[-1])
    found: Counter[float] = Counter()
    for action in actions:
        if isinstance(action, Settle):
            late_s = max(0.0, (action.clock_ms - action.deadline_ms) / 1000 + took_s)
            bound = bounds[min(len(bounds) - 1, bisect_left(bounds, late_s))]
            found[bound] += action.bits.bit_count()
    return ",".join(f"{bound:g}:{count}" for bound, count in sorted(found.items()))


def observe_lateness(text: str, partition: int) -> None:
    """Count what a status tells; a text of another release is passed over."""
    pairs = []
    for pair in filter(None, text.split(",")):
        seconds, _, count = pair.partition(":")
        try:
            pairs.append((float(seconds), int(count)))
        except ValueError:
            return
    if pairs:
        LATENESS.observe_all(pairs, partition)
