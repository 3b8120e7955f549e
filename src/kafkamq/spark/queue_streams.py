"""Queues as streams that acknowledge: read, transform, write, and then the ENDs.

    stream = read_queue(spark, "emails", config)
    done = map_messages(stream, handler)               # or any DataFrame code of your own
    query = ack(done, checkpoint="/data/emails")       # a verdict for each row

``ack`` writes the verdicts; with ``topic`` the rows' output goes to Kafka in the same transaction,
with ``table`` it goes to a Delta table before, each message once, and with ``each_batch`` a
function of yours writes it elsewhere. ``spark/queues/leasing.py`` and ``spark/queues/starting.py``
start and renew a batch, ``spark/queues/committing.py`` commits it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kafkamq.config import Backoff, ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.queue.wire.keys import join_key
from kafkamq.runtime.signals import python_interrupts
from kafkamq.spark.batches import QUERY_ID, Batch
from kafkamq.spark.checkpoint import Checkpoint, CheckpointNote
from kafkamq.spark.failures import (
    is_spark_gone,
    jvm_errors,
    opens_checkpoint,
    raise_ours,
    spark_failure,
)
from kafkamq.spark.formats import FORMAT, known_config, register_source
from kafkamq.spark.options import QueueOptions, queue_options
from kafkamq.spark.parallelism import FIRST_LOOK_S, NEXT_LOOK_S, check_spelling, cores
from kafkamq.spark.payloads import BodySchema, with_body
from kafkamq.spark.queues.acks import (
    ACK_COLUMNS,
    MAX_NAMED,
    RESULT_SCHEMA,
    AckSettings,
    check_columns,
    write_ends,
)
from kafkamq.spark.queues.committing import CommitSettings, commit_slots, next_epoch, with_slots
from kafkamq.spark.sink.rows import MAX_SLOTS, SINK_COLUMNS, check_types
from kafkamq.spark.sink.sink import start_query
from kafkamq.spark.tables import Table, check_table, insert_once
from kafkamq.transport.admin import Admin

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_STOP_S = 5.0
_ROW_BY_ROW = ("Filter", "Generate", "Project", "SubqueryAlias", "View")
_log = logging.getLogger(__name__)

EachBatch = Callable[["DataFrame", Batch], "DataFrame | None"]
"""Writes a batch's output, idempotently by the messages' origins; returns rows with verdicts, or
None: all are acknowledged."""


def read_queue(
    spark: SparkSession,
    queue_id: str,
    config: ServiceConfig | None = None,
    *,
    redelivery_timeout: float = QueueOptions.redelivery_timeout.default,
    max_deliveries: int = QueueOptions.max_deliveries.default,
    max_lease: float = QueueOptions.max_lease.default,
    max_rows: int = 10_000,
    batch_markers: bool = QueueOptions.batch_markers.default,
    group: str | None = None,
    schema: BodySchema | None = None,
    malformed: str = "reject",
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """A queue's messages as a streaming DataFrame: the columns of the view ``messages``.

    Each row is STARTed before Spark sees it, and its lease is kept alive until its batch is done.
    ``ack_token`` must reach ``ack``. Rows that get no verdict come back after the timeout. Spark
    reads the whole queue: no other workers at the same time.

    Args:
        config: Cluster and namespace; None: those that were registered.
        redelivery_timeout: Seconds without a sign of life until redelivery; the driver renews.
        max_deliveries: Of a message, until it is a dead letter.
        max_lease: Longest time for one batch, in seconds, whatever renews it.
        max_rows: Messages of a batch.
        batch_markers: One marker for many messages, as of a queue's own workers.
        group: The consumer group whose positions it goes on from, and commits; None: that of the
            queue's own workers. "kafka-mq-QUEUE_ID" takes over from kafka-mq-go's workers.
        schema: Of payloads that are JSON, Avro or Protobuf: they are in the column ``body``, by
            ``with_body``.
        malformed: With a schema: "reject" or "keep" what does not parse.
        options: More options of ``format("kafkamq")``, such as ``startingTimestamp``.

    Raises:
        ConfigError: An argument or an option is wrong, or no cluster is known.
        SchemaRegistryError: The registry does not say what the subject's schema is.
    """
    from pyspark.errors import PySparkException

    join_key(queue_id)
    if config is not None:
        register_source(spark, config)
    stream = spark.readStream.format(FORMAT).option("view", "messages").option("queue", queue_id)
    arguments = {
        "redelivery_timeout": redelivery_timeout,
        "max_deliveries": max_deliveries,
        "max_lease": max_lease,
        "batch_markers": batch_markers,
        "group": group,
    }
    own = queue_options(max_rows, arguments)
    if "maxoffsetspertrigger" in map(str.lower, options or ()):
        del own["maxRowsPerTrigger"]
    try:
        rows = stream.options(**{**own, **(options or {})}).load()
    except PySparkException as error:
        raise_ours(error)
    return rows if schema is None else with_body(rows, schema, malformed=malformed)


@dataclass
class Acknowledged:
    ends: int = 0
    written: int = 0
    skipped: int = 0
    late: int = 0


class AckQuery:
    """A running query that acknowledges.

    Attributes:
        query: Spark's own handle.
        total: Counts since this start; through Spark Connect none.
    """

    def __init__(self, query: StreamingQuery, total: Acknowledged) -> None:
        self.query = query
        self.total = total
        self._ended = threading.Event()
        self._error: Exception | None = None
        threading.Thread(target=self._watch, name="kafkamq-query", daemon=True).start()

    def _watch(self) -> None:
        """Wait in Spark, where a signal could not be handled."""
        try:
            self.query.awaitTermination()
        except Exception as error:  # noqa: BLE001 - wait() raises it
            self._error = error
        self._ended.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; False: it still runs. Ctrl-C ends the wait, and not Spark's jobs.

        Raises:
            KafkaMQError: What it failed with, where that is kafkamq's, and that the JVM is gone;
                else Spark's own error.
        """
        from pyspark.errors import PySparkException

        with python_interrupts():
            if not self._ended.wait(timeout_s):
                return False
        error = self._error
        if isinstance(error, PySparkException):
            raise_ours(error)
        if isinstance(error, jvm_errors()):
            raise spark_failure(error) from error
        if error is not None:
            raise error
        return True

    def stop(self) -> None:
        """End it; the next start repeats the batch under way.

        What of it has no verdict is not given back: a lease that ends before the next start is a
        delivery of its message, as with a kill.
        """
        calls = logging.getLogger("py4j.clientserver")
        # It leaves out the interrupt of the batch under way, which py4j would print.
        calls.addFilter(_is_no_interrupt)
        try:
            self.query.stop()
            self._ended.wait(_STOP_S)
        except jvm_errors() as error:
            if not is_spark_gone():
                raise
            _log.info("the query ended with its JVM", extra={"error": str(error)})
        finally:
            calls.removeFilter(_is_no_interrupt)


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    return record.exc_info is None or "InterruptedException" not in str(record.exc_info[1])


@opens_checkpoint
def ack(
    frame: DataFrame,
    config: ServiceConfig | None = None,
    *,
    checkpoint: str = "",
    topic: str = "",
    table: str = "",
    each_batch: EachBatch | None = None,
    backoff: Backoff | None = None,
    slots: int | None = None,
    trigger_s: float | None = None,
    available_now: bool = False,
    query_name: str = "",
    on_late: Callable[[list[str]], None] | None = None,
) -> AckQuery:
    """Start a query that gives each row's message its verdict, when its output is written.

    Args:
        frame: Rows of ``read_queue`` after any transformation, with ``ack_token`` and, where not
            all is well, ``verdict`` (ack, nack, reject), ``delay`` (s) and ``reason``. A message
            may have several rows: its last verdict that is no ack counts.
        config: Cluster and namespace; None: those that were registered.
        checkpoint: Spark's folder for this query.
        topic: Write the rows' ``value``, ``key``, ``headers``, ``partition`` and ``topic`` to
            Kafka in the transaction of the ENDs: exactly once for ``read_committed`` readers. The
            topic of rows that name none.
        table: Insert the rows of acked messages into this Delta table before the ENDs, each
            message once: ``write_once``.
        each_batch: Called with each batch and its number (a ``Batch``) before the ENDs: writes
            the output to another place. A message may come again in a later batch, as a copy
            with the same ``origin_`` columns; ``write_once`` goes by them. What it returns has
            the verdicts; None: the batch's own rows have.
        backoff: Delay of a nack that names none.
        slots: Transactions of a batch, with ``topic``. None: one for each core, later more if
            executors join. Another number holds from the next batch that is planned.
        trigger_s: Shortest time between two batches; None: 1 s.
        available_now: Work on what is there, then end.
        query_name: How Spark calls it.
        on_late: Called with the places (partition/offset) of messages whose ENDs came too late.

    Raises:
        ConfigError: Columns, topic or checkpoint cannot work; or output through Spark Connect.
        QueryFailedError: Spark cannot open the checkpoint.
    """
    outputs: dict[str, object] = {"topic": topic, "table": table, "each_batch": each_batch}
    _require(frame, checkpoint, slots, outputs)
    start = partial(
        start_query, trigger_s=trigger_s, available_now=available_now, query_name=query_name
    )
    if getattr(frame.sparkSession, "_jvm", None) is None:
        outputs |= {"backoff": backoff, "slots": slots, "on_late": on_late}
        return AckQuery(start(_remote_writer(frame, config, checkpoint, outputs)), Acknowledged())
    _require_plan(frame, is_judged=each_batch is not None or "verdict" in frame.columns)
    if table:
        each_batch = partial(_insert, check_table(frame, table))
    config = known_config(frame.sparkSession, config)
    settings = AckSettings(config=config, backoff=backoff or Backoff())
    output, folder = None, Checkpoint(frame.sparkSession, checkpoint)
    if topic or (each_batch is None and _names_topics(frame)):
        _require_output(frame, config, topic)
        output = _Output(settings, folder, topic, slots)
    elif slots is not None:
        raise ConfigError("slots is for output to a topic, and there is none")
    # What `table` needs reads all rows before the first one is written.
    keeps = not table and not _follows_from_messages(frame)
    batches = _Batches(settings, each_batch, on_late, output, folder.last_batch(), keeps)
    writer = frame.writeStream.foreachBatch(batches.run).option("checkpointLocation", checkpoint)
    return AckQuery(start(writer), batches.total)


def _insert(table: Table, frame: DataFrame, batch: Batch) -> None:
    insert_once(frame, table)


def _follows_from_messages(frame: DataFrame) -> bool:
    """Whether rows that are made again are the same: each is made of one message, by Spark alone.

    What takes several rows together may take others then, or in another order.
    """
    jvm: Any = frame.sparkSession._jvm
    patterns = jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    plan = frame._jdf.queryExecution().analyzed()
    others = patterns.PYTHON_UDF(), patterns.SCALA_UDF(), patterns.PLAN_EXPRESSION()
    if not plan.deterministic() or any(map(plan.containsPattern, others)):
        return False
    while plan.nodeName() in _ROW_BY_ROW:
        plan = plan.children().head()
    is_source: bool = plan.children().isEmpty()
    return is_source


def _require(
    frame: DataFrame, checkpoint: str, slots: int | None, outputs: Mapping[str, object]
) -> None:
    if not frame.isStreaming:
        raise ConfigError(
            "ack() is for a stream; inside of foreachBatch write verdicts with "
            'frame.write.format("kafkamq").option("mode", "ack").mode("append").save()'
        )
    function = outputs["each_batch"]
    if function is not None and not callable(function):
        raise ConfigError(f"each_batch is {function!r}: it must be a function")
    given = [name for name, value in outputs.items() if value]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other: output goes to one place")
    if not checkpoint:
        raise ConfigError("checkpoint is missing: name a folder that outlives the driver")
    if function is None:
        check_columns(frame.schema)
    if slots is not None and not 1 <= slots <= MAX_SLOTS:
        raise ConfigError(f"slots is {slots}: it must be from 1 to {MAX_SLOTS}")


def _require_plan(frame: DataFrame, *, is_judged: bool) -> None:
    """Refuse a plan that reads a queue twice, and one that drops verdicts.

    The later of two sources of a queue fences the earlier.
    """
    plan: Any = frame._jdf.queryExecution().analyzed()
    if not is_judged:
        _require_no_verdict(plan)
    sources: dict[str, Any] = {}
    for leaf in _listed(plan.collectLeaves()):
        if leaf.nodeName() != "StreamingRelationV2":
            continue
        queue_id = leaf.extraOptions().get("queue")
        is_leased = leaf.extraOptions().get("acknowledge") == "true"
        if is_leased and not sources.setdefault(queue_id, leaf).equals(leaf):
            raise ConfigError(
                f"the rows are of two sources of queue {queue_id!r}, as of a stream that is joined "
                "with itself: take all columns from one read_queue(), or join in each_batch"
            )


def _require_no_verdict(plan: Any) -> None:
    """Refuse rows that were given verdicts before: what was rejected would be acknowledged.

    A ``verdict`` of a table that they are joined with is none of theirs.
    """
    output, inputs, children = _listed(plan.output()), plan.inputSet(), _listed(plan.children())
    given = {each.name() for each in output if children and not inputs.contains(each)}
    if "verdict" in given and any(each.name() == "ack_token" for each in output):
        raise ConfigError(
            "the rows have no column verdict any more, which with_body(), map_messages() or you "
            "gave them: keep verdict and reason, or select 'ack' AS verdict if all are to be acked"
        )
    for child in children:
        if child.isStreaming():
            _require_no_verdict(child)


def _listed(found: Any) -> list[Any]:
    return [found.apply(number) for number in range(found.size())]


def _remote_writer(
    frame: DataFrame,
    config: ServiceConfig | None,
    checkpoint: str,
    needs_driver: Mapping[str, object],
) -> DataStreamWriter:
    """The server has what was registered in the session; its sink finds no more options."""
    given = [name for name, value in needs_driver.items() if value]
    if _names_topics(frame):
        given.append("topic")
    if given:
        raise ConfigError(
            f"{given[0]} needs a session of this process: through Spark Connect ack() writes "
            'verdicts alone; write output by a query of its own, with format("kafkamq")'
        )
    if config is not None:
        register_source(frame.sparkSession, config)
    rows = _verdicts(frame).repartition("ack_token")
    writer = rows.writeStream.format(FORMAT).option("mode", "ack")
    return writer.option("checkpointLocation", checkpoint)


def _verdicts(frame: DataFrame) -> DataFrame:
    """Return the columns that ENDs are made of.

    A message's rows must then be in one task, wherever a join, a union or a grouping took them.
    """
    return frame.select(*(name for name in ACK_COLUMNS if name in frame.columns))


def _names_topics(frame: DataFrame) -> bool:
    return "topic" in map(str.lower, frame.columns)


def _require_output(frame: DataFrame, config: ServiceConfig, topic: str) -> None:
    check_spelling(frame.columns, SINK_COLUMNS)
    if {"value", "result"} <= set(frame.columns):
        raise ConfigError(
            "the rows have both the message's value and the handler's result: select what to "
            "write, such as `result AS value`"
        )
    if "value" not in frame.columns:
        raise ConfigError(
            f"the rows have the columns {', '.join(frame.columns)}: output to a topic needs "
            f"`value` and knows {', '.join(SINK_COLUMNS)}"
        )
    check_types({name: kind for name, kind in frame.dtypes if name in SINK_COLUMNS})
    if topic:
        with Admin(config) as admin:
            if topic not in admin.topics([topic]):
                raise ConfigError(
                    f"topic {topic!r} does not exist at {config.bootstrap_servers}: create it "
                    "first; its output must not begin in a topic with default settings"
                )


class _Output:
    """Commits batches with their output, each in as many slots whenever it is repeated."""

    def __init__(self, ack: AckSettings, folder: Checkpoint, topic: str, slots: int | None) -> None:
        ledger_topic = ack.config.ledger_topic
        note = folder.note(ledger_topic)
        if note is None:
            tasks = slots or cores(folder.spark)
            note = folder.write(CheckpointNote.new("ack", topic=ledger_topic, tasks=tasks))
        elif slots is not None and slots != note.tasks:
            note = folder.write(note.cut(slots, since=folder.last_batch() + 1))
        self._note = note
        self._settings = CommitSettings(
            config=ack.config,
            backoff=ack.backoff,
            topic=topic,
            engine=note.engine,
            epoch=next_epoch(ack.config, note),
        )
        self._folder = folder
        self._is_fixed = slots is not None
        self._look_s = time.monotonic() + FIRST_LOOK_S

    def commits(self, frame: DataFrame, batch: int) -> DataFrame:
        settings = self._settings
        return with_slots(frame, self._note.tasks_of(batch)).mapInArrow(
            lambda parts: commit_slots(parts, settings, batch), RESULT_SCHEMA
        )

    def follow_executors(self, batch: int) -> None:
        """Take more slots for the batches behind this one, if there are more cores."""
        now_s = time.monotonic()
        if self._is_fixed or now_s < self._look_s:
            return
        self._look_s = now_s + NEXT_LOOK_S
        wanted = min(MAX_SLOTS, cores(self._folder.spark))
        if wanted > self._note.tasks:
            # Spark plans it when this one is done.
            self._note = self._folder.write(self._note.cut(wanted, since=batch + 1))
            _log.info("batches have more slots from now on", extra={"slots": wanted})


@dataclass
class _Batches:
    settings: AckSettings
    each_batch: EachBatch | None
    on_late: Callable[[list[str]], None] | None
    output: _Output | None
    # The last batch that an earlier run has planned.
    planned: int
    # Whether ``each_batch`` gets rows that are all made, and not made as they are first read.
    keeps_at_once: bool
    total: Acknowledged = field(default_factory=Acknowledged)

    def run(self, frame: DataFrame, batch: int) -> None:
        """Output first, ENDs last."""
        if self.output is not None:
            self._count(self.output.commits(frame, batch))
            self.output.follow_executors(batch)
        elif self.each_batch is None:
            self._end(frame)
        else:
            # Handlers before it run once, whatever the function does with it. What an executor
            # kept that was lost is not made again, as with persist(): it might have another verdict
            # than the output is of. It fails the batch, which is repeated whole. For the same
            # reason such rows are all made before any is written: an executor that is lost while
            # they are made has them made again. Others are kept as they are first read.
            kept: Any = frame.localCheckpoint(eager=self.keeps_at_once)
            try:
                query_id = frame.sparkSession.sparkContext.getLocalProperty(QUERY_ID) or ""
                is_repeated = batch <= self.planned
                number = Batch(batch, query_id=query_id, is_repeated=is_repeated)
                found = self.each_batch(kept, number)
                self._end(kept if found is None else found)
            finally:
                kept._jdf.queryExecution().logical().rdd().unpersist(False)

    def _end(self, frame: DataFrame) -> None:
        check_columns(frame.schema)
        settings = self.settings
        tasks = frame.sparkSession.sparkContext.defaultParallelism
        rows = _verdicts(frame).repartition(tasks, "ack_token")
        self._count(rows.mapInArrow(lambda parts: write_ends(parts, settings), RESULT_SCHEMA))

    def _count(self, results: DataFrame) -> None:
        rows, total = results.collect(), self.total
        for row in rows:
            total.ends += row.ends
            total.written += row.written
            total.skipped += row.skipped
            total.late += row.late
        late = sum(row.late for row in rows)
        if not late:
            return
        places = [place for row in rows for place in row.places]
        _log.warning(
            "verdicts came after their leases' ends: these messages are delivered again",
            extra={"count": late, "places": places[:MAX_NAMED]},
        )
        if self.on_late is not None:
            self.on_late(places)
