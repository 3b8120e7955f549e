"""``sql``, ``replay``, ``dlq redrive --where`` and ``audit``, as users call them."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from pyspark.errors import AnalysisException
from pyspark.logger import PySparkLogger
from tests.integration.cli_tools import Commands
from tests.integration.queue_logs import delete_group
from tests.integration.test_cli_redrive import Letters
from tests.integration.tracker_logs import Logs
from tests.waiting import wait_until, within

from kafkamq.cli.app import app
from kafkamq.cli.page import chart
from kafkamq.cli.spark.jobs import _bounds, parse_moment
from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, StateError
from kafkamq.queue.dead_letters import REPLAY_NAME, REPLAYED_FROM
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.queue.wire.keys import split_key
from kafkamq.spark import register, write_stream
from kafkamq.spark.formats import register_views
from kafkamq.spark.jobs.replay import Replay, replay
from kafkamq.spark.jobs.sql import Tables, view_session
from kafkamq.spark.options import VIEWS
from kafkamq.spark.session import SHUFFLE
from kafkamq.transport.admin import Admin
from kafkamq.transport.transactions import TransactionalProducer
from kafkamq.types import DeadLetterReason, Marker, MarkerType, MessageId, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ID = "kafkamq-id"
YARN = {"spark.master": "yarn"}
NOWHERE = ServiceConfig(bootstrap_servers="127.0.0.1:1", namespace="ns")


class MessageHistory:
    """Messages of two queues, and what became of them."""

    def __init__(self, bootstrap: str, namespace: str) -> None:
        self.logs = Logs(bootstrap, namespace, marker_partitions=2)
        self.commands = Commands(bootstrap, namespace)

    def send(self, queue: str, *ids: str) -> list[MessageId]:
        found = []
        for identity in ids:
            headers = ((ID, identity.encode()), ("trace", b"t-" + identity.encode()))
            found += self.logs.send(key=queue.encode() + b"\0" + b"k", headers=headers)
        return found

    def work(self, queue: str, *ids: MessageId, outcome: Outcome, consumer: str = "ann") -> None:
        key = queue.encode() + b"\0" + b"k"
        names = [self.names[one] for one in ids]
        for one, name in zip(ids, names, strict=True):
            headers = ((ID, name.encode()),)
            self.logs.start(one, key=key, consumer=consumer, timeout_ms=60_000, headers=headers)
        self.logs.end(*ids, outcome=outcome, consumer=consumer, reason="no" if outcome else "")

    @property
    def names(self) -> dict[MessageId, str]:
        found = {}
        for record in self.logs.read(self.logs.config.message_topic):
            place = MessageId(record.partition() or 0, record.offset() or 0)
            found[place] = read_message_headers(record.headers()).id
        return {one: found[MessageId(one.partition, one.offset)] for one in self.logs.sent}

    def replayed(self) -> Counter[tuple[str, str]]:
        """Queue and id of the messages that a replay sent."""
        return Counter(
            (split_key(record.key())[0].decode(), read_message_headers(record.headers()).id)
            for record in self.logs.read(self.logs.config.message_topic)
            if REPLAYED_FROM in dict(record.headers() or ())
        )


@pytest.fixture
def history(spark: SparkSession, bootstrap: str, namespace: str) -> MessageHistory:
    del spark  # the commands use the session of this process
    made = MessageHistory(bootstrap, namespace)
    orders = made.send("orders", "o1", "o2", "o3", "o4")
    mails = made.send("mails", "m1")
    made.work("orders", orders[0], orders[1], outcome=Outcome.ACK)
    made.work("orders", orders[2], outcome=Outcome.REJECT, consumer="bob")
    made.work("orders", orders[3], outcome=Outcome.REDELIVERED, consumer="bob")
    made.work("mails", *mails, outcome=Outcome.NACK)
    return made


def test_sql_asks_every_table(history: MessageHistory) -> None:
    rows = history.commands.json(
        "sql", "SELECT queue_id, id, outcome, started_at FROM deliveries ORDER BY id"
    )
    assert [(row["queue_id"], row["id"], row["outcome"]) for row in rows] == [
        ("mails", "m1", "NACK"), ("orders", "o1", "ACK"), ("orders", "o2", "ACK"),
        ("orders", "o3", "REJECT"), ("orders", "o4", "REDELIVERED"),
    ]  # fmt: skip
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", rows[0]["started_at"])
    (row,) = history.commands.json(
        "sql", "SELECT value, user_key, headers, X'ff' AS odd FROM messages WHERE id = 'm1'"
    )
    assert row["user_key"] == "k"
    assert row["headers"] == [{"key": "trace", "value": "t-m1"}]
    assert row["odd_base64"] == "/w=="
    assert history.commands.json(
        "sql",
        "SELECT array(double('nan'), double('-inf'), 1.5D) AS n, time'10:20:30' AS t, NULL AS z",
    ) == [{"n": ["NaN", "-Infinity", 1.5], "t": "10:20:30", "z": None}]
    text = history.commands.run("sql", "SELECT count(*) AS many FROM messages")
    assert "many" in text
    assert "5" in text


def test_tables_are_made_when_a_question_names_them(
    spark: SparkSession, history: MessageHistory
) -> None:
    def asked(statement: str) -> list[dict[str, object]]:
        for name in VIEWS:
            spark.catalog.dropTempView(name)
        return history.commands.json("sql", statement)

    def made() -> set[str]:
        return {each.name for each in spark.catalog.listTables()} & set(VIEWS)

    assert asked("SELECT 1 AS one") == [{"one": 1}]
    assert made() == set()
    assert asked("SELECT count(*) AS n FROM Messages") == [{"n": 5}]
    assert made() == {"messages"}
    assert asked("SELECT count(*) AS n FROM IDENTIFIER('mess' || 'ages')") == [{"n": 5}]
    assert {row["tableName"] for row in asked("SHOW TABLES")} >= set(VIEWS)
    assert asked("EXECUTE IMMEDIATE 'SELECT count(*) AS n FROM mess' || 'ages'") == [{"n": 5}]


def test_a_script_that_fails_has_run_once(spark: SparkSession) -> None:
    session = spark.newSession()
    session.sql("CREATE TABLE scripted (a INT) USING parquet")
    try:
        with pytest.raises(AnalysisException, match="nowhere"):
            Tables(session, NOWHERE).ask(
                "BEGIN INSERT INTO scripted VALUES (2); SELECT * FROM nowhere; END"
            )
        assert session.table("scripted").count() == 1
    finally:
        session.sql("DROP TABLE scripted")


def test_the_format_is_known_before_a_question_names_a_table(spark: SparkSession) -> None:
    session = spark.newSession()
    tables = Tables(session, NOWHERE)
    tables.ask("CREATE TEMPORARY VIEW others USING kafkamq OPTIONS (topic 'orders')")
    assert "offset" in tables.ask("SELECT * FROM others").columns


@pytest.mark.parametrize(
    ("has_tables", "given", "tasks"),
    [(False, {}, None), (True, {}, "200"), (True, {SHUFFLE: "9"}, "9"), (True, YARN, None)],
)
def test_a_job_that_reads_all_rows_has_as_many_tasks_as_spark_itself_makes(
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    has_tables: bool,
    given: dict[str, str],
    tasks: str | None,
) -> None:
    settings: dict[str, str] = {}

    def build(**wanted: Any) -> SparkSession:
        settings.update(wanted["settings"])
        return spark.newSession()

    for name, value in (
        ("has_session", lambda: False),
        ("end_session", lambda ended: None),
        ("build_session", build),
    ):
        monkeypatch.setattr(f"kafkamq.spark.jobs.sql.{name}", value)
    with view_session(NOWHERE, master="local[2]", settings=given, has_tables=has_tables):
        assert settings.get(SHUFFLE) == tasks


class Terminal:
    """Somebody who types, and who presses Ctrl-C."""

    def __init__(self, *lines: str | Callable[[], str]) -> None:
        self._lines = list(lines)

    def isatty(self) -> bool:
        return True

    def read(self, prompt: str) -> str:
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        return line if isinstance(line, str) else line()


def test_ctrl_c_in_a_session_ends_the_statement_alone(
    history: MessageHistory,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    jobs = spark.sparkContext.statusTracker()
    interrupter = threading.Thread(
        target=lambda: (
            wait_until(lambda: jobs.getActiveJobsIds() != []),
            os.kill(os.getpid(), signal.SIGINT),
        )
    )

    def asks_what_takes_hours() -> str:
        interrupter.start()
        return "SELECT max(id) FROM range(100000000000000);"

    def hesitates() -> str:
        raise KeyboardInterrupt

    typed = Terminal("SELECT 1 AS", hesitates, asks_what_takes_hours, "SELECT 7 AS seven;")
    monkeypatch.setattr("builtins.input", typed.read)
    monkeypatch.setattr("sys.stdin", typed)
    for name, value in history.commands.environment.items():
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGINT)
    app(["sql", "--json"], standalone_mode=False)
    interrupter.join()
    assert json.loads(capsys.readouterr().out.split()[-1]) == {"seven": 7}
    assert not [each for each in caplog.records if each.exc_info], "no traceback"
    assert signal.getsignal(signal.SIGINT) is before
    wait_until(lambda: jobs.getActiveJobsIds() == [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sql", "SELEC 1"), r"^SQL: .*\(line 1, column 1\).*Tables are messages"),
        (("sql", "SELECT quue_id FROM deliveries"), "^SQL: .*`quue_id`.*queue_id"),
        (("sql", "SELECT 1/0 FROM messages"), "^SQL: .*[Dd]ivision by zero"),
        (("sql", "SELECT 1 AS a, 2 AS a", "--json"), "^SQL: two columns are called a: name one"),
        (("sql", "SELECT X'ff' AS a, 2 AS a_base64", "--json"), "^SQL: two columns are called a_b"),
        (("sql", "SELECT date'+10000-01-01'"), r"^SQL: .*\(year 10000 .*\): CAST .* to STRING"),
        (("sql", "SELECT map(array(1), 2)"), "^SQL: Python has no such value"),
        (("replay", "--where", "id ==", "--dry-run"), "^--where: .*DESCRIBE"),
        (("replay",), "^choose with --where, --from or --to"),
        (("replay", "--from", "soon"), "^--from is 'soon': write a time as"),
        (("replay", "--everything", "--rate", "0"), "^rate is 0"),
        (("replay", "--where", "false", "--rate", "inf"), "^rate is inf: .*finite"),
        (("dlq", "redrive", "--where", "nothing = 1"), "^--where: .*`nothing`"),
        (("audit", "--html", "/no/where/page.html"), "^--html /no/where/page.html: there is no"),
    ],
)
def test_what_cannot_work_names_the_option(
    history: MessageHistory, arguments: tuple[str, ...], message: str
) -> None:
    printed = BufferingHandler(100)
    loggers = [
        PySparkLogger.getLogger(f"{kind}QueryContextLogger") for kind in ("SQL", "DataFrame")
    ]
    for logger in loggers:
        logger.addHandler(printed)
    try:
        with pytest.raises(ConfigError, match=message):
            history.commands.run(*arguments)
    finally:
        for logger in loggers:
            logger.removeHandler(printed)
    assert printed.buffer == [], "PySpark's own words, plan and stack"


def test_a_replay_sends_what_sql_chooses(history: MessageHistory) -> None:
    where = "id IN (SELECT id FROM deliveries WHERE outcome IN ('REJECT', 'ACK'))"
    run = history.commands.json
    (report,) = run("replay", "--where", where, "--dry-run")
    assert (report["selected"], report["sent"]) == (3, 0)
    assert not history.replayed()
    (report,) = run("replay", "--where", where, "--into", "again", "--name", "one")
    assert (report["selected"], report["sent"]) == (3, 3)
    assert history.replayed() == Counter([("again", "o1"), ("again", "o2"), ("again", "o3")])
    (report,) = run("replay", "--where", where, "--into", "again", "--name", "one")
    assert (report["sent"], report["sent_before"]) == (0, 3)
    assert sum(history.replayed().values()) == 3
    with pytest.raises(ConfigError, match="--name one: another replay"):
        history.commands.run("replay", "--where", "true", "--name", "one")
    later = ("--where", where, "--into", "again", "--to", "2999-01-01")
    with pytest.raises(ConfigError, match="--name one: another replay"):
        history.commands.run("replay", *later, "--name", "one")
    copies = history.logs.read(history.logs.config.message_topic)
    headers = {
        tuple(name for name, _ in record.headers() or ())
        for record in copies
        if REPLAYED_FROM in dict(record.headers() or ())
    }
    assert headers == {("trace", ID, REPLAYED_FROM, REPLAY_NAME)}
    future = ("replay", "--from", "2999-01-01", "--dry-run")
    assert run(*future)[0]["selected"] == 0


def test_a_replay_that_was_cut_short_goes_on(
    history: MessageHistory, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = history.logs.config
    history.send("many", *(f"n{number}" for number in range(20)))
    register_views(spark, config)
    commit, commits = TransactionalProducer.commit, []

    def failing(self: TransactionalProducer, **bound: float) -> None:
        commits.append(1)
        if len(commits) == 3:
            raise RuntimeError("killed")
        commit(self, **bound)

    monkeypatch.setattr(TransactionalProducer, "commit", failing)
    wanted = Replay(name="slow", where="queue_id = 'many'", rate=7.0)
    with pytest.raises(RuntimeError, match="killed"):
        replay(spark, config, wanted)
    monkeypatch.undo()
    assert sum(history.replayed().values()) == 14
    delete_group(config.bootstrap_servers, f"kafkamq.{config.message_topic}.replay.slow")  # expired
    history.send("many", "later")  # behind the time up to which the first run looked
    report = replay(spark, config, wanted)
    assert (report.sent_before, report.sent) == (14, 6)
    assert history.replayed() == Counter(("many", f"n{number}") for number in range(20))
    # As if retention had deleted a message.
    spark.table("messages").where("id <> 'n3'").createOrReplaceTempView("messages")
    with pytest.raises(StateError, match="does not choose the same ones"):
        replay(spark, config, wanted)


def test_a_replay_that_goes_on_does_not_choose_its_own_copies(
    history: MessageHistory, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = history.logs.config
    history.send("skewed", *(f"s{number}" for number in range(4)))
    register_views(spark, config)
    hour_ms = 3_600_000  # by which this machine's clock is ahead of the broker's
    wanted = Replay(name="skewed", where="queue_id = 'skewed'", rate=2.0)
    wanted = replace(wanted, to_ms=round(time.time() * 1000) + hour_ms)
    commit, commits = TransactionalProducer.commit, []

    def failing(self: TransactionalProducer, **bound: float) -> None:
        commits.append(1)
        if len(commits) == 2:
            raise RuntimeError("killed")
        commit(self, **bound)

    monkeypatch.setattr(TransactionalProducer, "commit", failing)
    with pytest.raises(RuntimeError, match="killed"):
        replay(spark, config, wanted)
    monkeypatch.undo()
    report = replay(spark, config, wanted)
    assert (report.sent_before, report.sent, report.selected) == (2, 2, 4)
    copied = {place: times for place, times in history.replayed().items() if place[0] == "skewed"}
    assert copied == {("skewed", f"s{number}"): 1 for number in range(4)}


def test_sql_chooses_dead_letters(spark: SparkSession, bootstrap: str, namespace: str) -> None:
    del spark
    commands = Commands(bootstrap, namespace)
    commands.run("create", "--partitions", "2", "--marker-partitions", "1", "--json")
    letters = Letters(commands)
    letters.write("a1", "a2", queue="a")
    letters.write("b1", queue="b", reason=DeadLetterReason.REJECTED)
    run = commands.json
    where = ("dlq", "redrive", "--where", "id IN ('a1', 'b1')")
    assert run(*where, "--dry-run")[0]["selected"] == 2
    assert run(*where, "--queue", "b", "--dry-run")[0]["selected"] == 1
    assert run(*where)[0]["redriven"] == 2
    assert run(*where)[0]["redriven"] == 0
    assert set(letters.redriven()) == {"a1", "b1"}


def test_a_redrive_needs_no_markers(spark: SparkSession, bootstrap: str, namespace: str) -> None:
    del spark
    commands = Commands(bootstrap, namespace)
    commands.run("create", "--partitions", "1", "--marker-partitions", "1", "--json")
    letters = Letters(commands)
    letters.write("a1", queue="a")
    with Admin(letters.config) as admin:
        admin.client.delete_topics([letters.config.marker_topic])[
            letters.config.marker_topic
        ].result()
    (report,) = commands.json("dlq", "redrive", "--where", "true", "--dry-run")
    assert report["selected"] == 1


@pytest.mark.faults
def test_a_redrive_is_a_stream_of_letters_that_are_mended_once(
    spark: SparkSession, bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    """Also where the last batch is repeated, since Spark does not know that it was done."""
    commands = Commands(bootstrap, namespace)
    commands.run("create", "--partitions", "2", "--marker-partitions", "1", "--json")
    letters, checkpoint = Letters(commands), tmp_path / "redrive"
    register(spark, letters.config)

    def redrive() -> None:
        rows = spark.readStream.format("kafkamq").option("view", "dead_letters").load()
        mended = rows.where("queue_id = 'a'").selectExpr(
            "concat(CAST(value AS STRING), '!') AS payload", "user_key AS key", "id"
        )
        query = write_stream(
            mended, letters.config, checkpoint=str(checkpoint), queue="a", available_now=True
        )
        assert query.awaitTermination(within(120))

    letters.write("a1", "a2", queue="a")
    letters.write("b1", queue="b")
    redrive()
    commits = [each for each in (checkpoint / "commits").iterdir() if each.name.isdigit()]
    last = max(commits, key=lambda each: int(each.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)
    letters.write("a3", queue="a")
    redrive()
    found = spark.read.format("kafkamq").option("view", "messages").option("queue", "a").load()
    rows = sorted((row.id, bytes(row.value), bytes(row.user_key)) for row in found.collect())
    assert rows == [(name, b"x!", b"key") for name in ("a1", "a2", "a3")]


def test_an_audit_tells_who_did_what(history: MessageHistory, tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    mails, orders = history.commands.json("audit", "--html", str(page))
    assert (mails["queue_id"], orders["queue_id"]) == ("mails", "orders")
    counted = ("messages", "attempts", "acked", "rejected", "leases_lost", "nacked")
    assert [orders[name] for name in counted] == [4, 4, 2, 1, 1, 0]
    shares = [(each["consumer_id"], float(each["share"])) for each in orders["consumers"]]
    assert shares == [("ann", 50.0), ("bob", 50.0)]
    assert [each["id"] for each in orders["poison"]] == ["o3"]
    assert orders["messages_by_attempts"] == {"1": 4}
    assert sum(orders["attempts_over_time"]) == 4
    assert sum(orders["lateness"]) == 1
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert not re.search(r"(src|href)=", text)  # nothing from elsewhere
    plots = re.findall(r"<svg.*?</svg>", text)
    assert len(plots) >= 6
    for plot in plots:
        ElementTree.fromstring(plot)
    (alone,) = history.commands.json("audit", "--queue", "mails")
    assert alone["nacked"] == 1
    text = history.commands.run("audit")
    assert "orders" in text
    assert "took p99" in text
    assert "No attempt was found" in history.commands.notes("audit", "--queue", "nosuch")


@pytest.mark.faults
def test_an_audit_counts_the_messages_of_batches(history: MessageHistory) -> None:
    acked, lost = history.send("orders", "o5", "o6")
    logs = history.logs
    logs.start_batch(acked, lost, key=b"orders", timeout_ms=60_000)
    logs.batch(acked, marker=Marker(MarkerType.END, consumer_id="worker"))
    logs.batch(lost, marker=Marker(MarkerType.END, outcome=Outcome.REDELIVERED))
    _, orders = history.commands.json("audit")
    counted = ("messages", "attempts", "acked", "leases_lost")
    assert [orders[name] for name in counted] == [6, 6, 3, 2]
    assert sum(orders["lateness"]) == 2


@pytest.mark.faults
def test_an_id_that_was_sent_again_is_one_line_of_an_audit(history: MessageHistory) -> None:
    (again,) = history.send("orders", "o3")
    history.work("orders", again, outcome=Outcome.NACK, consumer="bob")
    _, orders = history.commands.json("audit")
    assert (orders["messages"], orders["sent_again"]) == (5, 1)
    (o3,) = [each for each in orders["poison"] if each["id"] == "o3"]
    assert (o3["sent"], o3["attempts"], o3["outcome"]) == (2, 2, "NACK")
    assert "1 of the 5 messages were sent again" in history.commands.notes("audit")


def test_times_and_bars() -> None:
    assert parse_moment("", option="--to") is None
    assert parse_moment("1500", option="--to") == 1500
    assert parse_moment("1970-01-01T00:00:02Z", option="--to") == 2000
    assert parse_moment("1970-01-01 01:00:02+01:00", option="--to") == 2000
    assert parse_moment("1970-01-01", option="--to") == 0
    assert _bounds("", "1500") == (None, 1500)
    with pytest.raises(ConfigError, match=r"--to is '1500': it must be later than --from"):
        _bounds("1970-01-01T00:00:02Z", "1500")
    assert chart([0, 0], ["a", "b"]) == "<p>None.</p>"
    drawn = ElementTree.fromstring(chart([1, 3], ["<a>", "b"]))
    heights = [float(bar.attrib["height"]) for bar in drawn.iter("rect")]
    assert heights[1] == pytest.approx(3 * heights[0], rel=0.01)
