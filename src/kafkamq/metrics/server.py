"""The HTTP server of a process gives its metrics, its health, and what its handlers are at."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kafkamq.errors import ConfigError
from kafkamq.metrics.catalog import Collector
from kafkamq.metrics.health import health
from kafkamq.metrics.stacks import handlers


class MetricsServer:
    """Serves these addresses from a thread of its own until ``close``."""

    def __init__(self, port: int, host: str) -> None:
        try:
            self._server = ThreadingHTTPServer((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"metrics port {port}: cannot listen on {host} ({error})") from None
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="kafkamq-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    server_version = "kafkamq"
    sys_version = ""
    timeout = 10.0

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            registry = CollectorRegistry()
            registry.register(Collector())
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, content_type, encode(registry))
        elif path in ("/live", "/ready"):
            is_fine = health.is_live() if path == "/live" else health.is_ready()
            loops = [{**asdict(state), "is_live": state.is_live} for state in health.states()]
            body = json.dumps({"ok": is_fine, "loops": loops}).encode() + b"\n"
            self._answer(200 if is_fine else 503, "application/json", body)
        elif path == "/handlers":
            self._answer(200, "application/json", handlers() + b"\n")
        else:
            self._answer(404, "text/plain", b"/metrics, /live, /ready or /handlers\n")

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""
