"""A stage for fault tests: processes that play their parts, what happens to them, the judgement."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.faults import (
    NamespaceRecords,
    Part,
    Recorder,
    Report,
    check_run,
    committed_positions,
    log_end,
    read_histories,
    read_namespace,
)
from tests.faults.figures import say
from tests.waiting import deadline_after, wait_until, within

from kafkamq.config import ServiceConfig
from kafkamq.errors import KafkaMQError
from kafkamq.queue.names import group_of
from kafkamq.queue.topics import create_topics
from kafkamq.testing.checker import check_logs

__all__ = ["Actor", "Stage"]

_CRASHES = (-signal.SIGABRT, -signal.SIGSEGV)
_OWNED = re.compile(r"(tracking a partition|partitions assigned|partitions revoked)(.*)")


class Actor:
    """One process with a part."""

    def __init__(self, role: str, part: Part, log: Path, launcher: Sequence[str]) -> None:
        self.part = part
        self.launcher = launcher
        self.role = role
        self.was_replaced = False
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [
                    *launcher, sys.executable, "-m", "harness.faults.actors",
                    role, json.dumps(asdict(part)),
                ],
                stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )  # fmt: skip

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(within(20))

    def stop(self, timeout_s: float = 40.0) -> None:
        """Ask it to end, and wait for that."""
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()


class Stage:
    """A namespace, its actors and their histories; a context manager."""

    def __init__(
        self,
        bootstrap_servers: str,
        namespace: str,
        folder: Path,
        *,
        seed: int | None = None,
        partitions: int = 3,
        marker_partitions: int = 3,
        **settings: Any,
    ) -> None:
        self.seed = random.SystemRandom().randrange(10**6) if seed is None else seed
        self.chance = random.Random(self.seed)
        self.folder = folder
        self.namespace = namespace
        self.config = ServiceConfig(bootstrap_servers=bootstrap_servers, namespace=namespace)
        self.partitions, self.marker_partitions = partitions, marker_partitions
        create_topics(
            self.config,
            partitions=partitions,
            marker_partitions=marker_partitions,
            ledger_partitions=1,
        )
        self._settings = settings
        self._recorder = Recorder(folder, "test")
        self.actors: list[Actor] = []
        self._stop = threading.Event()
        self._observer = threading.Thread(target=self._observe, daemon=True)
        self._observer.start()
        self._began_s = time.monotonic()

    # ---- who plays

    def start(self, role: str, *, launcher: Sequence[str] = (), **settings: Any) -> Actor:
        """One more process, behind a command such as a machine's ``prefix``."""
        name = f"{role}{len(self.actors)}"
        part = Part(
            **{
                "bootstrap_servers": self.config.bootstrap_servers,
                "namespace": self.namespace,
                "folder": str(self.folder),
                "name": name,
                "seed": self.seed,
                **self._settings,
                **settings,
            }
        )
        actor = Actor(role, part, self.folder / f"{name}.log", launcher)
        self.actors.append(actor)
        return actor

    def again(self, actor: Actor) -> Actor:
        """Another process with the part of one that is gone."""
        return self.start(actor.role, seed=actor.part.seed)

    def playing(self, role: str) -> list[Actor]:
        return [actor for actor in self.actors if actor.role == role and actor.is_running]

    # ---- what happens

    def fault(self, kind: str, target: object) -> None:
        """Write down that it happens; the caller makes it happen. Only an actor feels its own."""
        felt_by: dict[str, object] = {}
        if isinstance(target, Actor):
            felt_by, target = {"felt_by": [target.part.name]}, target.part.name
        self._recorder.record("fault", kind=kind, target=str(target), **felt_by)

    def healed(self) -> None:
        """All faults are over."""
        self._recorder.record("healed")

    @contextmanager
    def kill_and_replace(self, actor: Actor) -> Iterator[Actor]:
        self.fault(f"kill {actor.role}", actor)
        actor.kill()
        yield self.again(actor)

    def replace(self, actor: Actor) -> Actor:
        """SIGKILL, and another one."""
        with self.kill_and_replace(actor) as successor:
            return successor

    # ---- what became of it

    def wait_until(self, condition: Any, *, timeout_s: float = 60.0) -> None:
        wait_until(condition, f"a state of seed {self.seed}", timeout_s)

    def count(self, op: str) -> int:
        """How often something is in the histories so far."""
        needle = f'"op": "{op}"'.encode()
        return sum(path.read_bytes().count(needle) for path in self._histories())

    def copies(self) -> int:
        """How many second deliveries there were so far."""
        return sum(path.read_bytes().count(b'"count": 2') for path in self._histories())

    def in_hand(self, actor: Actor) -> int:
        """How many messages a worker has been handed that it has given no verdict on."""
        lines = b"".join(path.read_bytes() for path in self._histories(f"{actor.part.name}-"))
        return lines.count(b'"op": "received"') - lines.count(b'"op": "verdict"')

    def at_work(self, role: str) -> list[Actor]:
        """Workers with messages in hand; trackers with partitions."""
        is_busy = self.in_hand if role == "worker" else self.tracked_by
        return [actor for actor in self.playing(role) if is_busy(actor)]

    def tracked_by(self, actor: Actor) -> set[int]:
        """The marker partitions that a tracker serves, by what it logs."""
        said = (self.folder / f"{actor.part.name}.log").read_text(errors="replace")
        assigned: set[int] = set()
        tracked: set[int] = set()
        for verb, numbers in _OWNED.findall(said):
            found = {int(number) for number in re.findall(r"\d+", numbers)}
            if verb == "tracking a partition":
                tracked |= found
                continue
            tracked -= found
            assigned = assigned | found if verb == "partitions assigned" else assigned - found
        return assigned & tracked

    def _histories(self, prefix: str = "") -> Iterator[Path]:
        return self.folder.glob(f"{prefix}*.jsonl")

    def wait_for_senders(self, *, timeout_s: float = 180.0) -> None:
        for actor in self.playing("sender"):
            actor.process.wait(timeout_s)

    def is_drained(self) -> bool:
        """Whether every message is settled, by the logs."""
        try:
            found = read_namespace(self.config)
        except KafkaMQError:
            return False
        verdict = check_logs(
            messages=found.messages, markers=found.markers, dead_letters=found.dead_letters
        )
        return not verdict.lost

    def drain(self, *, timeout_s: float = 90.0) -> None:
        """Wait until every message is settled."""
        deadline_s = deadline_after(timeout_s)
        while time.monotonic() < deadline_s:
            if self.is_drained():
                return
            time.sleep(1.0)
        for actor in self.actors:  # what they are doing instead, into their logs
            if actor.is_running:
                actor.send(signal.SIGUSR1)
        time.sleep(0.5)

    def close(self) -> None:
        """End everybody: workers first, cleanly."""
        self._stop.set()
        for role in ("sender", "worker", "tracker"):
            for actor in self.playing(role):
                actor.send(signal.SIGCONT)
                actor.process.terminate()
            for actor in self.playing(role):
                actor.stop()
        self._observer.join(within(20))

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def records(self) -> NamespaceRecords:
        """What is in the topics."""
        return read_namespace(self.config)

    def judge(self, title: str, **options: Any) -> Report:
        """Close, check, print the figures; call it when all is drained."""
        self.close()
        found = read_namespace(self.config)
        report = check_run(
            read_histories(self.folder),
            messages=found.messages,
            markers=found.markers,
            dead_letters=found.dead_letters,
            **options,
        )
        seconds = round(time.monotonic() - self._began_s, 1)
        row = {"scenario": title, "seed": self.seed, "seconds": seconds, **report.row()}
        say(row)
        return report

    def _restart_crashed(self) -> None:
        """Restart as a supervisor: librdkafka 2.16 was seen to crash when a broker went away."""
        for actor in list(self.actors):
            code = actor.process.poll()
            if code in _CRASHES and not actor.was_replaced:
                actor.was_replaced = True
                self.fault(f"crash in librdkafka: signal {-code}", actor)
                self.again(actor)

    def _observe(self) -> None:
        """Positions of the queue's group and of the tracker's ledgers, every second."""
        config = self.config
        groups = [(group_of(config, "a"), config.message_topic, self.partitions)]
        groups += [
            (f"kafkamq.{config.marker_topic}.{number}", config.marker_topic, number + 1)
            for number in range(self.marker_partitions)
        ]
        while not self._stop.wait(1.0):
            self._restart_crashed()
            for group, topic, partitions in groups:
                with suppress(Exception):  # an observer among faults
                    self._look(group, topic, partitions)

    def _look(self, group: str, topic: str, partitions: int) -> None:
        """Write down what a group has committed."""
        servers = self.config.bootstrap_servers
        for partition, offset in committed_positions(servers, group, topic, partitions).items():
            here: dict[str, object] = {"group": group, "topic": topic, "partition": partition}
            if topic == self.config.marker_topic:  # after it: what it rests on is in the log
                here["end"] = log_end(servers, topic, partition)
            self._recorder.record("position", **here, offset=offset)
