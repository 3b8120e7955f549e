"""The demo itself: starts everything, kills a worker half-way, waits, and asks for the verdict.

Order of things: the broker and the tracker's Spark start side by side; then the topics, the
tracker, the workers, the messages, and beside them the judge. When half of the messages are
settled, a worker that holds some is killed with SIGKILL and not replaced: its messages come back to
the two that are left, and its partitions go to them when the broker has missed its heartbeats for
six seconds.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from kafkamq.config import ServiceConfig
from kafkamq.dev.broker import LocalKafka
from kafkamq.dev.children import Child
from kafkamq.dev.demo.follow import Background, DemoFollower
from kafkamq.dev.demo.plan import DemoOptions, Planned
from kafkamq.dev.demo.show import Show
from kafkamq.dev.demo.verdict import Verdict
from kafkamq.dev.history import Event, HistoryReader, under_way
from kafkamq.queue.producer import Delivery, Producer
from kafkamq.queue.service import Service

# A child that ends is noticed at once: these are for one that hangs, and fit a busy machine.
ENGINE_TIMEOUT_S = 360.0
VERDICT_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 120.0
HOLD_TIMEOUT_S = 10.0
POLL_S = 0.2
ACTORS = "kafkamq.dev.actors"


Beside = Callable[[ServiceConfig, Path], AbstractContextManager[str]]


def run_demo(
    planned: Sequence[Planned],
    options: DemoOptions,
    show: Show,
    *,
    beside: Beside | None = None,
    stay: Callable[[], object] = lambda: None,
) -> Verdict:
    """Runs the demo; everything that it starts ends with it, also on Ctrl-C.

    Args:
        beside: Shows the namespace while the demo runs, with a folder for its files; its address.
        stay: Called behind the verdict; what was started ends when it returns.
    """
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kafkamq-demo-"))
    keep = options.keep
    try:
        with ExitStack() as stack:
            verdict = _Demo(planned, options, show, folder, stack, beside).run()
            verdict = replace(verdict, seconds=time.monotonic() - began)
            show.verdict(verdict)
            stay()
        keep = keep or not verdict.is_ok
    except KeyboardInterrupt:
        show.say("Stopped; everything that the demo had started is gone.")
        raise
    except BaseException:
        keep = True
        raise
    finally:
        if keep:
            show.say(f"Topics, logs and the workers' histories are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return verdict


class _Demo:
    def __init__(
        self,
        planned: Sequence[Planned],
        options: DemoOptions,
        show: Show,
        folder: Path,
        stack: ExitStack,
        beside: Beside | None,
    ) -> None:
        self.planned = planned
        self.options = options
        self.show = show
        self.folder = folder
        self.histories = folder / "histories"
        self.histories.mkdir()
        self.stack = stack
        self.beside = beside
        self.queues = sorted({item.queue_id for item in planned})
        self.workers: list[Child] = []
        self.others: list[Child] = []
        self.started: list[Child] = []
        self.brokers = stack.enter_context(ExitStack())
        stack.callback(self._end_children)

    def run(self) -> Verdict:
        show, options = self.show, self.options
        with show.step("Starting Kafka, and Spark beside it"):
            tracker = self._child(ACTORS, {"role": "tracker", "engine": options.engine}, "tracker")
            self.others.append(tracker)
            broker = self.brokers.enter_context(
                LocalKafka(
                    data_dir=self.folder / "kafka",
                    cache_dir=options.cache_dir,
                    java=options.java,
                    on_progress=show.fetching,
                )
            )
        config = ServiceConfig(
            bootstrap_servers=broker.bootstrap_servers,
            namespace=options.namespace,
            kafka=options.kafka,
        )
        where = {
            "bootstrap_servers": config.bootstrap_servers,
            "namespace": config.namespace,
            "histories": str(self.histories),
        }
        with show.step(f"Starting the tracker ({options.engine}) and the workers"):
            with Service(config.bootstrap_servers, config.namespace, kafka=config.kafka) as service:
                service.create_topics(
                    partitions=options.partitions,
                    marker_partitions=options.marker_partitions,
                    replication_factor=1,
                )
            tracker.order(
                {
                    **where,
                    "kafka": {},
                    "marker_partitions": options.marker_partitions,
                    "settings": {"max_deliveries": options.max_deliveries},
                }
            )
            self._start_workers({**where, "kafka": dict(config.kafka)})
            if self.beside is not None:
                show.say(f"Pages: {self.stack.enter_context(self.beside(config, self.folder))}")
            tracker.wait_for("ready", timeout_s=ENGINE_TIMEOUT_S)
        judge = self._child("kafkamq.dev.demo.judge", where, "judge")
        self.others.append(judge)
        follower = DemoFollower(config, planned=len(self.planned))
        sender = Sender(config, self.planned, per_s=options.send_per_s)
        half = options.kill_at * len(self.planned)
        self.stack.enter_context(follower)
        self.stack.enter_context(sender)
        with show.live(len(self.planned)):
            self._watch(follower, sender, until=lambda seen: seen.acked + seen.dead >= half)
            self._kill_one(follower)
            is_settled = self._watch(
                follower, sender, until=lambda seen: sender.is_done and seen.is_settled
            )
        with show.step("Stopping workers and tracker; asking Spark SQL what the logs say"):
            self._stop([*self.workers, tracker])
            judge.order({"do": "verdict"})
            report = judge.wait_for("verdict", timeout_s=VERDICT_TIMEOUT_S)
        return Verdict.from_rows(
            report["rows"], sent_confirmed=sender.confirmed, is_settled=is_settled
        )

    def _child(self, module: str, orders: Mapping[str, Any], name: str) -> Child:
        orders = {"folder": str(self.folder), "messages": len(self.planned), **orders}
        child = Child(module, orders, name=name, log=self.folder / f"{name}.log")
        self.started.append(child)
        return child

    def _end_children(self) -> None:
        """Ends all side by side; a JVM takes a second or two."""
        children, self.started = self.started, []
        with ThreadPoolExecutor(len(children) or 1) as pool:
            for ending in [pool.submit(child.end) for child in children]:
                ending.result()

    def _start_workers(self, where: Mapping[str, Any]) -> None:
        options = self.options
        for number in range(1, options.workers + 1):
            name = f"worker-{number}"
            orders = {
                "role": "worker",
                "runner": "demo",
                **where,
                "name": name,
                "queues": self.queues,
                "contender": "markers",
                "settings": {
                    "redelivery_timeout": options.redelivery_timeout,
                    "max_deliveries": options.max_deliveries,
                    "backoff": dict(options.backoff),
                },
                "concurrency": options.concurrency,
                "ordering": "unordered",
                "slow_s": options.slow_s,
            }
            self.workers.append(self._child(ACTORS, orders, name))
        for worker in self.workers:
            worker.wait_for("ready", timeout_s=ENGINE_TIMEOUT_S)

    def _watch(self, follower: DemoFollower, sender: Sender, *, until: Any) -> bool:
        """Shows what happens until a condition holds; False when the time is over."""
        deadline = time.monotonic() + self.options.drain_timeout
        while True:
            seen = follower.snapshot()
            self.show.progress(seen, workers=len(self.workers))
            if until(seen):
                return True
            if time.monotonic() > deadline:
                return False
            sender.check()
            for child in (*self.workers, *self.others):
                child.check()
            time.sleep(POLL_S)

    def _kill_one(self, follower: DemoFollower) -> None:
        """Kills a worker in a moment at which its history shows messages in its hands."""
        deadline = time.monotonic() + HOLD_TIMEOUT_S
        reader, events = HistoryReader(self.histories), list[Event]()
        while True:
            events += reader.read()
            held = under_way(events)
            victim = max(self.workers, key=lambda worker: held.get(worker.name, 0))
            # Few messages may all be settled by now: then any worker will do.
            if (
                held.get(victim.name)
                or follower.snapshot().is_settled
                or time.monotonic() > deadline
            ):
                break
            time.sleep(0.005)
        victim.kill()
        self.workers.remove(victim)
        held = under_way([*events, *reader.read()])
        self.show.killed(victim.name, pid=victim.pid, held=held.get(victim.name, 0))

    def _stop(self, children: Sequence[Child]) -> None:
        for child in children:
            child.order({"do": "stop"})
        for child in children:
            child.wait_for("stopped", timeout_s=STOP_TIMEOUT_S)


BATCHES_PER_S = 10
TIMEOUT_S = 120.0


class Sender(Background):
    def __init__(self, config: ServiceConfig, planned: Sequence[Planned], *, per_s: int) -> None:
        super().__init__("demo-sender", self._run)
        self._config = config
        self._planned = planned
        self._batch = max(1, per_s // BATCHES_PER_S)
        self.confirmed = 0
        self.is_done = False

    def _run(self) -> None:
        config = self._config
        with Service(config.bootstrap_servers, config.namespace, kafka=config.kafka) as service:
            queues = {item.queue_id for item in self._planned}
            self._send({queue: service.queue(queue).producer() for queue in queues})

    def _send(self, producers: dict[str, Producer]) -> None:
        deliveries: list[Delivery] = []
        next_at = time.monotonic()
        for start in range(0, len(self._planned), self._batch):
            if self.stopping.wait(max(0.0, next_at - time.monotonic())):
                return
            next_at += 1 / BATCHES_PER_S
            batch = self._planned[start : start + self._batch]
            for queue_id, producer in producers.items():
                deliveries += producer.send_many(
                    [item.message for item in batch if item.queue_id == queue_id]
                )
        for delivery in deliveries:
            delivery.result(TIMEOUT_S)
            self.confirmed += 1
        self.is_done = True
