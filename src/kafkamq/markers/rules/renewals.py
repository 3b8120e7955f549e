"""Which KEEPALIVEs a worker writes for what it holds (R7, R30); pure, used by ``leases.py``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kafkamq.markers.rules.batching import join
from kafkamq.markers.rules.lease import Lease, Renewal, Sharing

_NONE, _HOLDING = Sharing.NONE, Sharing.HOLDING


@dataclass(frozen=True, slots=True)
class Terms:
    """What the KEEPALIVEs of one moment have in common."""

    consumer_id: str
    timeout_ms: int
    number: int
    monotonic_ms: int


def plan_renewals(
    held: Sequence[Lease], terms: Terms, new_partitions: Collection[int], *, batch_markers: bool
) -> list[Renewal]:
    """The fewest KEEPALIVEs that renew these leases, each of which had messages a moment ago."""
    consumer_id, timeout_ms, now_ms = terms.consumer_id, terms.timeout_ms, terms.monotonic_ms
    together, named = defaultdict[int, list[Lease]](list), defaultdict[int, list[Lease]](list)
    single: list[Renewal] = []
    for lease in held:
        if lease.sharing is _HOLDING:  # R34: it would cut what was asked for
            continue
        # R7: an older owner's START may come late, a commit take longer than a lease lasts. R34:
        # who extended it by its token may hold it.
        is_ours = lease.holder_id == consumer_id and lease.sharing is _NONE
        if not is_ours or lease.partition in new_partitions:
            # R30: one time for all of a record would cut what was extended.
            if batch_markers and lease.asked_ms <= now_ms + timeout_ms:
                named[lease.marker_partition].append(lease)
            else:
                single.append(single_renewal(lease, terms))
        else:
            together[lease.marker_partition].append(lease)
    known = consumer_id, None, timeout_ms
    shared = [
        Renewal(partition, *known, tuple(leases), now_ms, terms.number)
        for partition, leases in together.items()
    ]
    for partition, leases in named.items():
        still = ((lease.held_batch(), lease) for lease in leases)
        for batches, of in join((batch, lease) for batch, lease in still if batch is not None):
            if len(of) == 1 and len(of[0].offsets) == 1:
                single.append(single_renewal(of[0], terms))
                continue
            single.append(Renewal(partition, *known, tuple(of), now_ms, terms.number, batches))
    return shared + single


def single_renewal(lease: Lease, terms: Terms) -> Renewal:
    """A KEEPALIVE of the one message of a lease."""
    # The tracker sets clock + this, so no renewal may cut what was asked for before it.
    after_ms = max(terms.timeout_ms, lease.asked_ms - terms.monotonic_ms)
    (message_id,) = lease.message_ids()
    to, by = lease.marker_partition, terms.consumer_id
    return Renewal(to, by, message_id, after_ms, (lease,), terms.monotonic_ms, terms.number)
