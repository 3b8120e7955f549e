"""The Containerfile: what its stages say of each other, and that its commands can be process 1."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.cli_tools import Commands
from tests.waiting import wait_until, within
from typer.testing import CliRunner

from kafkamq.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
UNSHARE = ("unshare", "--pid", "--fork", "--kill-child")
WORKER = """
from kafkamq import Service, Worker
service = Service({servers!r}, {namespace!r})
service.queue("orders").handler()(lambda message: print("handled", flush=True))
worker = Worker(service)
"""


def stages() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """By name, in their order: what a stage is made from, and its instructions."""
    text = (ROOT / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        if word == "FROM":
            source, _, name = rest.partition(" AS ")
            instructions: list[tuple[str, str]] = []
            found[name] = (source, instructions)
        elif word != "ARG":
            instructions.append((word, rest))
    return found


def image(name: str) -> dict[str, str]:
    """The last instruction of each kind of a stage, with those of what it is made from."""
    source, own = stages()[name]
    return {**(image(source) if source in stages() else {}), **dict(own)}


def test_stages_are_made_from_earlier_ones() -> None:
    earlier: set[str] = {"${BASE}"}
    for name, (source, instructions) in stages().items():
        assert source in earlier, name
        for word, rest in instructions:
            if copied := re.match(r"--from=(\S+)", rest):
                assert word == "COPY"
                assert copied[1] in earlier, name
        earlier.add(name)


@pytest.mark.parametrize("name", ["kafkamq", "spark"])
def test_an_image_runs_the_command_as_an_ordinary_user(name: str) -> None:
    instructions = image(name)
    assert int(instructions["USER"]) > 0
    assert instructions["STOPSIGNAL"] == "SIGTERM"
    # As a list: a shell between would be process 1 and keep the signal to itself.
    assert json.loads(instructions["ENTRYPOINT"]) == ["kafkamq"]
    command = [*json.loads(instructions["CMD"]), "--help"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert list(stages())[-1] == "kafkamq"  # what is built when no stage is named


def test_extras_are_those_of_the_package() -> None:
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    named = {extra for group in re.findall(r"\)\[([\w,]+)\]", text) for extra in group.split(",")}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert named == {"cli", "parallel", "metrics", "schemas", "all"}
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in named)


def why_no_namespace() -> str:
    try:
        subprocess.run([*UNSHARE, "true"], check=True, capture_output=True, timeout=within(30))
    except (OSError, subprocess.SubprocessError) as error:
        return f"no PID namespace here: {error}"
    return ""


@pytest.mark.skipif(bool(why_no_namespace()), reason=why_no_namespace() or "it can")
@pytest.mark.parametrize("command", ["work", "tracker"])
def test_process_1_stops_in_order(
    command: str, bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    """A signal that process 1 does not handle is dropped; the container then waits to be killed."""
    commands = Commands(bootstrap, namespace)
    commands.run("create", "--partitions", "1", "--marker-partitions", "1", "--json")
    (tmp_path / "app.py").write_text(WORKER.format(servers=bootstrap, namespace=namespace))
    where = ["-b", bootstrap, "-n", namespace, "--engine", "local"]
    arguments = ["app:worker"] if command == "work" else where
    holder = subprocess.Popen(
        [*UNSHARE, sys.executable, "-m", "kafkamq.cli", command, *arguments],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
    try:
        assert holder.stderr is not None
        assert any("Ctrl-C ends it" in line for line in holder.stderr)
        (process,) = (Path("/proc") / pid for pid in children.read_text().split())
        assert (process / "status").read_text().split("NSpid:")[1].splitlines()[0].split()[1] == "1"
        # In Python's own hands, as soon as it says that it works.
        wait_until(lambda: handles(process, signal.SIGTERM), "a handler of SIGTERM")
        os.kill(int(process.name), signal.SIGTERM)
        _, errors = holder.communicate(timeout=within(60))
        assert holder.returncode == 0, errors
    finally:
        holder.kill()
        holder.communicate()


def handles(process: Path, number: signal.Signals) -> bool:
    caught = (process / "status").read_text().split("SigCgt:")[1].split()[0]
    return bool(int(caught, 16) >> (number - 1) & 1)
