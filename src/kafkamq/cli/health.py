"""``health``: is the process behind a metrics port alive, can it work; for probes."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPException
from typing import Annotated, Any

import typer

from kafkamq.cli import output
from kafkamq.cli.options import Json
from kafkamq.errors import BrokerError, ConfigError

Host = Annotated[str, typer.Option(help="Host that the process runs on.")]
_TIMEOUT_S = 5.0


def health(
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="The process's --metrics-port.")
    ] = 9400,
    host: Host = "localhost",
    live: Annotated[
        bool, typer.Option("--live", help="Ask only whether the process is alive (/live).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Ask a worker or tracker that serves --metrics-port whether it is alive and can work.

    Exit code 0: yes; 1: no, or nobody answers. Ready means for a worker that it runs and its
    handlers do not hang, for a tracker that it has read what its predecessor wrote, and redelivers.
    """
    path = "/live" if live else "/ready"
    found = _loops(host, port, path)
    if as_json:
        output.print_json(found)
    else:
        rows = [
            (
                loop["name"],
                loop["is_live"],
                loop["is_ready"],
                loop["age_s"],
                loop["max_age_s"],
                loop.get("error_text", ""),
            )
            for loop in found["loops"]
        ]
        columns = ("loop", "alive", "ready", "age in s", "at most", "now")
        output.print_table(f"{path[1:]}: {'yes' if found['ok'] else 'no'}", columns, rows)
    if not found["ok"]:
        raise typer.Exit(1)


def _loops(host: str, port: int, path: str) -> dict[str, Any]:
    try:
        found = json.loads(ask(host, port, path))
    except ValueError:
        found = None
    if not isinstance(found, dict) or "loops" not in found:
        raise not_ours(port)
    return found


def ask(host: str, port: int, path: str) -> bytes:
    """What a process answers at its metrics port."""
    connection = HTTPConnection(host, port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    except (OSError, HTTPException) as error:
        raise BrokerError(f"nobody answers at {host}:{port}: {error}", code="NO_ANSWER") from None
    finally:
        connection.close()


def not_ours(port: int) -> ConfigError:
    return ConfigError(f"--port {port}: what answers there is no --metrics-port of kafkamq")
