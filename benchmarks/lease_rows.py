"""What a worker's leases cost it; no broker takes part."""

from __future__ import annotations

import statistics
import time

from benchmarks.rows import Row, scaled

from kafkamq.markers.rules.leases import Leases

COUNT = scaled(100_000)
TIMEOUT_MS = 10_000
BEATS_PER_S = 500  # a heart beats for each verdict that comes alone, at most every 2 ms


def held(rounds: int) -> Row:
    """Percent of a core: each beat looks for ended leases, every T/3 all are renewed."""
    leases = Leases("c" * 24, redelivery_timeout_ms=TIMEOUT_MS, max_lease_ms=43_200_000)
    log = (b"t" * 16, 1)
    batch = [leases.start(0, [offset], log, offset % 8) for offset in range(COUNT)]
    for lease in batch:
        leases.started(lease, 0, 0)
    leases.committed(batch, 1)
    shares = []
    for now_ms in range(1, 1 + max(3, rounds)):
        begin_s = time.thread_time()
        for renewal in leases.plan_renewals(now_ms):
            leases.renewed(renewal, now_ms, now_ms)
        renewing_s = time.thread_time() - begin_s
        begin_s = time.thread_time()
        for _ in range(BEATS_PER_S):
            leases.expire(now_ms)
        looking_s = time.thread_time() - begin_s
        shares.append(100 * (looking_s + renewing_s / (TIMEOUT_MS / 3000)))
    share = statistics.median(shares)
    name = f"{COUNT:,} in flight: what the heart takes"
    return Row(name, share, None, None, "% of a core", 5.0, share <= 5.0)
