"""Chooses free ports on the loopback."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

from kafkamq.dev.errors import LocalKafkaError
from kafkamq.dev.properties import HOST

_FIRST, _LAST = 15_000, 65_000
_MAX_TRIES = 1_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_EPHEMERAL = (32_768, 65_535)


def free_port_pair(port: int = 0) -> tuple[int, int]:
    """Two ports that nobody listens on now, outside the system's ephemeral range.

    The first is ``port`` unless that is 0.

    A port of that range may be taken by any outgoing connection while a broker restarts, even by
    a client that tries to reach the broker: on the loopback it then connects to itself.

    Another process may still take a port first: whoever binds must be ready to ask again.
    """
    if port and not _is_free(port):
        raise LocalKafkaError(f"port {port} on {HOST} is in use: choose another, or 0 for any")
    if port:
        return port, free_ports(1, besides=port)[0]
    first, second = free_ports(2)
    return first, second


def free_ports(count: int, *, besides: int = 0) -> tuple[int, ...]:
    """Ports that nobody listens on now, different from each other and from ``besides``."""
    low, high = _ephemeral_range()
    ports: list[int] = []
    with contextlib.ExitStack() as bound:  # all at once, so that they differ
        for _ in range(_MAX_TRIES):
            if len(ports) == count:
                return tuple(ports)
            drawn = random.randint(_FIRST, _LAST)
            if low <= drawn <= high or drawn in ports or drawn == besides:
                continue
            probe = bound.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            try:
                probe.bind((HOST, drawn))
            except OSError:
                continue
            ports.append(drawn)
    raise LocalKafkaError(f"no {count} free ports on {HOST} in {_MAX_TRIES} tries")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the broker binds: connections of its predecessor that still linger do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = map(int, _EPHEMERAL.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # not Linux
        return _USUAL_EPHEMERAL
    # A system that gives nearly all ports to connections leaves no choice.
    return (low, high) if low - _FIRST >= 1_000 or _LAST - high >= 1_000 else (0, 0)
