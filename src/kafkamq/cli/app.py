"""The program: its commands, and what becomes of their errors."""

from __future__ import annotations

import errno
import logging
import os
import sys
from typing import Annotated

import typer

from kafkamq import __version__
from kafkamq.cli import (
    claims,
    compare,
    dead_letters,
    handlers,
    local,
    output,
    queues,
    status,
    top,
    tracker,
    web,
)
from kafkamq.cli.options import Command, Group
from kafkamq.cli.spark import jobs
from kafkamq.errors import ConfigError, KafkaMQError

app = typer.Typer(
    name="kafkamq",
    cls=Group,
    help="Message queues on Kafka, with the pipeline behind them on Spark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_UNWRITTEN = (errno.EPIPE, errno.ENOSPC, errno.EBADF, errno.EIO)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"kafkamq {__version__}\n")
        raise typer.Exit


@app.callback()
def start(
    debug: Annotated[
        bool, typer.Option("--debug", help="Log what happens and show tracebacks (KAFKAMQ_DEBUG).")
    ] = False,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options before the command's name."""
    del show_version
    if debug:
        os.environ["KAFKAMQ_DEBUG"] = "1"
    logging.basicConfig(
        level=logging.DEBUG if _debug() else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if not _debug():
        # Each of its failed commands is raised as well, and becomes one line.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        logging.getLogger().addFilter(_is_not_of_py4j)


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    # It logs a Ctrl-C in the middle of a question, with the stack, by no name.
    return record.module != "java_gateway"


def _debug() -> bool:
    return os.environ.get("KAFKAMQ_DEBUG", "") not in ("", "0")


for _command in (
    *(local.dev, local.demo),
    *(queues.create, queues.send, queues.receive),
    tracker.tracker,
    *(status.stat, handlers.consume, status.doctor, status.health, status.backends),
    compare.compare,
    *(jobs.sql, jobs.replay, jobs.audit),
    handlers.work,
    web.web,
    top.top,
):
    app.command(cls=Command)(_command)
app.add_typer(dead_letters.group, name="dlq")
app.add_typer(claims.group, name="claims")
app.add_typer(jobs.cluster, name="spark")


def main() -> None:
    """Runs the program; an expected error becomes a line that says what to do, and an exit code."""
    output.prepare_stdout()
    try:
        app()
        sys.stdout.flush()
    except KafkaMQError as error:
        if _debug():
            raise
        output.refuse(error)
        sys.exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        if _debug() or error.errno not in _UNWRITTEN:
            raise
        if error.errno != errno.EPIPE:
            # Otherwise the reader of our output has left, as with ``| head``.
            text = f"[red]kafkamq:[/red] the output cannot be written: {error.strerror}"
            output.errors().print(text, soft_wrap=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
