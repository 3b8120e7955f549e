"""The wheel in an environment of its own: what comes with it, and that a queue works there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import within

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")
ITSELF = {"kafkamq", "confluent-kafka", "protobuf", "typing-extensions"}
"""typing-extensions is confluent-kafka's, for older Pythons."""

SEND_AND_RECEIVE = """
from kafkamq.testing import MemoryService
queue = MemoryService().queue("orders")
queue.producer().send(b"an order")
with queue.consumer() as consumer:
    with consumer.receive(0) as message:
        print(message.payload.decode())
    assert consumer.receive(0) is None
"""


def run(*command: object) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=within(200), check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("bare")
    run(UV, "build", "--quiet", "--wheel", "--out-dir", folder / "wheel", ROOT)
    (wheel,) = (folder / "wheel").glob("*.whl")
    run(UV, "venv", "--quiet", "--python", sys.executable, folder / "venv")
    python = folder / "venv" / "bin" / "python"
    run(UV, "pip", "install", "--quiet", "--python", python, wheel)
    return python


def test_no_other_distribution_comes_with_it(bare: Path) -> None:
    listed = json.loads(run(UV, "pip", "list", "--format", "json", "--python", bare))
    names = {each["name"] for each in listed}
    assert {"kafkamq", "confluent-kafka", "protobuf"} <= names <= ITSELF


def test_a_message_is_sent_and_received_there(bare: Path) -> None:
    assert run(bare, "-I", "-c", SEND_AND_RECEIVE) == "an order\n"


def test_the_command_asks_for_its_extra(bare: Path) -> None:
    done = subprocess.run(
        [bare.with_name("kafkamq"), "stat"],
        capture_output=True,
        text=True,
        timeout=within(60),
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "kafkamq: the command needs typer: pip install 'kafkamq[cli]'\n"
