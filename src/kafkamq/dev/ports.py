"""Chooses free ports on the loopback."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

from kafkamq.dev.errors import LocalKafkaError
from kafkamq.dev.properties import HOST

__all__ = ["free_port_pair"]

_FIRST, _LAST = 15_000, 65_000
_MAX_TRIES = 1_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_EPHEMERAL = (32_768, 65_535)


def free_port_pair() -> tuple[int, int]:
    """Two ports that nobody listens on now, outside the system's ephemeral range.

    A port of that range may be taken by any outgoing connection while a broker restarts, even by
    a client that tries to reach the broker: on the loopback it then connects to itself.

    Another process may still take a port first: whoever binds must be ready to ask again.
    """
    low, high = _ephemeral_range()
    with contextlib.ExitStack() as bound:  # all at once, so that they differ
        ports: list[int] = []
        for _ in range(_MAX_TRIES):
            port = random.randint(_FIRST, _LAST)
            if low <= port <= high:
                continue
            probe = bound.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            ports.append(port)
            if len(ports) == 2:
                return ports[0], ports[1]
    raise LocalKafkaError(f"no two free ports on {HOST} in {_MAX_TRIES} tries")


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = map(int, _EPHEMERAL.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # not Linux
        return _USUAL_EPHEMERAL
    # A system that gives nearly all ports to connections leaves no choice.
    return (low, high) if low - _FIRST >= 1_000 or _LAST - high >= 1_000 else (0, 0)
