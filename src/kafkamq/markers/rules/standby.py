"""When a tracker that stands by takes over (R36); one machine per start of a tracker.

All signs of life of a namespace stand in one partition, and their order there is the only time
that counts: clocks of machines are never compared.

- Who stands by writes beats into that log, one after the other: the next one when the last was
  read back, ``BEAT_MS`` after it at the earliest. Silence is a number of own beats without a sign
  of the active one between them. While the log cannot be read or written there are no beats, so
  an outage of a broker is no silence, and behind it the active one has as long as ever.
- After ``SILENT_BEATS`` it writes a bid. The bid that is first in the log wins: who reads another
  one's before its own begins to count again. So it does when the winner dies.
- Where nobody was active, or the last one ended on purpose, the bid is made at once.
- A sign of an epoch below the largest seen is that of a predecessor which was paused: it counts
  nothing. An active tracker that reads a larger epoch than its own has been succeeded.

Who takes over becomes the owner by R22, and fires by R17, as at any start. These rules keep
trackers from doing so needlessly; that nothing is done twice does not depend on them.
"""

from __future__ import annotations

from enum import Enum

BEAT_MS = 500
"""A tracker that stands by writes a beat so often; an active one gives a sign every second."""
SILENT_BEATS = 9
LOST_MS = 10_000
"""A beat that was not read back within this time is written again."""


class Phase(Enum):
    WAITING = "waiting"
    CHOSEN = "chosen"
    ACTIVE = "active"
    SUCCEEDED = "succeeded"


class Beat(Enum):
    STANDBY = "standby"
    BID = "bid"


class Standby:
    """One start of a tracker, which is told of signs in the order of the log.

    Attributes:
        phase: How far it has come.
        number: The number of the last beat that was written.
    """

    def __init__(self) -> None:
        self.phase = Phase.WAITING
        self.number = 0
        self._is_vacant = True
        self._is_bidding = False
        self._epoch = 0
        # Its own beats since the last sign of another one.
        self._silent = 0
        self._under_way_ms: int | None = None
        self._next_ms = 0

    # ---- what is read

    def active(self, epoch: int) -> None:
        """Take a sign of another start that is active."""
        if epoch < self._epoch:
            return
        # It was paused, and does not know yet (R36).
        is_later = epoch > self._epoch
        self._epoch = epoch
        if self.phase is Phase.ACTIVE and is_later:
            self.phase = Phase.SUCCEEDED
        elif self.phase is Phase.CHOSEN and is_later:
            # It was paused between bid and claim.
            self.phase = Phase.WAITING
        if self.phase is Phase.WAITING:
            self._heard()

    def ended(self, epoch: int) -> None:
        """Note that another start, which was active, has stopped on purpose."""
        if epoch >= self._epoch and self.phase is Phase.WAITING:
            self._epoch = epoch
            self._heard()
            self._is_vacant = True

    def bid(self) -> None:
        """Note that another start takes over: its bid came before ours, or we had none."""
        if self.phase is Phase.WAITING:
            self._heard()

    def own(self, number: int) -> None:
        """Note that a beat of ours was read back."""
        if self.phase is not Phase.WAITING or self._under_way_ms is None or number != self.number:
            return
        self._next_ms = self._under_way_ms + BEAT_MS
        self._under_way_ms = None
        if self._is_bidding:
            self.phase = Phase.CHOSEN
        else:
            self._silent += 1

    def _heard(self) -> None:
        self._is_vacant = False
        self._silent = 0
        if self._is_bidding:
            self._is_bidding = False
            # A bid that is behind another one is none.
            self._under_way_ms = None

    # ---- what is to be written

    def beat(self, monotonic_ms: int) -> Beat | None:
        """Return what is to be written now, which counts as written from here on."""
        if self.phase is not Phase.WAITING:
            return None
        if self._under_way_ms is not None:
            if monotonic_ms - self._under_way_ms < LOST_MS:
                return None
            # The log could not be read or written: that was no silence.
            self._silent = 0
        wants_bid = self._is_vacant or self._silent >= SILENT_BEATS
        if not wants_bid and monotonic_ms < self._next_ms:
            return None
        self.number += 1
        self._under_way_ms = monotonic_ms
        self._is_bidding = wants_bid
        return Beat.BID if wants_bid else Beat.STANDBY

    # ---- what its owner did

    def took_over(self, epoch: int) -> None:
        """Note that ours is the latest start (R22), under this epoch."""
        self.phase = Phase.ACTIVE if epoch >= self._epoch else Phase.SUCCEEDED
        self._epoch = max(self._epoch, epoch)

    def stand_by(self) -> None:
        """Begin to count again: ours is not active any more, or could not become so."""
        self.phase = Phase.WAITING
        self._under_way_ms = None
        self._heard()
