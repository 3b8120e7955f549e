"""Every program of examples/, as a user runs it: as a process, on a real broker."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
import pytest
from tests.integration.cli_tools import Commands
from tests.integration.parallel_tools import committed, fill, make_topic, read_all
from tests.sure_producer import SureProducer
from tests.waiting import wait_until, within

from kafkamq import Service

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 200

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


class Program:
    """An example that runs; its lines are read as they come."""

    def __init__(self, name: str, arguments: Sequence[object]) -> None:
        self.lines: list[str] = []
        self.was_killed = False
        self.process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        self._errors: list[str] = []
        self._readers = [
            threading.Thread(target=into.extend, args=(stream,), daemon=True)
            for into, stream in (
                (self.lines, self.process.stdout),
                (self._errors, self.process.stderr),
            )
        ]
        for reader in self._readers:
            reader.start()

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """While it runs: when it ends instead, its errors say why."""
        wait_until(lambda: self.process.poll() is not None or condition(), what, TIMEOUT_S)
        assert self.process.poll() is None, self.errors()

    def ends_well(self) -> None:
        code = self.process.wait(within(TIMEOUT_S))
        assert code == 0, self.errors()

    def kill(self) -> None:
        self.was_killed = True
        self.process.kill()
        self.process.wait()

    def errors(self) -> str:
        """What it has written to stderr; all of its lines are read by then."""
        for reader in self._readers:
            reader.join(within(TIMEOUT_S))
        return "".join(self._errors)


@contextmanager
def running(name: str, *arguments: object) -> Iterator[Program]:
    """Until the block ends: then SIGTERM, which it must answer well, unless it was killed."""
    program = Program(name, arguments)
    try:
        yield program
        if not program.was_killed:
            program.process.send_signal(signal.SIGTERM)
            program.ends_well()
    finally:
        program.kill()


class Calls:
    """A service's own log: when it was called, with what, what it answered; for any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rows: list[tuple[float, str, int]] = []
        self.at_once = self.most_at_once = 0

    def answered(self, status: int) -> int:
        with self.lock:
            return sum(row[2] == status for row in self.rows)

    def most_in_a_second(self) -> int:
        """Calls that were answered well in the second that had the most of them."""
        with self.lock:
            times = sorted(at_s for at_s, _, status in self.rows if status == 200)
        return max(
            sum(begin <= at_s < begin + 1.0 for at_s in times[index:])
            for index, begin in enumerate(times)
        )


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


@contextmanager
def service(
    answer: Callable[[str, bytes, Calls], tuple[int, bytes]],
) -> Iterator[tuple[str, Calls]]:
    """A slow HTTP service of this process: its address, and its log."""
    calls = Calls()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with calls.lock:
                calls.at_once += 1
                calls.most_at_once = max(calls.most_at_once, calls.at_once)
            status, text = answer(self.path, body, calls)
            with calls.lock:
                calls.at_once -= 1
            self.send_response(status)
            if status == 429:
                self.send_header("Retry-After", "1")
            self.end_headers()
            self.wfile.write(text)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", calls
    finally:
        server.shutdown()
        server.server_close()


def numbers(program: Program, delivery: int) -> set[int]:
    """The orders of which a worker has said that this is their so many-th delivery."""
    text = "".join(list(program.lines))  # its threads print side by side: ends of lines may be late
    return {int(order) for order in re.findall(rf"order (\d+), delivery {delivery}(?!\d)", text)}


def test_sender_worker_and_tracker(bootstrap: str, namespace: str) -> None:
    sender = Program("sender.py", (bootstrap, namespace, 6))
    sender.ends_well()
    assert sender.lines == ["sent 6 orders\n"]
    with running("tracker.py", bootstrap, namespace):
        with running("worker.py", bootstrap, namespace, 3600) as dying:
            # It holds all of them, also what was sent for later, and never finishes one.
            dying.wait_until(lambda: numbers(dying, 1) == {1, 2, 3, 4, 5, 6}, "six orders")
            dying.kill()
        with running("worker.py", bootstrap, namespace) as worker:
            worker.wait_until(lambda: numbers(worker, 2) == {1, 2, 3, 4, 5, 6}, "all again")
    commands = Commands(bootstrap, namespace)
    assert commands.json("receive", "orders", "--timeout", "2") == []
    assert commands.json("dlq", "ls") == []


def test_the_async_worker(bootstrap: str) -> None:
    commands = Commands(bootstrap, "kafkamq")
    commands.run("create", "--partitions", "2", "--marker-partitions", "2", "--json")
    commands.run("send", "mails", *(str(number) for number in range(60)))
    worker = Program("async_worker.py", (bootstrap, 60))
    worker.ends_well()
    assert "".join(worker.lines).count("handled") == 60


@pytest.fixture
def database(tmp_path: Path) -> Iterator[str]:
    """A PostgreSQL of its own behind a socket in a folder; no port is opened."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not found:
        pytest.skip("no PostgreSQL in /usr/lib/postgresql ('make postgres' installs it)")
    # The server refuses to run as root.
    user = "postgres" if os.geteuid() == 0 else None
    with TemporaryDirectory(prefix="kafkamq-pg-") as folder:
        if user:
            shutil.chown(folder, user)
        data = f"{folder}/data"
        initialise = [str(found[-1] / "initdb"), "-A", "trust", "-U", "postgres", "-N", data]
        subprocess.run(initialise, check=True, user=user, stdout=subprocess.DEVNULL)
        quick = ["-c", "listen_addresses=", "-c", "fsync=off", "-k", folder]
        server = subprocess.Popen([str(found[-1] / "postgres"), "-D", data, *quick], user=user)
        try:
            yield f"host={folder} dbname=postgres user=postgres"
        finally:
            server.send_signal(signal.SIGINT)  # its fast shutdown
            server.wait(within(30))


def test_orders_are_in_postgres_once(bootstrap: str, namespace: str, database: str) -> None:
    def rows() -> list[tuple[int, int]]:
        with psycopg.connect(database) as connection:
            return connection.execute("SELECT id, amount FROM orders ORDER BY id").fetchall()

    def is_there() -> bool:
        with suppress(psycopg.OperationalError):
            psycopg.connect(database).close()
            return True
        return False

    wait_until(is_there, "the database")
    with Service(bootstrap, namespace) as service:
        service.create_topics(partitions=2, marker_partitions=2)
        orders = service.queue("orders")
        with running("postgres_inbox.py", bootstrap, database, namespace) as worker:
            with orders.producer() as producer:
                # Each order twice, as a copy of a message would come that was not acknowledged.
                for number in [*range(150), *range(150)]:
                    body = json.dumps({"id": number, "amount": 7}).encode()
                    producer.send(body, id=f"order-{number}")
            handled = re.compile(r" in (\d+) messages").findall
            worker.wait_until(lambda: sum(map(int, handled("".join(worker.lines)))) == 300, "all")
        assert rows() == [(number, 7) for number in range(150)]
        assert Commands(bootstrap, namespace).json("receive", "orders", "--timeout", "2") == []


ALLOWED = 60
"""Calls in any second: what the service answers; to more it says 429."""


def limited(path: str, body: bytes, calls: Calls) -> tuple[int, bytes]:
    now_s = time.monotonic()
    with calls.lock:
        recent = sum(status == 200 and at_s > now_s - 1.0 for at_s, _, status in calls.rows)
        status = 429 if recent >= ALLOWED else 200
        calls.rows.append((now_s, body.decode(), status))
    return status, b""


@pytest.mark.parametrize("rate", [30, 1000], ids=["within the limit", "above the limit"])
def test_a_limited_service(bootstrap: str, namespace: str, rate: int) -> None:
    """Within the limit nothing is refused; above it what is refused is tried again, and done."""
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [None] * 120)
    group = f"{topic}-calls"
    with service(limited) as (url, calls):
        with running("limited.py", bootstrap, topic, url, rate) as caller:
            caller.wait_until(lambda: committed(bootstrap, group, topic) == (120, ""), "all")
        done = sorted(int(body) for _, body, status in calls.rows if status == 200)
        assert done == list(range(120))
        assert calls.most_in_a_second() <= ALLOWED
        if rate < ALLOWED:
            assert calls.answered(429) == 0
        else:
            assert calls.answered(429) > 0


def slow(path: str, body: bytes, calls: Calls) -> tuple[int, bytes]:
    time.sleep(0.05)
    with calls.lock:
        calls.rows.append((time.monotonic(), path[1:], 200))
    return 200, json.dumps({"name": path[1:]}).encode()


@pytest.mark.faults
@pytest.mark.spark
def test_spark_prepares_what_is_called_in_parallel(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    source, prepared, results = (make_topic(bootstrap, namespace + end) for end in ("", "-p", "-r"))
    make_topic(bootstrap, f"{prepared}-dead")
    positions = [
        {"device": f"d{number % 20}", "latitude": number / 10, "longitude": 0}
        for number in range(200)
    ]
    wrong: list[object] = [{"device": "lost", "latitude": 91, "longitude": 0}, {"latitude": 1}, "?"]
    producer = SureProducer({"bootstrap.servers": bootstrap})
    for position in [*positions, *wrong]:
        producer.produce(source, json.dumps(position).encode())
    producer.confirm(30)
    with (
        service(slow) as (url, calls),
        running("enrich.py", bootstrap, prepared, results, url),
        running("prepare.py", bootstrap, source, prepared, f"file://{tmp_path}/check") as spark,
    ):
        # The topic has a record beside the 200: the end of the transaction that wrote them.
        spark.wait_until(lambda: committed(bootstrap, "enrichment", prepared)[0] >= 200, "200")
    found = read_all(bootstrap, results, 200)
    by_device: dict[str, list[float]] = {}
    for record in found:
        result = json.loads(record.value())
        assert result["about"] == {"name": record.key().decode()}
        place = json.loads(result["order"])
        by_device.setdefault(record.key().decode(), []).append(place["latitude"])
    assert by_device == {
        f"d{device}": [number / 10 for number in range(device, 200, 20)] for device in range(20)
    }
    assert len(calls.rows) == 200
    assert calls.most_at_once > 1  # one partition, and yet


@pytest.mark.spark
@pytest.mark.faults  # starts Spark once more
def test_a_queue_on_spark(bootstrap: str, namespace: str, tmp_path: Path) -> None:
    commands = Commands(bootstrap, namespace)
    commands.run("create", "--partitions", "2", "--marker-partitions", "2", "--json")
    commands.run("send", "mails", *(f"mail {number}" for number in range(50)))
    results = make_topic(bootstrap, f"{namespace}-sent")
    found: list = []

    def is_done() -> bool:
        found[:] = read_all(bootstrap, results, 50)
        return len(found) >= 50

    arguments = (bootstrap, namespace, "mails", results, f"file://{tmp_path}/checkpoint")
    with running("spark_queue.py", *arguments) as worker:
        worker.wait_until(is_done, "50 results")
        worker.process.send_signal(signal.SIGINT)  # as Ctrl-C, while Spark waits for a batch
        worker.ends_well()
        said = [line for line in worker.errors().splitlines() if not line.startswith("%")]
        assert not "".join(said).strip()
    assert sorted(record.value() for record in found) == sorted(
        b"MAIL %d" % number for number in range(50)
    )


def test_every_example_that_is_described_runs_in_a_test() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^\| \[(\w+\.py)\]\(\1\)", text, re.MULTILINE))
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    assert {name for name in described if name not in tests} == set()
    assert described <= {path.name for path in EXAMPLES.glob("*.py")}
    assert len(described) > 5
