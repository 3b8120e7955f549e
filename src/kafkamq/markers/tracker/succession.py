"""Signs of life of one tracker, and whether it is its turn to take over (R36).

A thread of its own writes signs while a start, a claim or a batch keeps the tracking threads busy,
and stops when these have stood still for long. The rules are in ``markers/rules/standby.py``.
"""

from __future__ import annotations

import logging
import secrets
import threading
from contextlib import closing

from kafkamq.config import ServiceConfig
from kafkamq.errors import KafkaMQError
from kafkamq.markers.rules.standby import Beat, Phase, Standby
from kafkamq.markers.tracker.records import StatusReader, Ticker
from kafkamq.markers.wire.records import Sign, SignKind
from kafkamq.transport.clock import monotonic_ms

SIGN_MS = 1_000
"""Between two signs of a tracker that is active."""
_POLL_S = 0.1
_AGAIN_S = 1.0
_STILL_MS = 30_000
_CLOSE_S = 10.0
_log = logging.getLogger(__name__)


class Succession:
    """The signs of one process's tracker; a context manager, thread-safe.

    Args:
        engine: Whose starts share the work with this one, so that it need not wait while one of
            them is active; empty: there is none such.
        stands_by: Whether it reads the signs of others. Otherwise it only gives its own.

    Attributes:
        seen_epoch: The largest of any sign.
        is_caught_up: Whether it has read what was there when it began.
    """

    def __init__(self, config: ServiceConfig, *, engine: str = "", stands_by: bool = False) -> None:
        self._config = config
        self._shared = engine
        self._stands_by = stands_by
        self._start = secrets.token_hex(8)
        self._rules = Standby()
        self._gives: SignKind | None = None
        self._engine = engine
        self._epoch = 0
        self.seen_epoch = 0
        self._signed_ms = 0
        self._moved_ms = 0
        self._has_joined = False
        self.is_caught_up = False
        self._heard: set[str] = set()
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kafkamq-signs", daemon=True)

    def __enter__(self) -> Succession:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- for its owner

    @property
    def stands_by(self) -> bool:
        return self._stands_by and self._rules.phase is Phase.WAITING and not self._has_joined

    @property
    def is_chosen(self) -> bool:
        """Return whether it is this one's turn to take over, or to join those that are active."""
        return self._has_joined or self._rules.phase is Phase.CHOSEN

    @property
    def is_succeeded(self) -> bool:
        return self._rules.phase is Phase.SUCCEEDED

    def hears(self, engine: str) -> bool:
        """Return whether another start of an engine gave a sign since this one began."""
        return engine in self._heard

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is chosen; whether it is."""
        if not self.is_chosen:
            self._changed.wait(timeout_s)
            self._changed.clear()
        return self.is_chosen

    def stand_by(self, engine: str) -> None:
        """Stop being active, or never begin."""
        with self._lock:
            self._engine = engine
            self._gives = None
            self._has_joined = False
            if self._rules.phase is not Phase.WAITING:
                self._rules.stand_by()

    def take_over(self, engine: str) -> None:
        """A start is under way: those that stand by wait for it."""
        with self._lock:
            self._engine = engine
            self._gives = SignKind.BID
            self._signed_ms = 0
            self._moved_ms = monotonic_ms()

    def active(self, epoch: int) -> None:
        """It tracks from now on, under this epoch (R22)."""
        with self._lock:
            self._epoch = epoch
            self.seen_epoch = max(self.seen_epoch, epoch)
            self._rules.took_over(epoch)
            self._gives = SignKind.ACTIVE
            self._signed_ms = 0
            self._moved_ms = monotonic_ms()

    def pause(self) -> None:
        """It does not track just now, nor could it: it says nothing."""
        with self._lock:
            self._gives = None
            self._engine = ""

    def moves(self) -> None:
        self._moved_ms = monotonic_ms()

    def close(self) -> None:
        """Say that it has ended, if it was active; idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    # ---- its thread

    def _run(self) -> None:
        with closing(Ticker(self._config)) as ticker:
            while not self._stopping.is_set():
                try:
                    if self._stands_by:
                        self._watch(ticker)
                    else:
                        self._give(ticker)
                        self._stopping.wait(SIGN_MS / 2000)
                except KafkaMQError as error:  # noqa: PERF203 - the loop is the repetition
                    _log.warning("no signs of life just now: %s", error)
                    self._stopping.wait(_AGAIN_S)
            if self._gives is SignKind.ACTIVE and not self.is_succeeded:
                ticker.sign(self._sign(SignKind.ENDED))

    def _watch(self, ticker: Ticker) -> None:
        with closing(StatusReader(self._config)) as reader:
            reader.read_to_end()
            self._take(reader.take_signs())
            self.is_caught_up = True
            while not self._stopping.is_set():
                self._take(reader.take_signs())
                if self._has_joined:
                    self._stopping.set()
                    return
                self._give(ticker)
                reader.poll(_POLL_S)

    def _give(self, ticker: Ticker) -> None:
        now_ms = monotonic_ms()
        with self._lock:
            sign = self._wanted(now_ms)
        if sign is not None:
            ticker.sign(sign)
        ticker.poll()

    def _wanted(self, now_ms: int) -> Sign | None:
        if self._gives is None:
            beat = None if not self.stands_by or not self._engine else self._rules.beat(now_ms)
            if beat is None:
                return None
            return self._sign(SignKind.BID if beat is Beat.BID else SignKind.STANDBY)
        is_still = self._gives is SignKind.ACTIVE and now_ms - self._moved_ms > _STILL_MS
        if is_still or now_ms - self._signed_ms < SIGN_MS:
            return None
        self._signed_ms = now_ms
        return self._sign(self._gives)

    def _sign(self, kind: SignKind) -> Sign:
        return Sign(
            topic=self._config.marker_topic,
            kind=kind,
            engine=self._engine,
            start=self._start,
            epoch=self._epoch if kind in (SignKind.ACTIVE, SignKind.ENDED) else 0,
            number=self._rules.number,
        )

    def _take(self, signs: list[Sign]) -> None:
        with self._lock:
            before = self._rules.phase, self._has_joined
            for sign in signs:
                if sign.topic == self._config.marker_topic:
                    self._take_one(sign)
            if before != (self._rules.phase, self._has_joined):
                self._changed.set()

    def _take_one(self, sign: Sign) -> None:
        self.seen_epoch = max(self.seen_epoch, sign.epoch)
        if sign.start != self._start and self.is_caught_up:
            self._heard.add(sign.engine)
        if sign.start == self._start:
            self._rules.own(sign.number)
        elif sign.kind is SignKind.ACTIVE:
            self._rules.active(sign.epoch)
            if sign.epoch >= self.seen_epoch:
                self._has_joined = bool(sign.engine) and sign.engine == self._shared
        elif sign.kind is SignKind.ENDED:
            self._rules.ended(sign.epoch)
        elif sign.kind is SignKind.BID:
            self._rules.bid()
