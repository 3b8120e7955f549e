"""Serves the pages until it is stopped."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.web.actions import Actions
from kafkamq.web.app import build_app
from kafkamq.web.index.follower import Index, IndexOptions
from kafkamq.web.options import WebOptions
from kafkamq.web.runner import Runner

MAX_CONNECTIONS = 500
STOP_S = 5


@contextmanager
def serving(
    config: ServiceConfig, options: WebOptions, index_options: IndexOptions
) -> Iterator[str]:
    """Follow the logs and serve the pages while the block runs; yields their address.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    listening = _listen(options.host, options.port)
    index = Index(config, index_options)
    actions = Actions(config)
    runner = Runner(config, actions)
    server = _Server(
        uvicorn.Config(
            build_app(index, options, actions),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # the guard looks at the peer itself
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=STOP_S,
            ws="none",
        )
    )
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listening]}, name="kafkamq-web", daemon=True
    )
    index.start()
    actions.start()
    if not options.read_only:
        runner.start()
    thread.start()
    try:
        host = f"[{options.host}]" if ":" in options.host else options.host
        yield f"http://{host}:{listening.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(2 * STOP_S)
        runner.close()
        actions.close()
        index.close()
        listening.close()


class _Server(uvicorn.Server):
    """Runs beside the main thread, whose signals are its owner's."""

    def install_signal_handlers(self) -> None:
        """None."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error}") from None
