"""Machines made of network namespaces: addresses of their own, on one switch, with routes to cut.

Needs root and ``ip``, ``nsenter`` and ``unshare``. Every namespace is held by a process that ends
with this one, however this one ends, and everything in it (links, routes, mounts) goes with it.
"""

from __future__ import annotations

import functools
import ipaddress
import itertools
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kafkamq.dev.environment import BrokerProcess
from kafkamq.errors import KafkaMQError

_TOOLS = ("ip", "nsenter", "unshare", "sleep", "mount")
_HUB = "switch"
_READY_S = 10.0
_counter = itertools.count()


class NetworkError(KafkaMQError):
    """A namespace, a link or a route could not be made."""


@functools.lru_cache(maxsize=1)
def why_no_network() -> str:
    """Why networks cannot be made here; empty: they can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"commands are missing: {', '.join(missing)} (packages iproute2 and util-linux)"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "ip", "link", "add", "probe", "type", "bridge"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return "" if probe.returncode == 0 else f"no network namespaces: {probe.stderr.strip()}"


class Host:
    """One machine of a network: start its programs behind ``prefix``."""

    def __init__(self, name: str, address: str, holder: BrokerProcess) -> None:
        self.name = name
        self.address = address
        self._holder = holder

    @property
    def pid(self) -> int:
        """Return the id of the process that holds the namespaces."""
        return self._holder.pid

    @property
    def prefix(self) -> list[str]:
        """Put this before a command, and it runs on this machine."""
        return ["nsenter", "-t", str(self.pid), "-n", "-m", f"--wd={Path.cwd()}", "--"]

    def run(self, *command: str) -> str:
        """Return what a command prints.

        Raises:
            NetworkError: it failed.
        """
        return _run([*self.prefix, *command])

    def mount_tmpfs(self, folder: Path, size_bytes: int) -> None:
        """A small disk in place of a folder, which only programs of this machine see.

        It is full when ``size_bytes`` are on it. `path_of` is the way to look at it from outside.
        """
        self.run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder))

    def resize_tmpfs(self, folder: Path, size_bytes: int) -> None:
        """Make such a disk larger or smaller."""
        self.run("mount", "-o", f"remount,size={size_bytes}", str(folder))

    def path_of(self, path: Path) -> Path:
        """Return where a file of this machine is for other machines."""
        return Path(f"/proc/{self.pid}/root") / path.relative_to("/")

    def end(self) -> None:
        """End it; its programs stay alone, without a network."""
        self._holder.kill()


class Network:
    """A switch with machines on it, and this process on it too; a context manager."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kafkamq-net-"))
        self._subnet = _free_subnet()
        self._link = f"kmq{os.getpid() % 10**6}n{next(_counter)}"[:15]
        self._cut: set[tuple[str, str]] = set()  # (name, address that it has no route to)
        self._down: set[str] = set()
        self.hosts: dict[str, Host] = {}
        self.gateway = str(self._subnet[254])  # this process's address
        self._hub = Host(_HUB, "", self._hold())
        try:
            self._hub.run("ip", "link", "add", "br0", "type", "bridge")
            self._hub.run("ip", "link", "set", "br0", "up")
            pid = str(self._hub.pid)
            add = ["ip", "link", "add", self._link, "type", "veth"]
            _run([*add, "peer", "name", "uplink", "netns", pid])
            _run(["ip", "addr", "add", f"{self.gateway}/24", "dev", self._link])
            _run(["ip", "link", "set", self._link, "up"])
            self._hub.run("ip", "link", "set", "uplink", "master", "br0", "up")
        except BaseException:
            self.close()
            raise

    def add(self, name: str) -> Host:
        number = len(self.hosts) + 1
        host = Host(name, str(self._subnet[number]), self._hold())
        self.hosts[name] = host
        port = f"p{number}"
        self._hub.run(
            "ip", "link", "add", port, "type", "veth",
            "peer", "name", "eth0", "netns", str(host.pid),
        )  # fmt: skip
        self._hub.run("ip", "link", "set", port, "master", "br0", "up")
        host.run("ip", "link", "set", "lo", "up")
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        return host

    def cut(self, one: str, other: str) -> None:
        """Nothing goes between two machines any more, in silence.

        The empty name stands for this process's own machine.
        """
        for name, far in ((one, other), (other, one)):
            address = self.hosts[far].address if far else self.gateway
            if name and (name, address) not in self._cut:
                self.hosts[name].run("ip", "route", "add", "blackhole", f"{address}/32")
                self._cut.add((name, address))

    def isolate(self, name: str) -> None:
        """Pull a machine's plug."""
        number = list(self.hosts).index(name) + 1
        self._hub.run("ip", "link", "set", f"p{number}", "down")
        self._down.add(name)

    def heal(self) -> None:
        """Everybody reaches everybody again."""
        for name, address in sorted(self._cut):
            self.hosts[name].run("ip", "route", "del", "blackhole", f"{address}/32")
        self._cut.clear()
        for name in sorted(self._down):
            number = list(self.hosts).index(name) + 1
            self._hub.run("ip", "link", "set", f"p{number}", "up")
        self._down.clear()

    def close(self) -> None:
        """End all machines; idempotent."""
        for host in (*self.hosts.values(), self._hub):
            host.end()
        self.hosts.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hold(self) -> BrokerProcess:
        holder = BrokerProcess(
            ["unshare", "--net", "--mount", "sleep", "infinity"],
            log_path=self._folder / "holders.log",
            grace_s=0.0,
            remove=None,
        )
        deadline_s = time.monotonic() + _READY_S
        while _command_of(holder.pid) != "sleep":
            if time.monotonic() > deadline_s or not holder.is_running:
                raise NetworkError("a network namespace could not be made")
            time.sleep(0.005)
        return holder


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


def _free_subnet() -> ipaddress.IPv4Network:
    """Return a private /24 that this machine neither is in nor has a route to."""
    taken = _run(["ip", "-4", "addr"]) + _run(["ip", "-4", "route"])
    while True:
        prefix = f"10.{random.randint(128, 254)}.{random.randint(0, 254)}."
        if prefix not in taken:
            return ipaddress.IPv4Network(f"{prefix}0/24")
