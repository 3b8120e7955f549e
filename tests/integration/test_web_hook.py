"""The example of a web hook: call-backs finish messages, also after the worker was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.integration.queue_logs import dead_letters, ends, make_service, tracked
from tests.waiting import wait_until, within

from kafkamq.dev.environment import free_ports
from kafkamq.types import Outcome

ROOT = Path(__file__).resolve().parents[2]


class _Partner(BaseHTTPRequestHandler):
    """Takes orders, and remembers where to call back."""

    called: dict[bytes, str] = {}  # noqa: RUF012 - of the one test

    def do_POST(self) -> None:
        payload = self.rfile.read(int(self.headers["Content-Length"]))
        self.called[payload] = self.headers["X-Callback"]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def _post(url: str) -> int:
    request = urllib.request.Request(url, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=within(60)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_call_back_finishes_what_a_killed_worker_handed_over(
    bootstrap: str, namespace: str
) -> None:
    partner = ThreadingHTTPServer(("127.0.0.1", 0), _Partner)
    threading.Thread(target=partner.serve_forever, daemon=True).start()
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{partner.server_port}"
    command = [sys.executable, str(ROOT / "examples/web_hook.py"), bootstrap, url, str(port)]

    def start() -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        program = subprocess.Popen(
            [*command, namespace], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        return program

    with make_service(bootstrap, namespace, partitions=1) as service, tracked(service.config):
        producer = service.queue("orders").producer()
        for payload in (b"1", b"2"):
            producer.send(payload).result(within(30))
        program = start()
        try:
            wait_until(lambda: len(_Partner.called) == 2)
            program.kill()
            program.wait()
            program = start()
            done, failed = (_Partner.called[payload] for payload in (b"1", b"2"))
            assert _post(done.replace("TASK", "done")) == 200
            assert _post(done.replace("TASK", "done")) == 409
            assert _post(done.replace("TASK", "done")[:-3]) == 400
            assert _post(failed.replace("TASK", "failed")) == 200
            wait_until(lambda: dead_letters(service.config))
        finally:
            program.kill()
            program.wait()
            partner.shutdown()
            partner.server_close()
        assert (
            len(ends(service.config, Outcome.ACK)) == 2
        )  # the second one is told, and stands there
        assert len(_Partner.called) == 2
