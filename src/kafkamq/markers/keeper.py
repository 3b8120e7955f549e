"""Writes what is due for a consumer's leases: ENDs, KEEPALIVEs and positions; one thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kafkamq.errors import BrokerError, KafkaMQError
from kafkamq.markers.ack_writer import AckWriter
from kafkamq.markers.marker_producer import REPORTS_MS
from kafkamq.markers.state import ConsumerState
from kafkamq.metrics.health import health
from kafkamq.queue.namespace import IDENTITY_AGE_S
from kafkamq.transport.clock import monotonic_ms

RENEWALS_PER_TIMEOUT = 3  # R7: KEEPALIVE at T/3
MAX_SLEEP_MS = 1000
MAX_BEAT_S = 15.0  # a keeper that has not beaten for so long is taken for hung
_WAIT_S = 0.05  # one wait for reports that somebody waits for
_TURN_MS = 5  # between two of them
_log = logging.getLogger(__name__)


class Keeper:
    """Runs until ``stop``; nothing that goes wrong in one beat ends it."""

    def __init__(
        self, state: ConsumerState, ack_writer: AckWriter, each_second: Callable[[], None]
    ) -> None:
        """``each_second`` is what else is to be written now and then."""
        self._state = state
        self._ack_writer = ack_writer
        self.each_second = each_second
        self._period_ms = max(1, state.queue.redelivery_timeout_ms // RENEWALS_PER_TIMEOUT)
        self._renew_ms = monotonic_ms() + self._period_ms
        self._second_ms = 0
        self._stopped = False
        self.loop = health.add(f"worker of {state.queue.queue_id}", max_age_s=MAX_BEAT_S)
        self._thread = threading.Thread(
            target=self._run, name=f"kafkamq-keeper-{state.queue.queue_id}", daemon=True
        )

    def start(self) -> None:
        """Begin to beat."""
        self._ack_writer.is_kept = True
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; waits for a beat that is under way."""
        self._stopped = True
        health.remove(self.loop)
        self._state.keeper.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        self._ack_writer.is_kept = False

    def _run(self) -> None:
        while not self._stopped:
            self._state.keeper.wait(self.sleep_ms() / 1000)
            self.loop.beat()
            self.beat()

    def beat(self) -> None:
        for step in (self._serve, self._renew, self._tell, self._each_beat):
            if self._stopped:
                return
            try:
                step()
            except KafkaMQError as error:
                _log.warning(
                    "a heartbeat of a consumer failed",
                    extra={"queue": self._state.queue.queue_id, "error": str(error)},
                )
            except Exception:  # noqa: BLE001 - a dead keeper would lose every lease
                _log.exception("a heartbeat of a consumer failed")

    def sleep_ms(self) -> int:
        sleep_ms = min(self._second_ms, self._renew_ms) - monotonic_ms()
        if self._ack_writer.is_waited_for:
            sleep_ms = min(sleep_ms, _TURN_MS)
        elif len(self._state.writer):
            sleep_ms = min(sleep_ms, REPORTS_MS)
        return max(1, sleep_ms)

    def _serve(self) -> None:
        while gathering_s := self._ack_writer.gathering_s():
            self._state.keeper.wait(gathering_s)
        self._ack_writer.serve()
        if self._ack_writer.is_waited_for:
            self._ack_writer.serve_waiting(_WAIT_S)
        else:
            self._state.writer.poll()

    def _renew(self) -> None:
        """R7: first what has ended, then KEEPALIVEs for the rest."""
        state = self._state
        now_ms = monotonic_ms()
        with state.lock:
            lost = state.leases.expire(now_ms)
            state.renew_id()
            if now_ms >= self._renew_ms:
                self._renew_ms = now_ms + self._period_ms
                # Written with the lock held: a RELEASE names the holder as of what is before it.
                for renewal in state.leases.plan_renewals(now_ms):
                    try:
                        self._ack_writer.renew(renewal)
                    except BrokerError as error:  # noqa: PERF203 - the next one may go through
                        state.leases.renewal_failed(renewal)
                        _log.warning("a KEEPALIVE could not be queued", extra={"error": str(error)})
        if lost:
            self._ack_writer.lost(lost)

    def _tell(self) -> None:
        self._ack_writer.lost_leases.tell_soon()

    def _each_beat(self) -> None:
        now_ms = monotonic_ms()
        if now_ms < self._second_ms:  # there may be hundreds of beats a second, for verdicts
            return
        self._second_ms = now_ms + MAX_SLEEP_MS
        self.each_second()
        self._state.namespace.refresh_if_old(IDENTITY_AGE_S)
