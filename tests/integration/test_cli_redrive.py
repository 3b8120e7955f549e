"""Dead letters go back once: with everything they had, and however often it is tried."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import pytest
from confluent_kafka import Message
from tests.integration.cli_tools import Commands
from tests.integration.parallel_tools import fill, make, make_topic, topic_settings
from tests.integration.queue_logs import make_service, receive_all
from tests.integration.raw_producer import write_raw
from tests.sure_producer import SureProducer
from tests.waiting import wait_until, within

from kafkamq import Reject, Service
from kafkamq.config import ServiceConfig
from kafkamq.errors import FencedError
from kafkamq.queue.dead_letters import (
    MAX_TRANSACTION_RECORDS,
    REDRIVEN_FROM,
    DeadLetter,
    RedriveReport,
    Selection,
    done_key,
    read_dead_letters,
    redrive,
    redrive_transactional_id,
)
from kafkamq.queue.wire.headers import Origin, dead_letter_headers
from kafkamq.queue.wire.keys import join_key
from kafkamq.transport.admin import Admin
from kafkamq.transport.errors import TransactionAbortedError
from kafkamq.transport.log_reader import scan
from kafkamq.transport.transactions import TransactionalProducer
from kafkamq.types import DeadLetterReason


class Letters:
    """A namespace, and dead letters written into it as a tracker does."""

    def __init__(self, commands: Commands) -> None:
        self.commands = commands
        self.config = ServiceConfig(
            bootstrap_servers=commands.bootstrap, namespace=commands.namespace
        )
        self._producer = SureProducer(
            {"bootstrap.servers": commands.bootstrap, "enable.idempotence": True}
        )

    def write(
        self,
        *ids: str,
        queue: str = "q",
        reason: DeadLetterReason = DeadLetterReason.MAX_DELIVERIES,
        payload: bytes | None = b"x",
        payload_at: Origin | None = None,
        topic: str = "",
    ) -> None:
        for number, identity in enumerate(ids):
            headers = dead_letter_headers(
                [
                    ("a", b"1"),
                    ("a", None),
                    ("kafkamq-id", identity.encode()),
                    ("kafkamq-ttl-ms", b"60000"),
                ],
                reason=reason,
                error="why",
                delivery_count=3,
                origin=Origin(topic or self.config.message_topic, 0, number, 1_000),
                queue_id=queue,
                payload_at=payload_at,
            )
            self._producer.produce(
                self.config.dead_letter_topic,
                payload,
                join_key(queue, "key"),
                headers=list(headers),
            )
        self._producer.confirm(30)

    def bury(
        self, queue: bytes, *, payload: bytes | None, payload_at: Origin | None = None
    ) -> None:
        """A letter of R11's last resort: without the message's key and headers."""
        headers = dead_letter_headers(
            (),
            reason=DeadLetterReason.REJECTED if payload else DeadLetterReason.PAYLOAD_LOST,
            error="why",
            delivery_count=1,
            origin=Origin(self.config.message_topic, 0, 7, 1_000),
            queue_id=queue,
            payload_at=payload_at,
        )
        self._producer.produce(self.config.dead_letter_topic, payload, None, headers=list(headers))
        self._producer.confirm(30)

    def records(self, topic: str) -> list[Message]:
        """All of a topic. A transaction ends for readers a moment after it has for its writer."""
        with Admin(self.config) as admin:
            wait_until(lambda: all(low == high for low, high in admin.log_ends(topic).values()))
        return list(scan(self.config, topic))

    def redriven(self) -> Counter[str]:
        """How often each id is in the messages topic."""
        found: Counter[str] = Counter()
        for record in self.records(self.config.message_topic):
            headers = dict(record.headers() or ())
            found[bytes(headers["kafkamq-id"] or b"").decode()] += 1  # type: ignore[arg-type]
        return found


@pytest.fixture
def letters(bootstrap: str, namespace: str) -> Letters:
    with make_service(bootstrap, namespace):
        return Letters(Commands(bootstrap, namespace))


def test_a_redriven_message_is_itself_and_starts_again(letters: Letters) -> None:
    letters.write("one", "two")
    (report,) = letters.commands.json("dlq", "redrive", "--id", "one")
    assert report == {
        "selected": 1, "redriven": 1, "already_redriven": 0, "payload_lost": 0,
        "queue_unknown": 0, "headers_unreadable": 0, "refused": 0, "refusals": [],
        "dry_run": False,
    }  # fmt: skip
    (record,) = letters.records(letters.config.message_topic)
    headers = list(record.headers() or ())
    assert headers[:4] == [
        ("a", b"1"), ("a", None), ("kafkamq-id", b"one"), ("kafkamq-ttl-ms", b"60000"),
    ]  # fmt: skip
    assert [name for name, _ in headers[4:]] == [REDRIVEN_FROM]
    assert (record.key(), record.value()) == (b"q\0key", b"x")
    (received,) = letters.commands.json("receive", "q")
    assert (received["id"], received["delivery_count"], received["key"]) == ("one", 1, "key")


def test_twice_is_once(letters: Letters) -> None:
    letters.write("one", "two", "three")
    first = letters.commands.json("dlq", "redrive", "--queue", "q")
    second = letters.commands.json("dlq", "redrive", "--queue", "q")
    assert (first[0]["redriven"], second[0]["redriven"]) == (3, 0)
    assert second[0]["already_redriven"] == 3
    assert letters.redriven() == {"one": 1, "two": 1, "three": 1}
    (group,) = letters.commands.json("dlq", "ls")
    assert (group["open"], group["redriven"]) == (0, 3)
    assert letters.commands.json("dlq", "peek") == []
    assert len(letters.commands.json("dlq", "peek", "--all")) == 3


def test_what_was_redriven_before_brokers_told_the_topic_s_id_is_not_redriven_again(
    letters: Letters,
) -> None:
    letters.write("one", "two")
    (first,) = (one for one in read_dead_letters(letters.config) if one.id == "one")
    producer = SureProducer({"bootstrap.servers": letters.commands.bootstrap})
    producer.produce(
        letters.config.ledger_topic, b"1", done_key(b"", first.partition, first.offset)
    )
    producer.confirm(30)
    (report,) = letters.commands.json("dlq", "redrive", "--queue", "q")
    assert (report["redriven"], report["already_redriven"]) == (1, 1)
    assert letters.redriven() == {"two": 1}


def test_selections_limits_and_dry_runs(letters: Letters) -> None:
    letters.write("a1", "a2", "a3", queue="a")
    letters.write("b1", queue="b", reason=DeadLetterReason.REJECTED)
    run = letters.commands.json
    assert run("dlq", "redrive", "--dry-run")[0]["selected"] == 4
    assert run("dlq", "redrive", "--dry-run", "--reason", "rejected")[0]["selected"] == 1
    assert run("dlq", "redrive", "--dry-run", "--queue", "a", "--limit", "2")[0]["selected"] == 2
    assert letters.redriven() == {}
    assert run("dlq", "redrive", "--queue", "a", "--limit", "2")[0]["redriven"] == 2
    assert run("dlq", "redrive", "--everything")[0]["redriven"] == 2
    assert sum(letters.redriven().values()) == 4
    groups = run("dlq", "ls")
    assert [(group["queue_id"], group["reason"]) for group in groups] == [
        ("a", "max-deliveries"), ("b", "rejected"),
    ]  # fmt: skip


def test_a_lost_payload_is_not_sent_as_nothing(letters: Letters) -> None:
    letters.write("gone", payload=None, reason=DeadLetterReason.PAYLOAD_LOST)
    letters.write("null", payload=None)
    letters.commands.run("send", "q", "large", "--id", "large")
    (original,) = letters.records(letters.config.message_topic)
    place = Origin(
        letters.config.message_topic,
        original.partition() or 0,
        original.offset() or 0,
        original.timestamp()[1],
    )
    letters.write("by-reference", payload=None, payload_at=place)
    (report,) = letters.commands.json("dlq", "redrive", "--everything")
    assert (report["redriven"], report["payload_lost"]) == (2, 1)
    values = {
        dict(record.headers() or ())["kafkamq-id"]: record.value()
        for record in letters.records(letters.config.message_topic)
    }
    assert values == {b"large": b"large", b"null": None, b"by-reference": b"large"}


def test_a_dead_letter_of_the_last_resort_finds_its_queue(letters: Letters) -> None:
    """R11: neither key nor headers fitted; the header names the queue, the original has the rest.

    A delayed message's original is its SCHEDULE. What belongs to no known queue stays open.
    """
    config = letters.config
    sends = [("plain", ()), ("delayed", ("--delay", "600"))]
    for name, more in sends:
        given = ("--key", f"key of {name}", "--header", "h=1", "--id", name, *more)
        letters.commands.run("send", "q", f"payload of {name}", *given)
    places = [
        Origin(topic, record.partition() or 0, record.offset() or 0, record.timestamp()[1])
        for topic in (config.message_topic, config.marker_topic)
        for record in letters.records(topic)
    ]
    replaced = replace(places[0], timestamp_ms=places[0].timestamp_ms + 1)  # R13: another topic's
    for place in (*places, replaced):
        letters.bury(b"q", payload=None, payload_at=place)
    letters.bury(b"q", payload=b"of a tracker that knew no key")
    letters.bury(b"", payload=b"nobody's")
    (report,) = letters.commands.json("dlq", "redrive", "--queue", "q")
    assert (report["redriven"], report["payload_lost"], report["queue_unknown"]) == (3, 1, 0)
    (report,) = letters.commands.json("dlq", "redrive", "--everything")
    assert (report["redriven"], report["payload_lost"], report["queue_unknown"]) == (0, 1, 1)
    copies = {}
    for record in letters.records(config.message_topic):
        headers = dict(record.headers() or ())
        if REDRIVEN_FROM in headers:
            copies[record.value()] = (record.key(), headers.get("h"), headers.get("kafkamq-id"))
    assert copies == {
        b"payload of plain": (b"q\0key of plain", b"1", b"plain"),
        b"payload of delayed": (b"q\0key of delayed", b"1", b"delayed"),
        b"of a tracker that knew no key": (b"q", None, f"{config.message_topic}/0/7".encode()),
    }
    stayed = [letter["queue_id"] for letter in letters.commands.json("dlq", "peek")]
    assert sorted(stayed) == ["", "q"]


def test_what_does_not_fit_any_more_is_named_and_the_others_go(letters: Letters) -> None:
    """Batches of small ones, which are larger than the topic takes, go in smaller transactions."""
    config = letters.config
    small = [f"m{number}" for number in range(8)]
    letters.write(*small[:4], payload=b"s" * 400)
    letters.write("large", payload=os.urandom(3000))
    letters.write(*small[4:], payload=b"s" * 400)
    (large,) = (letter for letter in read_dead_letters(config) if letter.id == "large")
    bootstrap = config.bootstrap_servers
    topic_settings(bootstrap, config.message_topic, max_message_bytes="1000")
    process = letters.commands.process("dlq", "redrive", "--everything", "--limit", "8")
    _, notes = process.communicate(timeout=within(60))
    assert process.returncode == 1, notes
    assert letters.redriven() == dict.fromkeys(small, 1)  # the limit is of those that go
    place = f"{config.dead_letter_topic}[{large.partition}]@{large.offset}"
    assert f"{place} cannot be: its message, with a payload of 3,000 bytes, is larger than" in notes
    assert f"max.message.bytes of {config.message_topic} allows: raise it, and" in notes
    report = redrive(config, Selection())
    assert (report.selected, report.redriven, report.already_redriven) == (1, 0, 8)
    ((refused,), count) = report.refusals, report.refused
    assert (refused.topic, refused.partition, refused.offset, count) == (
        config.dead_letter_topic, large.partition, large.offset, 1,
    )  # fmt: skip
    topic_settings(bootstrap, config.message_topic, max_message_bytes="100000")
    wait_until(lambda: redrive(config, Selection()).redriven == 1)
    assert letters.redriven() == dict.fromkeys([*small, "large"], 1)


def test_a_queue_whose_topic_is_gone_holds_up_no_other_one(letters: Letters) -> None:
    gone = f"{letters.config.namespace}-gone"
    letters.write("first", topic=gone)
    letters.write("second")
    report = redrive(letters.config, Selection())
    assert letters.redriven() == {"second": 1}
    ((refused,), count) = report.refusals, report.refused
    assert (refused.error, count) == (f"there is no topic {gone}: create it, and redrive again", 1)


# Redrives until its second transaction is written, and waits there to be killed.
_STUCK = """
import sys, time
from kafkamq import Reject, Service
from kafkamq.transport.admin import Admin
from kafkamq.transport.transactions import TransactionalProducer
from kafkamq.config import ServiceConfig
from kafkamq.queue.dead_letters import Selection, redrive

commit, commits = TransactionalProducer.commit, []

def stuck(self, **bound):
    commits.append(1)
    if len(commits) == 2:
        self.flush()
        print("open", flush=True)
        time.sleep(600)
    commit(self, **bound)

TransactionalProducer.commit = stuck
redrive(ServiceConfig(bootstrap_servers=sys.argv[1], namespace=sys.argv[2]), Selection())
"""


def test_killed_redrives_lose_and_repeat_nothing(letters: Letters) -> None:
    ids = [f"m{number}" for number in range(3 * MAX_TRANSACTION_RECORDS + 10)]
    letters.write(*ids)
    for done in (1, 2):
        process = subprocess.Popen(
            [sys.executable, "-c", _STUCK, letters.config.bootstrap_servers,
             letters.config.namespace],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
        finally:
            process.kill()  # with a transaction that is written and not committed
            process.communicate()
        # The next redrive aborts that transaction when it starts; here a look of our own does.
        producer = TransactionalProducer(letters.config, redrive_transactional_id(letters.config))
        producer.init()
        producer.close()
        assert sum(letters.redriven().values()) == done * MAX_TRANSACTION_RECORDS
    letters.commands.run("dlq", "redrive", "--everything", "--json")
    assert letters.redriven() == dict.fromkeys(ids, 1)


def test_a_second_redrive_ends_the_first(letters: Letters) -> None:
    letters.write(*(f"m{number}" for number in range(2 * MAX_TRANSACTION_RECORDS)))

    def second(_: int) -> None:
        if not reports:
            reports.append(redrive(letters.config, Selection()))

    reports: list[RedriveReport] = []
    with pytest.raises(FencedError):
        redrive(letters.config, Selection(), on_progress=second)
    assert reports[0].redriven == MAX_TRANSACTION_RECORDS
    assert set(letters.redriven().values()) == {1}
    assert len(letters.redriven()) == 2 * MAX_TRANSACTION_RECORDS


def test_what_another_redrive_has_sent_is_not_repeated(letters: Letters) -> None:
    """The first one's transaction is aborted, behind which the second one does all of it."""
    ids = [f"m{number}" for number in range(30)]
    letters.write(*ids)
    others: list[RedriveReport] = []

    def also(_report: RedriveReport, _count: int) -> tuple[()]:
        if not others:
            others.append(redrive(letters.config, Selection()))
            raise TransactionAbortedError("its records were not confirmed in time")
        return ()

    report = redrive(letters.config, Selection(), also=also, max_records=10)
    assert letters.redriven() == dict.fromkeys(ids, 1)
    assert (others[0].redriven, report.redriven, report.selected) == (30, 0, 0)
    assert report.already_redriven == 30


# Stands still inside its second transaction, for longer than its records may be on their way.
_FROZEN = """
import os, signal, sys
from kafkamq.config import ServiceConfig
from kafkamq.queue.dead_letters import Selection, redrive

begun = []

def also(report, count):
    begun.append(1)
    if len(begun) == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    return ()

redrive(ServiceConfig(bootstrap_servers=sys.argv[1], namespace=sys.argv[2]), Selection(), also=also)
"""


@pytest.mark.faults
def test_a_redrive_that_was_frozen_repeats_nothing(letters: Letters) -> None:
    ids = [f"m{number}" for number in range(3 * MAX_TRANSACTION_RECORDS)]
    letters.write(*ids)
    process = subprocess.Popen(
        [sys.executable, "-c", _FROZEN, letters.config.bootstrap_servers, letters.config.namespace],
        stderr=subprocess.DEVNULL,
    )
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        report = redrive(letters.config, Selection())
        assert report.redriven == 2 * MAX_TRANSACTION_RECORDS
        time.sleep(14)  # its records expire after ten
        process.send_signal(signal.SIGCONT)
        process.wait(within(60))
    finally:
        process.kill()
        process.wait()
    assert letters.redriven() == dict.fromkeys(ids, 1)


def test_a_selection_is_all_of_its_parts() -> None:
    def letter(**fields: str) -> DeadLetter:
        return DeadLetter(
            partition=0, offset=0, timestamp_ms=0, error="", delivery_count=1, origin=None,
            user_key=None, payload=b"", headers=(), redriven_from="", is_redriven=False,
            **{"queue_id": "q", "id": "i", "reason": "expired", **fields},  # type: ignore[arg-type]
        )  # fmt: skip

    assert letter() in Selection()
    assert letter() in Selection(queue_id="q", reason="expired", ids=frozenset("i"))
    assert letter(queue_id="p") not in Selection(queue_id="q")
    assert letter(reason="rejected") not in Selection(reason="expired")
    assert letter(id="j") not in Selection(ids=frozenset("i"))
    assert "something else" not in Selection()


def test_a_letter_whose_header_names_are_no_text_stays_where_it_is(letters: Letters) -> None:
    """Kafka allows any bytes as a name; the client can't read them, so a copy would lose them."""
    config = letters.config
    write_raw(
        config.bootstrap_servers,
        config.dead_letter_topic,
        key=join_key("q", "key"),
        value=b"x",
        headers={b"\xff\xfe": b"1", b"kafkamq-id": b"unseen"},
    )
    letters.write("one")
    shown = letters.commands.json("dlq", "peek")
    assert sorted(letter["id"] for letter in shown) == ["", "one"]
    (report,) = letters.commands.json("dlq", "redrive", "--everything")
    assert (report["redriven"], report["headers_unreadable"]) == (1, 1)
    assert letters.redriven() == {"one": 1}


def test_a_letter_of_a_queue_with_its_own_topic_goes_back_there(letters: Letters) -> None:
    config = letters.config
    with Service(config.bootstrap_servers, config.namespace) as service:
        queue = service.queue("own", backend="offsets")
        queue.create_topics(partitions=2)
        queue.producer().send(b"x", key="k", id="one").result(within(30))
        with queue.consumer() as consumer:
            (message,) = receive_all(consumer, 1)
            message.reject("no", wait=True)
            (report,) = letters.commands.json("dlq", "redrive", "--queue", "own")
            assert (report["redriven"], letters.redriven()) == (1, {})
            (again,) = receive_all(consumer, 1)
            assert (again.id, again.key, again.payload) == ("one", b"k", b"x")
            again.ack(wait=True)


def test_a_letter_of_a_parallel_consumer_goes_back_with_its_key(letters: Letters) -> None:
    """The key is its record's alone: it names no queue."""
    topic = make_topic(letters.commands.bootstrap, f"{letters.config.namespace}-orders")
    fill(letters.commands.bootstrap, topic, ["customer 5", None])
    told: list[str] = []
    with make(
        letters.commands.bootstrap,
        topic,
        "charging",
        dead_letter_topic=letters.config.dead_letter_topic,
        on_dead_letter=lambda record, reason: told.append(reason),
    ) as consumer:
        consumer.poll(lambda record: Reject("no use"))
        wait_until(lambda: len(told) == 2)
    found = list(read_dead_letters(letters.config))
    assert {letter.queue_id for letter in found} == {"charging"}
    assert {letter.user_key for letter in found} == {b"customer 5", None}
    assert redrive(letters.config, Selection(queue_id="charging")).redriven == 2
    records = Counter((record.key(), record.value()) for record in letters.records(topic))
    assert records == Counter({(b"customer 5", b"0"): 2, (None, b"1"): 2})
