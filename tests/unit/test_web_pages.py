"""The pages without a broker: who is answered, with which headers, and that all is escaped."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from argon2 import PasswordHasher
from tests.unit.test_web_index import NOW_MS, dead_letter
from tests.unit.web_logs import CONFIG, FakeRecord, Logs
from tests.waiting import wait_until

from kafkamq.errors import ConfigError
from kafkamq.markers.wire.markers import encode_marker
from kafkamq.types import Marker, MarkerType, MessageId, Outcome
from kafkamq.web import lookups
from kafkamq.web.actions import Actions
from kafkamq.web.app import build_app
from kafkamq.web.guard import MAX_BODY_BYTES, hash_password
from kafkamq.web.index import fold
from kafkamq.web.index.fold import OTHER
from kafkamq.web.index.follower import Index, IndexOptions
from kafkamq.web.index.live import Counts, Picture, open_runs
from kafkamq.web.options import Account, User, WebOptions, read_accounts
from kafkamq.web.rendering import (
    STATIC,
    TEMPLATES,
    duration_of,
    number_of,
    size_of,
    spark,
    time_of,
)
from kafkamq.web.views import MAX_SHOWN_BYTES, show

CANARY = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}"
LOCAL = {"host": "localhost:8686"}
# Hashes of the product's own strength take 50 ms each: one test asks for them.
WEAK = PasswordHasher(time_cost=1, memory_cost=64, parallelism=1)


class Pages:
    """An application on an index that no thread follows."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.index = Index(CONFIG, IndexOptions(path=path))
        self.actions = Actions(CONFIG)
        self.app = build_app(self.index, WebOptions(**options), self.actions)

    def get(
        self,
        address: str,
        headers: Mapping[str, str] = LOCAL,
        *,
        method: str = "GET",
        peer: str = "127.0.0.1",
        **body: Any,
    ) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, client=(peer, 1))  # type: ignore[arg-type]
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                return await client.request(method, address, headers=dict(headers), **body)

        return asyncio.run(ask())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An index in which every text that somebody else chooses is a canary."""
    logs = Logs(tmp_path / "index")
    name = CANARY.encode()
    headers = [("kafkamq-id", name), (CANARY, name)]
    logs.messages(
        FakeRecord(0, name + b"\0" + name, None, headers, NOW_MS),
        FakeRecord(1, name, None, (), NOW_MS),
    )
    identity = MessageId(0, 0)
    start = Marker(MarkerType.START, identity, 60_000, name, consumer_id=CANARY)
    logs.marker(FakeRecord(0, None, encode_marker(start)))
    reject = Marker(
        MarkerType.END, identity, outcome=Outcome.REJECT, consumer_id=CANARY, reason=CANARY
    )
    logs.marker(FakeRecord(1, None, encode_marker(reject)))
    start = Marker(MarkerType.START, MessageId(0, 1), 60_000, name, consumer_id=CANARY)
    logs.marker(FakeRecord(2, None, encode_marker(start)))
    more = {"kafkamq-id": name, "kafkamq-queue-id": name, "kafkamq-reason": name, CANARY: name}
    logs.letter(dead_letter(0, CANARY, **more))
    logs.commit()
    runs = tuple(open_runs(logs.fold, {}))
    counts = {run.queue: Counts(in_flight=1) for run in runs}
    _PICTURES[logs.path] = Picture(is_caught_up=True, runs=runs, counts=counts, error=CANARY)
    logs.close()
    return logs.path


_PICTURES: dict[Path, Picture] = {}


def pages(path: Path, **options: Any) -> Pages:
    made = Pages(path, **options)
    made.index.picture = _PICTURES[path]
    return made


class Inert(HTMLParser):
    """Fails where a page has code or styles of its own."""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            assert not name.startswith(("on", "style", "hx-on")), (tag, name)
            assert not (value or "").strip().lower().startswith("javascript:")
        assert tag not in ("style", "iframe", "object", "embed", "img", "base"), tag
        if tag == "script":
            source = dict(attributes)["src"] or ""
            assert source.startswith(("/static/htmx.min.js?", "/static/kafkamq.js?"))


ADDRESSES = (
    "/",
    f"/?search={CANARY}",
    "/queue",
    "/find",
    "/message/0/0/0",
    "/message/0/0/1",
    "/message/2/0/0",
    "/dead-letters",
    "/workers",
    "/trackers",
    "/redrive",
    f"/redrive?queue={CANARY}&since_ms=1",
    "/jobs",
    "/actions",
    f"/send?queue={CANARY}",
    "/nowhere/at/all",
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_canaries_are_inert_on_every_page(path: Path, address: str) -> None:
    where = httpx.URL(f"http://localhost{address}")
    for name, pages_with_it in (("name", "/queue"), ("q", "/find"), ("consumer", "/workers")):
        if where.path == pages_with_it:
            where = where.copy_set_param(name, CANARY)
    site = pages(path)
    if where.path == "/dead-letters":
        for name in ("queue", "reason", "form", "text", "key", "header"):
            Inert().feed(site.get(str(where.copy_set_param(name, CANARY))).text)
    answer = site.get(str(where))
    assert answer.status_code == (404 if "nowhere" in address else 200), answer.text
    assert "<script>alert" not in answer.text
    assert "<img" not in answer.text
    assert "49" not in re.findall(r"onerror[^<]*", answer.text), "a template in a text was run"
    if where.path in ("/", "/queue", "/find", "/message/0/0/0", "/dead-letters", "/workers"):
        assert "&lt;script&gt;alert(1)" in answer.text, "the page shows it"
    Inert().feed(answer.text)


def test_the_api_answers_what_the_pages_show(path: Path) -> None:
    site = pages(path)
    (queue,) = site.get("/api/queues").json()["queues"]
    assert (queue["queue"], queue["waiting"], queue["in_flight"]) == (CANARY, 0, 1)
    (letter,) = site.get("/api/dead-letters").json()["letters"]
    assert (letter["error"], letter["where"]) == (CANARY, "2/0/0")
    life = site.get("/api/message/2/0/0").json()
    assert [step["what"] for step in life["steps"]] == ["SENT", "START", "REJECT", "DEAD LETTER"]
    (worker,) = site.get("/api/workers").json()["workers"]
    assert (worker["consumer"], worker["messages"]) == (CANARY, 1)
    assert site.get("/api/message/0/7/7").status_code == 404
    assert site.get("/api/message/0/7/x").status_code in (400, 404)
    assert site.get("/api/queue").status_code == 400
    paths = site.get("/api/openapi/openapi.json").json()["paths"]
    assert {"/api/queues", "/api/dead-letters", "/api/state"} <= paths.keys()


def test_each_queue_has_a_chart_of_its_last_hour(tmp_path: Path) -> None:
    """What was sent in each minute, the newest last; what is older is not in it."""
    minute = int(time.time()) // 60 + 1  # a page made in the next minute is another one
    logs = Logs(tmp_path / "index")
    sent = {"a": (0, 0, 30), "b": (59, 70), "c": ()}
    for at, (queue, ages) in enumerate(sent.items()):
        for number, age in enumerate(ages):
            at_ms = (minute - age) * 60_000
            logs.messages(FakeRecord(100 * at + number, queue.encode(), None, (), at_ms))
    logs.messages(FakeRecord(1000, b"c", None, (), NOW_MS))
    logs.commit()
    with lookups.reading(logs.path) as connection:
        names = {row[1]: row[0] for row in lookups.queue_rows(connection)}
        chosen = [names["a"], names["b"]]
        found = lookups.sent_by_minute(connection, chosen, minute - 59, 60)
    assert [found[each] for each in chosen] == [
        [2 if age == 0 else int(age == 30) for age in range(59, -1, -1)],
        [int(age == 59) for age in range(59, -1, -1)],
    ]
    site = Pages(logs.path)
    rows = site.get("/api/queues").json()["queues"]
    assert [sum(row["sent_by_minute"]) > 0 for row in rows] == [True, True, False]
    charts = re.findall(r'<path class="busy" d="([^"]*)"', site.get("/").text)
    assert [chart.count("M") > 0 for chart in charts] == [True, True, False]
    assert spark([0, 4, 1, 0]) == "M1 48v-48h1v48zM2 48v-12h1v12z"
    logs.close()


def test_a_queues_page_charts_how_long_workers_took(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "index")
    logs.messages(FakeRecord(0, b"q"), FakeRecord(1, b"q"))
    now_ms = int(time.time()) * 1000
    for offset, took_ms in enumerate((0, 0, 100, 250)):
        kind = MarkerType.END if took_ms else MarkerType.START
        marker = Marker(kind, MessageId(0, offset % 2), 60_000, consumer_id="w")
        at_ms = now_ms // 60_000 * 60_000 + took_ms
        logs.marker(FakeRecord(offset, None, encode_marker(marker), at_ms=at_ms))
    logs.commit()
    site = Pages(logs.path)
    chart = site.get("/api/queue?name=q").json()["chart"]["held_ms"]
    assert (len(chart), set(chart)) == (60, {0, 175}), "the mean of those of one minute"
    assert "the mean of a minute, at most 175 ms" in site.get("/queue?name=q").text
    logs.close()


def test_viewers_share_a_page_and_get_nothing_while_they_have_it(path: Path) -> None:
    site = pages(path)

    def seen(page: str) -> str:
        (tag,) = re.findall(r'"x-seen": "([^"]+)"', page)
        return str(tag)

    first = site.get("/").text
    assert site.get("/").text == first
    had = {**LOCAL, "x-seen": seen(first)}
    assert site.get("/", had).status_code == 204
    assert site.get("/?sort=due", had).status_code == 200, "another page"
    site.index.picture = replace(site.index.picture, version=7)
    wait_until(lambda: site.get("/", had).status_code == 200, "it is made again")
    had = {**LOCAL, "x-seen": seen(site.get("/").text)}
    wait_until(lambda: site.get("/", had).status_code == 200, "times go on, too")


def test_every_answer_has_the_headers(path: Path) -> None:
    site = pages(path)
    static = site.get("/static/kafkamq.css")
    assert static.status_code == 200
    refused = site.get("/", {"host": "evil.example"})
    for answer in (site.get("/"), site.get("/nothing"), site.get("/api/state"), static, refused):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in answer.headers
    assert site.get("/").headers["cache-control"] == "no-store"


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "", "127.0.0.1@e"])
def test_another_host_is_not_answered(path: Path, host: str) -> None:
    site = pages(path)
    assert site.get("/", {"host": host}).status_code == 421
    assert site.get("/", {"host": "[::1]:8686"}).status_code == 200
    named = pages(path, allowed_hosts=frozenset({"Queues.Example"}))
    assert named.get("/", {"host": "queues.example:80"}).status_code == 200


def test_nothing_can_be_posted_where_the_pages_only_read(path: Path) -> None:
    site = pages(path, read_only=True)
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        for address in ("/", "/api/jobs", "/jobs", "/static/kafkamq.css"):
            assert site.get(address, method=method).status_code == 405
    assert site.get("/api/state").json()["csrf"] == ""
    for address in ("/dead-letters", "/redrive", "/jobs", "/send", "/message/2/0/0"):
        assert 'method="post"' not in site.get(address).text, address


def test_no_other_method_is_answered(path: Path) -> None:
    site = pages(path)
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        for address in ("/", "/api/jobs", "/static/kafkamq.css"):
            assert site.get(address, method=method).status_code == 405


def token_of(site: Pages, headers: Mapping[str, str] = LOCAL) -> str:
    return str(site.get("/api/state", headers).json()["csrf"])


REFUSED_ORIGINS: tuple[dict[str, str], ...] = (
    {"origin": "http://evil.example"},
    {"origin": "http://localhost:3000"},
    {"origin": "http://localhost.evil.example:8686"},
    {"origin": "null"},
    {"origin": ""},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site", "origin": "http://localhost:8686"},
)


def test_who_acts_has_a_page_of_ours(path: Path) -> None:
    """Refused by the guard: 403. What comes behind it is 404 or 400, of a job that is not there."""
    site = pages(path)
    token = token_of(site)
    known = {**LOCAL, "x-csrf-token": token}
    for address in ("/jobs/none", "/api/jobs/none"):
        assert site.get(address, method="POST").status_code == 403
        for wrong in (token[:-1], "", "x" * 5000):
            headers = {**LOCAL, "x-csrf-token": wrong}
            assert site.get(address, headers, method="POST").status_code == 403
        for forged in REFUSED_ORIGINS:
            assert site.get(address, {**known, **forged}, method="POST").status_code == 403
        for fine in ({}, {"origin": "http://localhost:8686", "sec-fetch-site": "same-origin"}):
            body: dict[str, Any] = {"json": {"do": "pause"}}
            if not address.startswith("/api"):
                body = {"data": {"do": "pause"}}
            answer = site.get(address, {**known, **fine}, method="POST", **body)
            assert answer.status_code == 404, answer.text
    form = {"csrf": token, "do": "pause"}
    assert site.get("/jobs/none", method="POST", data=form).status_code == 404
    assert site.get("/jobs/none", method="POST", data={"do": "pause"}).status_code == 403
    twice = f"csrf={token}&csrf={token}"
    as_form = {**LOCAL, "content-type": "application/x-www-form-urlencoded"}
    assert site.get("/jobs/none", as_form, method="POST", content=twice).status_code == 403
    other = token_of(pages(path))
    assert other != token, "each process has its own"
    foreign = {**LOCAL, "x-csrf-token": other}
    assert site.get("/jobs/none", foreign, method="POST").status_code == 403
    named = pages(path, allowed_hosts=frozenset({"Queues.Example"}))
    headers = {**LOCAL, "origin": "https://queues.example", "x-csrf-token": token_of(named)}
    answer = named.get("/jobs/none", headers, method="POST", data={"do": "cancel"})
    assert answer.status_code == 404


def test_viewers_and_strangers_do_not_act(path: Path) -> None:
    accounts = {
        "ann": Account("operator", WEAK.hash("right")),
        "vic": Account("viewer", WEAK.hash("right")),
    }
    site = pages(path, accounts=accounts, host="0.0.0.0")
    ann, vic = basic("ann", "right"), basic("vic", "right")
    token = token_of(site, ann)
    assert token_of(site, vic) == ""
    own = {**vic, "x-csrf-token": site.app.token(User("vic", "viewer"))}
    assert "viewers" in site.get("/jobs/none", own, method="POST").text
    for address in ("/jobs", "/api/jobs", "/send", "/resend/2/0/0", "/cancel/1/0/0"):
        for headers, status in ((LOCAL, 401), (vic, 403), (basic("ann", "wrong"), 401)):
            refused = site.get(address, {**headers, "x-csrf-token": token}, method="POST")
            assert refused.status_code == status, address
    headers = {**ann, "x-csrf-token": token}
    assert site.get("/jobs/none", headers, method="POST").status_code == 400
    for address in ("/dead-letters", "/redrive", "/jobs", "/send", "/message/2/0/0"):
        shown = site.get(address, vic).text
        assert 'method="post"' not in shown, address
        assert "/resend/" not in shown
    for address in ("/resend/2/0/0", "/redrive?queue=q", "/api/redrive?header=h"):
        assert site.get(address, vic).status_code == 403
    assert 'name="csrf"' in site.get("/redrive", ann).text


def test_bodies_are_bounded_and_checked(path: Path) -> None:
    site = pages(path)
    known = {**LOCAL, "x-csrf-token": token_of(site)}
    large = b"x" * (MAX_BODY_BYTES + 1)
    refused = site.get("/send", known, method="POST", content=large)
    assert (refused.status_code, "too long" in refused.text) == (413, True)
    for body in (
        {"rate": -1, "filter": {"queue": "q"}},
        {"rate": 1e9, "filter": {"queue": "q"}},
        {"rate": "x", "filter": {"queue": "q"}},
        {},
        {"filter": {"queue": 7}},
        {"filter": {"queue": "q", "since_ms": -1}},
        {"filter": {"queue": "q", "redriven": "maybe"}},
        [],
    ):
        assert site.get("/api/jobs", known, method="POST", json=body).status_code == 400, body
    assert site.get("/api/jobs", known, method="POST", content=b"{").status_code == 400
    for query, form in (("queue=q", {"rate": "nan"}), ("", {"rate": "x"}), ("since_ms=1e9", {})):
        address = f"/jobs?{query}"
        assert site.get(address, known, method="POST", data=form).status_code == 400, form
    no_header = {"queue": "q", "headers": "x"}
    assert site.get("/send", known, method="POST", data=no_header).status_code == 400
    both = {"queue": "q", "payload": "x", "payload_base64": "eA=="}
    assert site.get("/api/messages", known, method="POST", json=both).status_code == 400
    assert site.get("/api/resend/2/0/7", known, method="POST", json={}).status_code == 404
    large, small = 10**30, -(10**30)
    for where in ("1/0/7", "2/0/0", f"{large}/0/0", f"1/{large}/{large}", f"1/{small}/{small}"):
        assert site.get(f"/api/cancel/{where}", known, method="POST").status_code == 404, where
    for where in ("1/0/0", f"{large}/0/0", f"2/{small}/{small}"):
        body = {"json": {"payload": "x"}}
        answer = site.get(f"/api/resend/{where}", known, method="POST", **body)
        assert answer.status_code == 404, where
    fields = "&".join(f"a{number}=1" for number in range(60))
    as_form = {**known, "content-type": "application/x-www-form-urlencoded"}
    assert site.get("/send", as_form, method="POST", content=fields).status_code == 400


def test_a_dry_run_says_how_many_and_which(path: Path) -> None:
    site = pages(path)
    found = site.get("/api/redrive", headers=LOCAL).json()
    assert (found["count"], [each["where"] for each in found["samples"]]) == (1, ["2/0/0"])
    for query in ("queue=other", "text=nothing", "since_ms=9999999999999", "key=k", "form=f"):
        assert site.get(f"/api/redrive?{query}").json()["count"] == 0


def test_single_dead_letters_are_chosen_by_a_form(tmp_path: Path) -> None:
    """The boxes of a page lead to a dry run of exactly those, and to a job of their places."""
    logs = Logs(tmp_path / "index")
    for at in range(4):
        logs.letter(dead_letter(at, f"error {at}"))
    logs.fold.redriven(0, 3, NOW_MS)
    logs.commit()
    site = Pages(logs.path)
    box = r'<input type="checkbox" name="place" value="([^"]*)"'
    assert re.findall(box, site.get("/dead-letters").text) == ["0:2", "0:1", "0:0"]
    assert not re.findall(box, Pages(logs.path, read_only=True).get("/dead-letters").text)
    answer = site.get("/redrive?place=&place=0%3A2&place=0%3A0")
    (action,) = re.findall(r'action="(/jobs[^"]*)"', answer.text)
    places = httpx.URL(f"http://localhost{html.unescape(action)}").params
    assert dict(places) == {"places": "0:2,0:0"}
    found = site.get("/api/redrive?places=0:2,0:0,0:3,1:1").json()
    assert (found["count"], [each["where"] for each in found["samples"]]) == (2, ["2/0/2", "2/0/0"])
    assert len(site.get("/api/dead-letters?places=0:3,0:1").json()["letters"]) == 2
    none = site.get("/redrive?place=")
    assert (none.status_code, "no dead letter is chosen" in none.text) == (400, True)
    logs.close()


@pytest.mark.parametrize(
    "query",
    [
        "places=0",
        "places=0:1,x:1",
        "places=0:-1",
        "since_ms=x",
        "until_ms=-1",
        "since=noon",
        "redriven=maybe",
        "queu=x",
        "queue=q&rejected",
        "since_s=1",
    ],
)
def test_a_filter_that_cannot_be_read_means_nothing(path: Path, query: str) -> None:
    """Without that part it would mean others."""
    site = pages(path)
    for address in ("/dead-letters", "/redrive", "/api/dead-letters", "/api/redrive"):
        assert site.get(f"{address}?{query}").status_code == 400, address


def test_times_of_a_filter_are_in_utc_and_stay_in_the_form(path: Path) -> None:
    site = pages(path)
    for query, count in (
        ("since=2023-11-14T22:13:20", 1),
        ("since=2023-11-14T22:13:20.001", 0),
        ("until=2023-11-14T22:13:20", 0),
        ("until=2023-11-14T23:13:20.001%2B01:00", 1),
        ("since=&until=", 1),
    ):
        assert site.get(f"/api/redrive?{query}").json()["count"] == count, query
    shown = site.get("/dead-letters?since=2023-11-14T22:13&until_ms=1700000000001").text
    assert 'name="since" value="2023-11-14T22:13:00.000"' in shown
    assert 'name="until" value="2023-11-14T22:13:20.001"' in shown


def test_a_job_gets_the_filter_that_its_dry_run_had(tmp_path: Path) -> None:
    """Browsers write other line ends into fields of forms, and none into addresses."""
    logs = Logs(tmp_path / "index")
    letter = dead_letter(0, "E: 7\rmore\n", **{"kafkamq-reason": b"one\rtwo"})
    letter.stored_key = b"q\0a\r\nb"
    logs.letter(letter)
    logs.commit()
    site = Pages(logs.path)
    query = {"key": "a\r\nb", "reason": "one\rtwo", "form": "E: #", "until_ms": str(NOW_MS + 1)}
    answer = site.get(f"/redrive?{httpx.QueryParams(query)}")
    (action,) = re.findall(r'action="(/jobs[^"]*)"', answer.text)
    address = httpx.URL(f"http://localhost{html.unescape(action)}")
    assert dict(address.params) == query
    fields = re.findall(r'<input type="hidden" name="([^"]*)"', answer.text)
    assert fields == ["csrf", "kind", "id"]
    for query, is_everything in (("", True), ("?redriven=no", True), ("?queue=q", False)):
        assert ('name="everything"' in site.get(f"/redrive{query}").text) == is_everything


def test_a_form_with_a_field_that_is_not_known_is_refused(path: Path) -> None:
    """The action would be another one than was meant."""
    site = pages(path)
    known = {**LOCAL, "x-csrf-token": token_of(site)}
    for address in ("/jobs/7", "/send", "/resend/2/0/0", "/api/messages", "/api/resend/2/0/0"):
        form = {"queue": "q", "do": "pause", "header": "a: b"}
        body = {"json": form} if address.startswith("/api") else {"data": form}
        answer = site.get(address, known, method="POST", **body)  # type: ignore[arg-type]
        assert (answer.status_code, "no " in answer.text) == (400, True), answer.text
        assert "header" in answer.text, "it is named"


def test_a_job_with_a_field_that_is_not_known_is_refused(path: Path) -> None:
    """What the field was to choose would be left out, and all would go."""
    site = pages(path)
    known = {**LOCAL, "x-csrf-token": token_of(site)}
    for body, name in (
        ({"queue": "q", "everything": True}, "queue"),
        ({"filter": {"queu": "q"}, "everything": True}, "queu"),
    ):
        answer = site.get("/api/jobs", known, method="POST", json=body)
        assert (answer.status_code, f"no {name}" in answer.text) == (400, True), answer.text
    for query, form, name in (
        ("", {"queue": "q"}, "queue"),
        ("", {"since": "2026-01-01"}, "since"),
        ("?queu=q", {}, "queu"),
    ):
        form = {**form, "everything": "yes"}
        answer = site.get(f"/jobs{query}", known, method="POST", data=form)
        assert (answer.status_code, f"no {name}" in answer.text) == (400, True), answer.text


def test_a_rate_that_is_no_number_of_messages_is_refused(path: Path) -> None:
    site = pages(path)
    known = {**LOCAL, "x-csrf-token": token_of(site)}
    for rate in ("inf", "-inf", "nan", "1e999", "-1", "1000001"):
        form = {"rate": rate, "everything": "yes"}
        answer = site.get("/jobs", known, method="POST", data=form)
        assert (answer.status_code, "it must be from 0 to" in answer.text) == (400, True), rate
    for rate, why in (("1e999", "Number out of range"), ("1e300", "it must be from 0 to")):
        content = f'{{"rate": {rate}, "everything": true}}'.encode()
        headers = {**known, "content-type": "application/json"}
        answer = site.get("/api/jobs", headers, method="POST", content=content)
        assert (answer.status_code, why in answer.text) == (400, True), answer.text


def test_a_field_that_is_there_twice_and_everything_but_yes_are_refused(path: Path) -> None:
    """One of the two would choose, and ``no`` would mean all."""
    site = pages(path)
    known = {**LOCAL, "x-csrf-token": token_of(site)}
    for query in ("queue=a&queue=b", "queue=a&place=0:1&place=0:2&queue=a"):
        for address in ("redrive", "api/redrive", "replay", "api/dead-letters"):
            assert site.get(f"/{address}?{query}").status_code == 400, (address, query)
        form = {"everything": "yes"}
        assert site.get(f"/jobs?{query}", known, method="POST", data=form).status_code == 400
    for form in ({"queue": ["a", "b"]}, {"queue": ["a", "a"], "payload": "x"}):
        answer = site.get("/send", known, method="POST", data=form)
        assert (answer.status_code, "twice" in answer.text) == (400, True), answer.text
    for text in ("no", "false", "0", "Yes"):
        answer = site.get("/jobs", known, method="POST", data={"everything": text})
        assert (answer.status_code, "must be yes" in answer.text) == (400, True), answer.text
    assert site.get("/redrive?place=0:1&place=0:2").status_code == 200


def test_a_dry_run_that_another_site_asks_for_is_refused(path: Path) -> None:
    """As pictures of any site in an operator's browser would ask for many, each for seconds."""
    site = pages(path)
    for address in (
        "/redrive?queue=q",
        "/api/redrive?queue=q",
        "/replay?queue=q",
        "/redrive/?queue=q",
    ):
        for where in ("cross-site", "same-site"):
            assert site.get(address, {**LOCAL, "sec-fetch-site": where}).status_code == 403
    for where in ("same-origin", "none"):
        answer = site.get("/redrive?queue=q", {**LOCAL, "sec-fetch-site": where})
        assert answer.status_code == 200


def test_what_a_replay_does_not_choose_by_is_refused(path: Path) -> None:
    """Before any broker is asked."""
    site = pages(path)
    known = {**LOCAL, "x-csrf-token": token_of(site)}
    for query in ("", "?key=k", "?queue=q&reason=x", "?queue=q&state=x", "?queu=q"):
        for address in ("/replay", "/api/replay"):
            assert site.get(f"{address}{query}").status_code == 400, query
        answer = site.get(f"/jobs{query}", known, method="POST", data={"kind": "replay"})
        assert answer.status_code == 400, answer.text
    for address in ("/redrive", "/dead-letters", "/api/dead-letters"):
        assert site.get(f"{address}?state=done").status_code == 400
    for wrong in ({"kind": "repeat"}, {"id": "a/b"}, {"id": "x" * 65}):
        body = {"everything": True, **wrong}
        answer = site.get("/api/jobs", known, method="POST", json=body)
        assert answer.status_code == 400, answer.text
    viewer = pages(path, read_only=True)
    assert viewer.get("/replay?queue=q").status_code == 403


def test_names_beyond_the_most_are_no_filter_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic does not know which names the index has no room for."""
    logs = Logs(tmp_path / "index")
    logs.letter(dead_letter(0, "a"))
    logs.commit()
    site = Pages(logs.path)
    assert site.get(f"/api/redrive?form={OTHER}").status_code == 200
    monkeypatch.setattr(fold, "MAX_NAMES", 3)  # q, rejected and "a"
    logs.letter(dead_letter(1, "b"))
    logs.commit()
    groups = site.get("/api/dead-letters").json()["groups"]
    assert {group["form"] for group in groups} == {"a", OTHER}
    assert len(site.get(f"/api/dead-letters?form={OTHER}").json()["letters"]) == 1
    for address in ("/redrive", "/api/redrive"):
        answer = site.get(f"{address}?form={OTHER}")
        assert (answer.status_code, "choose by" in answer.text) == (400, True)
    known = {**LOCAL, "x-csrf-token": token_of(site)}
    body = {"filter": {"form": OTHER}}
    assert site.get("/api/jobs", known, method="POST", json=body).status_code == 400
    assert site.get("/redrive?form=a").status_code == 200


def test_requests_are_bounded(path: Path) -> None:
    site = pages(path)
    assert site.get(f"/?search={'x' * 9000}").status_code == 414
    for odd in ("/?page=-5", f"/?page={10**12}", "/dead-letters?before=-1&since_ms=7"):
        assert site.get(odd).status_code == 200
    assert site.get("/?page=x").status_code == 400


def basic(name: str, password: str) -> dict[str, str]:
    token = base64.b64encode(f"{name}:{password}".encode()).decode()
    return {**LOCAL, "authorization": f"Basic {token}"}


def test_a_stranger_is_refused_and_viewers_see_no_hidden_payloads(path: Path) -> None:
    accounts = {
        "ann": Account("operator", WEAK.hash("right")),
        "vic": Account("viewer", WEAK.hash("wrong?")),
    }
    site = pages(path, accounts=accounts, host="0.0.0.0", hides_payloads=True)
    for headers in (
        LOCAL,
        basic("ann", "wrong?"),
        basic("bob", "right"),
        basic("ann", ""),
        {**LOCAL, "authorization": "Basic !"},
        {**LOCAL, "authorization": "Bearer right"},
        {**LOCAL, "x-user": "ann"},
    ):
        for address in ("/", "/api/queues", "/static/kafkamq.css", "/api/openapi/openapi.json"):
            answer = site.get(address, headers)
            assert (answer.status_code, "www-authenticate" in answer.headers) == (401, True)
    for _ in range(2):  # the second time it is remembered
        assert site.get("/", basic("ann", "right")).status_code == 200
    assert "read from Kafka" in site.get("/message/0/0/0", basic("ann", "right")).text
    hidden = site.get("/message/0/0/0?payload=text", basic("vic", "wrong?"))
    assert "Payloads are hidden" in hidden.text
    assert "right" not in repr(site.app) + repr(accounts)


def test_a_proxys_header_counts_from_the_proxy_alone(path: Path) -> None:
    site = pages(
        path,
        host="0.0.0.0",
        trusted_header="X-User",
        trusted_proxies=frozenset({"10.0.0.1"}),
        operators=frozenset({"ann"}),
    )
    for name in ("ann", "vic"):
        headers = {**LOCAL, "x-user": name}
        assert site.get("/", headers, peer="10.0.0.1").status_code == 200
        assert site.get("/", headers, peer="10.0.0.2").status_code == 401
    assert site.get("/", {**LOCAL, "x-user": " "}, peer="10.0.0.1").status_code == 401
    shown = site.get("/", {**LOCAL, "x-user": "ann"}, peer="10.0.0.1").text
    assert "ann (operator)" in shown


@pytest.mark.parametrize(
    "options",
    [
        {"host": "0.0.0.0"},
        {"host": "192.0.2.1"},
        {"host": "::"},
        {"host": ""},
        {"trusted_header": "x-user"},
        {"trusted_proxies": frozenset({"10.0.0.1"})},
        {"trusted_header": "x-user", "trusted_proxies": frozenset({"proxy.example"})},
    ],
)
def test_what_is_not_safe_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        WebOptions(**options)


@pytest.mark.parametrize(
    "line", ["", "ann", "ann:boss:$argon2id$x", "ann:viewer:secret", ":viewer:$argon2"]
)
def test_a_password_file_of_another_form_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "users"
    file.write_text(f"# who may look\n\n{line}\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError) as refused:
        read_accounts(file)
    assert "secret" not in str(refused.value)


def test_a_password_file_is_read_if_nobody_else_can(tmp_path: Path) -> None:
    file = tmp_path / "users"
    hashed = hash_password("p:w")
    file.write_text(f"ann:operator:{hashed}\nvic:viewer:{hashed}\n")
    file.chmod(0o640)
    assert {name: each.role for name, each in read_accounts(file).items()} == {
        "ann": "operator",
        "vic": "viewer",
    }
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod"):
        read_accounts(file)


def test_without_an_index_a_page_says_so(tmp_path: Path) -> None:
    answer = Pages(tmp_path / "none").get("/")
    assert (answer.status_code, "index is being made" in answer.text) == (503, True)
    assert Pages(tmp_path / "none").get("/api/queues").json()["error"]


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (b'{"a": [1]}', "json", '{\n  "a": [\n    1\n  ]\n}'),
        (b"[" * 100_000, "json", "[" * MAX_SHOWN_BYTES),
        (b"\xff<b>", "text", "\\xff<b>"),
        (b"\0A", "hex", "00000000  00 41                                            .A"),
        (None, "text", ""),
    ],
)
def test_a_payload_is_shown_in_each_form(value: bytes | None, form: str, text: str) -> None:
    assert show(value, form).text == text


def test_large_payloads_are_cut() -> None:
    for form in ("text", "json", "hex"):
        shown = show(b'"' + b"x" * (1 << 20) + b'"', form)
        assert shown.is_cut
        assert shown.size_bytes == (1 << 20) + 2
        assert len(shown.text) < 5 * MAX_SHOWN_BYTES


def test_numbers_times_and_sizes_as_people_write_them() -> None:
    assert [duration_of(each) for each in (0, 61_000, -7_500_000, 200_000_000)] == [
        "0.0 s",
        "1 min 01 s",
        "-2 h 05 min",
        "2 d 07 h",
    ]
    assert (number_of(1_234_567), number_of(None)) == ("1\u202f234\u202f567", "\u2013")
    assert (size_of(999), size_of(5 << 30)) == ("999 B", "5.0 GiB")
    assert (time_of(0), time_of(1 << 62)) == ("1970-01-01 00:00:00.000", f"{1 << 62} ms")


def test_the_browser_file_is_the_one_that_its_sum_names() -> None:
    for line in (STATIC / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == digest
    for template in TEMPLATES.glob("*.html"):
        text = template.read_text(encoding="utf-8")
        assert "|safe" not in text.replace(" ", ""), template
        assert "//" not in re.sub(r"/\*.*?\*/", "", text), "nothing from elsewhere"
