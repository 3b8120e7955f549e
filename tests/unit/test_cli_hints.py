"""What the commands say to somebody who tries them one after the other."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kafkamq.cli import local, output, queues
from kafkamq.cli.app import app
from kafkamq.cli.options import TRACKER_HERE
from kafkamq.config import Options, ServiceConfig, options_of
from kafkamq.errors import ConfigError


class StoppedError(Exception):
    """In place of a connection: what a command was about to do is known."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ServiceConfig]:
    """The settings with which a command went to its queue."""
    found: list[ServiceConfig] = []

    def service(config: ServiceConfig) -> Any:
        found.append(config)
        raise StoppedError

    monkeypatch.setattr(queues, "service", service)
    return found


def run(*arguments: str) -> BaseException | None:
    return CliRunner().invoke(app, [*arguments, "-b", "127.0.0.1:1"], env={}).exception


def test_the_tracker_that_is_suggested_is_one_that_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = run("tracker")
    assert isinstance(failed, ConfigError)
    assert str(failed).startswith("--checkpoint is missing")
    assert TRACKER_HERE in str(failed)
    assert "Tracking" not in capsys.readouterr().err
    assert run("tracker", "--conf", "spark.a") is not None


def test_a_tracker_without_spark_refuses_what_is_of_spark() -> None:
    for given in (
        ("--checkpoint", "file:///tmp/x"),
        ("--trigger", "7"),
        ("--tasks", "3"),
        ("--master", "yarn"),
        ("--conf", "spark.a=b"),
        ("--properties-file", os.devnull),
    ):
        failed = run("tracker", "--engine", "local", *given)
        assert isinstance(failed, ConfigError), given
        assert str(failed).startswith(f"{given[0]} is of Spark")


def test_n_is_the_namespace_of_every_command(asked: list[ServiceConfig]) -> None:
    for arguments in (("send", "q", "hello"), ("receive", "q", "-c", "3")):
        assert isinstance(run(*arguments, "-n", "shop"), StoppedError)
    assert [config.namespace for config in asked] == ["shop", "shop"]


def test_a_pid_has_no_thousands(capsys: pytest.CaptureFixture[str]) -> None:
    broker = SimpleNamespace(
        bootstrap_servers="127.0.0.1:1", version="4.2.1", pid=25491,
        data_dir=Path("/data"), log_path=Path("/log"),
    )  # fmt: skip
    local._say_where(broker, as_json=False)  # type: ignore[arg-type]  # what it shows of one
    said = capsys.readouterr()
    assert "25491" in said.out
    assert TRACKER_HERE in said.err
    local._say_where(broker, as_json=True)  # type: ignore[arg-type]
    assert '"pid":25491' in capsys.readouterr().out


def lines_of(command: Any, path: str = "kafkamq") -> Iterator[tuple[str, str]]:
    """Each line of ``--help``, of a command and of those below it."""
    yield path, (command.help or "").partition("\n")[0]
    for parameter in command.params:
        if parameter.name != "help" and not getattr(parameter, "hidden", False):
            yield f"{path} {parameter.opts[0]}", getattr(parameter, "help", None) or ""
    for name, below in getattr(command, "commands", {}).items():
        yield from lines_of(below, f"{path} {name}")


@pytest.mark.parametrize("path", ["", "receive", "dlq redrive", "claims watch"])
def test_a_flag_shows_no_type_in_its_help(path: str) -> None:
    said = CliRunner().invoke(app, [*path.split(), "--help"]).output
    assert "--help" in said
    assert "bool" not in said.lower()


def test_a_command_has_the_defaults_and_limits_of_the_table() -> None:
    command = get_command(app)
    options = {each.name: each for each in options_of(Options)}
    seen = set()
    for name in ("create", "receive", "consume"):
        for parameter in command.commands[name].params:  # type: ignore[attr-defined]  # a group
            option = options.get(parameter.name)
            if option is not None and parameter.help == option.says:
                seen.add(option.name)
                shown = str(option.default) if option is Options.concurrency else option.default
                assert parameter.default == shown, option.name
    assert {"max_deliveries", "redelivery_timeout", "hung_after", "partitions"} <= seen
    failed = run("receive", "q", "--max-deliveries", "0")
    assert failed is not None


@pytest.mark.parametrize(
    ("flag", "value"), [("--max-lease", "0"), ("--redelivery-timeout", "43201")]
)
def test_a_refusal_of_a_time_names_its_flag(flag: str, value: str) -> None:
    found = CliRunner().invoke(app, ["doctor", flag, value])
    assert found.exit_code == 2
    assert flag in found.output


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a:boom:[red]b\\"
    output.print_table("", (name,), [(name,)])
    output.note(name)
    output.refuse(ConfigError(name))
    shown, said = capsys.readouterr()
    assert shown.split() == [name, "─" * len(name), name]
    assert said.split() == [name, "kafkamq:", name]


def test_every_line_of_help_is_a_sentence_that_stands_alone() -> None:
    """Nobody reads the lines above it first."""
    lines = dict(lines_of(get_command(app)))
    assert len(lines) > 200
    leaning = re.compile(r"(Also|As above|The same|See above|With this|At most so)\b")
    wrong = [
        place
        for place, text in lines.items()
        if not re.match(r"[A-Z].*\.$", text, re.DOTALL)
        or len(text.split()) < 3
        or leaning.match(text)
    ]
    assert not wrong
