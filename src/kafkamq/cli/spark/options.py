"""Options of every command that starts Spark: ``--master``, ``--conf``, ``--properties-file``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kafkamq.cli.options import parse_pairs, reading, with_options
from kafkamq.errors import ConfigError

MASTER = "local[2]"

Master = Annotated[
    str, typer.Option("--master", help="Spark master: local[2], spark://host:port, yarn, k8s://...")
]
Conf = Annotated[
    list[str] | None,
    typer.Option(
        "--conf",
        metavar="NAME=VALUE",
        help="One of Spark's own properties; may be repeated. No secrets here.",
    ),
]
PropertiesFile = Annotated[
    Path | None,
    typer.Option(
        "--properties-file",
        metavar="FILE",
        help="File like spark-defaults.conf, secrets too; --conf overrides it.",
    ),
]


@dataclass(frozen=True)
class SparkChoice:
    master: str
    settings: Mapping[str, str]
    conf: Sequence[str] | None
    properties_file: Path | None


def _choice(
    *, master: Master = MASTER, conf: Conf = None, properties_file: PropertiesFile = None
) -> SparkChoice:
    return SparkChoice(master, spark_settings(conf, properties_file), conf, properties_file)


with_spark = partial(with_options, name="on", make=_choice)
"""Gives a command the options of this module; it gets them as its argument ``on``."""


_LINE = re.compile(r"(\S+?)(?:\s*[=:]\s*|\s+)(.*)")


def spark_settings(conf: Sequence[str] | None, file: Path | None) -> dict[str, str]:
    """Spark's properties from both options."""
    given = parse_pairs(
        "--conf", conf or (), "spark.NAME=VALUE", lambda _: "put it into a --properties-file"
    )
    for name in given:
        _require_name(name, f"--conf {name!r}")
    return {**(_read(file) if file is not None else {}), **given}


def _read(file: Path) -> dict[str, str]:
    found = {}
    with reading("--properties-file", file) as lines:
        for number, text in enumerate(lines, 1):
            line = text.strip()
            if not line or line.startswith(("#", "!")):
                continue
            match = _LINE.fullmatch(line)
            where = f"--properties-file {file}, line {number}"
            if match is None:
                raise ConfigError(f"{where}: write it as spark.NAME VALUE")
            _require_name(match[1], where)
            found[match[1]] = match[2].strip()
    return found


def _require_name(name: str, where: str) -> None:
    if not name.startswith("spark."):
        raise ConfigError(f"{where}: the names of Spark's properties begin with 'spark.'")
