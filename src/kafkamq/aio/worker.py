"""Here ``Worker`` runs on the caller's event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from datetime import timedelta

from kafkamq.aio.consumer import LeaseLostHook, OnLeaseLost
from kafkamq.aio.service import Service
from kafkamq.aio.threads import in_thread, same, shown
from kafkamq.config import Options, wait_seconds
from kafkamq.runtime import worker
from kafkamq.runtime.middleware import Middleware
from kafkamq.runtime.signals import ENDING, stopped_by

_POLL_S = 0.05


class Worker:
    """``kafkamq.Worker`` for asyncio: ``async def`` handlers are awaited on the running loop.

    ``def`` handlers run in threads and in processes as there; receiving has threads of its own, so
    nothing here blocks the loop. ``async with worker:`` runs it in the background.
    """

    def __init__(
        self,
        service: Service | worker.HandlerSource,
        *,
        queues: Iterable[str] | None = None,
        middleware: Sequence[Middleware] = (),
        drain: float | timedelta = Options.drain.default,
        on_lease_lost: OnLeaseLost | None = None,
        telemetry: bool | None = None,
        hung_after: float | timedelta | None = None,
    ) -> None:
        """Take what ``kafkamq.Worker`` takes, and start nothing.

        Args:
            service: Whose handlers: one of ``kafkamq.aio``, or of ``kafkamq``.
            on_lease_lost: A function or a coroutine function; runs in the event loop.

        Raises:
            ConfigError: ``drain`` is no time, or ``hung_after`` no positive one.
        """
        self._lease_lost = None if on_lease_lost is None else LeaseLostHook(on_lease_lost)
        self._sync = worker.Worker(
            service.sync_service if isinstance(service, Service) else service,
            queues=queues,
            middleware=middleware,
            drain=drain,
            on_lease_lost=self._lease_lost,
            telemetry=telemetry,
            hung_after=hung_after,
        )

    async def __aenter__(self) -> Worker:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    handled = shown(worker.Worker.handled)
    queues = shown(worker.Worker.queues)
    service_config = shown(worker.Worker.service_config)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._sync.use_loop(loop)
        if self._lease_lost is not None:
            self._lease_lost.loop = loop
        try:
            await in_thread(self._sync.start)
        except asyncio.CancelledError:
            # The start goes on in its thread.
            await self.stop(0.0)
            raise

    pause = same(worker.Worker.pause)
    resume = same(worker.Worker.resume)
    request_stop = same(worker.Worker.request_stop)

    async def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait until it is asked to stop; False: not in time.

        Raises:
            ConfigError: ``timeout`` is no time.
            KafkaMQError: What ended one of its queues; the others go on until ``stop``.
        """
        loop = asyncio.get_running_loop()
        deadline_s = math.inf
        if timeout is not None:
            deadline_s = loop.time() + wait_seconds(timeout, may_be_endless=True)
        while not self._sync.is_stopping:
            if self._sync.failure is not None:
                raise self._sync.failure
            if loop.time() > deadline_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def run(self) -> None:
        """Work until SIGTERM or SIGHUP (in the main thread), ``request_stop`` or a cancellation.

        Then drain.

        Raises:
            ConfigError, BrokerError, DeadlineExceededError: As ``start``, and what made it stop.
        """
        with stopped_by(ENDING) as stopping:
            await self.start()
            try:
                while not stopping.is_set() and not await self.wait(_POLL_S):
                    pass
            finally:
                await self.stop()

    async def stop(self, timeout: float | timedelta | None = None) -> None:
        await in_thread(self._sync.stop, timeout)
