"""The example of dead letters that an HTTP service keeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from base64 import b64decode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.integration.queue_logs import dead_letters, make_service
from tests.waiting import wait_until, within

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/http_dead_letters.py"


class _Incidents(BaseHTTPRequestHandler):
    """Is out of order at first, and keeps letters then."""

    refusals = 2
    kept: dict[str, dict[str, object]] = {}  # noqa: RUF012 - of the one test

    def do_POST(self) -> None:
        letter = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if _Incidents.refusals:
            _Incidents.refusals -= 1
            self.send_response(503)
        else:
            self.kept[self.headers["Idempotency-Key"]] = letter
            self.send_response(201)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_dead_letters_are_posted_until_the_service_has_them(bootstrap: str, namespace: str) -> None:
    incidents = ThreadingHTTPServer(("127.0.0.1", 0), _Incidents)
    threading.Thread(target=incidents.serve_forever, daemon=True).start()
    with make_service(bootstrap, namespace, partitions=1) as service:
        queue = service.queue("orders", backend="offsets")
        queue.create_topics(partitions=1)
        bad = {b'{"number": %d}' % number for number in range(3)}
        for payload in (*bad, b'{"amount": 1}'):
            queue.producer().send(payload).result(within(30))
        url = f"http://127.0.0.1:{incidents.server_port}/letters"
        program = subprocess.Popen(
            [sys.executable, str(EXAMPLE), bootstrap, url, namespace],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        try:
            wait_until(lambda: len(_Incidents.kept) == 3, "the dead letters")
        finally:
            program.kill()
            program.wait()
            incidents.shutdown()
            incidents.server_close()
        letters = list(_Incidents.kept.values())
        assert {b64decode(str(letter["payload"])) for letter in letters} == bad
        assert {letter["error"] for letter in letters} == {"the order has no amount"}
        assert dead_letters(service.config) == []
