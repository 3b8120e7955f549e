"""What ``kafkamq compare`` plans, and what it makes of histories."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from kafkamq.cli.app import app
from kafkamq.cli.compare import render, table_rows
from kafkamq.cli.page import chart
from kafkamq.dev.compare.plan import (
    Contender,
    Item,
    Measured,
    PhaseKind,
    Slow,
    Work,
    decode,
    encode,
    handlers_at_once,
    ideal_s,
    judge,
    max_busy,
    ordering_of,
    parse_range,
    parse_slow,
    percentile,
    phases,
)
from kafkamq.dev.history import Event, HistoryError, HistoryReader, Recorder, under_way
from kafkamq.errors import ConfigError

BEGIN, END, FAIL = "begin", "end", "fail"


def history(*lines: tuple[int, int, str] | tuple[int, int, str, int]) -> list[Event]:
    """Events of (number, ms, op, process) lines."""
    return [
        Event(ms / 1000, f"w{rest[0] if rest else 0}", op, {"id": number, "attempt": 1})
        for number, ms, op, *rest in lines
    ]


def once(*spans: tuple[int, int, int]) -> list[Event]:
    """Each (number, begin ms, end ms) is handled once."""
    return history(
        *((number, begin, BEGIN) for number, begin, _ in spans),
        *((number, end, END) for number, _, end in spans),
    )


@pytest.mark.parametrize(
    ("text", "expected"), [("0-5", (0, 5)), ("3", (3, 3)), (" 1.5 - 2 ", (1.5, 2))]
)
def test_ranges(text: str, expected: tuple[float, float]) -> None:
    assert parse_range(text) == expected


@pytest.mark.parametrize("text", ["", "5-1", "-1", "a", "1-2-3", "1e9", "0-60001"])
def test_ranges_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--handler-ms"):
        parse_range(text)


def test_slow_messages_are_a_share_and_a_time() -> None:
    assert parse_slow("1%:1000") == Slow(share=0.01, ms=1000)
    assert parse_slow("0.5 % : 20") == Slow(share=0.005, ms=20)
    for text in ("1:1000", "101%:5", "1%", "1%:60001", "%:1"):
        with pytest.raises(ConfigError, match="--slow"):
            parse_slow(text)


@pytest.mark.parametrize(
    "wrong",
    [{"messages": 0}, {"keys": -1}, {"failure": 1.1}, {"lease_s": 0.5}, {"payload_bytes": 63}],
)
def test_work_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Work(**wrong)  # type: ignore[arg-type]  # that is what is tested


def test_all_contenders_get_the_same_work_but_the_recovery() -> None:
    work = Work(messages=400, failure=0.1)
    plans = {each: phases(work, each) for each in Contender}
    first = plans[Contender.MARKERS][:-1]
    assert all(plan[:-1] == first for plan in plans.values())
    assert [phase.kind for phase in first] == list(PhaseKind)[:-1]
    numbers = [item.number for phase in plans[Contender.GROUP] for item in phase.items]
    assert numbers == list(range(len(numbers)))
    by_kind = {phase.kind: phase for phase in first}
    assert sum(item.fails for item in by_kind[PhaseKind.THROUGHPUT].items) == 40
    slow = [item for item in by_kind[PhaseKind.BLOCKING].items if item.us == 1_000_000]
    assert len(slow) == 4
    assert len({item.key for item in by_kind[PhaseKind.ORDER].items}) == 200
    rounds = {
        each: len(plan[-1].items) / handlers_at_once(each, work) for each, plan in plans.items()
    }
    assert set(rounds.values()) == {4}


def test_contenders_that_are_none() -> None:
    result = CliRunner().invoke(app, ["compare", "--only", "offsets,nobody"])
    assert isinstance(result.exception, ConfigError)
    assert "nobody" in str(result.exception)


def test_order_is_what_a_backend_has() -> None:
    work = Work()
    found = {each.value: ordering_of(each, work) for each in Contender}
    assert found == {
        "markers": "unordered",
        "offsets": "key",
        "share": "unordered",
        "claims": "partition",
        "group": "partition",
    }
    free = Work(keeps_order=False)
    assert ordering_of(Contender.OFFSETS, free) == "unordered"
    assert ordering_of(Contender.GROUP, free) == "partition"
    assert handlers_at_once(Contender.CLAIMS, free) == 200
    assert handlers_at_once(Contender.CLAIMS, work) == 8


def test_payloads_have_their_size() -> None:
    payload = encode(Item(1 << 41, "k", 5_000_000, 250), size=100)
    assert len(payload) == 100
    assert decode(payload) == (1 << 41, 5_000_000, 250)


def test_the_best_time_is_that_of_the_work_or_of_its_longest_part() -> None:
    items = [Item(0, None, 1_000_000), Item(1, None, 500_000), Item(2, None, 500_000)]
    assert ideal_s(items, 1) == 2.0
    assert ideal_s(items, 100) == 1.0


def test_a_history_survives_a_cut_line(tmp_path: Path) -> None:
    reader = HistoryReader(tmp_path)
    assert reader.read() == []
    recorder = Recorder(tmp_path, 'w"1')
    recorder.record_call("begin", 7, 1)
    recorder.record_call("fail", 'm-"7', 2)
    first, second = reader.read()
    assert (first.process, first.op, first["id"], first["attempt"]) == ('w"1', "begin", 7, 1)
    assert (second["id"], second["attempt"]) == ('m-"7', 2)
    assert first.time_s <= second.time_s
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:5])
    assert reader.read() == []
    path.write_bytes(whole + whole)
    assert reader.read() == [first, second]
    path.write_bytes(whole + whole + b"{}\n")
    with pytest.raises(HistoryError, match="no event"):
        reader.read()


def test_what_a_process_has_begun_and_not_ended() -> None:
    ended = (0, 1, BEGIN), (0, 3, END), (2, 4, BEGIN, 1), (2, 5, FAIL, 1)
    assert under_way(history(*ended, (1, 6, BEGIN, 1))) == {"w0": 0, "w1": 1}


def test_percentiles() -> None:
    assert percentile([], 0.5) is None
    assert percentile([4.0], 0.99) == 4.0
    values = [float(each) for each in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (50.0, 99.0)


def test_what_became_of_messages() -> None:
    items = [Item(0, "a", 0), Item(1, "a", 0, 1), Item(2, None, 0)]
    events = history(
        (0, 10, BEGIN),
        (9, 10, BEGIN),  # of another phase
        (0, 30, END),
        (1, 40, BEGIN),
        (1, 50, FAIL),
        (1, 60, BEGIN),
        (1, 70, END),
        (2, 15, BEGIN),
        (2, 90, END),
        (2, 80, BEGIN, 1),  # once more, by another process
        (2, 95, END, 1),
    )
    found = judge(items, reversed(events), begin_s=0.005)
    assert (found.messages, found.done, found.busy) == (3, 3, 2)
    assert found.seconds == pytest.approx(0.085)
    assert found.runs == pytest.approx(4 / 3)
    assert found.waits_ms == pytest.approx({0: 5.0, 1: 35.0, 2: 10.0})
    assert (found.keys, found.keys_in_order) == (1, 1)
    missing = judge(items, history((0, 10, BEGIN)), begin_s=0)
    assert (missing.done, missing.seconds, missing.keys_in_order) == (0, None, 0)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        (((0, 0, 10), (1, 10, 20)), 1),
        (((0, 0, 10), (1, 9, 20)), 0),  # begun before its predecessor had ended
        (((1, 0, 10), (0, 10, 20)), 0),  # overtaken
        (((0, 0, 10),), 0),  # lost
    ],
)
def test_order_of_a_key(spans: tuple[tuple[int, int, int], ...], expected: int) -> None:
    items = [Item(0, "a", 0), Item(1, "a", 0)]
    found = judge(items, once(*spans), begin_s=0)
    assert (found.keys, found.keys_in_order) == (1, expected)


def test_a_repeated_message_does_not_break_the_order_of_what_follows() -> None:
    items = [Item(0, "a", 0), Item(1, "a", 0)]
    again = history((0, 30, BEGIN, 1), (0, 40, END, 1))
    assert judge(items, once((0, 0, 10), (1, 10, 20)) + again, begin_s=0).keys_in_order == 1


def test_busy_handlers_of_a_killed_process_do_not_end() -> None:
    assert max_busy([]) == 0
    events = sorted(once((0, 0, 10), (1, 2, 4), (2, 5, 6)), key=lambda event: event.time_s)
    assert max_busy(events) == 2


def test_the_table_and_the_page_say_what_was_measured() -> None:
    found = [
        Measured(
            contender="offsets",
            ordering="key",
            per_second=12_345.6,
            seconds=0.4,
            recovery_s=10.25,
            keys=200,
            keys_in_order=199,
            lost=0,
        ),
        Measured(contender="share", notes=["needs <4.2>"]),
    ]
    rows = {row[0]: row[1:] for row in table_rows(found)}
    assert rows["messages/s"] == ("12,346", "-")
    assert rows["keys in order"] == ("no: 199 of 200", "-")
    assert rows["lost"] == ("0", "-")
    page = render(Work(), found, version="4.2.1")
    assert "needs &lt;4.2&gt;" in page
    assert "http" not in page.replace("http-equiv", "")
    plots = [part.partition("</svg>")[0] for part in page.split("<svg ")[1:]]
    assert len(plots) >= 3
    for plot in plots:
        ElementTree.fromstring(f"<svg {plot}</svg>")


def test_bars_are_as_high_as_their_values() -> None:
    assert chart([None, 0], ["a", "b"]) == "<p>None.</p>"
    drawn = ElementTree.fromstring(chart([1.5, None, 4.5], ["<a>", "", "b"]))
    heights = [float(bar.attrib["height"]) for bar in drawn.iter("rect")]
    assert heights == [pytest.approx(heights[1] / 3, rel=0.01), heights[1]]
    assert "1.5" in [text.text for text in drawn.iter("text")]
