"""Jobs are what their records say, and mean the dead letters that their page shows."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_web_index import NOW_MS, dead_letter
from tests.unit.web_logs import Logs

from kafkamq.queue.dead_letters import dead_letter_of
from kafkamq.web import lookups
from kafkamq.web.filters import MAX_PLACES, LetterFilter
from kafkamq.web.index.rows import form_of
from kafkamq.web.jobs import CANCELLED, ENDED, MAX_JOBS, PAUSED, RUNNING, Action, Trail, decode

JOB = {"filter": {"queue": "q"}, "rate": 5.0, "expected": 100, "ends": {"0": 7}, "topic_id": "aa"}


def folded(*records: tuple[str, str, dict[str, Any]], id: str = "job") -> Trail:
    """What, who, and the rest of records; as they are read from the topic."""
    trail = Trail()
    for offset, (what, user, more) in enumerate(records):
        value = Action(what=what, id=id, user=user, more=more).encode()
        action = decode(value, at_ms=NOW_MS + offset, offset=offset)
        assert action is not None
        trail.apply(action)
    return trail


BEGUN = (("redrive", "ann", JOB), ("run", "one", {}))


def test_a_job_goes_through_its_states() -> None:
    job = folded(*BEGUN).jobs["job"]
    assert (job.state, job.user, job.runner, job.left) == (RUNNING, "ann", "one", 100)
    assert (job.ends, job.rate, job.filter) == ({0: 7}, 5.0, LetterFilter(queue="q"))
    went = ("progress", "one", {"count": 30, "refused": 2})
    job = folded(*BEGUN, went, ("pause", "bob", {}), went).jobs["job"]
    assert (job.state, job.done, job.refused, job.left) == (PAUSED, 60, 2, 38)
    resumed = (*BEGUN, ("pause", "bob", {}), ("resume", "bob", {}))
    assert folded(*resumed).jobs["job"].state == RUNNING
    ended = (*resumed, ("end", "one", {"refused": 3, "why": "3 stay", "refusals": ["x"]}))
    job = folded(*ended).jobs["job"]
    assert (job.state, job.refused, job.left, job.refusals) == (ENDED, 3, 0, ["x"])
    for late in ("resume", "pause", "cancel", "run", "stop"):
        job = folded(*ended, (late, "one", {})).jobs["job"]
        assert (job.state, job.why) == (ENDED, "3 stay")
    cancelled = folded(*BEGUN, ("cancel", "bob", {}), ("resume", "bob", {}), went).jobs["job"]
    assert (cancelled.state, cancelled.done) == (CANCELLED, 30), "those had gone"


@pytest.mark.parametrize("what", ["stop", "end"])
def test_a_process_that_lost_its_turn_ends_no_job(what: str) -> None:
    taken = (*BEGUN, ("run", "two", {}))
    assert folded(*taken, (what, "one", {"why": "fenced"})).jobs["job"].state == RUNNING
    assert folded(*taken, (what, "two", {"why": "x"})).jobs["job"].state != RUNNING


def test_the_first_job_runs_first_but_one_edited_message_does_not_wait() -> None:
    trail = Trail()
    for offset, (what, id) in enumerate(
        (("redrive", "a"), ("redrive", "b"), ("resend", "c"), ("redrive", "a"))
    ):
        more = {**JOB, "place": [0, 1], "payload": ""} if what == "resend" else JOB
        trail.apply(Action(what=what, id=id, user="ann", more=more, offset=offset))
    order = []
    while (job := trail.next_job()) is not None:
        order.append(job.id)
        trail.apply(Action(what="cancel", id=job.id, user="ann"))
    assert order == ["c", "a", "b"]


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"\xff",
        b"[]",
        b"7",
        b"[" * 100_000,
        b'{"what": 1, "id": "a", "user": "u", "more": {}}',
        b'{"what": "redrive", "id": "a", "user": "u", "more": []}',
        b'{"what": "redrive", "id": "a", "user": "u"}',
        b'{"what": "send", "id": "a", "user": "\\ud800", "more": {}}',
        b'{"what": "send", "id": "a", "user": "u", "more": {"a": 9999999999999999999}}',
    ],
)
def test_what_is_no_action_is_none(value: bytes | None) -> None:
    assert decode(value, at_ms=0, offset=0) is None


def test_no_record_stops_the_fold() -> None:
    odd: tuple[Any, ...] = (None, "x", -1, 1e999, [], {}, [1], {"a": 1}, True)
    names = ("place", "ends", "topic_id", "rate", "expected", "filter", "count", "refused")
    for what, name, value in itertools.product(("redrive", "progress", "end"), names, odd):
        broken = {**JOB, name: value}
        trail = folded(*BEGUN, (what, "one", json.loads(json.dumps(broken))))
        json.dumps(trail.jobs["job"].as_dict())
        more = folded(("redrive", "ann", broken)).jobs
        json.dumps([job.as_dict() for job in more.values()])


def test_a_replay_means_messages_of_a_queue() -> None:
    more = {**JOB, "marker_ends": {"0": 9}}
    job = folded(("replay", "ann", more)).jobs["job"]
    assert (job.kind, job.ends, job.marker_ends) == ("replay", {0: 7}, {0: 9})
    assert "marker_ends" not in folded(("replay", "ann", more)).entries[0].more
    for wrong in (
        JOB,
        {**more, "filter": {}},
        {**more, "filter": {"queue": "q", "reason": "expired"}},
        {**more, "filter": {"queue": "q", "places": "0:1"}},
        {**more, "filter": {"queue": "q", "state": "any"}},
    ):
        assert not folded(("replay", "ann", wrong)).jobs, wrong
    assert not folded(("redrive", "ann", {**JOB, "filter": {"state": "done"}})).jobs


def test_a_replay_says_how_many_fewer_went_than_were_counted() -> None:
    """Retention has deleted them; a redrive leaves out what others have redriven."""
    begun = ("replay", "ann", {**JOB, "marker_ends": {}})
    went = ("progress", "one", {"count": 90, "refused": 2})
    end = ("end", "one", {"refused": 2, "why": "2 stay"})
    job = folded(begun, BEGUN[1], went, end).jobs["job"]
    assert (job.state, job.why) == (ENDED, "2 stay; 8 fewer than expected")
    assert folded(begun, BEGUN[1], went, went, end).jobs["job"].why == "2 stay"
    assert folded(*BEGUN, went, end).jobs["job"].why == "2 stay"


def test_what_names_nothing_means_nothing() -> None:
    for what, name in (("redrive", "filter"), ("resend", "place"), ("redrive", "ends")):
        more = {**JOB, "place": [0, 1], "payload": ""}
        assert folded((what, "ann", more)).jobs
        del more[name]
        assert not folded((what, "ann", more)).jobs


@pytest.mark.parametrize(
    "chosen",
    [
        [["queue", "q"]],
        {"since": 1},
        {"queue": 1},
        {"since_ms": "1"},
        {"until_ms": True},
        {"places": ["0:1"]},
        {"places": "0:1,"},
        {"places": ",".join(["0:1"] * (MAX_PLACES + 1))},
    ],
)
def test_a_filter_that_nobody_knows_means_nothing(chosen: Any) -> None:
    assert not folded(("redrive", "ann", {**JOB, "filter": chosen})).jobs


def test_payloads_are_kept_as_long_as_a_job_may_run() -> None:
    begun = ("resend", "ann", {**JOB, "place": [0, 1], "payload": "eA=="})
    trail = folded(begun, ("run", "one", {}))
    assert trail.jobs["job"].payload == "eA=="
    assert not {"payload", "ends", "topic_id"} & trail.entries[0].more.keys()
    for last in (("cancel", "bob", {}), ("end", "one", {})):
        assert folded(begun, ("run", "one", {}), last).jobs["job"].payload == ""


def test_an_edited_message_that_had_gone_before_says_so() -> None:
    begun = (("resend", "ann", {**JOB, "place": [0, 1], "payload": ""}), ("run", "one", {}))
    went, end = ("progress", "one", {"count": 1}), ("end", "one", {"already_redriven": 1})
    assert "nothing was sent" in folded(*begun, end).jobs["job"].why
    assert folded(*begun, went, end).jobs["job"].why == "", "its own process had sent it"


def test_jobs_that_ended_are_forgotten_at_last() -> None:
    trail = Trail()
    trail.apply(Action(what="redrive", id="open", user="ann", more=JOB))
    for number in range(MAX_JOBS + 20):
        trail.apply(Action(what="redrive", id=str(number), user="ann", more=JOB))
        trail.apply(Action(what="cancel", id=str(number), user="ann"))
    assert len(trail.jobs) <= MAX_JOBS + 2
    assert trail.jobs["open"].state == RUNNING


def test_a_job_means_what_its_page_shows(tmp_path: Path) -> None:
    """The database chooses for the page, and code for the log; each filter is asked of both."""
    pick = random.Random(1)
    texts = ("Timeout after 30 s", "timeout AFTER 31 s", "\u00c4rger 7", "no id 0x1f", "x" * 600)
    logs = Logs(tmp_path / "index")
    letters = []
    for offset in range(300):
        record = dead_letter(
            offset,
            pick.choice(texts),
            **{
                "kafkamq-id": b"id-%d" % offset,
                "kafkamq-reason": pick.choice((b"rejected", b"expired")),
                "Trace": pick.choice((b"ABC", b"abd", b"\xff\xfe", "\u00c4".encode())),
            },
        )
        record.at_ms = NOW_MS + pick.randrange(0, 100, 10)
        record.stored_key = pick.choice((b"q\0k", b"q", b"r\0k", b"r\0" + b"y" * 2000))
        logs.letter(record)
        letters.append(dead_letter_of(record, frozenset(), b""))  # type: ignore[arg-type]
    logs.commit()
    some = {
        "queue": ("", "q", "r", "none"),
        "reason": ("", "rejected"),
        "form": ("", form_of(texts[0]), form_of(texts[3])),
        "text": ("", "AFTER", "\u00c4", "\u00e4", "x" * 500, "x" * 501),
        "key": ("", "k", "y" * 1024),
        "header": ("", "trace", "aBc", "\u00c4", "\\xff"),
        "since_ms": (0, NOW_MS + 50),
        "until_ms": (0, NOW_MS + 60),
        "places": ("", "0:7", ",".join(f"0:{at}" for at in range(50, 250)), "1:7,0:400"),
    }
    counts = set()
    for _ in range(400):
        filled = {
            name: pick.choice((values[0], pick.choice(values))) for name, values in some.items()
        }
        chosen = LetterFilter(**filled)  # type: ignore[arg-type]
        shown, more = lookups.letters(logs.connection, chosen, before=0, limit=1000)
        meant = {f"2/0/{each.offset}" for each in letters if chosen.means(each)}
        assert {each["where"] for each in shown} == meant, chosen
        assert (lookups.count_letters(logs.connection, chosen), more) == (len(meant), 0)
        counts.add(len(meant))
    assert len(counts) > 20
    logs.close()
