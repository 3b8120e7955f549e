"""Claims for asyncio: the same names as in ``kafkamq.claims``, what waits is a coroutine.

    async with Cluster("localhost:9092") as cluster:
        member = await cluster.member("worker-1", "billing")
        async with member.consumer("orders") as consumer:
            async for message in consumer:
                await handle(message.payload)
                message.commit()

A thread of its own receives for each consumer. Cancelling is safe: what a cancelled ``receive``,
``next_batch`` or ``next_range`` would have returned is returned by the next one, or given back with
its claim.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from kafkamq import claims as sync
from kafkamq.aio.threads import MadeTwin, Twin, attribute, in_thread, same, shown, twin
from kafkamq.claims import Batch, ClaimedMessage
from kafkamq.claims.consumer import Outputs
from kafkamq.errors import StateError

_POLL_S = 0.5
T = TypeVar("T")
_Held = TypeVar("_Held", sync.Consumer, sync.Hold)


class Cluster(MadeTwin[sync.Cluster]):
    """The twin of ``kafkamq.claims.Cluster`` connects when it is entered, awaited or asked."""

    def __init__(self, bootstrap_servers: str, **options: Any) -> None:
        """The arguments are those of ``kafkamq.claims.Cluster``."""
        super().__init__(partial(sync.Cluster, bootstrap_servers, **options))

    async def connected(self) -> sync.Cluster:
        await self
        return self._sync

    _connected = connected
    ready = twin(sync.Cluster.ready)
    paused_until = twin(sync.Cluster.paused_until)
    claims = twin(sync.Cluster.claims)

    async def member(self, client_id: str, group_id: str) -> Member:
        return Member((await self.connected()).member(client_id, group_id))

    async def close(self, timeout: float | timedelta = 30.0) -> None:
        """Release everything and end the clients. Idempotent."""
        if self._made is not None:
            await in_thread(self._made.close, timeout)


class Member(Twin[sync.Member]):
    """The twin of ``kafkamq.claims.Member`` makes twins of its consumers and holds."""

    def __init__(self, member: sync.Member) -> None:
        self._sync = member
        self.client_id = member.client_id
        self.group_id = member.group_id

    claimed = twin(sync.Member.claimed)
    claim_of = twin(sync.Member.claim_of)

    def consumer(self, *arguments: Any, **options: Any) -> Consumer:
        """Return a consumer, which begins to claim when it is entered or awaited."""
        return Consumer(lambda: self._sync.consumer(*arguments, **options))

    def hold(self, *arguments: Any, **options: Any) -> Hold:
        """Return a hold, which begins to claim when it is entered or awaited."""
        return Hold(lambda: self._sync.hold(*arguments, **options))


class _Owner:
    """The one thread that works with a consumer; calls in it outlive their cancellation.

    Each result goes to one caller: calls wait for each other, and what a cancelled one would have
    got is for the next of its name.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "kafkamq-aio-claims")
        self._pending: dict[str, asyncio.Future[Any]] = {}
        self._turn = asyncio.Lock()
        self._closing: asyncio.Future[None] | None = None

    async def run(self, name: str, call: Callable[[], T]) -> T:
        """Return its result, or that of the call of this name that was cancelled before it."""
        async with self._turn:
            pending = self._pending.get(name)
            if pending is None:
                if self._closing is not None:
                    raise StateError("it is closed")
                loop = asyncio.get_running_loop()
                pending = self._pending[name] = loop.run_in_executor(self._thread, call)
            try:
                found: T = await asyncio.shield(pending)
            except asyncio.CancelledError:
                # A result that came just then is the next caller's.
                if pending.cancelled():
                    del self._pending[name]
                raise
            except BaseException:
                del self._pending[name]
                raise
            del self._pending[name]
            return found

    async def close(self, call: Callable[[], None]) -> None:
        """Make the last call, behind the one that is under way; it outlives its cancellation."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().run_in_executor(self._thread, call)
            self._thread.shutdown(wait=False)
        await asyncio.shield(self._closing)


class _Holder(MadeTwin[_Held]):
    claims = shown(sync.Consumer.claims)
    complete_topics = shown(sync.Consumer.complete_topics)
    positions = same(sync.Consumer.positions)
    wait_for_claims = twin(sync.Consumer.wait_for_claims)
    flush = twin(sync.Consumer.flush)

    async def close(
        self,
        *,
        release: bool = True,
        drain: float | timedelta = 0.0,
        timeout: float | timedelta = 30.0,
    ) -> None:
        if self._made is not None:
            await in_thread(self._made.close, release=release, drain=drain, timeout=timeout)


class Hold(_Holder[sync.Hold]):
    """The twin of ``kafkamq.claims.Hold`` holds partitions and their positions."""

    is_held = same(sync.Hold.is_held)
    commit_position = same(sync.Hold.commit_position)


class Consumer(_Holder[sync.Consumer]):
    """The twin of ``kafkamq.claims.Consumer`` hands out the messages of held partitions."""

    def __init__(self, make: Callable[[], sync.Consumer]) -> None:
        super().__init__(make)
        self._owner = _Owner()

    async def __aiter__(self) -> AsyncIterator[ClaimedMessage]:
        while not self._sync.is_stopped:
            message = await self.receive(_POLL_S)
            if message is not None:
                yield message

    async def receive(self, timeout: float | timedelta = 1.0) -> ClaimedMessage | None:
        """Receive the next message; None: there was none in time, or ``stop`` was called."""
        return await self._owner.run("receive", lambda: self._sync.receive(timeout))

    async def next_batch(self, timeout: float | timedelta = 1.0) -> Batch | None:
        """Receive the next messages of one partition; None as for ``receive``."""
        made = self._sync
        # What a cancelled call found is not taken: it goes back with its claim.
        while True:
            batch = await self._owner.run("next_batch", lambda: made.find_batch(timeout))
            if batch is None or made.take(batch):
                return batch
            if made.is_stopped:
                return None

    async def batches(self, timeout: float | timedelta | None = None) -> AsyncIterator[Batch]:
        """Yield batches, until ``stop``, or until none came for ``timeout`` seconds."""
        while not self._sync.is_stopped:
            batch = await self.next_batch(_POLL_S if timeout is None else timeout)
            if batch is not None:
                yield batch
            elif timeout is not None:
                return

    commit = same(sync.Consumer.commit)

    @asynccontextmanager
    async def transaction(self, of: ClaimedMessage | Batch) -> AsyncIterator[Outputs]:
        """Produce under a claim, with ``async with``: a former owner is refused by the brokers."""
        inner = self._sync.transaction(of)
        outputs = await in_thread(inner.__enter__)
        try:
            yield outputs
        except BaseException as error:
            await in_thread(inner.__exit__, type(error), error, error.__traceback__)
            raise
        await in_thread(inner.__exit__, None, None, None)

    stop = same(sync.Consumer.stop)

    async def close(
        self,
        *,
        release: bool = True,
        drain: float | timedelta = 0.0,
        timeout: float | timedelta = 30.0,
    ) -> None:
        """Give everything back; messages that were not handed out are dropped. Idempotent."""
        if self._made is not None:
            self._made.stop()
            close = self._made.close
            await self._owner.close(lambda: close(release=release, drain=drain, timeout=timeout))


class Admin:
    """The twin of ``kafkamq.claims.Admin`` commands one group."""

    def __init__(self, cluster: Cluster, group_id: str, **options: Any) -> None:
        """The arguments are those of ``kafkamq.claims.Admin``."""
        self._cluster = cluster
        self._arguments = (group_id, options)

    pause = twin(sync.Admin.pause)
    resume = twin(sync.Admin.resume)
    paused_until = twin(sync.Admin.paused_until)
    wait_until_free = twin(sync.Admin.wait_until_free)
    set_position = twin(sync.Admin.set_position)

    async def _connected(self) -> sync.Admin:
        group_id, options = self._arguments
        return sync.Admin(await self._cluster.connected(), group_id, **options)


class RangeClaims(MadeTwin[sync.RangeClaims]):
    """The twin of ``kafkamq.claims.RangeClaims`` claims when it is entered or awaited."""

    def __init__(self, bootstrap_servers: str, topic: str, **options: Any) -> None:
        """The arguments are those of ``kafkamq.claims.RangeClaims``."""
        super().__init__(partial(sync.RangeClaims, bootstrap_servers, topic, **options))
        self._owner = _Owner()

    async def __aiter__(self) -> AsyncIterator[ClaimedRange]:
        while not self._sync.is_stopped:
            found = await self.next_range(_POLL_S)
            if found is not None:
                yield found

    async def next_range(self, timeout: float | timedelta = 1.0) -> ClaimedRange | None:
        """Take a range that is held and has messages; None: there was none in time."""
        made = self._sync
        found = await self._owner.run("next_range", lambda: made.next_range(timeout))
        return None if found is None else ClaimedRange(found, self._owner)

    held = same(sync.RangeClaims.held)
    stop = same(sync.RangeClaims.stop)

    async def close(self, timeout: float | timedelta = 10.0) -> None:
        """Give back what is not done, and end the clients. Idempotent."""
        if self._made is not None:
            self._made.stop()
            await self._owner.close(lambda: self._sync.close(timeout))


class ClaimedRange(Twin[sync.ClaimedRange]):
    """The twin of ``kafkamq.claims.ClaimedRange`` yields its messages to ``async for``."""

    def __init__(self, claimed: sync.ClaimedRange, owner: _Owner) -> None:
        self._sync = claimed
        self._owner = owner
        self._messages: Iterator[ClaimedMessage] | None = None
        self._batches: Iterator[Batch] | None = None

    topic: str = attribute("topic", doc="Of which topic.")
    partition: int = attribute("partition", doc="Its partition.")
    first: int = attribute("first", doc="The first offset that is not done.")
    next: int = attribute("next", doc="Behind the last offset.")
    position: int = attribute("position", doc="Behind the last message that was handed out.")
    token: int = attribute("token", doc="Fencing token.")

    async def __aiter__(self) -> AsyncIterator[ClaimedMessage]:
        """Yield its messages; waits for those that are not written yet, until ``stop``."""
        messages = self._messages = self._messages or iter(self._sync)
        name = f"messages of {self._sync.token}"
        while True:
            found = await self._owner.run(name, lambda: next(messages, None))
            if found is None:
                return
            yield found

    async def batches(self) -> AsyncIterator[Batch]:
        """Yield its messages, up to 200 at a time, as ``kafkamq.claims.ClaimedRange.batches``."""
        batches = self._batches = self._batches or self._sync.batches()
        name = f"batches of {self._sync.token}"
        while True:
            found = await self._owner.run(name, lambda: next(batches, None))
            if found is None:
                return
            try:
                yield found
            except GeneratorExit:
                self._batches = None
                raise

    done = twin(sync.ClaimedRange.done)
