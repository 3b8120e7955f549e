"""A session with the views of a namespace, and SQL errors that say what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, KafkaMQError
from kafkamq.spark.failures import (
    QueryFailedError,
    is_spark_gone,
    query_failure,
    spark_failure,
    without_spark_log,
)
from kafkamq.spark.formats import Views, register_views
from kafkamq.spark.options import VIEWS
from kafkamq.spark.session import SHUFFLE, build_session, end_session, has_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PLACE = re.compile(r"[;(] ?line (\d+),? pos (\d+)\)?")
_WRONG_SQL = ("22", "42", "21", "0A")
_STATE = re.compile(r"\s*SQLSTATE: \w+")
_NO_TABLE = "TABLE_OR_VIEW_NOT_FOUND"
# These name tables that their text does not, or run before all of it is understood.
_BLIND = {"show", "begin", "execute", "call"}
MAX_LETTERS = 1_000_000


@contextmanager
def view_session(
    config: ServiceConfig,
    *,
    master: str,
    app_name: str = "kafkamq",
    settings: Mapping[str, str] | None = None,
    has_tables: bool = True,
) -> Iterator[SparkSession]:
    """Yield a session in which a namespace's views are tables; one of its own ends behind it.

    Without ``has_tables`` they are what ``Tables`` makes of it.
    """
    is_own = not has_session()
    settings = settings or {}
    if is_own and has_tables and settings.get("spark.master", master).startswith("local"):
        # A replay has the rows of a task in memory: as many tasks as Spark itself makes.
        settings = {SHUFFLE: "200", **settings}
    spark = build_session(app_name=app_name, master=master, settings=settings)
    try:
        if has_tables:
            register_views(spark, config)
        yield spark
    finally:
        if is_own:
            end_session(spark)


class Tables:
    """The views of a namespace, each made a table when a question first names it.

    Making one takes processes of Python's, and a question asks one or two.
    """

    def __init__(self, spark: SparkSession, config: ServiceConfig) -> None:
        self._spark = spark
        self._views = Views(spark, config)
        self._unknown = set(VIEWS)

    def ask(self, statement: str) -> DataFrame:
        from pyspark.errors import AnalysisException

        words = set(re.findall(r"\w+", statement.lower()))
        self._make(words if words.isdisjoint(_BLIND) else VIEWS)
        try:
            return self._spark.sql(statement)
        except AnalysisException as error:
            if not self._unknown or error.getCondition() != _NO_TABLE:
                raise
        # It may make a name out of parts, or Spark says what was meant.
        self._make(VIEWS)
        return self._spark.sql(statement)

    def _make(self, names: Iterable[str]) -> None:
        for name in self._unknown.intersection(names):
            self._views.view(name).createOrReplaceTempView(name)
            self._unknown.remove(name)


@contextmanager
def sql_errors(option: str) -> Iterator[None]:
    """Errors of a statement become ConfigErrors that name the option.

    Raises:
        ConfigError: The statement is wrong; says where, and what there is.
        KafkaMQError: Everything else that ended the query.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # no hints
    from pyspark.errors import PySparkException

    try:
        with without_spark_log():
            yield
    except KafkaMQError:
        raise
    except (Py4JError, OSError) as error:
        if not is_spark_gone():
            raise
        raise spark_failure(error) from error
    except PySparkException as error:
        ours = query_failure(error)
        is_wrong_sql = (error.getSqlState() or "").startswith(_WRONG_SQL)
        if not is_wrong_sql or not isinstance(ours, QueryFailedError):
            raise ours from error
        raise ConfigError(
            f"{option}: {_shortened(str(error))} Tables are {', '.join(VIEWS)}; "
            "'kafkamq sql \"DESCRIBE deliveries\"' lists a table's columns"
        ) from None


def _shortened(error_text: str) -> str:
    """Spark's first line: the place in front, without the plan."""
    lines = [line.strip() for line in error_text.strip().splitlines() if line.strip()]
    place = _PLACE.search(error_text)
    text = _STATE.sub("", _PLACE.sub("", lines[0])).rstrip(" ;.")
    where = f" (line {place[1]}, column {int(place[2]) + 1})" if place else ""
    return f"{text}{where}."


def chosen_letters(spark: SparkSession, where: str) -> frozenset[tuple[int, int]]:
    """Partition and offset of the dead letters that a condition chooses."""
    with sql_errors("--where"):
        chosen = spark.table("dead_letters").where(where).select("partition", "offset")
        rows = chosen.limit(MAX_LETTERS + 1).collect()
    if len(rows) > MAX_LETTERS:
        raise ConfigError(
            f"--where chooses more than {MAX_LETTERS:,} dead letters: choose fewer, for example by "
            "a range of `timestamp`, and redrive several times"
        )
    return frozenset((row[0], row[1]) for row in rows)
