"""What operators do on the pages, on a real broker: each dead letter once, and on record."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode

import pytest
from confluent_kafka import Producer
from tests.integration.cli_tools import Commands
from tests.integration.test_cli_redrive import Letters
from tests.integration.web_client import WebClient
from tests.sure_producer import SureProducer
from tests.waiting import wait_until, within

from kafkamq import Service
from kafkamq.config import ServiceConfig
from kafkamq.errors import DeadlineExceededError, StateError
from kafkamq.markers.replays import Messages
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.markers.wire.markers import encode_marker
from kafkamq.queue.dead_letters import (
    REDRIVEN_FROM,
    REPLAY_NAME,
    REPLAYED_FROM,
    DeadLetter,
    Selection,
    read_dead_letters,
    redrive,
)
from kafkamq.queue.names import actions_topic
from kafkamq.queue.wire.headers import Origin
from kafkamq.transport.admin import Admin
from kafkamq.transport.log_reader import scan
from kafkamq.transport.record import headers_of
from kafkamq.types import DeadLetterReason, Headers, Marker, MarkerType, MessageId, Outcome
from kafkamq.web import acting
from kafkamq.web.acting import Operations
from kafkamq.web.actions import Actions
from kafkamq.web.app import serving
from kafkamq.web.filters import LetterFilter
from kafkamq.web.index.follower import Index, IndexOptions
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

    def begin(web: WebClient) -> str:
        found = web.get("redrive?queue=q")
        assert (found["count"], len(found["samples"])) == (count + refused, 20)
        rate = count / (2 * kills + 3)
        return str(web.post("jobs", filter={"queue": "q"}, rate=rate, name="once more")["id"])

    job = through_kills(commands, begin, kills, before_kill)
    id = job["id"]
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


def through_kills(
    commands: Commands,
    begin: Callable[[WebClient], str],
    kills: int,
    before_kill: Callable[[int], None],
) -> dict[str, Any]:
    """The job that ``begin`` has begun goes on, whatever process is killed, to its end."""
    index, id = str(Path.cwd() / "index"), ""
    for number in range(kills + 1):
        process = commands.process("web", "--port", "0", "--index", index)
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            address = next(word for word in line.split() if word.startswith("http://"))
            web = WebClient(address, timeout_s=120.0)
            id = id or begin(web)
            if number < kills:
                web.wait_for_more(id)
                before_kill(number)
                web.wait_for_more(id)
            else:
                job = web.wait_for(id, "done")
        finally:
            process.kill()  # SIGKILL
            process.communicate()
    return job


def replay_through_kills(
    commands: Commands,
    config: ServiceConfig,
    count: int,
    kills: int,
    *,
    before_kill: Callable[[int], None] = lambda number: None,
) -> None:
    """Each message goes again once, and nothing that was sent since."""
    with Service(config.bootstrap_servers, config.namespace) as service:
        producer = service.queue("q").producer()
        for number in range(count):
            producer.send(b"x", key=f"k{number % 7}", id=f"id-{number}")
        producer.flush()

        def begin(web: WebClient) -> str:
            found = web.get("replay?queue=q")
            assert (found["count"], found["is_whole"]) == (count, True)
            rate = count / (2 * kills + 3)
            started = web.post("jobs", kind="replay", filter={"queue": "q"}, rate=rate)
            producer.send(b"x", id="later").result(within(30))
            return str(started["id"])

        job = through_kills(commands, begin, kills, before_kill)
    assert (job["kind"], job["done"], job["refused"]) == ("replay", count, 0)
    again = Counter(headers["kafkamq-id"] for _, headers in replayed(config, job["id"]))
    assert again == {b"id-%d" % number: 1 for number in range(count)}, "each once"
    log = actions(config)
    assert (log[0].what, log[0].id) == ("replay", job["id"])
    assert sum(each.more["count"] for each in log if each.what == "progress") == count


def replayed(config: ServiceConfig, id: str) -> list[tuple[Any, dict[str, bytes | None]]]:
    """Key and value, and the headers, of what a job has sent again."""
    found = [
        ((record.key(), record.value()), dict(headers_of(record)))
        for record in scan(config, config.message_topic)
    ]
    return [each for each in found if each[1].get(REPLAY_NAME) == id.encode()]


def test_messages_that_are_chosen_go_again_once(letters: Letters, tmp_path: Path) -> None:
    config = letters.config
    with (
        Service(config.bootstrap_servers, config.namespace) as service,
        LocalTracker(config).in_thread(),
        client(config, tmp_path / "index") as web,
    ):
        queue = service.queue("q", redelivery_timeout=30.0)
        producer = queue.producer()
        service.queue("another").producer().send(b"x", id="other").result(within(30))
        for number in range(6):
            headers = {"parity": b"even" if number % 2 == 0 else b"odd"}
            producer.send(b"%d" % number, key="k", id=f"id-{number}", headers=headers)
        producer.send(b"later", id="delayed", delay=0.1)
        producer.flush()
        copied, acked = [], set[str]()
        with queue.consumer() as worker:
            while len(acked) < 5:  # the sixth, and what comes behind it, stays
                message = worker.receive(within(30.0))
                if message is None or message.id == "id-5":
                    continue
                if message.id == "id-1" and message.delivery_count == 1:
                    message.nack(delay=0.0)
                    copied.append(message.id)
                elif message.id != "delayed":
                    message.ack()
                    acked.add(message.id)
            worker.flush()
        assert (copied, acked) == (["id-1"], {f"id-{number}" for number in range(5)})

        def meant(filter: dict[str, Any]) -> list[str]:
            found = web.get(f"replay?{urlencode(filter)}")
            assert [each["queue"] for each in found["samples"]] == ["q"] * found["count"]
            return sorted(each["id"] for each in found["samples"])

        def sent(filter: dict[str, Any], **more: Any) -> list[str]:
            wanted = meant(filter)
            id = web.post("jobs", kind="replay", filter=filter, **more)["id"]
            assert web.wait_for(id, "done")["done"] == len(wanted)
            assert (
                sorted(str(each[1]["kafkamq-id"], "utf-8") for each in replayed(config, id))
                == wanted
            )
            return wanted

        last_ms = max(record.timestamp()[1] for record in scan(config, config.message_topic))
        until = {"queue": "q", "until_ms": last_ms + 1}
        wanted = {"queue": "q", "state": "done"}
        assert sent(wanted, id="mine") == [f"id-{number}" for number in range(5)]
        for pair, headers in replayed(config, "mine"):
            number = (headers["kafkamq-id"] or b"")[-1:]
            assert pair == (b"q\0k", number), "key and payload stay"
            assert headers["parity"] == (b"odd" if int(number) % 2 else b"even")
            assert "kafkamq-delivery-count" not in headers, "it starts again"
            assert (headers[REPLAYED_FROM] or b"").startswith(config.message_topic.encode())
        with pytest.raises(HTTPError, match="409"):
            web.post("jobs", kind="replay", filter=wanted, id="mine")  # as by a second click
        everything = [f"id-{number}" for number in range(6)]
        assert meant(until) in (everything, ["delayed", *everything]), "no copy of a tracker's"
        assert meant({**until, "header": "odd"}) == ["id-1", "id-3", "id-5"]
        assert sent({**until, "state": "done", "header": "odd"}) == ["id-1", "id-3"]
        assert meant({"queue": "q", "key": "k", "since_ms": 1 << 45}) == []
        assert len(meant({"queue": "q", "since_ms": last_ms + 1})) == 5 + 2, "what went again"
        for wrong in ({}, {"key": "k"}, {"queue": "q", "reason": "expired"}):
            with pytest.raises(HTTPError, match="400"):
                web.post("jobs", kind="replay", filter=wrong, everything=True)
        page = web.page("replay?queue=q&state=done")
        assert "Replay them" in page
        shown = web.send_form("jobs?queue=none&state=done", kind="replay", name="by form")
        assert "by form" in shown


def test_a_message_goes_again_once_whichever_of_its_records_a_run_reads(letters: Letters) -> None:
    """Of two acknowledged copies each run of a replay may read another one first, and alone."""
    config = letters.config
    _copied(config, 0, (0, 0), (1, 0), (0, 1))
    report = redrive(config, Selection(), source=_replayed(config, {0: 2, 1: 0}))
    assert (report.redriven, _sent_again(config)) == (1, [b"0:1"])
    report = redrive(config, Selection(), source=_replayed(config, {0: 1, 1: 1}))
    assert (report.redriven, report.already_redriven, _sent_again(config)) == (0, 1, [b"0:1"])
    alone = [*_replayed(config, {0: 2, 1: 0}, is_done=False).read(config)]
    assert [(each.partition, each.offset) for each in alone] == [(0, 0)], "the sender's own"


def test_a_done_message_goes_again_if_one_of_its_acknowledged_records_is_meant(
    letters: Letters,
) -> None:
    """Its sender's record was acknowledged too, late, and is of another time, or was deleted."""
    config = letters.config
    _copied(config, 0, (0, 0), (0, 1), acked=((0, 0), (0, 1)))
    source = _replayed(config, {0: 2}, means=lambda letter: letter.offset > 0)
    assert [each.offset for each in source.read(config)] == [1]
    assert [each.offset for each in _replayed(config, {0: 2}).read(config)] == [0], "one goes"


@pytest.mark.parametrize("link", [REDRIVEN_FROM, REPLAYED_FROM])
def test_what_was_redriven_or_replayed_is_a_message_of_its_own(letters: Letters, link: str) -> None:
    config = letters.config
    _copied(config, 0, (0, 0), acked=((0, 0),))
    _copied(config, 1, (0, 1), (1, 0), headers=((link, f"{config.message_topic}/0/0/1".encode()),))
    for is_done, wanted in ((False, [(0, 0), (0, 1)]), (True, [(0, 0), (1, 0)])):
        source = _replayed(config, {0: 2, 1: 1}, is_done=is_done)
        assert sorted((each.partition, each.offset) for each in source.read(config)) == wanted


def test_a_dry_run_of_a_replay_ends_in_time_and_the_job_can_be_started(
    letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = letters.config
    _copied(config, 0, (0, 0))
    with pytest.raises(DeadlineExceededError):
        # No reader comes to this end.
        [*_replayed(config, {0: 2}, is_done=False, until_s=time.monotonic() + 0.5).read(config)]
    monkeypatch.setattr(acting, "MAX_DRY_RUN_S", 0.0)
    with client(config, tmp_path / "index") as web:
        assert not web.get("replay?queue=q")["is_whole"]
        page = web.page("replay?queue=q")
        assert ("At least 0" in page, "Replay them" in page) == (True, True)
        id = web.post("jobs", kind="replay", filter={"queue": "q"})["id"]
        assert web.wait_for(id, "done")["done"] == 1


def test_one_dry_run_of_a_replay_is_under_way_at_a_time(letters: Letters, tmp_path: Path) -> None:
    config = letters.config
    _copied(config, 0, (0, 0))
    reached, go = threading.Event(), threading.Event()

    class Slow(LetterFilter):
        def means(self, letter: DeadLetter) -> bool:
            reached.set()
            return go.wait(within(30))

    operations = Operations(Index(config, IndexOptions(path=tmp_path / "index")), Actions(config))
    counts: list[int] = []
    thread = threading.Thread(
        target=lambda: counts.append(operations.dry_run("replay", Slow(queue="q"))["count"])
    )
    thread.start()
    assert reached.wait(within(30))
    with pytest.raises(StateError, match="under way"):
        operations.dry_run("replay", LetterFilter(queue="q"))
    go.set()
    thread.join(within(30))
    assert counts == [1]
    assert operations.dry_run("replay", LetterFilter(queue="q"))["count"] == 1


def _copied(
    config: ServiceConfig,
    first_offset: int,
    *places: tuple[int, int],
    acked: Sequence[tuple[int, int]] = (),
    headers: Headers = (),
) -> None:
    """Write a message's first record and its copies; ``acked``: empty for all copies."""
    origin = Origin(config.message_topic, 0, first_offset, 1000).encode()
    producer = SureProducer({"bootstrap.servers": config.bootstrap_servers})
    for number, (partition, offset) in enumerate(places):
        own = [*headers, ("kafkamq-id", b"a")] + [("kafkamq-origin", origin)] * (number > 0)
        value = b"%d:%d" % (partition, offset)
        producer.produce(config.message_topic, value, b"q", partition, headers=own)
        producer.confirm(30)
    for place in acked or places[1:]:
        end = Marker(MarkerType.END, MessageId(*place), outcome=Outcome.ACK)
        producer.produce(config.marker_topic, encode_marker(end), None, 0)
    producer.confirm(30)


def _replayed(
    config: ServiceConfig,
    ends: Mapping[int, int],
    *,
    is_done: bool = True,
    means: Callable[[DeadLetter], bool] = lambda letter: True,
    until_s: float = math.inf,
) -> Messages:
    with Admin(config) as admin:
        marker_ends = {
            number: end for number, (end, _) in admin.log_ends(config.marker_topic).items()
        }
    return Messages(
        topic=config.message_topic,
        prefix="replay-mine",
        headers=((REPLAY_NAME, b"mine"),),
        means=means,
        since_ms=0,
        is_done=is_done,
        ends=ends,
        marker_ends=marker_ends,
        until_s=until_s,
    )


def _sent_again(config: ServiceConfig) -> list[bytes]:
    return [value for (_, value), _ in replayed(config, "mine")]


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


def test_what_cannot_be_read_yet_is_written_and_reported(letters: Letters, tmp_path: Path) -> None:
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
