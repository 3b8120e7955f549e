"""What goes wrong says what to do, in a line or two, with an exit code and without a traceback."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest
from tests.integration.cli_tools import Commands, run_program
from tests.waiting import wait_until, within

from kafkamq.cli import output
from kafkamq.cli.app import main
from kafkamq.cli.web import default_path
from kafkamq.config import ServiceConfig
from kafkamq.dev import cache_dir_from
from kafkamq.dev.artifacts import cache_folder
from kafkamq.web.app import serving
from kafkamq.web.index.follower import IndexOptions
from kafkamq.web.options import WebOptions


@pytest.fixture
def closed_port() -> Iterator[str]:
    """An address that nobody listens at, and nobody else can take."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"


class Program(Protocol):
    """The program in this process: its exit code, stdout and stderr."""

    def __call__(
        self, arguments: list[str], environment: Mapping[str, str]
    ) -> tuple[object, str, str]: ...


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    def run(arguments: list[str], environment: Mapping[str, str]) -> tuple[object, str, str]:
        for name in [name for name in os.environ if name.startswith("KAFKAMQ_")]:
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("sys.argv", ["kafkamq", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        shown = capsys.readouterr()
        return caught.value.code, shown.out, shown.err

    return run


@pytest.mark.parametrize("arguments", [["backends"], ["backends", "--json"]])
@pytest.mark.parametrize(
    ("redirection", "said"), [(">/dev/full", "No space left"), (">&-", "Bad file descriptor")]
)
def test_output_that_cannot_be_written(arguments: list[str], redirection: str, said: str) -> None:
    command = shlex.join([sys.executable, "-m", "kafkamq.cli", *arguments])
    done = subprocess.run(
        ["/bin/sh", "-c", f"{command} {redirection}"],
        capture_output=True,
        text=True,
        timeout=within(60),
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"kafkamq: the output cannot be written: {said}")
    assert done.stderr.count("\n") == 1


def test_a_program_without_stdout_and_stderr_ends_as_with_them() -> None:
    command = shlex.join([sys.executable, "-m", "kafkamq.cli", "backends", "--json"])
    assert subprocess.run(["/bin/sh", "-c", f"{command} >&- 2>&-"], check=False).returncode == 1


def test_a_stdout_without_the_characters_gets_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    output.prepare_stdout()
    output.print_json({"payload": "\u00fcn\U0001f600"})
    output.print_table("", ("text",), [("\u00fcn",)])
    sys.stdout.flush()
    lines = written.getvalue().decode().splitlines()
    assert json.loads(lines[0]) == {"payload": "\u00fcn\U0001f600"}
    assert lines[-1].strip() == r"\xfcn"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["send", "q", "x"], "KAFKAMQ_BOOTSTRAP_SERVERS"),
        (["send", "q", "-b", "h:1"], "give either payloads or --file"),
        (["send", "q", "x", "-b", "h:1", "-p", "sasl.password=hunter2"], "does not belong"),
        (["send", "", "x", "-b", "h:1"], "queue_id"),
        (["send", "q", "-b", "h:1", "--file", "/nowhere.jsonl"], "cannot read it"),
        (["receive", "q", "-b", "h:1", "--ack", "--nack"], "give one of"),
        (["receive", "q", "-b", "h:1", "--timeout", "nan"], "--timeout is nan"),
        (["receive", "q", "-b", "h:1", "--reject"], "--reason"),
        (["receive", "q", "-b", "h:1", "--redelivery-timeout", "0"], "--redelivery-timeout"),
        (["receive", "q", "-b", "h:1", "--delay", "5"], "--delay belongs to --nack"),
        (["receive", "q", "-b", "h:1", "--reason", "no"], "--reason belongs to"),
        (["send", "q", "\udcff", "-b", "h:1"], "PAYLOAD is"),  # as a shell's $'\xff' comes
        (["send", "\udcff", "x", "-b", "h:1"], "queue_id"),
        (["create", "-b", "\udcff:1"], "bootstrap"),
        (["dev", "--data-dir", "/proc/x"], "data_dir is /proc/x"),
        (["dev", "--data-dir", "/proc"], "data_dir is /proc"),
        (["create", "-b", "h:1", "-n", "bad name"], "namespace"),
        (["tracker", "-b", "h:1"], "--checkpoint"),
        (["dlq", "redrive", "-b", "h:1"], "--everything"),
        (["dlq", "ls", "-b", "h:1", "--reason", "bored"], "max-deliveries"),
        (["demo", "--input", "/nowhere.jsonl"], "cannot read it"),
        (["dev", "--kafka-version", "newest"], "4.2.1"),
        (["receive"], "Missing argument"),
        (["nothing"], "No such command"),
    ],
)
def test_usage(arguments: list[str], said: str, program: Program) -> None:
    code, out, errors = program(arguments, {"COLUMNS": "200"})
    assert code in (1, 2)
    assert said in errors
    assert out == ""
    assert "hunter2" not in errors


def test_the_program_says_it_without_a_traceback() -> None:
    code, out, errors = run_program(["send", "q", "x", "-p", "sasl.password=hunter2"], {})
    assert code == 2
    assert out == ""
    assert errors.startswith("kafkamq: --property sasl.password")
    assert "Traceback" not in errors
    assert "hunter2" not in errors


@pytest.mark.parametrize(
    "arguments",
    [
        ["stat"],
        ["create"],
        ["send", "q", "x"],
        ["receive", "q"],
        ["dlq", "ls"],
        ["tracker", "--engine", "local"],
        ["claims", "state"],
    ],
)
def test_a_broker_that_is_down_is_named_in_one_line(closed_port: str, arguments: list[str]) -> None:
    code, out, errors = run_program([*arguments, "-b", closed_port], {"COLUMNS": "80"})
    assert (code, out) == (1, "")
    (line,) = errors.splitlines()  # nothing of librdkafka's own
    assert line.startswith(f"kafkamq: no broker answers at {closed_port} (")
    assert "Connection refused)" in line


def test_doctor_says_in_its_table_that_no_broker_answers(closed_port: str) -> None:
    code, out, errors = run_program(["doctor", "--json", "-b", closed_port], {})
    assert (code, errors) == (1, "")
    (refused,) = [each for each in json.loads(out)["checks"] if each["level"] == "refuse"]
    assert refused["text"].startswith(f"no broker answers at {closed_port}")


def test_missing_topics_say_how_to_create_them(
    bootstrap: str, namespace: str, program: Program
) -> None:
    environment = {**Commands(bootstrap, namespace).environment, "COLUMNS": "300"}
    sql = ["sql", "SELECT 1"]
    for arguments in (["send", "q", "x"], ["receive", "q"], ["stat"], ["dlq", "ls"], sql):
        code, _, errors = program(arguments, environment)
        assert code == 1, errors
        assert "kafkamq create" in errors
        assert "is the namespace" in errors or arguments[0] == "stat"


def test_debug_shows_the_traceback() -> None:
    code, _, errors = run_program(["--debug", "send", "q", "x"], {})
    assert code != 0
    assert "Traceback" in errors


def test_secrets_of_a_file_are_not_shown(tmp_path: Path, bootstrap: str) -> None:
    file = tmp_path / "client.properties"
    file.write_text(
        f"bootstrap.servers={bootstrap}\nsecurity.protocol=SASL_PLAINTEXT\n"
        "sasl.mechanism=PLAIN\nsasl.username=me\nsasl.password=hunter2\n"
    )
    for debug in ([], ["--debug"]):
        code, out, errors = run_program([*debug, "doctor", "--config", str(file), "--json"], {})
        assert code == 1
        assert "hunter2" not in out + errors


def test_dev_prints_its_address_and_ends_at_once(
    bootstrap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del bootstrap  # its jars are fetched then
    monkeypatch.setenv("KAFKAMQ_CACHE", str(cache_folder(cache_dir_from(os.environ))))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    process = Commands("", "").process("dev", "--web", "--json")
    try:
        assert process.stdout is not None
        where = json.loads(process.stdout.readline())
        # Its pages leave the index of this namespace to those of `kafkamq web`.
        config = ServiceConfig(bootstrap_servers=where["bootstrap_servers"])
        pages = IndexOptions(path=default_path(config))
        with serving(config, WebOptions(port=0), pages) as address:
            for each in (address, where["pages"]):
                with urllib.request.urlopen(f"{each}api/state", timeout=within(60)) as answer:
                    assert json.load(answer)["namespace"] == config.namespace
        process.send_signal(signal.SIGINT)
        assert process.wait(within(60)) == 0
    finally:
        process.kill()
        process.communicate()
    wait_until(lambda: not Path(where["data_dir"]).exists())
    with pytest.raises(ProcessLookupError):
        os.kill(where["pid"], 0)
