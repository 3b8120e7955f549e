"""Kafka in Spark without connector jars: ``format("kafkamq")``, batch and streaming.

    register(spark, config)
    spark.read.format("kafkamq").option("view", "deliveries").load()
    spark.readStream.format("kafkamq").option("topic", "orders").load()
    rows.write.format("kafkamq").option("queue", "emails").mode("append").save()

    register_views(spark, config)
    spark.sql("SELECT queue_id, outcome, count(*) FROM deliveries GROUP BY ALL").show()

What writing does is in ``spark/sink/``, and for acknowledgements in ``spark/queues/acks.py``.
Options are in ``options.py``, the columns of each view in ``spark/source/columns.py``. Readers are
``read_committed`` and assigned (no consumer group takes part); a position outside a log is an
error, never a jump, unless ``failOnDataLoss`` says otherwise (R23).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, NoReturn
from weakref import WeakKeyDictionary

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.spark.options import VIEWS, SourceOptions, parse_source_options
from kafkamq.spark.queues.acks import BatchEndWriter, StreamEndWriter, parse_ack_options
from kafkamq.spark.queues.leasing import QueueReader
from kafkamq.spark.session import active, check_packages
from kafkamq.spark.sink.rows import SinkOptions, parse_sink_options
from kafkamq.spark.sink.writer import BatchWriter, StreamWriter
from kafkamq.spark.source.columns import columns_of
from kafkamq.spark.source.planning import NOTHING_PUSHED, batch_ranges, push
from kafkamq.spark.source.rows import RangePartition, read_rows
from kafkamq.spark.source.streaming import StreamReader, WaitingReader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import Filter

FORMAT = "kafkamq"
_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def register(
    spark: SparkSession, config: ServiceConfig | None = None, *, name: str = FORMAT
) -> SparkSession:
    """Make ``format("kafkamq")`` known; returns the session.

    Args:
        spark: The session, of ``build_session`` or any other.
        config: Cluster, namespace and Kafka's properties for all queries. None: each query names
            them as options (``kafka.bootstrap.servers``, ``namespace``, ``kafka.NAME``), where
            secrets can be seen in plans.
        name: What ``format`` is given; another one for a second cluster or namespace. With
            ``-sink`` behind it it is the same.

    Raises:
        ConfigError: A Python package is missing or has an unsupported version.
    """
    check_packages()
    register_source(spark, config, name=name)
    register_source(spark, config, name=f"{name}-sink")
    return spark


def register_source(
    spark: SparkSession, config: ServiceConfig | None = None, *, name: str = FORMAT
) -> str:
    """Make ``format(name)`` known to a session; returns the name."""
    _check(config)
    given, format_name = config, name

    class RegisteredSource(KafkaSource):
        service = given
        batch_reader = _PushingReader

        @classmethod
        def name(cls) -> str:
            return format_name

    spark.conf.set(_PUSHDOWN, "true")
    with active(spark):
        # Spark looks there whether somebody else's source has that name.
        spark.dataSource.register(RegisteredSource)
    if config is not None and name == FORMAT:
        _registered[spark] = config
    return name


_registered: WeakKeyDictionary[SparkSession, ServiceConfig] = WeakKeyDictionary()


def _check(config: object) -> None:
    if config is not None and not isinstance(config, ServiceConfig):
        raise ConfigError(
            f"config is of type {type(config).__name__}: it must be a "
            "ServiceConfig(bootstrap_servers=..., namespace=...)"
        )


def known_config(spark: SparkSession, config: ServiceConfig | None) -> ServiceConfig:
    """Return what is given, or else what ``format("kafkamq")`` was registered with."""
    _check(config)
    found = config or _registered.get(spark)
    if found is None:
        raise ConfigError(
            "no cluster is known: call kafkamq.spark.register(spark, ServiceConfig(...)) first, "
            "or give config"
        )
    return found


class _BatchReader(DataSourceReader):
    _pushed = NOTHING_PUSHED

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        return [RangePartition(wanted) for wanted in batch_ranges(self._options, self._pushed)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_rows(partition, self._options, self._schema, self._pushed)


class _PushingReader(_BatchReader):
    """Spark refuses one of these in a session that does not push filters."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Take what narrows the ranges; Spark applies every filter again."""
        self._pushed = push(filters, self._options)
        return filters


class _Refused(DataSourceStreamReader):
    """Raises at its first call; what ``streamReader`` raises is hidden by an error of PySpark's."""

    def __init__(self, error: ConfigError) -> None:
        self._error = error

    def latestOffset(self, start: object, limit: object) -> NoReturn:  # noqa: N802
        raise self._error

    def getDefaultReadLimit(self) -> NoReturn:  # noqa: N802
        raise self._error

    def read(self, partition: InputPartition) -> NoReturn:
        raise self._error


class KafkaSource(DataSource):
    """The data source; ``register_source`` makes one with its cluster inside."""

    service: ClassVar[ServiceConfig | None] = None
    batch_reader: ClassVar[type[_BatchReader]] = _BatchReader

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        options = parse_source_options(self.options, self.service)
        columns = columns_of(options.view, options.include_headers)
        return ", ".join(f"{name} {kind}" for name, kind in columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        self._refuse("a batch", "maxRowsPerTrigger", "maxOffsetsPerTrigger")
        return self.batch_reader(self._checked(schema), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        try:
            return self._stream_reader(schema)
        except ConfigError as error:
            return _Refused(error)

    def _stream_reader(self, schema: StructType) -> DataSourceStreamReader:
        self._refuse("a stream", "endingOffsets", "endingTimestamp", "minPartitions")
        options = self._checked(schema)
        if options.view == "in_flight":
            raise ConfigError(
                "view in_flight is how things stand, not a log: read it as a batch "
                "(spark.read), or stream deliveries"
            )
        if options.acknowledge is not None:
            return QueueReader(options, schema)
        kind = WaitingReader if options.view == "blocks" else StreamReader
        return kind(options, schema)

    def streamWriter(  # noqa: N802 - Spark's
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """Verdicts with ``mode`` = ``ack``; else rows for topics or a queue."""
        if overwrite:
            raise ConfigError(
                "outputMode is complete: each batch would have all rows again, and a topic can "
                "only be appended to; outputMode('append')"
            )
        if "mode" in self.options:
            return StreamEndWriter(parse_ack_options(self.options, self.service), schema)
        return StreamWriter(self._for_sink(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        if overwrite:
            raise ConfigError("mode is overwrite: a topic can only be appended to; mode('append')")
        if "mode" in self.options:
            return BatchEndWriter(parse_ack_options(self.options, self.service), schema)
        return BatchWriter(self._for_sink(schema))

    def _for_sink(self, schema: StructType) -> SinkOptions:
        types = {field.name: field.dataType.simpleString() for field in schema.fields}
        return parse_sink_options(self.options, self.service, types)

    def _refuse(self, kind: str, *names: str) -> None:
        for name in names:
            if name in self.options:
                raise ConfigError(f"{name} means nothing to {kind}: leave it out")

    def _checked(self, schema: StructType) -> SourceOptions:
        options = parse_source_options(self.options, self.service)
        names = [name for name, _ in columns_of(options.view, options.include_headers)]
        if schema.fieldNames() != names:
            raise ConfigError(
                f"view {options.view} has the columns {', '.join(names)}: leave .schema() out"
            )
        return options


class Views:
    def __init__(self, spark: SparkSession, config: ServiceConfig | None = None) -> None:
        self._spark = spark
        self._config = known_config(spark, config)
        register_source(spark, self._config)

    def messages(self) -> DataFrame:
        """Every copy of every message in the queue topic.

        ``origin_*`` is the place of the first copy, its own for the first; ``headers`` are the
        sender's; ``delivery_count`` is what the copy's delivery is.
        """
        return self.view("messages")

    def markers(self) -> DataFrame:
        """Every record of the markers topic; ``type`` is null where it is no marker."""
        return self.view("markers")

    def dead_letters(self) -> DataFrame:
        """Every dead letter, with its reason and the error's text."""
        return self.view("dead_letters")

    def deliveries(self) -> DataFrame:
        """Return one row per attempt: a copy of a message that a worker STARTed.

        It ends with the first END that names it: a worker's verdict (ACK, NACK, REJECT, RELEASE),
        or a tracker's (REDELIVERED, DEAD_LETTERED) when none came. What has not ended has null
        there. ``is_late``: the verdict came after the lease's end, and the message went on.
        """
        return self.view("deliveries")

    def in_flight(self) -> DataFrame:
        """Return what a tracker still has to do with: held, waiting, scheduled or due, by log time.

        Computed by the tracker's own rules from the position that a tracker has committed.
        """
        return self.view("in_flight")

    def view(self, name: str) -> DataFrame:
        # A session may have been given another namespace since.
        source = register_source(self._spark, self._config)
        return self._spark.read.format(source).option("view", name).load()


def register_views(
    spark: SparkSession, config: ServiceConfig | None = None, *, prefix: str = ""
) -> tuple[str, ...]:
    """Make the views known to a session as temporary views; returns their names.

    ``config``: None: that which was registered. ``prefix`` goes before each name, for several
    namespaces in one session.

    Raises:
        ConfigError: The prefix cannot begin a view's name, or no cluster is known.
    """
    if prefix and not prefix.isidentifier():
        raise ConfigError(
            f"prefix is {prefix!r}: it must begin with a letter or '_' and go on "
            "with letters, digits and '_'"
        )
    views = Views(spark, config)
    for name in VIEWS:
        views.view(name).createOrReplaceTempView(f"{prefix}{name}")
    return tuple(f"{prefix}{name}" for name in VIEWS)
