"""Every metric of kafkamq by name: a contract, pinned by a test and used by the dashboard.

Labels are ``queue``, ``partition`` and, of Spark, ``query`` only. A worker's ``partition`` is one
of the messages topic, a tracker's one of the markers topic. One process serves one namespace: the
scrape job tells them apart. All times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

from kafkamq.metrics.families import Counter, Family, Gauge, Histogram

_QUEUE = ("queue",)
_PARTITION = ("partition",)
_BOTH = ("queue", "partition")
_QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_HANDLING = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0, 43_200.0)
_AGES = (*_QUICK[2:], 60.0, 300.0, 1800.0, 7200.0, 43_200.0)
_AGES = (*_QUICK[2:], 60.0, 300.0, 1800.0, 7200.0, 43_200.0)
_LATENESS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)

_all: dict[str, Family] = {}


def register(named: Mapping[str, object]) -> None:
    """Add the families among a module's globals; their names begin with ``kafkamq_``."""
    for family in [each for each in named.values() if isinstance(each, Family)]:
        assert family.name.startswith("kafkamq_"), family.name
        assert family.name not in _all, family.name
        _all[family.name] = family


def families() -> tuple[Family, ...]:
    """All of them, in the order in which they were made."""
    return tuple(_all.values())


# Producers.
SENT = Counter("kafkamq_messages_sent", "Messages that Kafka has confirmed.", _BOTH)
SEND_FAILED = Counter("kafkamq_sends_failed", "Sends that Kafka refused or timed out.", _QUEUE)
SEND_SECONDS = Histogram(
    "kafkamq_send_seconds", "From send to Kafka's confirmation.", _QUEUE, _QUICK
)

# Workers.
RECEIVED = Counter(
    "kafkamq_messages_received", "Deliveries: STARTed and committed, to be handed out.", _BOTH
)
RECEIVED_AGAIN = Counter(
    "kafkamq_messages_received_again", "Deliveries with a delivery_count above 1.", _BOTH
)
ACKED = Counter("kafkamq_messages_acked", "Verdicts: done.", _BOTH)
NACKED = Counter("kafkamq_messages_nacked", "Verdicts: given back, counted.", _BOTH)
REJECTED = Counter("kafkamq_messages_rejected", "Verdicts: to the dead letters.", _BOTH)
RELEASED = Counter("kafkamq_messages_released", "Given back by close, never handed out.", _BOTH)
LEASES_LOST = Counter(
    "kafkamq_leases_lost", "Leases that ended while this worker held the message.", _BOTH
)
LATE_VERDICTS = Counter(
    "kafkamq_late_verdicts", "Verdicts that reached the log after their lease, or never.", _BOTH
)
NAMES_OF_OURS = Counter(
    "kafkamq_names_of_ours",
    "Messages of a topic that anybody writes to with headers of the sender's called as ours are.",
    _QUEUE,
)
IN_FLIGHT = Gauge("kafkamq_in_flight", "Messages held by this process's workers.", _QUEUE)
READY = Gauge("kafkamq_ready", "Of these, what no receive has taken yet.", _QUEUE)
UNDER_WAY = Gauge("kafkamq_under_way", "Messages STARTed and not committed.", _QUEUE)
POLL_AGE = Gauge(
    "kafkamq_poll_age_seconds",
    "Since the last poll of a queue's topic, of the consumer that polled the longest ago.",
    _QUEUE,
    combine=max,
)
SEND_TO_RECEIVE_SECONDS = Histogram(
    "kafkamq_send_to_receive_seconds",
    "From the time of a record in its topic to its first hand-out.",
    _QUEUE,
    _AGES,
)
SEND_TO_RECEIVE_SECONDS = Histogram(
    "kafkamq_send_to_receive_seconds",
    "From the time of a record in its topic to its first hand-out.",
    _QUEUE,
    _AGES,
)
HANDLING_SECONDS = Histogram(
    "kafkamq_receive_to_verdict_seconds",
    "From STARTed and committed to the verdict.",
    _QUEUE,
    _HANDLING,
)

# Trackers.
REDELIVERED = Counter("kafkamq_tracker_redelivered", "Copies written.", _PARTITION)
DEAD_LETTERED = Counter("kafkamq_tracker_dead_lettered", "Dead letters written.", _PARTITION)
TRACKER_LATE = Counter(
    "kafkamq_tracker_late_verdicts", "ENDs that found their message due (R9).", _PARTITION
)
MALFORMED = Counter(
    "kafkamq_tracker_malformed_markers", "Records set aside in the quarantine (R21).", _PARTITION
)
IN_PROGRESS = Gauge(
    "kafkamq_tracker_in_progress", "Entries: held, waiting, due or delayed.", _PARTITION
)
DUE = Gauge("kafkamq_tracker_due", "Entries that are due and not settled.", _PARTITION)
AWAITED = Gauge(
    "kafkamq_tracker_awaited",
    "Of what is due: what waits for logs that do not answer, or are not known (R18).",
    _PARTITION,
)
OLDEST_DEADLINE = Gauge(
    "kafkamq_tracker_oldest_deadline_seconds",
    "Log time until the earliest deadline, or until what ended beside it is forgotten (R12, 60 s)"
    " if that is sooner; negative: so long past. Absent: nothing is open.",
    _PARTITION,
)
POSITION = Gauge("kafkamq_tracker_position", "Next offset that the tracker folds.", _PARTITION)
LAG = Gauge("kafkamq_tracker_lag", "Readable records of the markers not folded yet.", _PARTITION)
LIVE = Gauge(
    "kafkamq_tracker_live", "1: has read its own TICK and redelivers (R17); else 0.", _PARTITION
)
LSO_STALLED = Gauge(
    "kafkamq_lso_stalled_seconds",
    "How long an open transaction has held readers of the markers back.",
    _PARTITION,
)
MESSAGES_LSO_STALLED = Gauge(
    "kafkamq_messages_lso_stalled_seconds",
    "How long an open transaction has held readers of the messages back.",
    _PARTITION,
)
LATENESS = Histogram(
    "kafkamq_tracker_lateness_seconds",
    "From the deadline to the copy or dead letter.",
    _PARTITION,
    _LATENESS,
)

# Streaming queries of Spark, the tracker's among them.
_QUERY = ("query",)
STANDBY = Gauge("kafkamq_spark_standby", "1: it stands by (R36); 0: it is active.", _QUERY)
SPARK_RUNNING = Gauge("kafkamq_spark_running", "1: the query runs; 0: it has ended.", _QUERY)
SPARK_FAILURES = Counter("kafkamq_spark_failures", "Runs of the query that failed.", _QUERY)
SPARK_ROWS = Counter("kafkamq_spark_rows", "Rows that batches have read.", _QUERY)
SPARK_ROWS_PER_SECOND = Gauge(
    "kafkamq_spark_rows_per_second", "Rows of the last batch by its time.", _QUERY
)
SPARK_BATCH_SECONDS = Histogram(
    "kafkamq_spark_batch_seconds", "Time of a batch, planning and commit included.", _QUERY,
    _LATENESS,
)  # fmt: skip
SPARK_STATE_BYTES = Gauge(
    "kafkamq_spark_state_bytes", "State of the query in memory and in RocksDB's files.", _QUERY
)
SPARK_STATE_ROWS = Gauge("kafkamq_spark_state_rows", "Rows in the state.", _QUERY)
SPARK_BACKLOG = Gauge(
    "kafkamq_spark_backlog", "Records of the source behind the last batch.", _QUERY
)

register(globals())
