"""The index and the pages on a real broker, and in a real browser."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from tests.integration.cli_tools import Commands
from tests.integration.queue_logs import make_service
from tests.unit.test_web_workers import CALL, POOL, answer, answering
from tests.waiting import wait_until, within

from kafkamq import Service, Worker
from kafkamq.cli.top import Sort
from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, StateError
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.metrics import serve_metrics
from kafkamq.queue.dead_letters import Selection, redrive
from kafkamq.transport.admin import Admin
from kafkamq.web.app import serving
from kafkamq.web.guard import hash_password
from kafkamq.web.index.follower import Index, IndexOptions
from kafkamq.web.lookups import reading
from kafkamq.web.options import Account, WebOptions
from kafkamq.web.views import SORTS, Views

CHROMIUM = Path("/usr/bin/chromium")
AXE = Path(__file__).with_name("axe") / "axe.min.js"  # of the npm package axe-core


@pytest.fixture
def config(bootstrap: str, namespace: str) -> ServiceConfig:
    return ServiceConfig(bootstrap_servers=bootstrap, namespace=namespace)


@pytest.fixture
def service(config: ServiceConfig) -> Iterator[Service]:
    with (
        make_service(config.bootstrap_servers, config.namespace) as made,
        LocalTracker(config).in_thread(),
    ):
        yield made


def lives(service: Service, count: int = 20) -> None:
    """Of so many messages: the first two rejected, the third nacked, the others acked."""
    queue = service.queue("orders", redelivery_timeout=30.0)
    producer = queue.producer()
    for number in range(count):
        producer.send(b'{"order": %d}' % number, key=f"k{number}", id=f"order-{number}")
    producer.send(b"later", delay=600.0, id="later")
    producer.flush()
    with queue.consumer() as worker:
        for _ in range(count):
            message = worker.receive(within(30.0))
            assert message is not None
            number = int(message.id.removeprefix("order-"))
            if number < 2:
                message.reject(f"ValueError: no article {number}")
            elif number == 2:
                message.nack(delay=600.0, reason="busy")
            else:
                message.ack()
        worker.flush()
    service.queue("quiet").producer().send(b"?", id="unseen").result(within(30))


def following(config: ServiceConfig, path: Path) -> tuple[Index, Views]:
    index = Index(config, IndexOptions(path=path))
    index.start()
    return index, Views(index)


def shows(views: Views, check: Callable[[dict[str, Any]], bool]) -> bool:
    """Whether the overview's row of the queue is so."""
    if views.state()["error"] or not views.state()["made_ms"]:
        return False
    rows = [row for row in views.overview()["queues"] if row["queue"] == "orders"]
    return bool(rows) and check(rows[0])


def test_the_index_follows_restarts_and_is_built_again(
    service: Service, config: ServiceConfig, tmp_path: Path
) -> None:
    path = tmp_path / "index"
    index, views = following(config, path)
    try:
        lives(service)
        wanted = {"letters": 2, "delayed": 2, "messages": 21}
        wanted |= {"waiting": 0, "in_flight": 0, "due": 0}
        wait_until(lambda: shows(views, lambda row: wanted.items() <= row.items()), "all of it")
        with pytest.raises(ConfigError, match="--index"):
            following(config, path)
        wait_until(lambda: views.queue("quiet") is not None)
        (unseen,) = views.queue("quiet")["waiting_messages"]  # type: ignore[index]
        assert unseen["id"] == "unseen"
        with reading(path) as connection:
            found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")
            assert {"copy_origin", "letter_queue"} <= {name for (name,) in found}
        before = views.overview()["queues"]
        steps = life(views, "order-0")
        assert steps[:3] == ["SENT", "START", "REJECT"]
        # One transaction of two topics: the brokers may stamp either of its records first.
        assert sorted(steps[3:]) == ["DEAD LETTER", "DEAD_LETTERED"]
        assert life(views, "order-5") == ["SENT", "START", "ACK"]
    finally:
        index.close()
    assert redrive(config, Selection(ids=frozenset({"order-0"}))).redriven == 1
    index, views = following(config, path)  # what happened meanwhile is read, nothing twice
    try:
        wait_until(lambda: shows(views, lambda row: (row["letters"], row["waiting"]) == (1, 1)))
        assert life(views, "order-0") == [*steps, "REDRIVEN", "SENT AGAIN"] or life(
            views, "order-0"
        ) == [*steps, "SENT AGAIN", "REDRIVEN"]
        path.unlink()  # while it is open
        service.queue("orders").producer().send(b"one more", id="one-more").result(within(30))
        wait_until(lambda: path.exists() and shows(views, lambda row: row["waiting"] == 2))
        expected = {
            row["queue"]: (
                row["messages"] + 2 * (row["queue"] == "orders"),
                row["delayed"],
                row["in_flight"],
            )
            for row in before
        }

        def counted() -> dict[str, tuple[int, int, int]]:
            return {
                row["queue"]: (row["messages"], row["delayed"], row["in_flight"])
                for row in views.overview()["queues"]
            }

        # What is open is of a picture, which is made behind the rows and at most so often.
        wait_until(lambda: counted() == expected, "the counts of before")
        with Admin(config) as admin:
            ours = [group for group in admin.groups() if config.namespace in group]
        assert not [group for group in ours if "web" in group], "in no group"
    finally:
        index.close()


def test_what_retention_deleted_meanwhile_is_passed(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    with make_service(bootstrap, namespace, partitions=1) as service:
        producer = service.queue("orders").producer()
        admin = AdminClient({"bootstrap.servers": bootstrap})

        def send(count: int) -> None:
            for _ in range(count):
                producer.send(b"x").result(within(30))

        def reads(wanted: int) -> None:
            index, views = following(service.config, tmp_path / "index")
            try:
                wait_until(lambda: shows(views, lambda row: row["messages"] == wanted))
                assert views.message(0, 0, 0) is not None, "what was read is kept"
            finally:
                index.close()

        send(3)
        reads(3)
        send(4)
        place = TopicPartition(service.config.message_topic, 0, 7)
        for future in admin.delete_records([place]).values():
            future.result(within(30))
        send(2)
        reads(5)


def life(views: Views, id: str) -> list[str]:
    places = [each for each in views.find(id) if each["kind"] == "message"]
    log, partition, offset = map(int, places[-1]["where"].split("/"))
    found = views.message(log, partition, offset)
    assert found is not None
    return [step["what"] for step in found["steps"]]


def ask(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=within(30)) as answer:
        text = answer.read().decode()
    return json.loads(text) if "/api/" in address else text


def test_without_topics_the_pages_say_so(config: ServiceConfig, tmp_path: Path) -> None:
    options = IndexOptions(path=tmp_path / "index")
    with serving(config, WebOptions(port=0), options) as address:
        wait_until(lambda: bool(ask(f"{address}api/state")["error"]))
        assert "kafkamq create" in ask(f"{address}api/state")["error"]


def test_the_command_serves_until_it_is_interrupted(service: Service, tmp_path: Path) -> None:
    commands = Commands(service.config.bootstrap_servers, service.config.namespace)
    index = str(tmp_path / "index")
    with commands.running("web", "--port", "0", "--index", index) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        address = next(word for word in line.split() if word.startswith("http://127.0.0.1:"))
        wait_until(lambda: ask(f"{address}api/state")["is_caught_up"])
        health = ask(f"{address}api/health")
        assert {check["what"] for check in health["checks"]} >= {"brokers", "kafka"}


def test_top_prints_queues_and_one_queue(
    service: Service, config: ServiceConfig, tmp_path: Path
) -> None:
    assert {each.value for each in Sort} == SORTS.keys()
    lives(service, 6)
    service.queue("a\x1b[2J").producer().send(b"x").result(within(30))
    commands = Commands(config.bootstrap_servers, config.namespace)
    shown = commands.run("top", "--once", "--sort", "letters")  # by an index of its own
    lines = [line.split() for line in shown.splitlines()]
    (row,) = [line for line in lines if line[:1] == ["orders"]]
    assert row[1:6] == ["0", "0", "2", "0", "2"], "waiting, in flight, delayed, due, dead"
    assert lines.index(row) < lines.index(next(line for line in lines if line[:1] == ["quiet"]))
    assert "\x1b" not in shown
    accounts = {"vic": Account("viewer", hash_password("right"))}
    options = IndexOptions(path=tmp_path / "index")
    with serving(config, WebOptions(port=0, accounts=accounts), options) as address:
        known = ("--url", address, "--user", "vic", "--password", "right")
        wait_until(lambda: "order-2" in commands.run("top", "orders", "--once", *known))
        shown = commands.run("top", "orders", "--once", *known)
        assert {"later", "delayed", "ValueError: no article #"} <= {
            word for line in shown.splitlines() for word in re.split(r"  +", line.strip())
        }
        assert "was seen" in commands.run("top", "nobody", "--once", *known)
        with pytest.raises(ConfigError, match="wants a user"):
            commands.run("top", "--once", "--url", address)
        with pytest.raises(StateError, match="404"):
            commands.run("top", "--once", "--url", f"{address}elsewhere", *known[2:])
    with pytest.raises(StateError, match="does not answer"):
        commands.run("top", "--once", *known)


@contextmanager
def working(service: Service) -> Iterator[str]:
    """A worker whose two handlers never end of themselves, and where it serves its metrics."""
    entered, leave = threading.Event(), threading.Event()

    def never_ending(body: bytes) -> None:
        del body
        entered.set()
        leave.wait(within(60))

    queue = service.queue("orders")
    queue.handler(concurrency=2)(never_ending)
    with serve_metrics(0, host="127.0.0.1") as server, Worker(service, drain=30.0):
        queue.producer().send(b"secret").result(within(30))
        assert entered.wait(within(60))
        try:
            yield f"http://127.0.0.1:{server.port}"
        finally:
            leave.set()


def test_pages_say_what_handlers_are_at(
    service: Service, config: ServiceConfig, tmp_path: Path
) -> None:
    canary = "<script>alert(1)</script>{{7*7}}"
    call = CALL | {"topic": canary, "runs_in": canary, "stack": [canary] * 3}
    hostile_pool = POOL | {"queue": canary, "handler": canary, "consumer": canary, "calls": [call]}
    service.queue("nobodys").producer().send(b"?").result(within(30))
    with (
        working(service) as url,
        answering(answer({"pools": [hostile_pool]})) as hostile,
        answering(b"") as silent,
    ):
        options = WebOptions(port=0, workers=(url, hostile, silent))
        with serving(config, options, IndexOptions(path=tmp_path / "index")) as address:

            def slots() -> dict[str, tuple[int | None, int | None]]:
                queues = ask(f"{address}api/queues")["queues"]
                return {each["queue"]: (each["busy"], each["slots"]) for each in queues}

            wait_until(lambda: ask(f"{address}api/state")["is_caught_up"])
            wait_until(lambda: slots().get("orders") == (1, 2))
            assert slots()["nobodys"] == (None, None), "nobody says"
            assert ask(f"{address}api/queue?name=orders")["slots"] == 2
            assert {"1 of 2, 50 %", "unknown"} <= set(
                re.findall(r"1 of 2, 50 %|unknown", ask(address))
            )
            wait_until(lambda: ask(f"{address}api/workers")["workers"])
            data = ask(f"{address}api/workers")
            (holder,) = data["workers"]
            (pool,) = data["asked"][0]["pools"]
            assert (pool["consumer"], pool["queue"]) == (holder["consumer"], "orders")
            assert data["asked"][2]["error"]
            page = ask(f"{address}workers?consumer={holder['consumer']}")
            assert "never_ending" in page
            assert "secret" not in page
            assert f'href="/message/{ask_where(address, holder["consumer"])}"' in page
            for query in ("", f"?at={hostile}", f"?consumer={quote(canary)}"):
                page = ask(f"{address}workers{query}")
                assert "&lt;script&gt;alert(1)" in page, query
                assert "<script>alert" not in page
                assert "49" not in re.findall(r"alert\(1\)[^\n]*", page)
            assert "no answer" in ask(f"{address}workers")
            named = ask(f"{address}workers?at=http://127.0.0.1:1")
            assert "127.0.0.1:1<" not in named.split("</h1>")[1], "only what was named is asked"


def ask_where(address: str, consumer: str) -> str:
    """Where the one message stands that a consumer holds."""
    (held,) = ask(f"{address}api/workers?consumer={consumer}")["open"]
    return str(held["where"])


@pytest.fixture
def browser() -> Iterator[Any]:
    if not CHROMIUM.exists():
        pytest.skip(f"no browser: {CHROMIUM} is missing ('make chromium' installs it)")
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox", "--disable-background-networking", "--no-first-run"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


@contextmanager
def serving_with_stacks(config: ServiceConfig, options: IndexOptions) -> Iterator[tuple[str, str]]:
    """The address of pages that have read the topics, and of a worker with deep stacks."""
    pool = POOL | {"queue": "orders", "calls": [CALL | {"stack": ["x" * 300] * 20}] * 3}
    with answering(answer({"pools": [pool]})) as worker:
        access = WebOptions(port=0, workers=(worker, f"{worker}/elsewhere"))
        with serving(config, access, options) as address:
            wait_until(lambda: ask(f"{address}api/state")["is_caught_up"])
            wait_until(lambda: ask(f"{address}api/workers")["asked"][0]["pools"])
            yield address, worker


@pytest.mark.slow
def test_a_browser_shows_each_page_and_what_happens_next(
    service: Service, config: ServiceConfig, tmp_path: Path, browser: Any
) -> None:
    lives(service, 6)
    canary = (
        "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"
    )
    service.queue(canary).producer().send(canary.encode(), id=canary, key=canary).result(within(30))
    options = IndexOptions(path=tmp_path / "index")
    complaints: list[str] = []
    with serving_with_stacks(config, options) as (address, worker):
        wait_until(lambda: ask(f"{address}api/queues")["totals"]["letters"] == 2)
        page = browser.new_page(viewport={"width": 400, "height": 800})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: elsewhere(request.url, address, complaints))
        shown = ("", "queue?name=orders", "dead-letters", "workers", "trackers", "health")
        beside = ("redrive", "replay?queue=orders", "jobs", "actions", "send", "find?q=none")
        for path in (*shown, *beside, f"workers?at={worker}"):
            page.goto(f"{address}{path}")
            assert "kafkamq" in page.title()
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= 400, f"{path} is {wide} wide"
            complaints += found_by_axe(page)
        page.goto(f"{address}find?q=order-1")
        page.get_by_role("link", name="order-1").first.click()
        page.get_by_role("link", name="json").click()
        page.get_by_text('"order": 1').wait_for()
        complaints += found_by_axe(page)
        page.emulate_media(color_scheme="dark")
        complaints += found_by_axe(page)
        for path in shown:
            page.goto(f"{address}{path}")
            complaints += found_by_axe(page)
        page.emulate_media(color_scheme="light")
        page.goto(address)
        page.get_by_role("link", name=canary[:40]).click()
        page.get_by_role("link", name=canary[:30]).first.click()
        page.get_by_role("link", name="text", exact=True).click()
        page.locator("pre").wait_for()
        assert page.locator("pre").inner_text() == canary
        assert "hacked" not in page.title()[:6]
        assert page.evaluate("document.images.length") == 0
        page.goto(f"{address}queue?name=quiet")  # the page stays, its numbers go on
        reader_at = (
            "[document.activeElement.textContent, document.querySelector('.scroll').scrollLeft]"
        )
        page.get_by_role("link", name="unseen").focus()
        page.evaluate("document.querySelector('.scroll').scrollLeft = 70")
        service.queue("quiet").producer().send(b"!", id="the-next").result(within(30))
        page.get_by_role("link", name="the-next").wait_for(timeout=60_000)
        assert page.evaluate(reader_at) == ["unseen", 70]
        page.goto(f"{address}dead-letters?queue=orders&text=article")
        complaints += choose_one(page)
        tab_to(page, "Redrive what matches …")  # all of it by the keyboard
        page.keyboard.press("Enter")
        page.wait_for_url("**/redrive*")
        tab_to(page, "name")
        page.keyboard.type("once more")
        tab_to(page, "Redrive them")
        page.keyboard.press("Enter")
        page.get_by_role("row", name="once more").get_by_text("done").wait_for(timeout=60_000)
        assert page.url.startswith(f"{address}jobs?written=")
        assert ask(f"{address}api/jobs")["jobs"][0]["done"] == 2
        page.goto(f"{address}queue?name=quiet")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
    assert not complaints, "\n".join(complaints)


@pytest.mark.faults  # by its length: it kills nothing
def test_a_viewer_sees_what_an_operator_does_and_cannot_do_it(
    service: Service, config: ServiceConfig, tmp_path: Path, browser: Any
) -> None:
    lives(service, 3)
    producer = service.queue("orders").producer()
    token = producer.send(b"!", delay=600.0, id="too-much").result(within(30))
    options = IndexOptions(path=tmp_path / "index")
    secret = hash_password("right")
    accounts = {"ann": Account("operator", secret), "vic": Account("viewer", secret)}
    with serving(config, WebOptions(port=0, accounts=accounts), options) as address:

        def open_pages(name: str, *paths: str) -> list[Any]:
            credentials = {"username": name, "password": "right"}
            context = browser.new_context(http_credentials=credentials)
            pages = [context.new_page() for _ in paths]
            for page, path in zip(pages, paths, strict=True):
                page.goto(f"{address}{path}")
                page.evaluate("window.isTheSame = true")  # until it is loaded again
            return pages

        message = f"message/1/{token.partition}/{token.offset}"
        (jobs,) = open_pages("vic", "jobs")
        wait_until(lambda: jobs.request.get(f"{address}api/{message}").ok)
        totals = f"{address}api/queues?search=orders"
        wait_until(lambda: jobs.request.get(totals).json()["totals"]["letters"] == 2)
        letters, delayed = open_pages("vic", "dead-letters?redriven=yes", message)
        delayed.get_by_text("delayed", exact=True).first.wait_for()
        (operator,) = open_pages("ann", "redrive?queue=orders")
        operator.get_by_label("name").fill("by ann")
        operator.get_by_role("button", name="Redrive them").click()
        jobs.get_by_role("row", name="by ann").get_by_text("done").wait_for()
        for number in range(2):
            letters.get_by_role("link", name=f"order-{number}").wait_for()
        operator.goto(f"{address}{message}")
        operator.get_by_role("button", name="Cancel it").click()
        delayed.get_by_text("nobody holds it").wait_for()
        for page in (letters, jobs, delayed):
            assert page.evaluate("window.isTheSame")
            assert page.locator("form[method=post]").count() == 0
        for path in ("jobs", "redrive?queue=orders", f"cancel/{message[8:]}"):
            assert jobs.request.post(f"{address}{path}").status in (403, 405), path


def found_by_axe(page: Any) -> list[str]:
    """What hinders readers with other senses or devices, as far as axe-core sees it."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{page.url}: {each['id']}: {node['html'][:120]}"
        for each in found["violations"]
        for node in each["nodes"]
    ]


def choose_one(page: Any) -> list[str]:
    """Go to the dry run of one dead letter and back, and return what axe-core found."""
    box = page.get_by_role("checkbox").first
    box.check()
    found = found_by_axe(page)
    page.get_by_role("button", name="Redrive the chosen").click()
    page.get_by_text("1 dead letter:").wait_for()
    page.go_back()
    box.uncheck()
    return found


def tab_to(page: Any, name: str) -> None:
    """Press Tab until the element of this text, or with this label, has the focus."""
    said = "(e => [e.textContent, e.name])(document.activeElement)"
    for _ in range(100):
        page.keyboard.press("Tab")
        if name in page.evaluate(said):
            return
    raise AssertionError(f"no way to {name!r}")


def elsewhere(url: str, address: str, complaints: list[str]) -> None:
    """Notes a request to anybody else."""
    if not url.startswith(address):
        complaints.append(url)
