"""The parallel consumer's command, its example, its metrics, and Kafka's reading of its maps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

from tests.integration.parallel_tools import (
    Seen,
    committed,
    fill,
    make,
    make_topic,
    read_all,
)
from tests.waiting import wait_until, within

from kafkamq.metrics import families, health

ROOT = Path(__file__).parents[2]


def test_consume(bootstrap: str, namespace: str, tmp_path: Path) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n % 5}" for n in range(200)])
    (tmp_path / "work.py").write_text(
        "import pathlib\n"
        "def handle(record):\n"
        "    with pathlib.Path('seen').open('a') as file:\n"
        "        file.write(f'{record.offset}\\n')\n"
    )
    command = [sys.executable, "-m", "kafkamq.cli", "consume", "-b", bootstrap, "-t", topic]
    program = subprocess.Popen(
        [*command, "-g", namespace, "--ordering", "key", "--concurrency", "auto", "work:handle"],
        cwd=tmp_path,
    )
    try:
        wait_until(lambda: (tmp_path / "seen").exists(), what="the first record")
        wait_until(lambda: len((tmp_path / "seen").read_text().split()) == 200)
        program.send_signal(signal.SIGINT)
        assert program.wait(within(60)) == 0
    finally:
        program.kill()
        program.wait()
    assert committed(bootstrap, namespace, topic) == (200, "")
    wrong = subprocess.run(
        [*command, "-g", namespace, "work:nothing"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert wrong.returncode == 2
    assert "work:nothing" in wrong.stderr


class _About(BaseHTTPRequestHandler):
    """Knows k0 to k8; fails once for each."""

    lock = threading.Lock()
    known: ClassVar[set[str]] = set()
    at_once = most_at_once = 0

    def do_GET(self) -> None:
        name = self.path[1:]
        with self.lock:
            is_new = name not in self.known
            self.known.add(name)
            _About.at_once += 1
            _About.most_at_once = max(_About.most_at_once, _About.at_once)
        time.sleep(0.05)
        with self.lock:
            _About.at_once -= 1
        self.send_response(404 if name == "k9" else 500 if is_new else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"name": name}).encode())

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    request_queue_size = 128


def test_the_enrichment_example(bootstrap: str, namespace: str) -> None:
    orders = make_topic(bootstrap, namespace)
    results = make_topic(bootstrap, f"{namespace}-out")
    letters = make_topic(bootstrap, f"{orders}-dead")
    fill(bootstrap, orders, [f"k{n % 10}" for n in range(100)])
    server = _Server(("127.0.0.1", 0), _About)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    program = subprocess.Popen(
        [sys.executable, str(ROOT / "examples/enrich.py"), bootstrap, orders, results, url],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    try:
        wait_until(lambda: committed(bootstrap, "enrichment", orders) == (100, ""), timeout_s=40)
        program.send_signal(signal.SIGINT)
        assert program.wait(within(60)) == 0
    finally:
        program.kill()
        program.wait()
        server.shutdown()
        server.server_close()
    found = read_all(bootstrap, results, 90)
    by_key: dict[bytes, list[int]] = {}
    for record in found:
        value = json.loads(record.value())
        assert value["about"] == {"name": record.key().decode()}
        by_key.setdefault(record.key(), []).append(int(value["order"]))
    assert {key: sorted(range(int(key[1:]), 100, 10)) for key in by_key} == by_key
    assert len(found) == 90
    assert len(read_all(bootstrap, letters, 10)) == 10
    assert _About.most_at_once >= 5


def test_metrics_and_health(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n}" for n in range(100)])
    gate = threading.Event()
    seen = Seen(lambda record: gate.wait(within(60)) and None)

    def figures() -> dict[str, float]:
        return {
            family.name.removeprefix("kafkamq_parallel_"): value
            for family in families()
            for labels, value in family.values().items()
            if labels[:1] == (namespace,)
        }

    with make(bootstrap, topic, namespace, concurrency=4) as consumer:
        consumer.poll(seen)
        wait_until(lambda: seen.at_once == 4)
        assert figures()["in_flight"] >= 1
        assert health.is_ready()
        gate.set()
        wait_until(lambda: figures()["committed_offset"] == 100)
        now = figures()
    assert now["polled"] == now["processed"] == 100
    assert now["waiting"] == now["open"] == now["failed"] == 0
    assert now["running"] == 1
    assert figures() == {}
    assert not [state for state in health.states() if namespace in state.name]
