"""In which order a log of claims ends: services, thread, writer, reader, then what is claimed."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator

import pytest
from tests.waiting import within

from kafkamq.claims import init_topic
from kafkamq.claims.log_engine import CoordinationTopic, LogEngine
from kafkamq.config import ServiceConfig
from kafkamq.errors import StateError
from kafkamq.transport.memory.cluster import forget_cluster
from kafkamq.transport.record import Record

INTERVAL_MS = 60_000


class Log(LogEngine):
    """A log with one service, which notes in ``ended`` what ends, and when."""

    def __init__(self, servers: str) -> None:
        config = ServiceConfig(bootstrap_servers=servers)
        topic = CoordinationTopic("log", partitions=1)
        super().__init__(config, topic, interval_ms=INTERVAL_MS, owner="Log")
        self.ended: list[str] = []
        self.answers: list[int] = []  # where what the service said last was written
        self.thread = threading.current_thread()
        self.turned, self.may_turn = threading.Event(), threading.Event()
        self.on_turn = self._wait

    def open_log(self, partition: int, since_s: float | None) -> None: ...

    def fold(self, message: Record, partition: int, offset: int, broker_ms: int) -> None: ...

    def turn(self, now_ms: int) -> None: ...

    def _wait(self) -> None:
        self.thread = threading.current_thread()
        self.turned.set()
        self.may_turn.wait(within(60))

    def services(self) -> list[Callable[[float], object]]:
        return [self._end_service]

    def _end_service(self, timeout_s: float) -> None:
        self.ended.append("service")
        if self.error is None:
            self.append(0, b"its last answer", self.answers.append)

    def on_stopped(self) -> None:
        self.ended.append("reader")

    def on_failure(self) -> None:
        self.ended.append("claims")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """A log that was started, whose thread waits in a turn."""
    name = uuid.uuid4().hex
    servers = f"memory://{name}"
    init_topic(servers, "log", partitions=1, heartbeat_interval=INTERVAL_MS / 1000)
    log = Log(servers)
    writer = log.open_writer()
    end_writer = writer.close

    def close_writer(timeout_s: float = 0.0) -> None:
        log.ended.append("writer beside the thread" if log.thread.is_alive() else "writer")
        end_writer(timeout_s)

    monkeypatch.setattr(writer, "close", close_writer)
    log.start([0])
    assert log.turned.wait(within(60))
    yield log
    log.may_turn.set()
    log.thread.join()
    forget_cluster(name)


def test_what_its_services_say_last_is_written(log: Log) -> None:
    log.may_turn.set()
    log.close(within(60))
    assert log.ended == ["service", "writer", "reader", "claims"]
    assert log.answers == [0]
    with pytest.raises(StateError, match="this Log is closed"):
        log.check()


def test_a_thread_that_does_not_end_keeps_its_reader(log: Log) -> None:
    log.close(0.01)
    assert log.ended == ["service", "writer beside the thread", "claims"]
    log.may_turn.set()
    log.thread.join()
    log.close(within(60))
    assert log.ended[3:] == ["service", "writer", "reader", "claims"]
    assert log.answers == [0]
