"""Builds the wheel and the sdist, and checks them in fresh environments, one for each Python.

    python tools/check_distributions.py 3.10 3.13

A Python is a version, or the path of an interpreter. For each of them every extra is installed
alone, and the modules that it is for are imported; then what is missing of ``all`` comes to Spark,
whose installation takes longest, and the demo runs there. The wheel is built out of the sdist, so
that what is missing there is seen. What is installed is what a user gets today: the newest
versions that the ranges allow.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
UV = Path(sys.executable).with_name("uv")
DEMO = ("--messages", "300", "--engine", "local", "--json")  # Spark judges, and does not track
DEMO_S = 600.0

HERE = ("--no-python-downloads", "--python-preference", "only-system")

EXTRAS = {
    "": "kafkamq kafkamq.aio kafkamq.claims kafkamq.testing kafkamq.dev kafkamq.markers.backend",
    "cli": "kafkamq.cli.app",
    "parallel": "kafkamq.parallel kafkamq.parallel.backend kafkamq.parallel.wire.offsets zstandard",
    "spark": "kafkamq.spark kafkamq.spark.tracker.tracker kafkamq.spark.sink.writer pyspark.sql",
    "schemas": "kafkamq.queue.schemas.confluent",
    "metrics": "kafkamq.metrics prometheus_client",
    "all": "kafkamq.cli.app kafkamq.parallel.backend kafkamq.spark.tracker.tracker zstandard",
}
"""By extra: modules that it lets import."""


class CheckError(Exception):
    """What is wrong; `str` says it."""


def run(*command: object, timeout_s: float = 600.0, **environment: str) -> str:
    """Stdout of a command that succeeds, far from the checkout."""
    words = [str(word) for word in command]
    clean = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=folder,
            env={**clean, **environment},
        )
    if done.returncode != 0:
        raise CheckError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def build() -> Path:
    """Builds both into an empty dist/; returns the wheel."""
    for old in DIST.glob("*"):
        old.unlink()
    run(UV, "build", "--quiet", "--out-dir", DIST, ROOT)
    version = version_of((ROOT / "src/kafkamq/__init__.py").read_text(encoding="utf-8"))
    wheel = DIST / f"kafkamq-{version}-py3-none-any.whl"
    names = {path.name for path in DIST.iterdir() if not path.name.startswith(".")}
    if names != {wheel.name, f"kafkamq-{version}.tar.gz"}:
        raise CheckError(f"dist/ holds {sorted(names)}: expected version {version}")
    return wheel


def version_of(package: str) -> str:
    """What the text of the package's ``__init__.py`` says."""
    found = re.search(r'^__version__ = "(.+)"$', package, re.MULTILINE)
    if found is None:
        raise CheckError("kafkamq/__init__.py has no __version__")
    return found[1]


def require_all_extras(wheel: Path) -> None:
    """Each extra of the wheel but ``dev`` has its modules here."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    found = set(re.findall(r"^Provides-Extra: (.+)$", text, re.MULTILINE)) - {"dev"}
    if found != set(EXTRAS) - {""}:
        raise CheckError(f"the wheel has the extras {sorted(found)}: name their modules here")


def install(python: str, wheel: Path, extra: str, folder: Path) -> Path:
    """The wheel with one extra in an environment, a fresh one if need be; returns its Python."""
    interpreter = folder / "bin" / "python"
    if not interpreter.exists():
        run(UV, "venv", "--quiet", *HERE, "--python", python, folder)
    what = f"kafkamq[{extra}] @ {wheel.as_uri()}" if extra else wheel
    # Spark starts a dozen Pythons at a time, and waits 10 s for each.
    run(UV, "pip", "install", "--quiet", "--compile-bytecode", "--python", interpreter, what)
    run(UV, "pip", "check", "--quiet", "--python", interpreter)
    return interpreter


def check(python: str, wheel: Path) -> None:
    """One Python: each extra alone, then the demo."""
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory(prefix="kafkamq-dist-") as folder:
        for extra, modules in EXTRAS.items():
            environment = Path(folder) / ("spark" if extra == "all" else extra or "none")
            interpreter = install(python, wheel, extra, environment)
            run(interpreter, "-I", "-c", "import " + ", ".join(modules.split()))
            print(f"{python}: {extra or 'no extra'}: imports", flush=True)
        command = interpreter.with_name("kafkamq")
        if run(command, "--version").strip() != f"kafkamq {version}":
            raise CheckError(f"`kafkamq --version` does not say {version}")
        demo = run(command, "demo", *DEMO, timeout_s=DEMO_S)
        print(f"{python}: demo: {demo.splitlines()[-1]}", flush=True)


def missing(pythons: Sequence[str]) -> list[str]:
    """Those that are not on this machine."""
    find = (UV, "python", "find", "--quiet", *HERE)
    return [
        python
        for python in pythons
        if subprocess.run([*find, python], capture_output=True, check=False).returncode
    ]


def main() -> int:
    pythons = sys.argv[1:]
    try:
        absent = missing(pythons)
        wheel = build()
        require_all_extras(wheel)
        for python in pythons:
            if python not in absent:
                check(python, wheel)
    except (CheckError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    for path in sorted(DIST.glob("kafkamq-*")):
        print(hashlib.sha256(path.read_bytes()).hexdigest(), path.name)
    for python in absent:
        print(f"Python {python} is not on this machine: nothing was checked on it", file=sys.stderr)
    return 1 if absent else 0


if __name__ == "__main__":
    sys.exit(main())
