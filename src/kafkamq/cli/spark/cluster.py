"""``spark master`` and ``spark worker``: a standalone cluster from the installed PySpark."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

import typer

from kafkamq.cli import output

Host = Annotated[str, typer.Option(help="Name or address of this machine, as the others reach it.")]


def _become(command: Sequence[str]) -> None:
    """This process goes on as that one: its signals and its exit code are the caller's."""
    from kafkamq.spark.cluster import daemon_environment

    os.execve(command[0], list(command), daemon_environment(os.environ))


def master(
    host: Host = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for workers and drivers.")
    ] = 7077,
    web_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the web pages.")] = 8080,
) -> None:
    """Run the master of a standalone cluster until Ctrl-C."""
    from kafkamq.spark.cluster import master_command

    command = master_command(host=host, port=port, web_port=web_port)
    output.note(f"Master at spark://{host}:{port}; workers join with 'kafkamq spark worker'.")
    _become(command)


def worker(
    master: Annotated[
        str, typer.Argument(metavar="spark://HOST:PORT", help="Address of the master.")
    ],
    cores: Annotated[int, typer.Option(min=1, help="Cores that executors may use.")] = 1,
    memory: Annotated[str, typer.Option(help="Memory that executors may use, such as 2g.")] = "1g",
    host: Host = "",
    work_folder: Annotated[
        str, typer.Option("--work-dir", help="Folder for logs and shipped files of executors.")
    ] = "",
) -> None:
    """Run a worker of a standalone cluster until Ctrl-C.

    Executors use this Python; PYSPARK_PYTHON names another one.
    """
    from kafkamq.spark.cluster import worker_command

    _become(worker_command(master, cores=cores, memory=memory, host=host, work_folder=work_folder))


group = typer.Typer(
    help="A standalone Spark cluster for --master, from the installed PySpark.",
    no_args_is_help=True,
)
group.command()(master)
group.command()(worker)
