"""A worker decides this around handing out: how far ahead, alone or not, too old, a NACK's delay.

Pure parts of R5 (how many STARTs ahead of ``receive``), R6 (the last allowed delivery is alone in
its process), R8 (the delay of a NACK) and R10 (expired messages).
"""

from __future__ import annotations

from typing import Protocol

from kafkamq.config import Backoff
from kafkamq.markers.rules.leases import Lease
from kafkamq.queue.rules.retry import backoff_delay_ms

RETENTION_SHARE = 4
"""A NACK waits at most the markers' retention divided by this (R8)."""

_AHEAD_MS = 250
"""What is STARTed ahead should be handed out within about this."""

_MOST_AT_ONCE = 4096
"""More in one batch take longer for each: they do not fit into a processor's caches."""

_CLAIM_MS = 1000
"""A wish to be alone that is not renewed within this is forgotten."""

_PRESS_MS = 10_000
"""So long a wish to be alone keeps the others from STARTing ..."""

_YIELD_MS = 30_000
"""... and so long it then lets them, if somebody held a message all the while."""

# The latest time that a marker can name.
_LATEST_MS = 0x7FFF_FFFF_FFFF_FFFF


def is_last_delivery(delivery_count: int, max_deliveries: int) -> bool:
    return delivery_count >= max_deliveries > 1


class Holder(Protocol):
    """What ``LastDeliveries`` must know of a consumer."""

    @property
    def open_count(self) -> int: ...


class LastDeliveries:
    """It keeps R6 in one process: while a last allowed delivery is held, nothing else is.

    It is held until its END is in the log: what starts beside a verdict that is still under way may
    kill the process, and the verdict with it.

    The caller serialises. STARTs are planned between ``enter`` or ``enter_last`` and ``entered``,
    so that two consumers never plan at once what excludes each other. A consumer that waits to be
    alone keeps the others from STARTing more, but only while it asks, and not without end: a
    message that is worked on for hours must not stop every queue of the process.
    """

    def __init__(self) -> None:
        self._holders: list[Holder] = []
        self._entering: list[Holder] = []
        self._alone: Lease | None = None
        self._alone_holder: Holder | None = None
        # id of the holder -> when it first and last asked to be alone
        self._claims: dict[int, tuple[int, int]] = {}

    def join(self, holder: Holder) -> None:
        self._holders.append(holder)

    def leave(self, holder: Holder) -> None:
        """A consumer ends; what it held is not held any more."""
        self._holders = [other for other in self._holders if other is not holder]
        self.entered(holder)
        self._claims.pop(id(holder), None)
        if self._alone_holder is holder:
            self._alone = self._alone_holder = None

    def enter(self, holder: Holder, monotonic_ms: int) -> bool:
        """Return whether ordinary messages may be STARTed now; True: until ``entered``."""
        if self._is_taken(monotonic_ms) or any(
            other != id(holder) and (monotonic_ms - since_ms) % (_PRESS_MS + _YIELD_MS) < _PRESS_MS
            for other, (since_ms, _) in self._claims.items()
        ):
            return False
        self._claims.pop(id(holder), None)
        self._entering.append(holder)
        return True

    def enter_last(self, holder: Holder, monotonic_ms: int) -> bool:
        """Return whether a last delivery may be STARTed now; asking keeps the others waiting."""
        taken = self._is_taken(monotonic_ms)
        if holder.open_count:
            # Its own messages come first: nobody waits for those.
            self._claims.pop(id(holder), None)
            return False
        first = next(iter(self._claims), id(holder))
        since_ms, _ = self._claims.get(id(holder), (monotonic_ms, 0))
        self._claims[id(holder)] = (since_ms, monotonic_ms)
        if taken or first != id(holder) or self._entering:
            return False
        if any(other.open_count for other in self._holders):
            return False
        self._entering.append(holder)
        return True

    def entered(self, holder: Holder, alone: Lease | None = None) -> None:
        """The STARTs are planned; ``alone``: the lease of the last delivery."""
        self._entering = [other for other in self._entering if other is not holder]
        if alone is not None:
            self._alone, self._alone_holder = alone, holder
            self._claims.pop(id(holder), None)

    def _is_taken(self, monotonic_ms: int) -> bool:
        for member, (_, asked_ms) in list(self._claims.items()):
            if monotonic_ms - asked_ms > _CLAIM_MS:
                del self._claims[member]
        if self._alone is not None and self._alone.is_over(monotonic_ms):
            self._alone = self._alone_holder = None
        return self._alone is not None


class ReceiveAhead:
    """How many messages a receive STARTs at once (R5): grows with the measured rate."""

    def __init__(self, *, first: int, maximum: int) -> None:
        self._first = min(first, maximum)
        self._maximum = maximum
        self.size = self._first

    def size_for(self, n: int) -> int:
        """Return ``n``, or as many times ``n`` as are used up fast, for ``receive_many(n)``.

        At most half of ``max_in_flight``, so that the next ones can be STARTed meanwhile.
        """
        if self.size == self._first:
            # Nothing says that they are used up fast.
            return n
        return n * max(1, min(self.size, self._maximum // 2, _MOST_AT_ONCE) // n)

    def drained(self, count: int, elapsed_ms: int) -> None:
        """``count`` messages were handed out in that time, since they were there."""
        if count > 0:
            wanted = count * _AHEAD_MS // max(elapsed_ms, 1)
            self.size = max(self._first, min(wanted, 2 * self.size, self._maximum))


def expires_at_ms(ttl_ms: int | None, origin_timestamp_ms: int) -> int:
    """Broker time after which a message is not handed out (R10); 0: never.

    Total: a foreign writer's TTL may be any number.
    """
    if ttl_ms is None or origin_timestamp_ms < 0:
        return 0
    return min(max(1, origin_timestamp_ms + ttl_ms), _LATEST_MS)


def has_expired(expiry_ms: int, start_log_ms: int) -> bool:
    """Return whether a message had expired when it was STARTed, by the broker's clock (R10)."""
    return 0 < expiry_ms < start_log_ms


def nack_delay_ms(
    requested_ms: int | None,
    *,
    backoff: Backoff,
    delivery_count: int,
    retention_ms: int,
    random_unit: float,
) -> int:
    """Return the delay that an END(NACK) carries (R8).

    Args:
        requested_ms: What the application asked for; None: the queue's back-off.
        retention_ms: Of the markers topic; negative: forever.
        random_unit: In [0, 1), draws the jitter.
    """
    delay_ms = requested_ms
    if delay_ms is None:
        delay_ms = backoff_delay_ms(backoff, delivery_count, random_unit)
    return delay_ms if retention_ms < 0 else min(delay_ms, retention_ms // RETENTION_SHARE)
