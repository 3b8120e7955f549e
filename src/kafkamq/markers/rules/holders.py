"""Who holds messages: one record per consumer and lease terms, so that a KEEPALIVE costs O(1).

A KEEPALIVE without message id renews every lease of its consumer (R7). Touching each entry would
cost as much as the consumer holds; instead the renewal is written here once, and an entry's lease
ends at the later of its own deadline and its holder's ``renewed_until_ms``.

That is exact because of one invariant: an entry joins a holder only when its own deadline is not
before the holder's ``renewed_until_ms``. Where it would be (a lease shortened after a renewal), the
entry joins a variant of the holder that starts without renewals.
"""

from __future__ import annotations

_MAX_IDLE = 256


class Holder:
    """A consumer with the terms of its leases; shared by all entries that it holds."""

    __slots__ = (
        "consumer_id",
        "max_lease_ms",
        "number",
        "references",
        "renewed_ms",
        "renewed_until_ms",
        "timeout_ms",
    )

    def __init__(self, number: int, consumer_id: str, timeout_ms: int, max_lease_ms: int) -> None:
        self.number = number  # its name in a state store; never used twice in a partition
        self.consumer_id = consumer_id
        self.timeout_ms = timeout_ms
        self.max_lease_ms = max_lease_ms
        self.renewed_ms = -1  # clock of the last KEEPALIVE without message id
        self.renewed_until_ms = -1
        self.references = 0


class Holders:
    """The holders of one marker partition, by terms, by consumer and by number."""

    __slots__ = ("_by_consumer", "_by_terms", "_idle", "_timeouts", "by_number", "next_number")

    def __init__(self) -> None:
        self.next_number = 0
        self.by_number: dict[int, Holder] = {}
        self._by_terms: dict[tuple[str, int, int], list[Holder]] = {}
        self._by_consumer: dict[str, list[Holder]] = {}
        self._timeouts: dict[int, int] = {}  # how many holders with entries have it
        self._idle = 0

    def join(
        self, consumer_id: str, timeout_ms: int, max_lease_ms: int, deadline_ms: int
    ) -> Holder:
        """The holder for an entry whose own deadline has just been set to ``deadline_ms``."""
        variants = self._by_terms.get((consumer_id, timeout_ms, max_lease_ms))
        if variants is not None:
            for holder in variants:
                if holder.renewed_until_ms <= deadline_ms:
                    if holder.references == 0:
                        self._idle -= 1
                        self._timeouts[timeout_ms] = self._timeouts.get(timeout_ms, 0) + 1
                    holder.references += 1
                    return holder
        holder = Holder(self.next_number, consumer_id, timeout_ms, max_lease_ms)
        self.next_number += 1
        holder.references = 1
        self.restore(holder)
        return holder

    def restore(self, holder: Holder) -> None:
        """Take in a holder with entries: just made, or read from a state store."""
        terms = (holder.consumer_id, holder.timeout_ms, holder.max_lease_ms)
        self._by_terms.setdefault(terms, []).append(holder)
        self._by_consumer.setdefault(holder.consumer_id, []).append(holder)
        self.by_number[holder.number] = holder
        self._timeouts[holder.timeout_ms] = self._timeouts.get(holder.timeout_ms, 0) + 1

    def leave(self, holder: Holder) -> None:
        """An entry is held no more; holders without entries are dropped now and then."""
        holder.references -= 1
        if holder.references == 0:
            self._idle += 1
            others = self._timeouts[holder.timeout_ms] - 1
            if others:
                self._timeouts[holder.timeout_ms] = others
            else:
                del self._timeouts[holder.timeout_ms]
            if self._idle > _MAX_IDLE:
                self._sweep()

    def renew(self, consumer_id: str, now_ms: int, timeout_ms: int) -> None:
        """A KEEPALIVE of this consumer; ``timeout_ms`` 0 means each message's own timeout."""
        for holder in self._by_consumer.get(consumer_id, ()):
            until_ms = now_ms + (timeout_ms or holder.timeout_ms)
            holder.renewed_ms = now_ms
            holder.renewed_until_ms = max(holder.renewed_until_ms, until_ms)

    def shortest_timeout_ms(self) -> int:
        """Smallest timeout among holders with entries; 0 when nothing is held."""
        return min(self._timeouts, default=0)

    def used(self) -> list[Holder]:
        """Holders that have entries."""
        return [holder for holder in self.by_number.values() if holder.references > 0]

    def _sweep(self) -> None:
        used = self.used()
        self._by_terms.clear()
        self._by_consumer.clear()
        self.by_number.clear()
        self._timeouts.clear()
        self._idle = 0
        for holder in used:
            self.restore(holder)
