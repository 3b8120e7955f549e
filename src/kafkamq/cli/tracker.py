"""``tracker`` redelivers what workers left, on Spark or in this process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from enum import Enum
from typing import Annotated

import typer

from kafkamq.cli import output
from kafkamq.cli.options import TRACKER_HERE, MetricsPort, connected, serving_metrics
from kafkamq.cli.spark.options import MASTER, SparkChoice, with_spark
from kafkamq.config import Options, ServiceConfig, TrackerConfig
from kafkamq.errors import ConfigError
from kafkamq.runtime.memory import calm_allocator, calm_collector
from kafkamq.runtime.signals import stop_on_signals
from kafkamq.transport.admin import require_brokers

_TRIGGER_S = 1.0


class Engine(Enum):
    SPARK = "spark"
    LOCAL = "local"


NoTakeover = Annotated[
    bool,
    typer.Option("--no-takeover", help="Refuse to start while another tracker is the latest one."),
]
Standby = Annotated[
    bool,
    typer.Option(
        "--standby",
        help="Wait while another tracker is active, take over when it gives no sign of life "
        "for some 5 s, and wait again when fenced. On Spark it folds along meanwhile; each "
        "needs a --checkpoint of its own. With --engine local it waits for Spark's trackers "
        "only: local ones share the work.",
    ),
]


@connected
@with_spark
def tracker(
    config: ServiceConfig,
    on: SparkChoice,
    engine: Annotated[
        Engine,
        typer.Option(help="Where the tracker runs: spark, or local, which is this one process."),
    ] = Engine.SPARK,
    checkpoint: Annotated[
        str, typer.Option(help="Folder for Spark's state, for example file:///var/lib/kafkamq.")
    ] = "",
    trigger: Annotated[
        float, typer.Option(min=0.0, max=60.0, help="Seconds between Spark's batches.")
    ] = _TRIGGER_S,
    tasks: Annotated[
        int | None,
        typer.Option(min=1, help="Partitions of Spark's batches; default: by the number of cores."),
    ] = None,
    no_takeover: NoTakeover = False,
    standby: Standby = False,
    max_deliveries: Annotated[
        int, typer.Option(min=1, help="Limit of deliveries for messages whose worker names none.")
    ] = Options.max_deliveries.default,
    metrics_port: MetricsPort = None,
) -> None:
    """Run the redelivery tracker until Ctrl-C.

    One serves a namespace at a time: a later start takes over, and the earlier one stops; with
    --standby it waits for its turn instead. More processes with --engine local share the work.
    """
    settings = TrackerConfig(takeover=not no_takeover, max_deliveries=max_deliveries)
    of_spark = {
        "--checkpoint": checkpoint,
        "--trigger": trigger != _TRIGGER_S,
        "--tasks": tasks,
        "--master": on.master != MASTER,
        "--conf": on.conf,
        "--properties-file": on.properties_file,
    }
    _prepare(engine, of_spark, is_refusing=standby and no_takeover)
    stopping = threading.Event()
    stop_on_signals(stopping.set)
    require_brokers(config)
    output.note(f"Tracking {config.marker_topic} ({engine.value}); Ctrl-C ends it.")
    with serving_metrics(metrics_port):
        if engine is Engine.LOCAL:
            _track_here(config, settings, stopping, standby=standby)
            return
        from kafkamq.spark.tracker.tracker import run_spark_tracker

        run_spark_tracker(
            config,
            settings,
            checkpoint=checkpoint,
            master=on.master,
            trigger_s=trigger,
            tasks=tasks,
            settings=on.settings,
            stop=stopping,
            standby=standby,
        )


def _prepare(engine: Engine, of_spark: Mapping[str, object], *, is_refusing: bool) -> None:
    if is_refusing:
        raise ConfigError("--standby takes over, --no-takeover refuses to: give one of them")
    if engine is Engine.SPARK and not of_spark["--checkpoint"]:
        raise ConfigError(
            "--checkpoint is missing: name a folder for Spark's state that all its workers reach, "
            f"or run without Spark: {TRACKER_HERE}"
        )
    if engine is Engine.LOCAL:
        for name in filter(of_spark.get, of_spark):
            raise ConfigError(f"{name} is of Spark, and --engine local runs without it")
        calm_allocator()
    else:
        from kafkamq.spark.session import check_packages

        check_packages()


def _track_here(
    config: ServiceConfig, settings: TrackerConfig, stopping: threading.Event, *, standby: bool
) -> None:
    calm_collector()
    if standby:
        from kafkamq.markers.tracker.local import run_standing_by

        run_standing_by(config, settings, stopping)
        return
    from kafkamq.markers.tracker.local import LocalTracker

    local = LocalTracker(config, settings)
    for warning in local.warnings:
        output.note(f"warning: {warning}")
    local.run(stopping)
