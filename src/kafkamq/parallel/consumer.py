"""``ParallelConsumer`` is what users call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

from kafkamq.config import Options, ServiceConfig, wait_seconds
from kafkamq.errors import ConfigError, DeadlineExceededError, StateError
from kafkamq.parallel.config import (
    ParallelOptions,
    called,
    fan_out_of,
    is_async_handler,
    make_config,
    processes_of,
)
from kafkamq.parallel.engine import Engine, State
from kafkamq.parallel.failure_policy import FailurePolicy
from kafkamq.parallel.health import Health, health_of, watch_engine
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.results import (
    Handling,
    OnProduced,
    Produced,
    ProducedStream,
    ProducePublisher,
    Publisher,
    ResultStream,
)
from kafkamq.parallel.transactions import TransactionCommitter, TransactionPublisher
from kafkamq.queue.handler import refuse_generator
from kafkamq.runtime.loop_executor import LoopExecutor
from kafkamq.runtime.process_executor import ProcessExecutor
from kafkamq.runtime.rules.pace import Adjustable
from kafkamq.runtime.signals import STOPS, stopped_by
from kafkamq.runtime.steps import Attempt
from kafkamq.runtime.thread_executor import ThreadExecutor
from kafkamq.runtime.work_queue import Executor, HandlerCall, is_inside
from kafkamq.transport.clients import ForkCheck

if TYPE_CHECKING:
    from typing_extensions import Unpack

_SLICE_S = 0.2
T = TypeVar("T")
MakePublisher: TypeAlias = Callable[[Engine, FailurePolicy], "Publisher | None"]


def ending(timeout: float | timedelta, drain: float | timedelta = 0.0) -> tuple[float, float]:
    """Return what an end takes at most, in s: for handlers, and before that for what was polled.

    Raises:
        ConfigError: One of them is no time.
    """
    return wait_seconds(timeout, name="timeout"), wait_seconds(drain, name="drain")


class ParallelBase:
    """What the consumers with and without asyncio have in common."""

    def __init__(
        self,
        topics: str | Sequence[str],
        *,
        group_id: str = "",
        bootstrap_servers: str = "",
        kafka: Mapping[str, str] | None = None,
        ordering: str = Options.ordering.default,
        concurrency: int | str = Options.concurrency.default,
        **options: Unpack[ParallelOptions],
    ) -> None:
        """Makes the client; nothing is read before a handler is given.

        Args:
            topics: One topic or several; a name that begins with ``^`` is a pattern.
            group_id: The consumer group.
            bootstrap_servers: Kafka's brokers, ``host:port[,host:port...]``.
            kafka: Kafka's own properties, verbatim.
            ordering: What stays in order: records of one ``"key"``, of one ``"partition"``, or
                nothing (``"unordered"``).
            concurrency: Handlers at once: threads for ``def``, coroutines for ``async def``;
                ``"auto"``: as many as bring more, up to ``max_concurrency``.
            **options: See ``ParallelOptions``.

        Raises:
            ConfigError: A setting cannot work.
        """
        service = ServiceConfig(bootstrap_servers=bootstrap_servers, kafka=kafka or {})
        self._config = make_config(
            service, topics, group_id, ordering=ordering, concurrency=concurrency, options=options
        )
        self._fork_check = ForkCheck("ParallelConsumer")
        self._engine = Engine(self._config)

    def __repr__(self) -> str:
        state = self._engine.state.value
        return f"<{type(self).__name__} of {', '.join(self._config.topics)}: {state}>"

    @property
    def _slack_s(self) -> float:
        return 2 * self._config.commit_timeout_ms / 1000 + 10.0

    @property
    def failure(self) -> BaseException | None:
        return self._engine.failure

    def health(self) -> Health:
        """Return its state, for probes; from any thread, at once."""
        return health_of(self._engine)

    def pause(self) -> None:
        """Begin no more records, and stay in the group; what is in flight goes on."""
        if self._engine.state is State.RUNNING:
            self._engine.state = State.PAUSED
            self._engine.work_queue.pause()

    def resume(self) -> None:
        if self._engine.state is State.PAUSED:
            self._engine.state = State.RUNNING
            self._engine.work_queue.resume()

    def commit_soon(self) -> None:
        """Commit without waiting for the end of the interval."""
        self._engine.committer.request()

    def _begin(
        self,
        handler: Callable[..., object],
        publisher: MakePublisher,
        *,
        takes_all: bool = False,
        may_yield: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        is_async = is_async_handler(handler)
        engine, config = self._engine, self._config
        takes_lists = bool(config.batch_size)
        is_one_by_one = not (takes_lists or config.processes)
        refuse_generator(handler, may_yield=may_yield and is_one_by_one)
        self._fork_check.check()
        if engine.state is not State.UNUSED:
            raise StateError(
                f"this parallel consumer is {engine.state.value}: each is given one handler, once"
            )
        policy = FailurePolicy(
            config, engine.stats, engine.dead_letters.write, engine.fail, engine.dead_letters.hold
        )
        results = publisher(engine, policy)
        queue = Handling(engine.work_queue, policy, results, takes_all=takes_all)
        call = HandlerCall(
            function=called(
                handler, config.middleware, config.deserializer, takes_lists=takes_lists
            ),
            takes_lists=takes_lists,
            wants_all=takes_all,
            publishes=results is not None,
            timeout_ms=config.timeout_ms,
            owner=config,
        )
        fan_out = fan_out_of(config, is_async=is_async)
        count = config.threads if config.processes else config.concurrency
        if fan_out is not None:
            count = fan_out.maximum
        pool: Executor
        slots: Adjustable = engine.work_queue
        if config.processes:
            wanted = processes_of(
                config, handler, is_async=is_async, slots=count, wants_results=results is not None
            )
            pool = slots = ProcessExecutor(queue, wanted)
        elif is_async:
            pool = LoopExecutor(queue, call, count, loop)
        else:
            pool = ThreadExecutor(queue, call, count)
        if fan_out is not None:
            engine.steer(fan_out, slots)
        engine.start(pool)
        engine.on_end = watch_engine(engine)

    def _check_stream(self) -> None:
        if self._config.is_transactional:
            raise ConfigError("a stream of results cannot be part of a transaction")

    def _polling(self, *_: object) -> Publisher | None:
        """Offsets alone may be committed in transactions as well."""
        if self._config.is_transactional:
            raise ConfigError(
                "commit_mode='transactional' needs results: use poll_and_produce, or another mode"
            )
        return None

    def _producing(
        self, on_produced: OnProduced | None, await_room: Attempt | None = None
    ) -> MakePublisher:
        if on_produced is not None and not callable(on_produced):
            raise ConfigError(f"on_produced is {on_produced!r}: give a function")

        def make(engine: Engine, policy: FailurePolicy) -> Publisher:
            committer = engine.committer
            if isinstance(committer, TransactionCommitter):
                committer.on_produced = on_produced
                return TransactionPublisher(committer, policy, await_room)
            return ProducePublisher(
                engine.work_queue,
                policy,
                engine.results,
                timeout_s=self._config.send_timeout_ms / 1000,
                on_produced=on_produced,
                await_room=await_room,
            )

        return make


class ParallelConsumer(ParallelBase):
    """Processes the records of topics many at once on one consumer, in order where asked for.

    A record that is done is not done again by another member or after a restart, even with others
    in front of it that are not: the commit's metadata says which are done, in the format of
    Confluent's Parallel Consumer. Delivery is at least once; in mode ``transactional`` results and
    offsets are written exactly once.

    A context manager: leaving it closes. Made before a fork, it refuses to work in the child.
    """

    def __enter__(self) -> ParallelConsumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def poll(self, handler: Callable[[ParallelRecord], object]) -> None:
        """Call ``handler`` for each record, in the background; returns at once.

        A record is done when the handler returns; it may return ``Nack`` or ``Reject`` instead of
        raising. An exception means another attempt.

        Args:
            handler: ``def``: called in threads. ``async def``: awaited on one event loop in a
                thread (uvloop's if that is installed), ``concurrency`` at once.

        Raises:
            ConfigError: The handler cannot be called, or yields.
            StateError: It has a handler already, or is closed.
            BrokerError: A topic does not exist, or no broker answers.
        """
        self._begin(handler, self._polling)

    def poll_and_produce(
        self, handler: Callable[..., object], on_produced: OnProduced | None = None
    ) -> None:
        """Call the handler for each record as ``poll`` does, and produce what it returns.

        A record is done when its results are in Kafka.

        With ``commit_mode="transactional"`` results and offsets are committed together: readers of
        committed data see each result exactly once.

        Args:
            handler: Returns an ``OutgoingRecord``, several of them, None, or a verdict. A ``def``
                may yield them, but for lists and in processes.
            on_produced: Gets record, result, partition and offset of each result, one by one: when
                Kafka has it, before its record is done; in transactions when it is committed. It
                must be quick, as results wait for it. What it raises is logged, and does not count.

        Raises:
            ConfigError, StateError, BrokerError: As ``poll``.
        """
        self._begin(handler, self._producing(on_produced), may_yield=True)

    def produce_and_stream(self, handler: Callable[..., object]) -> Iterator[Produced]:
        """Produce what the handler returns, and iterate over results with their places in Kafka.

        In transactions only what is committed is told of. A record is done with its results, not
        with the iteration. When the consumer is closed, by another thread or in the loop, the
        iteration goes on until all is told; then it raises what made the consumer stop.

        Raises:
            ConfigError, StateError, BrokerError: As ``poll``.
        """
        engine = self._engine
        stream = ProducedStream(engine.is_ending)
        self._begin(handler, self._producing(stream.put, stream.await_room), may_yield=True)
        return self._told(cast("Iterator[Produced]", stream.results(engine.ended.is_set)))

    def stream(self, handler: Callable[..., object]) -> Iterator[tuple[ParallelRecord, object]]:
        """Call the handler as ``poll`` does, and iterate over records and what it returned.

        A record is done when the next one is asked for. The iteration ends when the consumer is
        closed, by another thread or in the loop; it raises what made the consumer stop.

        Raises:
            ConfigError, StateError, BrokerError: As ``poll``.
        """
        self._check_stream()
        engine = self._engine
        stream = ResultStream(engine.work_queue)
        self._begin(handler, lambda *_: stream, takes_all=True, may_yield=True)
        found = stream.results(engine.has_stopped)
        return self._told(cast("Iterator[tuple[ParallelRecord, object]]", found))

    def _told(self, results: Iterator[T]) -> Iterator[T]:
        yield from results
        if self._engine.failure is not None:
            raise self._engine.failure

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait until it has ended, by ``close`` or by a failure; False: not in time.

        Raises:
            ConfigError: ``timeout`` is no time.
            KafkaMQError: What made it stop.
        """
        timeout_s = None if timeout is None else wait_seconds(timeout, may_be_endless=True)
        if not self._engine.ended.wait(timeout_s):
            return False
        if self._engine.failure is not None:
            raise self._engine.failure
        return True

    def run(
        self, handler: Callable[[ParallelRecord], object], *, timeout: float | timedelta = 30.0
    ) -> None:
        """``poll``, and wait for the end; in the main thread SIGTERM, SIGHUP and Ctrl-C close.

        Args:
            handler: See ``poll``.
            timeout: s that handlers have to end then, but for a second Ctrl-C; what has not ended
                comes again elsewhere.

        Raises:
            KafkaMQError: As ``poll`` and ``close``, and what made it stop.
        """
        ending(timeout)
        with stopped_by(STOPS, at_once=partial(self.close, 0.0)) as stopping:
            try:
                self.poll(handler)
                while not stopping.is_set() and not self.wait(_SLICE_S):
                    pass
            finally:
                self.close(timeout)

    def drain(self, timeout: float | timedelta = 60.0) -> None:
        """Poll no more, process what was polled (up to ``timeout`` s), and close."""
        self.close(drain=timeout)

    def close(self, timeout: float | timedelta = 30.0, *, drain: float | timedelta = 0.0) -> None:
        """Begin nothing more, wait for what is in flight, commit, leave the group.

        Closing twice is fine, and so is closing what was never used. What is still in flight after
        ``timeout`` is not committed and comes again. In a handler or hook it only begins the end.

        Args:
            timeout: s to wait for handlers.
            drain: s for which what was polled is processed first.

        Raises:
            ConfigError: ``timeout`` or ``drain`` is no time; nothing has ended.
            DeadlineExceededError: Leaving the group takes longer, and goes on.
        """
        timeout_s, drain_s = ending(timeout, drain)
        engine = self._engine
        if self._fork_check.is_forked:
            return
        engine.end(timeout_s=timeout_s, drain_s=drain_s)
        if is_inside(self._config):
            return
        if not engine.ended.wait(timeout_s + drain_s + self._slack_s):
            raise DeadlineExceededError("leaving the group takes long, and goes on behind this")
