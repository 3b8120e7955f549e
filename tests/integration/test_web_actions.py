"""What operators do on the pages, on a real broker: each dead letter once, and on record."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from confluent_kafka import Producer
from tests.integration.cli_tools import Commands
from tests.integration.test_cli_redrive import Letters
from tests.integration.web_client import WebClient
from tests.waiting import wait_until, within

from kafkamq import Service
from kafkamq.config import ServiceConfig
from kafkamq.queue.dead_letters import REDRIVEN_FROM, Selection, read_dead_letters, redrive
from kafkamq.queue.names import actions_topic
from kafkamq.transport.log_reader import scan
from kafkamq.transport.record import headers_of
from kafkamq.types import DeadLetterReason
from kafkamq.web.app import serving
from kafkamq.web.index.follower import IndexOptions
from kafkamq.web.jobs import Action, decode
from kafkamq.web.options import WebOptions


@pytest.fixture
def commands(bootstrap: str, namespace: str) -> Commands:
    made = Commands(bootstrap, namespace)
    with Service(bootstrap, namespace) as service:
        service.create_topics(partitions=2, marker_partitions=1)
    return made


@pytest.fixture
def letters(commands: Commands) -> Letters:
    return Letters(commands)


@contextmanager
def client(config: ServiceConfig, path: Path) -> Iterator[WebClient]:
    with serving(config, WebOptions(port=0), IndexOptions(path=path)) as address:
        yield WebClient(address, timeout_s=120.0)


def actions(config: ServiceConfig) -> list[Action]:
    """The committed records of the topic."""
    found = []
    for record in scan(config, actions_topic(config)):
        at_ms, offset = record.timestamp()[1], record.offset() or 0
        action = decode(record.value(), at_ms=at_ms, offset=offset)
        assert action is not None
        found.append(action)
    return found


def copies(config: ServiceConfig) -> Counter[bytes]:
    """How often each dead letter was sent back."""
    found: Counter[bytes] = Counter()
    for record in scan(config, config.message_topic):
        name = dict(headers_of(record)).get(REDRIVEN_FROM)
        if name is not None:
            found[name] += 1
    return found


def redrive_through_kills(
    commands: Commands,
    letters: Letters,
    count: int,
    kills: int,
    *,
    before_kill: Callable[[int], None] = lambda number: None,
    refused: int = 0,
) -> dict[str, Any]:
    """Each dead letter that is meant goes once, and is counted by a record of its transaction.

    ``refused``: how many more the caller has written, which no topic takes; all are named.
    """
    config = letters.config
    for first in range(0, count, 10_000):
        letters.write(*(f"id-{number}" for number in range(first, min(count, first + 10_000))))
    letters.write("other", queue="another")
    unmoved = {each.id for each in read_dead_letters(config) if not each.id.startswith("id-")}
    index, id, rate = str(Path.cwd() / "index"), "", count / (2 * kills + 3)
    for number in range(kills + 1):
        process = commands.process("web", "--port", "0", "--index", index)
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            address = next(word for word in line.split() if word.startswith("http://"))
            web = WebClient(address, timeout_s=120.0)
            if not id:
                found = web.get("redrive?queue=q")
                assert (found["count"], len(found["samples"])) == (count + refused, 20)
                id = web.post("jobs", filter={"queue": "q"}, rate=rate, name="once more")["id"]
            if number < kills:
                web.wait_for_more(id)
                before_kill(number)
                web.wait_for_more(id)
            else:
                job = web.wait_for(id, "done")
        finally:
            process.kill()  # SIGKILL
            process.communicate()
    assert (job["done"], job["refused"], job["left"]) == (count, refused, 0)
    assert len(job["refusals"]) == refused
    assert job["name"] == "once more"
    sent = copies(config)
    assert (len(sent), set(sent.values())) == (count, {1}), "each once"
    assert {each.id for each in read_dead_letters(config) if not each.is_redriven} == unmoved
    log = actions(config)
    assert log[0].at_ms <= min(
        record.timestamp()[1] for record in scan(config, config.message_topic)
    ), "its record is there before its effect"
    assert (log[0].what, log[0].id, log[0].user) == ("redrive", id, "local")
    assert sum(each.more["count"] for each in log if each.what == "progress") == count
    runs = [each.user for each in log if each.what == "run"]
    assert len(set(runs)) == kills + 1, "each process took it up"
    return job


@pytest.mark.slow
def test_a_job_goes_on_behind_a_kill(
    commands: Commands, letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    redrive_through_kills(commands, letters, 2000, 1)


def test_a_job_is_paused_goes_on_and_is_cancelled(letters: Letters, tmp_path: Path) -> None:
    config = letters.config
    letters.write(*(f"id-{number}" for number in range(20)))
    letters.write("late", reason=DeadLetterReason.EXPIRED)
    with client(config, tmp_path / "index") as web, client(config, tmp_path / "other") as other:
        with pytest.raises(HTTPError, match="400"):
            web.post("jobs")
        id = web.post("jobs", filter={"reason": "max-deliveries"}, rate=2)["id"]
        web.wait_for_more(id)
        other.wait_for(id, "running")
        other.post(f"jobs/{id}", do="pause")  # by the process that may not have the turn
        assert other.job(id)["state"] == "paused"
        done = web.wait_for(id, "paused")["done"]
        one = web.post("jobs", filter={"key": "key", "reason": "expired"})["id"]
        web.wait_for(one, "done")
        assert web.job(id)["done"] <= done + 2, "what was under way, and no more"
        letters.write("died again", reason=DeadLetterReason.MAX_DELIVERIES)
        web.post(f"jobs/{id}", do="resume")
        wait_until(lambda: web.job(id)["done"] > done + 2, timeout_s=120.0)
        other.post(f"jobs/{id}", do="cancel")
        assert web.wait_for(id, "cancelled")["left"] == 0
        with pytest.raises(HTTPError, match="409"):
            web.post(f"jobs/{id}", do="resume")
        rest = web.post("jobs", filter={"queue": "q", "text": "WHY"})["id"]
        assert web.wait_for(rest, "done")["done"] == 22 - 1 - web.job(id)["done"]
        wanted = ("redrive", "pause", "redrive", "end", "resume", "cancel", "redrive", "end")
        shown = tuple(each["what"] for each in reversed(other.get("actions")["actions"]))
        assert shown == wanted
    assert set(copies(config).values()) == {1}


def test_a_job_leaves_what_died_after_it_began(letters: Letters, tmp_path: Path) -> None:
    letters.write(*(f"id-{number}" for number in range(22)))
    chosen = {"id-3", "id-20"}
    places = [
        f"{each.partition}:{each.offset}"
        for each in read_dead_letters(letters.config)
        if each.id in chosen
    ]
    with client(letters.config, tmp_path / "index") as web:
        id = web.post("jobs", filter={"places": ",".join(places)})["id"]
        assert web.wait_for(id, "done")["done"] == 2
        found = read_dead_letters(letters.config)
        assert {each.id for each in found if each.is_redriven} == chosen, "and no other"
        id = web.post("jobs", filter={"queue": "q"}, rate=4)["id"]
        web.wait_for_more(id)
        web.post(f"jobs/{id}", do="pause")
        letters.write("died again")
        web.post(f"jobs/{id}", do="resume")  # which reads all of the topic again
        assert web.wait_for(id, "done")["done"] == 20
    left = [each.id for each in read_dead_letters(letters.config) if not each.is_redriven]
    assert left == ["died again"]


def test_a_job_names_what_is_refused(letters: Letters, tmp_path: Path) -> None:
    letters.write("fits", "x")
    letters.write("gone", topic="no.such.topic")
    letters.write("lost", payload=None, reason=DeadLetterReason.PAYLOAD_LOST)
    with client(letters.config, tmp_path / "index") as web:
        id = web.post("jobs", everything=True)["id"]
        job = web.wait_for(id, "done")
        assert (job["done"], job["refused"]) == (2, 2)
        assert any("no.such.topic" in each for each in job["refusals"])
        assert "payload" in job["why"]


def test_another_redrive_ends_the_turn_once_and_pauses_the_second_time(
    letters: Letters, tmp_path: Path
) -> None:
    letters.write(*(f"id-{number}" for number in range(30)))
    with client(letters.config, tmp_path / "index") as web:
        id = web.post("jobs", filter={"queue": "q"}, rate=1)["id"]
        for name in ("id-28", "id-29"):
            web.wait_for_more(id)
            redrive(letters.config, Selection(ids=frozenset({name})))
        job = web.wait_for(id, "paused")
        assert "another redrive" in job["why"]
        web.post(f"jobs/{id}", do="cancel")
    assert set(copies(letters.config).values()) == {1}


def test_messages_are_sent_edited_and_cancelled(letters: Letters, tmp_path: Path) -> None:
    config = letters.config
    letters.write("broken", payload=b"{")
    with Service(config.bootstrap_servers, config.namespace) as service:
        queue = service.queue("q")
        later = queue.producer().send(b"later", id="later", delay=600.0).result(within(30))
        with client(config, tmp_path / "index") as web:
            sent = web.post(
                "messages", queue="q", payload="h\u00e4", key="k", id="new", headers={"a": "b"}
            )
            assert (sent["id"], sent["where"][:2]) == ("new", "0/")
            (letter,) = web.get("find?q=broken")["found"]
            id = web.post(f"resend/{letter['where']}", payload='{"a": 1}')["id"]
            assert web.wait_for(id, "done")["done"] == 1
            wait_until(lambda: web.get("redrive")["count"] == 0)
            with pytest.raises(HTTPError, match="409"):
                web.post(f"resend/{letter['where']}", payload="again")
            (delayed,) = web.get("find?q=later")["found"]
            assert delayed["where"] == f"1/{later.partition}/{later.offset}"
            web.post(f"cancel/{delayed['where']}")
            what = [each["what"] for each in web.get("actions")["actions"]]
            assert what == ["done", "cancel-delayed", "end", "resend", "done", "send"]
            with pytest.raises(HTTPError, match="400"):
                web.post("messages", queue="q", payload="x" * 1_000_000, headers={"kafkamq-id": ""})
        found = {}
        for record in scan(config, config.message_topic):
            headers = dict(headers_of(record))
            found[headers["kafkamq-id"]] = (record.value(), headers.get("a"))
    assert found[b"new"] == ("h\u00e4".encode(), b"b")
    assert found[b"broken"][0] == b'{"a": 1}'
    log = actions(config)
    assert [each.what for each in log if each.id == log[0].id] == ["send", "done"]
    assert "h\u00e4" not in json.dumps([dict(each.more) for each in log], ensure_ascii=False)


def test_what_cannot_be_read_yet_is_written_and_said(letters: Letters, tmp_path: Path) -> None:
    config = letters.config
    letters.write("one")
    with client(config, tmp_path / "index") as web:
        web.wait_for(web.post("jobs", filter={"queue": "nobody's"})["id"], "done")
        made = [f"many-{number}" for number in range(60)]
        with open_transaction(config, made) as producer:
            written = web.post("jobs", filter={"queue": "q"})
            assert written["is_read"] is False
            page = web.send_form("jobs?queue=q", name="by form")
            assert "It is written, and not read yet." in page
            assert written["id"] not in {job["id"] for job in web.get("jobs")["jobs"]}
            producer.commit_transaction(within(30))
        assert web.wait_for(written["id"], "done")["done"] == 1
        wait_until(lambda: web.get("jobs")["count"] == 63)
        pages = [web.get(f"jobs?page={page}") for page in (1, 2, 3)]
        assert [each["page"] for each in pages] == [1, 2, 2]
        ids = [job["id"] for each in pages[:2] for job in each["jobs"]]
        assert (len(set(ids)), len(pages[0]["jobs"])) == (63, 50)
        assert ids[2:62] == made[::-1], "the newest first"


@contextmanager
def open_transaction(config: ServiceConfig, ids: list[str]) -> Iterator[Producer]:
    """A process that has written jobs, which nobody may read as long as it commits nothing."""
    settings = {"bootstrap.servers": config.bootstrap_servers}
    producer = Producer({**settings, "transactional.id": f"{config.namespace}.stands-still"})
    producer.init_transactions(within(30))
    producer.begin_transaction()
    more = {"filter": {"queue": "none"}, "ends": {}, "topic_id": ""}
    for id in ids:
        for what in ("redrive", "cancel"):
            value = Action(what=what, id=id, user="ann", more=more).encode()
            producer.produce(actions_topic(config), value)
    producer.flush(within(30))
    yield producer


def test_an_action_that_fails_says_so(letters: Letters, tmp_path: Path) -> None:
    with client(letters.config, tmp_path / "index") as web:
        with pytest.raises(HTTPError, match="400"):
            web.post("messages", queue="q", payload="x", headers={"kafkamq-id": "mine"})
        last, first = web.get("actions")["actions"]
        assert (first["what"], last["what"]) == ("send", "failed")
        assert "kafkamq-id" in last["more"]["why"]
