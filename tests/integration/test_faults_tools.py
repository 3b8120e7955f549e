"""The tools of fault tests: machines with routes to cut, small disks, slow links, moved clocks."""

from __future__ import annotations

import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import network
from harness.faults import (
    BrokerClock,
    Network,
    NetworkError,
    SlowLink,
    why_no_clock,
    why_no_network,
)
from tests.waiting import wait_until, within

needs_network = pytest.mark.skipif(bool(why_no_network()), reason=why_no_network() or "it can")
_LISTEN = "import socket; s = socket.create_server(('', 7000)); input(); s.accept()"
_ANSWER_S = 0.7


def reaches(prefix: list[str], address: str) -> bool:
    """Whether a machine can open a connection to another."""
    program = f"import socket; socket.create_connection(({address!r}, 7000), {_ANSWER_S})"
    done = subprocess.run(
        [*prefix, sys.executable, "-c", program], capture_output=True, check=False
    )
    return done.returncode == 0


@needs_network
def test_routes_are_cut_and_healed() -> None:
    with Network() as net:
        one, two = net.add("one"), net.add("two")
        listener = subprocess.Popen([*two.prefix, sys.executable, "-c", _LISTEN], stdin=-1)
        try:
            wait_until(lambda: reaches([], two.address))
            wait_until(lambda: reaches(one.prefix, two.address))
            net.cut("one", "two")
            assert not reaches(one.prefix, two.address)
            wait_until(lambda: reaches([], two.address))
            net.cut("two", "")
            assert not reaches([], two.address)
            net.heal()
            wait_until(lambda: reaches(one.prefix, two.address))
            net.isolate("two")
            assert not reaches([], two.address)
            net.heal()
            wait_until(lambda: reaches([], two.address))
        finally:
            listener.kill()
            listener.wait(within(10))


@needs_network
def test_a_small_disk_is_full(tmp_path: Path) -> None:
    with Network() as net:
        host = net.add("one")
        host.mount_tmpfs(tmp_path, 1024 * 1024)
        host.run("sh", "-c", f"echo here > {tmp_path}/file")
        assert host.path_of(tmp_path / "file").read_text() == "here\n"
        assert not (tmp_path / "file").exists()  # only that machine sees it
        with pytest.raises(NetworkError, match="No space left"):
            host.run("dd", "if=/dev/zero", f"of={tmp_path}/filler", "bs=64k")
        host.resize_tmpfs(tmp_path, 8 * 1024 * 1024)
        host.run("dd", "if=/dev/zero", f"of={tmp_path}/filler", "bs=64k", "count=32")


@needs_network
def test_a_network_ends_with_its_owner() -> None:
    """Also when that is killed: nothing is left on the machine."""
    program = (
        "from harness.faults import Network\n"
        "net = Network(); print(net.add('one').pid, net.gateway, flush=True); input()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid, gateway = owner.stdout.readline().split()
    owner.send_signal(signal.SIGKILL)
    owner.wait(within(10))

    def addresses() -> str:
        return subprocess.run(["ip", "addr"], capture_output=True, text=True, check=True).stdout

    wait_until(lambda: not Path(f"/proc/{pid}").exists() and gateway not in addresses())


def test_why_there_are_no_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    check = network.why_no_network.__wrapped__
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda tool: f"/bin/{tool}")
    assert "root" in check()
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert "iproute2" in check()


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    class Echo(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while data := self.request.recv(65_536):
                self.request.sendall(data)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield ("127.0.0.1", server.server_address[1])
        server.shutdown()


def test_a_slow_link_keeps_order_and_takes_its_time(echo: tuple[str, int]) -> None:
    with SlowLink(delay_s=0.1) as link:
        link.target = echo
        with socket.create_connection(("127.0.0.1", link.port), 30) as client:
            began_s = time.monotonic()
            client.sendall(b"first")
            assert client.recv(10) == b"first"
            assert time.monotonic() - began_s >= 0.2  # there and back
            link.delay_s = 0.0
            sent = os.urandom(500_000)
            threading.Thread(target=client.sendall, args=(sent,)).start()
            received = b""
            while len(received) < len(sent):
                received += client.recv(65_536)
            assert received == sent


@pytest.mark.skipif(bool(why_no_clock()), reason=why_no_clock() or "it can")
def test_a_clock_is_moved_while_its_program_runs(tmp_path: Path) -> None:
    """The wall clock only; the monotonic one goes on."""
    clock = BrokerClock(tmp_path)
    program = (
        "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
    )
    with subprocess.Popen(
        [*clock.launcher, sys.executable, "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None

        def ask() -> tuple[float, float]:
            process.stdin.write("\n")
            process.stdin.flush()
            wall_s, monotonic_s = map(float, process.stdout.readline().split())
            return wall_s - time.time(), monotonic_s - time.monotonic()

        for offset_s in (0, 3600, -7200, 0):
            clock.set(offset_s)
            wall_s, monotonic_s = ask()
            assert wall_s == pytest.approx(offset_s, abs=60)
            assert monotonic_s == pytest.approx(0, abs=60)
        process.stdin.close()
