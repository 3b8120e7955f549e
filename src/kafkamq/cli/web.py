"""``web``: what a namespace holds, in a browser, and what operators do about it."""

from __future__ import annotations

import getpass
import hashlib
import os
import sys
import threading
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from kafkamq.cli import output
from kafkamq.cli.options import connected, with_options
from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.runtime.signals import stop_on_signals


def _access(
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one beyond loopback needs authentication.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8686,
    password_file: Annotated[
        Path | None,
        typer.Option(help="File of users, lines NAME:viewer:HASH or NAME:operator:HASH."),
    ] = None,
    trusted_header: Annotated[
        str, typer.Option(help="Header in which a proxy names the user.")
    ] = "",
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address from which that header counts; may be repeated."),
    ] = None,
    operator: Annotated[
        list[str] | None,
        typer.Option(help="User by that header who is an operator; may be repeated."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Name by which browsers reach these pages; may be repeated."),
    ] = None,
    hide_payloads: Annotated[
        bool, typer.Option("--hide-payloads", help="Show payloads to operators alone.")
    ] = False,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Only show; operators act otherwise.")
    ] = False,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Where a worker serves --metrics-port, as http://host:9400; may be repeated.",
        ),
    ] = None,
) -> Any:
    from kafkamq.web.options import WebOptions, read_accounts

    return WebOptions(
        host=host,
        port=port,
        accounts={} if password_file is None else read_accounts(password_file),
        trusted_header=trusted_header,
        trusted_proxies=frozenset(trusted_proxy or ()),
        operators=frozenset(operator or ()),
        allowed_hosts=frozenset(allowed_host or ()),
        hides_payloads=hide_payloads,
        read_only=read_only,
        workers=tuple(worker or ()),
    )


@connected
@partial(with_options, name="access", make=_access)
def web(
    config: ServiceConfig,
    access: Any,
    hash_password: Annotated[
        bool, typer.Option("--hash-password", help="Ask for a password, print its hash, and end.")
    ] = False,
    index: Annotated[
        Path | None, typer.Option(help="File of the index, which may be deleted at any time.")
    ] = None,
    keep_hours: Annotated[
        float, typer.Option(min=0.1, max=87_600, help="How old messages in the index may be.")
    ] = 168.0,
    max_gib: Annotated[
        float, typer.Option(min=0.05, help="How large the index may grow, in GiB.")
    ] = 4.0,
) -> None:
    """Serve pages on queues, messages, dead letters, workers and trackers, until Ctrl-C.

    Operators act: they redrive dead letters, send messages and cancel delayed ones. The topics are
    followed into an index on this machine.
    """
    require_extra()
    from kafkamq.web.app import serving
    from kafkamq.web.guard import hash_password as hashed
    from kafkamq.web.index.follower import IndexOptions

    if hash_password:
        sys.stdout.write(hashed(getpass.getpass()) + "\n")
        return
    options = IndexOptions(
        path=index or default_path(config),
        keep_ms=round(keep_hours * 3_600_000),
        max_bytes=round(max_gib * 1024**3),
    )
    stopping = threading.Event()
    stop_on_signals(stopping.set)
    with serving(config, access, options) as address:
        output.note(f"Pages of {config.namespace}: {address} Ctrl-C ends it.")
        while not stopping.wait(0.5):
            pass


def serving_pages(config: ServiceConfig, folder: Path) -> AbstractContextManager[str]:
    """Serve pages on loopback, for ``dev`` and ``demo``, with an index in their own folder."""
    require_extra()
    from kafkamq.web.app import serving
    from kafkamq.web.index.follower import IndexOptions
    from kafkamq.web.options import WebOptions

    return serving(config, WebOptions(port=0), IndexOptions(path=folder / "pages.sqlite"))


def default_path(config: ServiceConfig) -> Path:
    """Return where the index of a namespace lies: in the user's cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "kafkamq" / "web"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot make it ({error}); name a file by --index") from None
    name = f"{config.bootstrap_servers} {config.namespace}"
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.sqlite"


def require_extra() -> None:
    """Raise a ConfigError that says what to install, where the pages cannot be served."""
    try:
        for name in ("argon2", "jinja2", "litestar", "uvicorn"):
            import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"the pages need {error.name}; install with: pip install 'kafkamq[web]'"
        ) from None
