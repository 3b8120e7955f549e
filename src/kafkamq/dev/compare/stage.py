"""One contender at work: its topics, its processes, and what their histories say."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kafkamq.config import ServiceConfig
from kafkamq.dev.children import Child
from kafkamq.dev.compare.facts import Event, Kind
from kafkamq.dev.compare.history import HistoryReader
from kafkamq.dev.compare.logs import remove
from kafkamq.dev.compare.plan import Contender, Item, Work, encode, ordering_of
from kafkamq.dev.compare.worker import QUEUE
from kafkamq.errors import DeadlineExceededError, KafkaMQError
from kafkamq.queue.names import group_of
from kafkamq.queue.service import Queue, Service

WORKER = "kafkamq.dev.compare.worker"
TRACKER = "kafkamq.dev.compare.tracker"
MIN_SESSION_S = 6.0  # of brokers: group.min.session.timeout.ms
READY_S = 90.0
STOP_S = 30.0
_FOLLOW_S = 0.02
_WARM_FIRST = 1 << 40
_WARM_QUICK_S = 0.7
_WARM_ROUNDS = 100
_WARM_PAUSE_S = 0.1
_JOIN_S = 12.0  # for every process to get messages; of claims one may have all of them


class Stage:
    """A contender's own namespace, with worker processes; a context manager; one thread."""

    def __init__(
        self,
        config: ServiceConfig,
        work: Work,
        contender: Contender,
        folder: Path,
        *,
        module: str = WORKER,
        name: str = "",
        keep: bool = False,
    ) -> None:
        self.name = name or contender.value
        self.config = ServiceConfig(
            bootstrap_servers=config.bootstrap_servers,
            namespace=f"{config.namespace}-{self.name}",
            kafka={**self._session(contender, work), **config.kafka},
        )
        self.contender = contender
        self.work = work
        self.left: list[str] = []
        self.events: list[Event] = []
        self.ended: set[int] = set()
        self.sent_ns: dict[int, int] = {}
        self._user_kafka = dict(config.kafka)
        self._folder = folder
        self._module = module
        self._keep = keep
        self._workers: list[Child] = []
        self._tracker: Child | None = None
        self._readers: list[HistoryReader] = []
        self._warmed = _WARM_FIRST
        self._service = Service(
            config.bootstrap_servers, self.config.namespace, kafka=self._user_kafka
        )
        self.queue = self._queue()

    @staticmethod
    def _session(contender: Contender, work: Work) -> dict[str, str]:
        """The session timeout that decides when a dead process's partitions go to others."""
        if contender is Contender.SHARE:  # the broker's
            return {}
        return {"session.timeout.ms": str(int(max(MIN_SESSION_S, work.lease_s) * 1000))}

    def _queue(self) -> Queue:
        backend = "offsets" if self.contender is Contender.GROUP else self.contender.value
        return self._service.queue(QUEUE, backend=backend, redelivery_timeout=self.work.lease_s)

    @property
    def topic(self) -> str:
        return self.queue.config.topic or self.config.message_topic

    def __enter__(self) -> Stage:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._create_topics()
            if self.contender is Contender.MARKERS:
                self._tracker = self._child(TRACKER, "tracker", {})
            for number in range(self.work.processes):
                self._start_worker(number)
            for child in filter(None, (self._tracker, *self._workers)):
                child.wait_for("ready", timeout_s=READY_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _create_topics(self) -> None:
        partitions = self.work.partitions
        if self.contender is Contender.MARKERS:
            self._service.create_topics(partitions=partitions, marker_partitions=min(partitions, 8))
        else:
            self.queue.create_topics(partitions=partitions)

    def _start_worker(self, number: int) -> None:
        path = self._folder / f"{self.name}-{number}.history"
        orders = {
            "history": str(path),
            "contender": self.name,
            "topic": self.topic,
            "lease_s": self.work.lease_s,
            "concurrency": self.work.concurrency,
            "ordering": ordering_of(self.contender, self.work),
            "partitions": self.work.partitions,
            "processes": self.work.processes,
        }
        self._readers.append(HistoryReader(path, number))
        self._workers.append(self._child(self._module, f"worker-{number}", orders))

    def _child(self, module: str, name: str, orders: Mapping[str, Any]) -> Child:
        where = {
            "bootstrap_servers": self.config.bootstrap_servers,
            "namespace": self.config.namespace,
            "kafka": dict(self.config.kafka),
        }
        log = self._folder / f"{self.name}-{name}.log"
        return Child(module, {**where, **orders}, name=f"{self.name} {name}", log=log)

    # Messages.

    def send(self, items: Sequence[Item], *, interval_ms: int = 0) -> None:
        """Send these, and wait until Kafka has them."""
        producer = self.queue.producer()
        size = self.work.payload_bytes
        at_s = time.monotonic()
        for item in items:
            if interval_ms:
                at_s += interval_ms / 1000
                time.sleep(max(0.0, at_s - time.monotonic()))
            payload = encode(item, size=size)
            self.sent_ns[item.number] = time.monotonic_ns()
            producer.send(payload, key=item.key)
        producer.flush(60.0)

    def send_backlog(self, items: Sequence[Item]) -> int:
        """Send while the processes stand still; returns when they went on, monotonic ns."""
        workers = [each for each in self._workers if each.is_running]
        for worker in workers:
            worker.pause()
        try:
            self.send(items)
        finally:
            begin_ns = time.monotonic_ns()
            for worker in workers:
                worker.resume()
        return begin_ns

    def warm_up(self, *, limit_s: float = 60.0) -> None:
        """Messages to all partitions, until they are through at once and everybody has joined."""
        deadline_s = time.monotonic() + limit_s
        joined_s = time.monotonic() + _JOIN_S
        quick = 0
        for _ in range(_WARM_ROUNDS):
            count = 16 * self.work.partitions
            items = [Item(self._warmed + each, f"warm-{each}", 0) for each in range(count)]
            self._warmed += count
            began_s = time.monotonic()
            self.send(items)
            if not self.wait([each.number for each in items], deadline_s - time.monotonic()):
                raise DeadlineExceededError(
                    f"{self.name}: messages were not handled within {limit_s:g} s of the start"
                )
            last = {event.process for event in self.events if event.number >= items[0].number}
            has_joined = len(last) == len(self._workers) or time.monotonic() > joined_s
            is_quick = time.monotonic() - began_s < _WARM_QUICK_S
            quick = quick + 1 if is_quick and has_joined else 0
            if quick >= 2:
                return
            time.sleep(_WARM_PAUSE_S)

    # What happens.

    def follow(self) -> None:
        """Read what workers have written."""
        for reader in self._readers:
            for event in reader.read():
                self.events.append(event)
                if event.kind is Kind.END:
                    self.ended.add(event.number)

    def wait(self, numbers: Sequence[int], limit_s: float) -> bool:
        deadline_s = time.monotonic() + limit_s
        open_numbers = set(numbers)
        while True:
            self.follow()
            open_numbers -= self.ended
            if not open_numbers:
                return True
            if time.monotonic() > deadline_s:
                return False
            self._check()
            time.sleep(_FOLLOW_S)

    def wait_for_share(self, numbers: Sequence[int], share: float, limit_s: float) -> bool:
        deadline_s = time.monotonic() + limit_s
        wanted = set(numbers)
        while len(wanted & self.ended) < share * len(wanted):
            if time.monotonic() > deadline_s:
                return False
            self._check()
            time.sleep(_FOLLOW_S / 4)
            self.follow()
        return True

    def _check(self) -> None:
        for child in (self._tracker, *self._workers):
            if child is not None:
                child.check()

    def kill_busiest(self) -> int:
        """SIGKILL to the process that holds most messages; returns when, monotonic ns."""
        self.follow()
        held: dict[int, set[int]] = {number: set() for number in range(len(self._workers))}
        for event in self.events:
            if event.kind is Kind.BEGIN:
                held[event.process].add(event.number)
            else:
                held[event.process].discard(event.number)
        number = max(held, key=lambda each: len(held[each]))
        victim = self._workers.pop(number)
        at_ns = time.monotonic_ns()
        victim.kill()
        victim.end()
        return at_ns

    # The end.

    def _end(self) -> None:
        children = [each for each in (*self._workers, self._tracker) if each is not None]
        for child in children:
            with contextlib.suppress(KafkaMQError):
                child.order({"stop": True})
        for child in children:
            if child is not self._tracker:
                with contextlib.suppress(KafkaMQError):
                    child.wait_for("stopped", timeout_s=STOP_S)
            child.end()
        with contextlib.suppress(KafkaMQError):
            self._service.close()
        if not self._keep:
            share = self.contender is Contender.SHARE
            groups = [group_of(self.config, QUEUE)] if share else []
            self.left = remove(self.config, self.config.namespace, groups=groups)
