"""The pages measured on a real broker and in a real browser: the index, its size, and what is seen.

Run: python benchmarks/web.py [--json] [--messages N] [--letters N] [--queues N] [--viewers N]

It starts a broker of its own unless one is named. The index reads messages and their markers, in
runs of 1024 and one by one, in turns with a loop that only consumes them. Then ``kafkamq web``
serves the same index, with dead letters beside: each page is painted in Chromium, beside one that
is three words in a file, an event is waited for, beside a consumer that does nothing else, and
viewers ask as browsers do. The figures of processors are what processes used. With ``--json`` the
last line is one JSON list of rows
``{"row", "ours", "peer", "ratio", "unit", "goal", "ok"}``.
"""

from __future__ import annotations

# ruff: noqa: E402
import sys
from pathlib import Path

# This file's folder is on the path first, where it would hide the standard library's `queue`.
sys.path[:] = [each for each in sys.path if Path(each).resolve() != Path(__file__).resolve().parent]
sys.path.append(str(Path(__file__).resolve().parents[1]))

import argparse
import asyncio
import os
import re
import shutil
import sqlite3
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
from benchmarks.load import LoadProducer
from benchmarks.rows import IS_BRIEF, Row, finish, scaled, show
from confluent_kafka import OFFSET_END, Consumer, KafkaError, TopicPartition

from kafkamq import Service
from kafkamq.config import ServiceConfig
from kafkamq.dev import LocalKafka
from kafkamq.markers.wire.markers import encode_marker
from kafkamq.queue.wire.headers import Origin, dead_letter_headers
from kafkamq.queue.wire.keys import join_key
from kafkamq.types import DeadLetterReason, Marker, MarkerType, MessageBatch, MessageId, Outcome
from kafkamq.web.index.follower import Index, IndexOptions

CHROMIUM = "/usr/bin/chromium"
PARTITIONS = 4
RUN = 1024  # messages of one marker, of one chunk of the index
POLL_S = 0.6  # how often a page asks
SECONDS = 2.0 if IS_BRIEF else 15.0
PAINTS = 1 if IS_BRIEF else 5
EVENTS = 2 if IS_BRIEF else 12
PAYLOAD = b'{"article": 4711, "count": 3}'


def queue_of(number: int, queues: int) -> str:
    return f"queue-{number % queues:05}"


def fill(config: ServiceConfig, messages: int, queues: int, *, run: int) -> None:
    """Messages of 16-byte ids and keys; all but some tenth were STARTed and acknowledged."""
    producer = LoadProducer(config.bootstrap_servers)
    each = messages // PARTITIONS
    for number in range(each * PARTITIONS):
        key = join_key(queue_of(number, queues), f"key-{number:012}")
        headers = [("kafkamq-id", b"id-%013d" % number)]
        producer.write(config.message_topic, PAYLOAD, key, number // each, headers=headers)
    producer.confirm()
    worker = "worker-1"
    for partition in range(PARTITIONS):
        # Whole runs: a message that comes later must not have been STARTed.
        for first in range(0, each * 9 // 10 - run + 1, run):
            named: dict[str, object] = {"message_id": MessageId(partition, first)}
            if run > 1:
                batch = MessageBatch(partition, b"", 0, first, (1 << run) - 1)
                named = {"batches": (batch,)}
            start = Marker(MarkerType.START, redeliver_after_ms=60_000, consumer_id=worker, **named)
            end = Marker(MarkerType.END, outcome=Outcome.ACK, consumer_id=worker, **named)
            for marker in (start, end):
                producer.write(config.marker_topic, encode_marker(marker), None, 0)
    producer.confirm()


def bury(config: ServiceConfig, letters: int, queues: int) -> None:
    """Dead letters with 200 kinds of errors."""
    producer = LoadProducer(config.bootstrap_servers)
    for number in range(letters):
        queue = queue_of(number, queues)
        headers = dead_letter_headers(
            [("kafkamq-id", b"dead-%011d" % number)],
            reason=DeadLetterReason.REJECTED,
            error=f"ValueError: no article {number} in shop-{chr(97 + number % 20)}",
            delivery_count=3,
            origin=Origin(config.message_topic, number % PARTITIONS, number, 1_000),
            queue_id=queue,
        )
        key = join_key(queue, f"key-{number:012}")
        producer.write(config.dead_letter_topic, PAYLOAD, key, headers=list(headers))
    producer.confirm()


def consume(config: ServiceConfig) -> tuple[float, float]:
    """Read messages and markers, and do nothing: seconds by the clock, and of the processor."""
    consumer = Consumer(
        {
            "bootstrap.servers": config.bootstrap_servers,
            "group.id": "none",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "queued.max.messages.kbytes": 16_384,
        }
    )
    places = [TopicPartition(config.message_topic, number, 0) for number in range(PARTITIONS)]
    places.append(TopicPartition(config.marker_topic, 0, 0))
    began_s, cpu_s, left = time.perf_counter(), time.process_time(), len(places)
    consumer.assign(places)
    while left:
        for record in consumer.consume(5000, 0.25):
            error = record.error()
            if error is not None and error.code() == KafkaError._PARTITION_EOF:
                left -= 1
    took = time.perf_counter() - began_s, time.process_time() - cpu_s
    consumer.close()
    return took


def index(config: ServiceConfig, path: Path) -> tuple[float, float]:
    """The same for an index that is made of them."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    made = Index(config, IndexOptions(path=path))
    made.start()
    while not made.picture.is_caught_up:
        time.sleep(0.01)
    took = time.perf_counter() - began_s, time.process_time() - cpu_s
    made.close()
    return took


def index_rows(config: ServiceConfig, path: Path, name: str, count: int, goal: float) -> list[Row]:
    rounds = 1 if IS_BRIEF else 3
    ours, peer = [], []
    for number in range(rounds):
        peer.append(consume(config))
        ours.append(index(config, path if number == 0 else path.with_suffix(f".{number}")))
    rows = []
    for which, unit in enumerate(("messages/s", "messages/CPU s")):
        mine, other = (count / statistics.median(e[which] for e in each) for each in (ours, peer))
        wanted = goal if which == 0 else None
        ratio = mine / other
        is_ok = wanted is None or ratio >= wanted
        rows.append(Row(f"index, {name}: {unit}", mine, other, ratio, unit, wanted, is_ok))
    return rows


def size_rows(path: Path, messages: int) -> list[Row]:
    """Bytes of a message, with and without the database's indexes."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copy(path, copy)
        connection = sqlite3.connect(copy, isolation_level=None)
        made = connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'").fetchall()
        for (name,) in made:
            if not name.startswith("sqlite_"):
                connection.execute(f"DROP INDEX {name}")
        connection.execute("VACUUM")
        connection.close()
        for name, file, goal in (("with", path, 120.0), ("without", copy, None)):
            size = file.stat().st_size / messages
            is_ok = goal is None or size <= goal
            name = f"index: bytes a message, {name} indexes"
            rows.append(Row(name, size, None, None, "B", goal, is_ok))
    return rows


class Pages:
    """``kafkamq web`` in a process of its own."""

    def __init__(self, config: ServiceConfig, path: Path) -> None:
        places = ("--bootstrap-servers", config.bootstrap_servers, "--namespace", config.namespace)
        command = [sys.executable, "-m", "kafkamq.cli", "web", *places]
        self._process = subprocess.Popen(
            [*command, "--port", "0", "--index", str(path)], stderr=subprocess.PIPE, text=True
        )
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        self.address = re.findall(r"http://\S+", line)[0]
        while not self.get("state")["is_caught_up"]:
            time.sleep(0.2)

    def get(self, path: str) -> dict[str, object]:
        found: dict[str, object] = httpx.get(f"{self.address}api/{path}", timeout=120).json()
        return found

    def cpu_s(self) -> float:
        return cpu_s(self._process.pid)

    def memory_mb(self) -> float:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) * 1024 / 1e6

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def cpu_s(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


ADDRESSES = {
    "queues": "",
    "queues, by what waits": "?sort=waiting",
    "queues that are searched": "?search=0042",
    "a queue": "queue?name=queue-00007",
    "a message": "message/0/0/1",
    "a dead letter": "message/2/0/0",
    "messages that are found": "find?q=key-000000000007",
    "dead letters": "dead-letters",
    "dead letters of a queue": "dead-letters?queue=queue-00007&redriven=no",
    "dead letters with a text": "dead-letters?text=shop-c",
    "dead letters that no text matches": "dead-letters?text=nothing-has-this",
    "a dry run": "redrive?queue=queue-00007",
    "a dry run over all": "redrive?text=shop-c",
    "workers": "workers",
    "trackers": "trackers",
    "health": "health",
    "jobs": "jobs",
    "actions": "actions",
    "sending": "send",
}


@contextmanager
def bare_page() -> Iterator[str]:
    """What is the least that a browser takes for a page."""

    class Bare(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><p>Three words more")

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Bare) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@contextmanager
def browsing(address: str) -> Iterator[object]:
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox", "--disable-background-networking", "--no-first-run"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = browser.new_page()
        page.goto(address)
        yield page
        browser.close()


def paint_rows(page: object, pages: Pages) -> list[Row]:
    """When each page is painted first, the second time and later; none is one that was kept."""
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    with bare_page() as bare:
        addresses = {"": bare} | {name: f"{pages.address}{at}" for name, at in ADDRESSES.items()}
        found: dict[str, list[float]] = {name: [] for name in addresses}
        for number in range(PAINTS + 1):
            for name, address in addresses.items():
                page.goto(address)  # type: ignore[attr-defined]
                while (painted_ms := page.evaluate(paint)) is None:  # type: ignore[attr-defined]
                    time.sleep(0.02)
                if number:
                    found[name].append(painted_ms / 1000)
    least_s = statistics.median(found.pop(""))
    return [
        Row(f"first paint: {name}", seconds, least_s, None, "s", 0.5, seconds <= 0.5)
        for name, each in found.items()
        for seconds in (statistics.median(each),)
    ]


def event_rows(page: object, pages: Pages, config: ServiceConfig) -> list[Row]:
    """How long a message that was sent takes until an open page, and a bare consumer, has it."""
    took, read = [], []
    producer = LoadProducer(config.bootstrap_servers, linger_ms=0)
    consumer = Consumer({"bootstrap.servers": config.bootstrap_servers, "group.id": "none"})
    consumer.assign([TopicPartition(config.message_topic, 0, OFFSET_END)])
    consumer.consume(1, 3.0)
    for number in range(EVENTS + 1):
        name = f"event-{number}"
        began_s = time.perf_counter()
        producer.write(
            config.message_topic, b"", b"events", 0, headers=[("kafkamq-id", name.encode())]
        )
        producer.confirm()
        consumer.consume(1, 30.0)
        read.append(time.perf_counter() - began_s)
        if number == 0:
            # There is no page of a queue that has no message.
            while httpx.get(f"{pages.address}api/queue?name=events", timeout=120).is_error:
                time.sleep(0.1)
            page.goto(f"{pages.address}queue?name=events")  # type: ignore[attr-defined]
        page.get_by_role("link", name=name, exact=True).wait_for()  # type: ignore[attr-defined]
        took.append(time.perf_counter() - began_s)
        time.sleep(0.137 * number % 1)
    consumer.close()
    return [
        Row(f"an event is on the page: the {name}", ours, peer, None, "s", 1.5, ours <= 1.5)
        for name, of in (("median", statistics.median), ("last", max))
        for ours, peer in ((of(took[1:]), of(read[1:])),)
    ]


async def view(address: str, viewers: int, seconds: float) -> int:
    """So many viewers, who ask as pages do; returns how many answers they got."""
    paths = ["", "queue?name=queue-00007", "dead-letters", "workers", "trackers", "jobs"]
    answers, until_s = 0, time.monotonic() + seconds
    limits = httpx.Limits(max_connections=viewers)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        nonlocal answers
        url, tag = f"{address}{paths[number % len(paths)]}", ""
        await asyncio.sleep(POLL_S * number / viewers)
        while time.monotonic() < until_s:
            began_s = time.monotonic()
            answer = await client.get(url, headers={"x-seen": tag}, timeout=60)
            answers += 1
            if answer.status_code == 200:
                tag = re.findall(r'"x-seen": "([^"]+)"', answer.text)[0]
            await asyncio.sleep(max(0.0, POLL_S - (time.monotonic() - began_s)))

    async with httpx.AsyncClient(limits=limits) as client:
        await asyncio.gather(*(one(client, number) for number in range(viewers)))
    return answers


def viewer_rows(pages: Pages, viewers: int, broker: Callable[[], float]) -> list[Row]:
    """What viewers cost this process and the broker, beside what nobody costs."""
    used = {}
    for count in (0, 1, viewers):
        began = time.monotonic(), pages.cpu_s(), broker()
        if count:
            asyncio.run(view(pages.address, count, SECONDS))
        else:
            time.sleep(SECONDS)
        seconds = time.monotonic() - began[0]
        used[count] = (pages.cpu_s() - began[1]) / seconds, (broker() - began[2]) / seconds
    ours, one = 100 * (used[viewers][0] - used[0][0]), 100 * (used[1][0] - used[0][0])
    mine, other = 100 * used[viewers][1], 100 * used[1][1]
    return [
        Row(f"{viewers} viewers: of a core", ours, one, None, "%", 10.0, ours <= 10.0),
        Row(f"{viewers} viewers: the broker, of a core", mine, other, None, "%", None, True),
    ]


@contextmanager
def measured_broker(servers: str) -> Iterator[tuple[str, Callable[[], float]]]:
    """A broker, and what it has used so far; of one that is named nobody knows it."""
    if servers:
        yield servers, lambda: 0.0
        return
    with LocalKafka(heap="1g", jvm_options=()) as kafka:
        yield kafka.bootstrap_servers, lambda: cpu_s(kafka.pid)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON list, last")
    parser.add_argument("--messages", type=int, default=scaled(1_000_000, least=3 * 4096))
    parser.add_argument("--letters", type=int, default=scaled(1_000_000))
    parser.add_argument("--queues", type=int, default=scaled(10_000))
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--bootstrap-servers", default="")
    arguments = parser.parse_args()
    rows: list[Row] = []

    def add(found: list[Row]) -> None:
        show(*found)
        rows.extend(found)

    with (
        measured_broker(arguments.bootstrap_servers) as (servers, broker),
        tempfile.TemporaryDirectory() as folder,
    ):
        path = Path(folder) / "index"

        def namespace(name: str) -> ServiceConfig:
            with Service(servers, f"{name}-{os.getpid()}") as service:
                service.create_topics(partitions=PARTITIONS, marker_partitions=1)
                return service.config

        singles = arguments.messages // 20
        config = namespace("singles")
        fill(config, singles, 10, run=1)
        add(index_rows(config, path.with_suffix(".singles"), "single markers", singles, 0.15))
        config = namespace("runs")
        fill(config, arguments.messages, arguments.queues, run=RUN)
        add(index_rows(config, path, f"runs of {RUN}", arguments.messages, 0.5))
        add(size_rows(path, arguments.messages))
        bury(config, arguments.letters, arguments.queues)
        began_s = time.perf_counter()
        pages = Pages(config, path)
        seconds = time.perf_counter() - began_s
        try:
            speed = arguments.letters / seconds
            add([Row("index, dead letters", speed, None, None, "letters/s", None, True)])
            if Path(CHROMIUM).exists():
                with browsing(pages.address) as page:
                    add(paint_rows(page, pages))
                    add(event_rows(page, pages, config))
            add(viewer_rows(pages, arguments.viewers, broker))
            memory = pages.memory_mb()
            add([Row("memory at most", memory, None, None, "MB", 400.0, memory <= 400.0)])
        finally:
            pages.close()
    return finish(rows, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
