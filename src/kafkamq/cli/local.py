"""``dev`` and ``demo`` run a real broker on this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kafkamq.cli import output
from kafkamq.cli.options import TRACKER_HERE, Json, ends_by_sigterm, parse_properties, reading
from kafkamq.cli.payloads import read_lines
from kafkamq.cli.tracker import Engine
from kafkamq.cli.web import require_extra, serving_pages
from kafkamq.config import ServiceConfig
from kafkamq.dev.artifacts import DEFAULT_VERSION
from kafkamq.dev.broker import LocalKafka
from kafkamq.dev.demo.plan import DemoOptions, Kind, Planned, check_input, from_input, synthetic
from kafkamq.dev.demo.show import Show
from kafkamq.dev.demo.verdict import QueueResult, Verdict

if TYPE_CHECKING:
    from kafkamq.dev.demo.run import Beside
from kafkamq.dev.environment import LocalKafkaError, cache_dir_from, java_from
from kafkamq.errors import ConfigError, KafkaMQError
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.queue.service import Service
from kafkamq.runtime.signals import stop_on_signals

DEMO_FIELDS = ("queue", "demo")


def dev(
    kafka_version: Annotated[
        str, typer.Option("--kafka-version", "--version", help="Version of Kafka, such as 4.2.1.")
    ] = DEFAULT_VERSION,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the broker; 0: a free one.")
    ] = 0,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for the broker's data, which is kept and opened again."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the broker's temporary folder.")
    ] = False,
    broker_property: Annotated[
        list[str] | None,
        typer.Option(
            "--property",
            "-p",
            metavar="NAME=VALUE",
            help="Property of the broker; may be repeated.",
        ),
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="Serve the pages, with topics and a tracker.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a local Kafka broker until Ctrl-C; the first run fetches it."""
    with output.progress("Fetching Kafka", None) as fetched:
        broker = LocalKafka(
            kafka_version,
            port=port,
            data_dir=data_dir,
            keep=keep,
            properties=parse_properties(broker_property or ()),
            cache_dir=cache_dir_from(os.environ),
            java=java_from(os.environ),
            on_progress=lambda done, _total: fetched(done),
        ).start()
    stopping = threading.Event()
    try:
        stop_on_signals(stopping.set)
        with _with_pages(broker) if web else nullcontext() as pages:
            _say_where(broker, pages, as_json=as_json)
            while not stopping.wait(0.5):
                if not broker.is_running:
                    raise LocalKafkaError(f"the broker has ended by itself; see {broker.log_path}")
    finally:
        broker.stop()


@contextmanager
def _with_pages(broker: LocalKafka) -> Iterator[str]:
    """Make the topics of the default namespace, a tracker, and the pages; yield their address."""
    config = ServiceConfig(bootstrap_servers=broker.bootstrap_servers)
    with Service(config.bootstrap_servers, config.namespace) as service:
        service.create_topics()
    with LocalTracker(config).in_thread(), serving_pages(config, broker.data_dir) as address:
        yield address


def _say_where(broker: LocalKafka, pages: str | None = None, *, as_json: bool) -> None:
    where = {
        "bootstrap_servers": broker.bootstrap_servers,
        "kafka_version": broker.version,
        "pid": broker.pid,
        "data_dir": str(broker.data_dir),
        "log": str(broker.log_path),
    }
    if pages is not None:
        where["pages"] = pages
    if as_json:
        output.print_json(where)
        return
    rows = [(name, str(value)) for name, value in where.items()]
    output.print_table("Kafka is up", ("what", "value"), rows)
    output.note(
        "In another terminal:\n"
        f"  export KAFKAMQ_BOOTSTRAP_SERVERS={broker.bootstrap_servers}\n"
        + (f"  kafkamq create && {TRACKER_HERE}\n" if pages is None else "")
        + "Ctrl-C ends it."
    )


def demo(
    messages: Annotated[
        int, typer.Option("--messages", min=1, help="Number of messages.")
    ] = 10_000,
    file: Annotated[
        Path | None,
        typer.Option(
            "--input",
            metavar="FILE.jsonl",
            help="File of your own messages, in the format of 'kafkamq send'.",
        ),
    ] = None,
    engine: Annotated[Engine, typer.Option(help="Which tracker redelivers.")] = Engine.SPARK,
    seed: Annotated[
        int, typer.Option(help="Seed that decides which messages are poison, slow or delayed.")
    ] = 1,
    keep: Annotated[bool, typer.Option("--keep", help="Keep topics and logs at the end.")] = False,
    stay: Annotated[
        bool, typer.Option("--stay", help="Keep the pages open at the end, until Ctrl-C.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run the demo: a real broker, three workers, one killed; then a verdict from the logs.

    Exit code 0 says that nothing was lost, that every poison message is in the dead letters, and
    that nothing that was acknowledged in time came again. The pages of 'kafkamq web' show it
    meanwhile, where they are installed.
    """
    from kafkamq.dev.demo.run import run_demo

    planned = synthetic(messages, seed) if file is None else _from_file(file, seed)
    options = DemoOptions(
        engine=engine.value,
        keep=keep,
        cache_dir=cache_dir_from(os.environ),
        java=java_from(os.environ),
    )
    show = Show(output.errors() if as_json else output.output())
    stays = _stay if stay else lambda: None
    try:
        with ends_by_sigterm():
            verdict = run_demo(planned, options, show, beside=_pages(is_wanted=stay), stay=stays)
    except KafkaMQError as error:
        if as_json:
            failed = Verdict(total=QueueResult(queue=""), queues=(), errors=(str(error),))
            output.print_json(failed.as_json())
        raise
    if as_json:
        output.print_json(verdict.as_json())
    if not verdict.is_ok:
        raise typer.Exit(1)


def _pages(*, is_wanted: bool) -> Beside | None:
    try:
        require_extra()
    except ConfigError:
        if is_wanted:
            raise
        return None
    return serving_pages


def _stay() -> None:
    output.note("The pages stay open; Ctrl-C ends all.")
    with suppress(KeyboardInterrupt):
        threading.Event().wait()


def _from_file(file: Path, seed: int) -> list[Planned]:
    """Return the user's messages, with the demo's own fields ``queue`` and ``demo``."""
    with reading("--input", file) as lines:
        read = list(read_lines(lines, source=str(file), extra_fields=DEMO_FIELDS))
    check_input([(line.number, line.message) for line in read], source=str(file))
    chosen = []
    for line in read:
        where = f"{file}, line {line.number}"
        queue_id, name = (line.extra.get(field) for field in DEMO_FIELDS)
        if not isinstance(queue_id, str | None):
            raise ConfigError(f"{where}: queue must be a text")
        try:
            kind = None if name is None else Kind(name)
        except ValueError:
            known = ", ".join(each.value for each in Kind)
            raise ConfigError(f"{where}: demo must be one of {known}") from None
        chosen.append((queue_id, kind, line.message))
    return from_input(chosen, seed)
