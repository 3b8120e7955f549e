"""Who holds messages: one record per consumer and lease terms, so that a KEEPALIVE costs O(1).

A KEEPALIVE without message id renews every lease of its consumer (R7). Touching each entry would
cost as much as the consumer holds; instead the renewal is written here once, and an entry's lease
ends at the later of its own deadline and its holder's ``renewed_until_ms``.

That is exact because of one invariant: an entry joins a holder only when its own deadline is not
before the holder's ``renewed_until_ms``. Where it would be (a lease shortened after a renewal), the
entry joins a new variant of the holder, which counts only what is renewed from then on. So of
several variants the newest one was renewed least, and is the only one that may be joined.

Renewals are written once for all holders of a consumer, whatever their terms: how many these are
costs a KEEPALIVE nothing.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

_MAX_IDLE = 256


class Consumer:
    """What renewed the leases of a consumer; its renewals are numbered."""

    __slots__ = ("_numbers", "_own", "_own_ms", "_untils", "renewals", "renewed_ms")

    def __init__(self) -> None:
        self.renewals = 0
        self.renewed_ms = -1  # clock of the last KEEPALIVE without message id
        # Of one that names a time, until when, the latest first. One that is followed by a longer
        # one says nothing any more, so there are as many here as still differ.
        self._numbers = array("q")
        self._untils = array("q")
        self._own, self._own_ms = -1, -1  # the last one for each message's own timeout

    def renew(self, now_ms: int, timeout_ms: int) -> None:
        """One more; 0: for each message's own timeout."""
        self.renewed_ms = now_ms
        if timeout_ms:
            until_ms, numbers, untils = now_ms + timeout_ms, self._numbers, self._untils
            while untils and untils[-1] <= until_ms:
                untils.pop()
                numbers.pop()
            numbers.append(self.renewals)
            untils.append(until_ms)
        else:
            self._own, self._own_ms = self.renewals, now_ms
        self.renewals += 1

    def until_ms(self, first: int, timeout_ms: int) -> int:
        """The latest end that renewals from this number on set for a lease of this timeout."""
        own_ms = self._own_ms + timeout_ms if self._own >= first else -1
        at = bisect_left(self._numbers, first)
        return max(own_ms, self._untils[at]) if at < len(self._untils) else own_ms


class Holder:
    """A consumer with the terms of its leases; shared by all entries that it holds."""

    __slots__ = (
        "_consumer",
        "_counted",
        "_until_ms",
        "consumer_id",
        "max_lease_ms",
        "number",
        "references",
        "timeout_ms",
    )

    def __init__(
        self,
        number: int,
        consumer_id: str,
        timeout_ms: int,
        max_lease_ms: int,
        consumer: Consumer,
        until_ms: int = -1,
    ) -> None:
        self.number = number  # its name in a state store; never used twice in a partition
        self.consumer_id = consumer_id
        self.timeout_ms = timeout_ms
        self.max_lease_ms = max_lease_ms
        self.references = 0
        self._consumer = consumer
        self._until_ms = until_ms  # with the first so many renewals of the consumer
        self._counted = consumer.renewals

    @property
    def renewed_ms(self) -> int:
        """Clock of the consumer's last KEEPALIVE without message id; -1: there was none."""
        return self._consumer.renewed_ms

    @property
    def renewed_until_ms(self) -> int:
        """No entry's lease ends before; -1: it was never renewed."""
        consumer = self._consumer
        if self._counted < consumer.renewals:
            until_ms = consumer.until_ms(self._counted, self.timeout_ms)
            self._until_ms = max(self._until_ms, until_ms)
            self._counted = consumer.renewals
        return self._until_ms


class Holders:
    """The holders of one marker partition, by terms and by number, and their consumers."""

    __slots__ = ("_by_terms", "_consumers", "_idle", "_timeouts", "by_number", "next_number")

    def __init__(self) -> None:
        self.next_number = 0
        self.by_number: dict[int, Holder] = {}
        self._by_terms: dict[tuple[str, int, int], Holder] = {}  # the newest
        self._consumers: dict[str, Consumer] = {}  # of holders
        self._timeouts: dict[int, int] = {}  # how many holders with entries have it
        self._idle = 0

    def join(
        self, consumer_id: str, timeout_ms: int, max_lease_ms: int, deadline_ms: int
    ) -> Holder:
        """The holder for an entry whose own deadline has just been set to ``deadline_ms``."""
        holder = self._by_terms.get((consumer_id, timeout_ms, max_lease_ms))
        if holder is not None and holder.renewed_until_ms <= deadline_ms:
            if holder.references == 0:
                self._idle -= 1
                self._timeouts[timeout_ms] = self._timeouts.get(timeout_ms, 0) + 1
            holder.references += 1
            return holder
        holder = self.restore(self.next_number, consumer_id, timeout_ms, max_lease_ms)
        self.next_number += 1
        holder.references = 1
        return holder

    def restore(
        self,
        number: int,
        consumer_id: str,
        timeout_ms: int,
        max_lease_ms: int,
        renewed_ms: int = -1,
        until_ms: int = -1,
    ) -> Holder:
        """A new holder of entries, or one as a state store had it; these in their order."""
        consumer = self._consumers.setdefault(consumer_id, Consumer())
        consumer.renewed_ms = max(consumer.renewed_ms, renewed_ms)
        holder = Holder(number, consumer_id, timeout_ms, max_lease_ms, consumer, until_ms)
        self._list(holder)
        return holder

    def _list(self, holder: Holder) -> None:
        self._by_terms[holder.consumer_id, holder.timeout_ms, holder.max_lease_ms] = holder
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
            if self._idle > _MAX_IDLE and 2 * self._idle > len(self.by_number):
                self._sweep()

    def renew(self, consumer_id: str, now_ms: int, timeout_ms: int) -> None:
        """A KEEPALIVE of this consumer; ``timeout_ms`` 0 means each message's own timeout."""
        consumer = self._consumers.get(consumer_id)
        if consumer is not None:
            consumer.renew(now_ms, timeout_ms)

    def shortest_timeout_ms(self) -> int:
        """Smallest timeout among holders with entries; 0 when nothing is held."""
        return min(self._timeouts, default=0)

    def used(self) -> list[Holder]:
        """Holders that have entries."""
        return [holder for holder in self.by_number.values() if holder.references > 0]

    def _sweep(self) -> None:
        used = self.used()
        consumers = {holder.consumer_id: self._consumers[holder.consumer_id] for holder in used}
        self._consumers = consumers
        self._by_terms.clear()
        self.by_number.clear()
        self._timeouts.clear()
        self._idle = 0
        for holder in used:
            self._list(holder)
