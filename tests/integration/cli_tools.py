"""Runs the commands the way a user does, in this process or in one of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from click.testing import Result
from tests.waiting import within
from typer.testing import CliRunner

from kafkamq.cli.app import app

WAIT_S = within(120.0)


@dataclass
class Commands:
    """The program, pointed at one namespace, with Kafka's properties in its environment."""

    bootstrap: str
    namespace: str
    kafka: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "KAFKAMQ_BOOTSTRAP_SERVERS": self.bootstrap,
            "KAFKAMQ_NAMESPACE": self.namespace,
            "COLUMNS": "200",
            **{
                "KAFKAMQ_KAFKA__" + name.upper().replace(".", "_"): value
                for name, value in self.kafka.items()
            },
        }

    def run(self, *arguments: str, stdin: str | None = None) -> str:
        """Stdout of a command that succeeds."""
        return self._result(*arguments, stdin=stdin).stdout

    def notes(self, *arguments: str) -> str:
        """Stderr of a command that succeeds."""
        return self._result(*arguments, stdin=None).stderr

    def _result(self, *arguments: str, stdin: str | None) -> Result:
        result = CliRunner().invoke(app, arguments, input=stdin, env=self.environment)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result

    def json(self, *arguments: str, stdin: str | None = None) -> list[dict[str, Any]]:
        """The objects that a command prints with --json."""
        return [
            json.loads(line) for line in self.run(*arguments, "--json", stdin=stdin).splitlines()
        ]

    def process(self, *arguments: str, **more: Any) -> subprocess.Popen[str]:
        """A command in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "kafkamq.cli", *arguments],
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **more,
        )

    @contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A command that runs until the block ends; then Ctrl-C, and it must end well."""
        process = self.process(*arguments)
        try:
            yield process
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=WAIT_S)
            assert process.returncode == 0, errors
        finally:
            process.kill()
            process.communicate()


def run_program(arguments: Sequence[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the program."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KAFKAMQ_")}
    done = subprocess.run(
        [sys.executable, "-m", "kafkamq.cli", *arguments],
        env={**clean, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr
