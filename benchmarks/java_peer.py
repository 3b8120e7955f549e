"""Java programs that benchmarks run beside ours: built by Maven from ``benchmarks/peers``."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["build_peer"]

_PEERS = Path(__file__).parent / "peers"


def build_peer(name: str, main: str) -> str:
    """The classpath of a peer, which is built where its class ``main`` is not there yet."""
    peer = _PEERS / name
    classpath = peer / "target" / "cp"
    if not classpath.exists() or not (peer / "target/classes" / f"{main}.class").exists():
        if shutil.which("mvn") is None:
            raise SystemExit("the peer is built by Maven (mvn): install it, or give --no-peer")
        build = "mvn", "-q", "-B", "compile", "dependency:build-classpath"
        subprocess.run([*build, "-Dmdep.outputFile=target/cp"], cwd=peer, check=True)
    return f"{peer / 'target/classes'}{os.pathsep}{classpath.read_text().strip()}"
