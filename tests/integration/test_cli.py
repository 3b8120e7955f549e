"""The commands on a real broker."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.cli_tools import Commands, run_program
from tests.integration.queue_logs import ends, make_service, read_topic, set_topic, starts
from tests.waiting import wait_until, within
from typer.testing import CliRunner

from kafkamq import Service
from kafkamq.cli.app import app
from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.metrics import serve_metrics
from kafkamq.transport.admin import Admin
from kafkamq.types import Outcome


@pytest.fixture
def commands(bootstrap: str, namespace: str) -> Commands:
    with make_service(bootstrap, namespace):
        return Commands(bootstrap, namespace)


@pytest.fixture
def tracked(commands: Commands) -> Iterator[Commands]:
    config = ServiceConfig(bootstrap_servers=commands.bootstrap, namespace=commands.namespace)
    with LocalTracker(config).in_thread():
        yield commands


def test_create_says_what_it_made_and_can_be_repeated(bootstrap: str, namespace: str) -> None:
    commands = Commands(bootstrap, namespace)
    for _ in range(2):
        (made,) = commands.json("create", "--partitions", "2", "--marker-partitions", "2")
        assert made["topics"]["messages"] == f"{namespace}.messages"
        assert len(made["topics"]) == 6


def test_send_and_receive_keep_everything(commands: Commands) -> None:
    sent = commands.json(
        "send", "q", "héllo", "--key", "k", "--header", "a=1", "--id", "mine", "--ttl", "600"
    )
    assert [(item["id"], item["delayed"]) for item in sent] == [("mine", False)]
    binary = json.dumps({"payload_base64": "AP8=", "headers": {"b": {"base64": "/w=="}}})
    commands.run("send", "q", "--file", "-", stdin=binary)
    received = {item["id"]: item for item in commands.json("receive", "q", "-c", "2")}
    first = received.pop("mine")
    assert (first["payload"], first["key"], first["headers"]) == ("héllo", "k", {"a": "1"})
    assert (first["delivery_count"], first["verdict"]) == (1, "ack")
    (second,) = received.values()
    assert (second["payload_base64"], second["headers"]) == ("AP8=", {"b": {"base64": "/w=="}})
    assert commands.json("receive", "q", "--timeout", "2") == []


def test_queues_are_apart(commands: Commands) -> None:
    commands.run("send", "a", "for a")
    commands.run("send", "b", "for b")
    assert [item["payload"] for item in commands.json("receive", "b")] == ["for b"]
    assert [item["payload"] for item in commands.json("receive", "a")] == ["for a"]


def test_a_mistyped_queue_is_told_and_leaves_nothing_behind(commands: Commands) -> None:
    commands.run("send", "orders", "one")
    commands.run("send", "mails", "later", "--delay", "1000")
    before = groups(commands)
    said = commands.notes("receive", "ordres", "--timeout", "1")
    assert f"nothing was ever sent to ordres in {commands.namespace}; queues there:" in said
    assert "mails, orders" in said
    assert "No message in ordres within 1 s." in said
    for arguments in (("ls",), ("peek",), ("redrive",)):
        assert "ever sent to ordres" in commands.notes("dlq", *arguments, "--queue", "ordres")
        assert "ever sent" not in commands.notes("dlq", *arguments, "--queue", "orders")
    assert groups(commands) == before


def test_a_queue_with_delayed_messages_alone_is_none_that_is_mistyped(commands: Commands) -> None:
    commands.run("send", "mails", "later", "--delay", "1000")
    assert "ever sent" not in commands.notes("receive", "mails", "--timeout", "0")
    assert f"kafkamq/{commands.namespace}/mails" in groups(commands)


def test_the_first_message_of_a_queue_may_come_while_it_is_waited_for(commands: Commands) -> None:
    process = commands.process("receive", "q", "--follow")
    try:
        assert process.stderr is not None
        assert "nothing was ever sent to q" in process.stderr.readline()
        commands.run("send", "q", "first")
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
    finally:
        process.kill()
        process.communicate()


def groups(commands: Commands) -> set[str]:
    with Admin(ServiceConfig(bootstrap_servers=commands.bootstrap)) as admin:
        return {name for name in admin.groups() if commands.namespace in name}


def test_a_file_of_lines(commands: Commands, tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    file.write_text("".join(f'{{"json":{{"n":{n}}},"id":"{n}"}}\n' for n in range(2500)))
    sent = commands.json("send", "q", "--file", str(file))
    assert [item["id"] for item in sent] == [str(n) for n in range(2500)]
    received = commands.json("receive", "q", "-c", "2500")
    assert {item["payload"] for item in received} == {f'{{"n":{n}}}' for n in range(2500)}


@pytest.mark.parametrize("option", ["--batch-markers", "--no-batch-markers"])
def test_receive_writes_one_marker_for_many_unless_told_otherwise(
    commands: Commands, option: str
) -> None:
    lines = "\n".join(json.dumps({"payload": str(number)}) for number in range(300))
    commands.run("send", "q", "--file", "-", stdin=lines)
    assert len(commands.json("receive", "q", "-c", "300", option)) == 300
    records = read_topic(commands.bootstrap, f"{commands.namespace}.markers")
    is_batched = [bool(decode_marker(record.value()).batches) for record in records]
    if option == "--no-batch-markers":
        assert is_batched == [False] * 600
    else:  # the first hundred STARTs are single: nothing has told the brokers' time
        assert any(is_batched)
        assert len(records) < 400


def test_a_bad_line_stops_and_what_went_before_is_sent(commands: Commands, tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    file.write_text('{"payload":"x"}\n' * 1000 + '{"payload":1}\n')
    with pytest.raises(ConfigError, match="line 1001: payload must be a text"):
        commands.run("send", "q", "--file", str(file))
    assert len(commands.json("receive", "q", "-c", "1000", "--timeout", "60")) == 1000
    assert commands.json("receive", "q", "--timeout", "2") == []


def test_an_error_inside_a_batch_says_what_was_sent(commands: Commands) -> None:
    """The fourth of five is too large: three are in the queue, and their ids are printed."""
    lines = [{"payload": "x", "id": str(number)} for number in range(5)]
    lines[3]["payload"] = "x" * 2_000_000
    text = "\n".join(json.dumps(line) for line in lines)
    result = CliRunner().invoke(
        app, ["send", "q", "--file", "-", "--json"], input=text, env=commands.environment
    )
    assert isinstance(result.exception, ConfigError)
    assert "3 messages were sent before the error" in result.stderr
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == ["0", "1", "2"]
    received = commands.json("receive", "q", "-c", "3", "--timeout", "60")
    assert {message["id"] for message in received} == {"0", "1", "2"}
    assert commands.json("receive", "q", "--timeout", "2") == []


@pytest.mark.slow
def test_what_was_not_printed_goes_back_uncounted(commands: Commands) -> None:
    """``| head -1``: the reader of the output leaves while a batch is being printed."""
    commands.run("send", "q", *[str(number) * 1000 for number in range(300)])
    config = ServiceConfig(bootstrap_servers=commands.bootstrap, namespace=commands.namespace)
    process = commands.process("receive", "q", "--follow")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(within(60)) == 1
    started = [place for place in starts(config) if place is not None]
    settled = ends(config, Outcome.ACK) + ends(config, Outcome.RELEASE)
    assert len(started) > 1
    assert set(settled) == set(started)
    assert ends(config, Outcome.RELEASE)


@pytest.mark.slow
def test_sigterm_ends_receive_and_leaves_nothing_held(commands: Commands) -> None:
    commands.run("send", "q", *map(str, range(300)))
    config = ServiceConfig(bootstrap_servers=commands.bootstrap, namespace=commands.namespace)
    process = commands.process("receive", "q", "--follow")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=within(60))
    assert process.returncode == 0, errors
    assert set(starts(config)) == {*ends(config, Outcome.ACK), *ends(config, Outcome.RELEASE)}


def test_a_delayed_message_comes_later(tracked: Commands) -> None:
    (sent,) = tracked.json("send", "q", "later", "--delay", "1")
    assert sent["delayed"]
    assert sent["topic"] == f"{tracked.namespace}.markers"
    (received,) = tracked.json("receive", "q", "--timeout", "60")
    assert received["payload"] == "later"
    assert received["timestamp_ms"] >= sent["timestamp_ms"] + 1000


def test_nack_brings_it_back_and_the_last_one_buries_it(tracked: Commands) -> None:
    tracked.run("send", "q", "x", "--id", "i")
    limits = ("--max-deliveries", "2", "--timeout", "60")
    (first,) = tracked.json("receive", "q", "--nack", "--delay", "0.1", *limits)
    (second,) = tracked.json("receive", "q", "--nack", "--reason", "no good", *limits)
    assert (first["delivery_count"], second["delivery_count"]) == (1, 2)
    wait_until(lambda: bool(tracked.json("dlq", "ls")))
    (letter,) = tracked.json("dlq", "peek")
    assert (letter["id"], letter["reason"], letter["error"]) == ("i", "max-deliveries", "no good")


def test_stat_counts_what_waits_and_what_is_held(tracked: Commands) -> None:
    tracked.run("send", "busy", *[str(n) for n in range(5)])
    tracked.run("send", "idle", "x")
    assert len(tracked.json("receive", "busy", "-c", "2")) == 2
    tracked.run("receive", "busy", "--nack", "--delay", "500")

    def open_entries() -> int:
        (stat,) = tracked.json("stat")
        return sum((part["status"] or {}).get("entries", 0) for part in stat["markers"])

    wait_until(lambda: open_entries() == 1)
    (stat,) = tracked.json("stat")
    queues = {queue["queue_id"]: queue for queue in stat["queues"]}
    assert queues["busy"]["waiting"] == 2
    assert queues["idle"]["waiting"] == 1
    assert stat["messages"] >= 6
    assert [part["partition"] for part in stat["markers"]] == [0, 1]
    assert all(part["lag"] is not None for part in stat["markers"])
    (short,) = tracked.json("stat", "--max-scanned", "1")
    assert all(queue["waiting"] is None for queue in short["queues"])
    assert "busy" in tracked.run("stat")


def test_stat_asks_a_worker_by_its_port(commands: Commands) -> None:
    # Of one key, so of one partition: one fetch brings all three.
    commands.run("send", "q", "x", "y", "z", "--key", "k")
    service = Service(commands.bootstrap, commands.namespace)
    queue = service.queue("q", receive_buffer=3)
    with service, queue.consumer() as consumer, serve_metrics(0, host="127.0.0.1") as server:
        assert consumer.receive(within(30)) is not None
        where = ("--port", str(server.port), "--host", "127.0.0.1")

        def has_taken_one_of_three() -> bool:
            # Of the whole process: a consumer of an earlier test may not be collected yet.
            consumers = [
                [each[name] for name in ("queue_id", "in_flight", "ready", "under_way")]
                for each in commands.json("stat", *where)[0]["worker"]
                if each["poll_age_s"] is not None and 0 <= each["poll_age_s"] < within(15)
            ]
            return ["q", 3, 2, 0] in consumers

        wait_until(has_taken_one_of_three)
        assert "last poll" in commands.run("stat", *where)
        assert commands.json("stat")[0]["worker"] is None


def test_stat_counts_messages_and_not_the_ends_of_transactions(tracked: Commands) -> None:
    """Each redelivery and each dead letter is a transaction, whose control records have offsets."""
    tracked.run("send", "q", "x", "y", "z")
    limits = ("--max-deliveries", "2", "--timeout", "60")
    # No copy may come before all three were received once.
    tracked.run("receive", "q", "-c", "3", "--nack", "--delay", "3", *limits)
    tracked.run("receive", "q", "-c", "3", "--reject", "--reason", "no", *limits)
    wait_until(lambda: tracked.json("stat")[0]["dead_letters"] == 3)
    (stat,) = tracked.json("stat")
    (queue,) = stat["queues"]
    assert (queue["behind"], queue["waiting"]) == (0, 0)
    assert (stat["messages"], stat["messages_counted"]) == (6, True)
    assert (stat["dead_letters"], stat["dead_letters_counted"]) == (3, True)
    (short,) = tracked.json("stat", "--max-scanned", "0")
    assert (short["messages_counted"], short["dead_letters_counted"]) == (False, False)
    assert (short["messages"], short["dead_letters"]) > (6, 3)
    assert f"at most {short['dead_letters']} dead" in tracked.run("stat", "--max-scanned", "0")


def test_doctor_passes_good_topics_and_refuses_bad_ones(commands: Commands, bootstrap: str) -> None:
    (report,) = commands.json("doctor")
    assert report["ok"]
    levels = {check["level"] for check in report["checks"]}
    assert levels == {"ok", "warn"}  # one broker: fewer than three replicas
    assert any(check["what"] == "kafka" for check in report["checks"])
    code, out, _ = run_program(["doctor", "-b", bootstrap, "-n", "nothing-here", "--json"], {})
    assert code == 1
    refused = [check for check in json.loads(out)["checks"] if check["level"] == "refuse"]
    assert len(refused) == 6
    assert all("kafkamq create" in check["text"] for check in refused)


def test_doctor_says_when_groups_are_forgotten_before_messages(
    commands: Commands, bootstrap: str
) -> None:
    topic = f"{commands.namespace}.messages"
    (found,) = (one for one in commands.json("doctor") if "checks" in one)
    assert not [one for one in found["checks"] if one["what"] == "groups"]
    set_topic(bootstrap, topic, "retention.ms", str(8 * 86_400_000))
    (found,) = (one for one in commands.json("doctor") if "checks" in one)
    (said,) = [one["text"] for one in found["checks"] if one["what"] == "groups"]
    assert "offsets.retention.minutes is 10080" in said


@pytest.mark.parametrize(("retention_ms", "is_said"), [(86_400_000, True), (86_400_001, False)])
def test_doctor_says_when_nothing_can_be_batched(
    commands: Commands, bootstrap: str, retention_ms: int, is_said: bool
) -> None:
    """R28: not even a message of now outlives a lease of 12 h by far."""
    set_topic(bootstrap, f"{commands.namespace}.messages", "retention.ms", str(retention_ms))
    (found,) = (one for one in commands.json("doctor") if "checks" in one)
    said = [one for one in found["checks"] if one["what"] == "batches"]
    assert [one["level"] for one in said] == (["warn"] if is_said else [])
    assert found["ok"]


def test_doctor_says_when_a_dead_worker_is_noticed_too_late(commands: Commands) -> None:
    session = ("--property", "session.timeout.ms=10000")
    longer = (*session, "--redelivery-timeout", "17")
    for extra, is_said in (((), False), (session, True), (longer, False)):
        (found,) = (one for one in commands.json("doctor", *extra) if "checks" in one)
        said = [one for one in found["checks"] if one["what"] == "sessions"]
        assert [one["level"] for one in said] == (["warn"] if is_said else [])


def test_doctor_refuses_a_lease_that_the_markers_do_not_outlive(commands: Commands) -> None:
    code, out, _ = run_program(["doctor", "--max-lease", "999999", "--json"], commands.environment)
    assert code == 1
    assert any("retention.ms" in check["text"] for check in json.loads(out)["checks"])


def test_the_local_tracker_as_a_command(commands: Commands) -> None:
    with commands.running("tracker", "--engine", "local"):
        commands.run("send", "q", "x")
        commands.json("receive", "q", "--nack", "--delay", "0")
        (again,) = commands.json("receive", "q", "--timeout", "60")
        assert again["delivery_count"] == 2
