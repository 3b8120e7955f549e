"""The index says what its logs say, however they are cut, killed and read again."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.naive import NaiveTracker
from harness.random_markers import MarkerRecord, random_markers
from tests.unit.web_logs import FakeRecord, Logs, is_whole

from kafkamq.markers.wire.markers import encode_marker
from kafkamq.queue.dead_letters import done_key, redriven_place
from kafkamq.transport.record import LOG_APPEND_TIME
from kafkamq.types import Marker, MarkerType, MessageBatch, MessageId, Outcome, expand
from kafkamq.web import lookups
from kafkamq.web.filters import LetterFilter
from kafkamq.web.index.live import open_runs
from kafkamq.web.index.rows import LETTERS, MARKERS, MESSAGES, form_of, place_of, split_place
from kafkamq.web.index.schema import open_index, size_bytes

TABLES = ("pack", "copy", "event", "chunk", "minute", "queue")
NOW_MS = 1_700_000_000_000


def markers(seed: int, count: int, batch_rate: float) -> list[MarkerRecord]:
    """A random log as it can be written: one batch of each chunk."""
    found = []
    for each in random_markers(seed, count, batch_rate=batch_rate):
        if each.marker is not None and each.marker.batches:
            chunks = {(one.partition, one.base_offset // 4096): one for one in each.marker.batches}
            marker = replace(each.marker, batches=tuple(chunks.values()))
            each = MarkerRecord(each.offset, each.timestamp_ms, marker)
        found.append(each)
    return found


def record_of(each: MarkerRecord) -> FakeRecord:
    value = b"\xff\xff" if each.marker is None else encode_marker(each.marker)
    kind = LOG_APPEND_TIME if each.timestamp_ms >= 0 else 1
    return FakeRecord(each.offset, None, value, at_ms=max(0, each.timestamp_ms), kind=kind)


def named_messages(records: list[MarkerRecord]) -> list[FakeRecord]:
    """A message at each place that a marker names, of two queues."""
    named = {
        (one.message_id.partition, one.message_id.offset)
        for each in records
        if each.marker is not None and not each.marker.of_schedule
        for one in expand(each.marker)
        if one.message_id is not None and one.type is not MarkerType.SCHEDULE
    }
    return [
        FakeRecord(offset, b"a" if offset % 3 else b"b\0key", number=partition, at_ms=NOW_MS)
        for partition, offset in sorted(named)
    ]


def started(records: list[MarkerRecord]) -> set[tuple[int, int]]:
    """Places that a START names."""
    return {
        (one.message_id.partition, one.message_id.offset)
        for each in records
        if each.marker is not None and each.marker.type is MarkerType.START
        for one in expand(each.marker)
        if one.message_id is not None
    }


@pytest.mark.parametrize("seed", range(6))
def test_what_is_open_and_what_waits_is_what_a_naive_fold_says(tmp_path: Path, seed: int) -> None:
    records = markers(seed, 300, 0.4 * (seed % 2))
    logs, naive = Logs(tmp_path / "i"), NaiveTracker(records[0].offset)
    messages = named_messages(records)
    rng = random.Random(seed)
    feed = [*records, *messages]
    rng.shuffle(feed)  # of the two topics; each in its order
    queues = iter(records), iter(messages)
    for each in feed:
        if isinstance(each, MarkerRecord):
            marker = next(queues[0])
            logs.marker(record_of(marker))
            naive.apply(marker.offset, marker.timestamp_ms, marker.marker)
        else:
            logs.messages(next(queues[1]))
    logs.commit()
    places = {split_place(place) for run in open_runs(logs.fold, {}) for place in run.places()}
    wanted = {(MESSAGES, each.partition, each.offset) for each in naive.in_progress()}
    wanted |= {(MARKERS, each.partition, each.offset) for each in naive.scheduled()}
    known = {split_place(row[0]) for row in logs.rows("pack")}
    assert places == wanted & known
    assert {each for each in wanted if each[0] == MESSAGES} <= known
    begun = started(records)
    waiting = Counter(
        (each.stored_key or b"").partition(b"\0")[0].decode()
        for each in messages
        if (each.number, each.at) not in begun
    )
    with lookups.reading(logs.path) as connection:
        found = {name: left for _, name, _, left, _, _ in lookups.queue_rows(connection)}
    assert {name: found.get(name, 0) for name in "ab"} == {name: waiting[name] for name in "ab"}


@pytest.mark.parametrize("seed", range(4))
def test_a_start_goes_on_where_it_was_and_writes_no_row_twice(tmp_path: Path, seed: int) -> None:
    records = markers(seed, 200, 0.3)
    messages = named_messages(records)
    whole, cut = Logs(tmp_path / "whole"), Logs(tmp_path / "cut")
    for logs in (whole, cut):
        for message in messages:
            logs.messages(message)
        logs.commit()
    for each in records:
        whole.marker(record_of(each))
    whole.commit()
    rng, first = random.Random(seed), records[0].offset
    at = 0
    while at < len(records):
        for each in records[at : at + rng.randint(1, 60)]:
            cut.marker(record_of(each))
        if rng.random() < 0.7:
            cut.commit()
        cut.close()  # what was not committed is lost
        cut = Logs(tmp_path / "cut")
        next_offset, restart = cut.positions().get(0, (first, first))
        for each in records:
            if restart <= each.offset < next_offset:
                cut.marker(record_of(each))
        at = sum(each.offset < next_offset for each in records)
    cut.commit()
    for table in TABLES:
        # For how long they were held: ends that trackers remember are not folded again (R12).
        columns = 7 if table == "minute" else None
        rows = [[row[:columns] for row in logs.rows(table)] for logs in (cut, whole)]
        assert rows[0] == rows[1], table
    assert is_whole(cut.path)


@pytest.mark.parametrize("seed", range(3))
def test_messages_are_the_same_however_they_are_cut(tmp_path: Path, seed: int) -> None:
    """With gaps, as transactions leave them, and over the ends of packs and chunks."""
    rng = random.Random(seed)
    kinds: tuple[list[tuple[str, bytes | None]], ...] = (
        [],
        [("kafkamq-id", b"plain")],
        [("kafkamq-id", "\u00fc".encode())],
        [("kafkamq-id", b"\xff")],
        [("kafkamq-id", b"x" * 300), ("trace", None)],
        [("kafkamq-id", b"copy"), ("kafkamq-origin", b"ns.messages/0/1/1")],
    )
    messages = [
        FakeRecord(
            offset,
            rng.choice((None, b"a", b"b\0", b"b\0key")),
            None,
            rng.choice(kinds) if rng.random() < 0.1 else kinds[1],
            NOW_MS + rng.choice((0, 60_000)) * (offset > 6000),
        )
        for offset in range(9000)
        if offset < 1500 or rng.random() < 0.7
    ]
    whole, cut = Logs(tmp_path / "whole"), Logs(tmp_path / "cut")
    whole.messages(*messages)
    at = 0
    while at < len(messages):
        size = rng.choice((1, 2, 30, 1000, 3000))
        cut.messages(*messages[at : at + size])
        at += size
        if rng.random() < 0.5:
            cut.commit()
            cut.close()
            cut = Logs(tmp_path / "cut")
    for logs in (whole, cut):
        logs.commit()
    for table in TABLES:
        assert whole.rows(table) == cut.rows(table), table
    with lookups.reading(cut.path) as connection:
        for message in rng.sample(messages, 20):
            place = place_of(MESSAGES, 0, message.at)
            shown = lookups.messages_at(connection, [place])[place]
            queue, _, key = (message.stored_key or b"").partition(b"\0")
            assert (shown["queue"], shown["key"] or "") == (queue.decode(), key.decode())
            ids = [value for name, value in message.stored_headers if name == "kafkamq-id"]
            assert shown["id"] == "".join(id.decode("utf-8", "replace") for id in ids if id)
        assert [each["at_ms"] for each in lookups.find_messages(connection, "key")] == sorted(
            (each.at_ms for each in messages if each.stored_key == b"b\0key"), reverse=True
        )[: lookups.MAX_FOUND]


def test_a_pack_ends_by_bytes_and_each_message_is_found(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "i")
    values = {1: b"x" * 2000, 2: b"\xff" * 600, 3: bytes(600)}

    def message(offset: int, partition: int = 0) -> FakeRecord:
        headers = [("kafkamq-id", b"id-%d" % offset), ("trace", values.get(partition))]
        return FakeRecord(offset, b"q", None, headers, number=partition)

    for begin in range(0, 512, 8):
        for partition in range(4):
            logs.messages(*(message(offset, partition) for offset in range(begin, begin + 8)))
        logs.commit()
    sizes = [
        [
            bytes_
            for (bytes_,) in logs.connection.execute(
                "SELECT length(ids) + length(keys) + length(headers) FROM pack"
                " WHERE place BETWEEN ? AND ?",
                (place_of(MESSAGES, partition, 0), place_of(MESSAGES, partition, 511)),
            )
        ]
        for partition in range(4)
    ]
    assert len(sizes[0]) == 1, "it goes on"
    assert max(map(max, sizes)) < 100_000
    assert sum(sizes[1]) > 1_000_000
    assert sum(sizes[3]) < 50_000, "they are bounded as they are kept"
    with lookups.reading(logs.path) as connection:
        places = [place_of(MESSAGES, 1, offset) for offset in (0, 63, 64, 511)]
        found = lookups.messages_at(connection, places)
        assert [found[place]["id"] for place in places] == ["id-0", "id-63", "id-64", "id-511"]
        assert found[places[-1]]["headers"] == [("trace", "x" * 2000)]
        assert len(lookups.find_messages(connection, "id-300")) == 4


def test_a_start_shows_the_same_lives_and_numbers_no_name_twice(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "i")
    name = "<b>'\x00\u2028 \U0001f9a1"
    queue_id = name.replace("\x00", "").encode()

    def message(offset: int) -> FakeRecord:
        headers = [("kafkamq-id", b"id"), (name, name.encode())]
        return FakeRecord(offset, queue_id + b"\0" + name.encode(), None, headers, NOW_MS + offset)

    def mark(offset: int, kind: MarkerType, **more: Any) -> FakeRecord:
        marker = Marker(kind, MessageId(0, offset // 3), 1000, consumer_id=name, **more)
        return FakeRecord(offset, None, encode_marker(marker), at_ms=NOW_MS + offset)

    def lives() -> list[Any]:
        with lookups.reading(logs.path) as connection:
            return [
                (
                    lookups.family(connection, place_of(MESSAGES, 0, offset)),
                    lookups.events(connection, place_of(MESSAGES, 0, offset)),
                )
                for offset in range(3)
            ]

    logs.messages(*map(message, range(3)))
    marks = [mark(0, MarkerType.START), mark(1, MarkerType.KEEPALIVE)]
    marks.append(mark(2, MarkerType.END, outcome=Outcome.NACK, reason=name))
    marks.append(mark(3, MarkerType.START))
    for each in marks:
        logs.marker(each)
    logs.commit()
    shown, names = lives(), logs.rows("name")
    assert [len(steps) for _, steps in shown] == [2, 1, 0]
    assert {step["consumer"] for _, steps in shown for step in steps} == {name}
    logs.close()
    logs = Logs(tmp_path / "i")
    _, restart = logs.positions()[0]
    for each in marks[restart:]:
        logs.marker(each)
    assert {run.consumer_id for run in open_runs(logs.fold, {})} == {"", name}
    logs.commit()
    assert lives() == shown
    logs.messages(message(3))
    logs.marker(mark(4, MarkerType.END, outcome=Outcome.REJECT, reason=name))
    logs.commit()
    assert logs.rows("name") == names
    (first, _), (_, steps), _ = lives()
    assert first == shown[0][0], "a pack goes on"
    assert [each["what"] for each in steps] == ["START", "REJECT"]


def test_a_run_of_a_thousand_is_one_row(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "i")
    logs.messages(*(FakeRecord(offset, b"q") for offset in range(1000)))
    batch = (MessageBatch(0, b"", 0, 0, (1 << 1000) - 1),)
    start = Marker(MarkerType.START, None, 1000, b"q", consumer_id="w", batches=batch)
    logs.marker(FakeRecord(0, None, encode_marker(start)))
    end = Marker(MarkerType.END, consumer_id="w", batches=batch)
    logs.marker(FakeRecord(1, None, encode_marker(end), at_ms=NOW_MS + 40))
    logs.commit()
    assert len(logs.rows("event")) == 2
    with lookups.reading(logs.path) as connection:
        for offset in (0, 517, 999):
            found = lookups.events(connection, place_of(MESSAGES, 0, offset))
            assert [each["what"] for each in found] == ["START", "ACK"]
    ((_, _, *counts),) = logs.rows("minute")
    assert counts == [1000, 1000, 1000, 0, 0, 1000, 40_000]


def test_a_verdict_is_timed_from_the_first_start_of_what_its_worker_holds(tmp_path: Path) -> None:
    """Not what was never STARTed, is due since, or was timed before."""
    logs = Logs(tmp_path / "i")
    logs.messages(*(FakeRecord(4030 + at, b"ab"[at % 2 : at % 2 + 1]) for at in range(200)))
    written: list[FakeRecord] = []

    def mark(kind: MarkerType, after_ms: int, *, first: int, bits: int, **more: Any) -> None:
        batch = (MessageBatch(0, b"", 0, 4030 + first, bits),)
        named: dict[str, Any] = {"batches": batch}
        if bits == 1:
            named = {"message_id": MessageId(0, 4030 + first)}
        marker = Marker(kind, redeliver_after_ms=1000, consumer_id="w", **named, **more)
        record = FakeRecord(len(written), None, encode_marker(marker), at_ms=NOW_MS + after_ms)
        written.append(record)
        logs.marker(record)

    mark(MarkerType.START, 0, first=0, bits=0b1111)
    mark(MarkerType.START, 100, first=4, bits=1)
    mark(MarkerType.START, 200, first=4, bits=1)  # once more: the first one counts
    logs.commit()
    logs.close()
    logs = Logs(tmp_path / "i")  # a start folds again what is open
    for record in written[logs.positions()[0][1] :]:
        logs.marker(record)
    mark(MarkerType.END, 300, first=0, bits=0b11011)  # in two pages; 4 is of another START
    mark(MarkerType.END, 400, first=0, bits=0b11011)
    mark(MarkerType.END, 400, first=90, bits=1)
    mark(MarkerType.END, 450, first=2, bits=1, outcome=Outcome.NACK)
    mark(MarkerType.START, 500, first=150, bits=1)
    for after_ms in (5000, 8000):  # its grace, and the end of that
        mark(MarkerType.END, after_ms, first=90, bits=1)
    mark(MarkerType.END, 9000, first=150, bits=1)
    logs.commit()
    names = dict(logs.rows("name"))
    timed = {names[queue]: (number, held) for _, queue, *_, number, held in logs.rows("minute")}
    assert timed == {"a": (3, 300 + 200 + 450), "b": (2, 300 + 300)}


def test_r13_markers_of_a_topic_that_is_gone_say_nothing_of_its_successor(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "i")
    logs.fold.topic_id = b"n" * 16
    logs.messages(FakeRecord(0, b"q"), FakeRecord(1, b"q"))
    for number, topic_id in enumerate((b"o" * 16, b"n" * 16)):
        start = Marker(
            MarkerType.START, MessageId(0, number, topic_id), 1000, b"q", consumer_id="w"
        )
        logs.marker(FakeRecord(number, None, encode_marker(start)))
    logs.commit()
    assert [row[2] for row in logs.rows("chunk")] == [1]
    assert [run.place for run in open_runs(logs.fold, {})] == [place_of(MESSAGES, 0, 0)]


def dead_letter(offset: int, error: str, **more: bytes) -> FakeRecord:
    headers = {
        "kafkamq-id": b"id-%d" % offset,
        "kafkamq-reason": b"rejected",
        "kafkamq-error": error.encode(),
        "kafkamq-queue-id": b"q",
        "kafkamq-origin": b"ns.messages/0/%d/%d" % (offset, NOW_MS),
    }
    return FakeRecord(offset, b"q\0k", b"x", [*(headers | more).items()], at_ms=NOW_MS + offset)


def test_a_redriven_letter_is_counted_once_whichever_is_read_first(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "i")
    logs.fold.redriven(0, 1, NOW_MS)
    for offset in range(3):
        logs.letter(dead_letter(offset, f"Timeout after {offset} ms"))
        logs.letter(dead_letter(offset, f"Timeout after {offset} ms"))  # read again
    for _ in range(2):
        logs.fold.redriven(0, 2, NOW_MS)
    logs.commit()
    with lookups.reading(logs.path) as connection:
        (group,) = lookups.letter_groups(connection)
        ((_, _, _, _, letters, redriven),) = lookups.queue_rows(connection)
        left, _ = lookups.letters(connection, LetterFilter(redriven="no"), before=0, limit=9)
    assert (group["form"], group["letters"], group["redriven"]) == ("Timeout after # ms", 3, 2)
    assert (letters, redriven) == (3, 2)
    assert [each["id"] for each in left] == ["id-0"]


def test_letters_are_found_by_each_filter_and_a_page_goes_on_before(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "i")
    for offset in range(10):
        logs.letter(dead_letter(offset, f"E{'rror' * (offset % 2)} in %", region=b"eu-%d" % offset))
    logs.commit()
    with lookups.reading(logs.path) as connection:

        def ids(before: int = 0, **chosen: object) -> list[str]:
            wanted = LetterFilter(**chosen)  # type: ignore[arg-type]
            found, _ = lookups.letters(connection, wanted, before=before, limit=4)
            return [each["id"] for each in found]

        assert ids() == ["id-9", "id-8", "id-7", "id-6"]
        assert ids(before=3) == ["id-1", "id-0"]
        assert ids(form="E in %") == ["id-8", "id-6", "id-4", "id-2"]
        assert ids(text="ERROR IN %", since_ms=NOW_MS + 8) == ["id-9"]
        assert ids(header="eu-3", key="k", queue="q", reason="rejected") == ["id-3"]
        assert ids(queue="' OR 1=1 --") == ids(key="%") == []
        assert ids(until_ms=NOW_MS + 2) == ["id-1", "id-0"]


def test_the_life_of_a_message_is_found_from_each_of_its_records(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "i")
    origin, redriven = b"ns.messages/0/0/%d" % NOW_MS, "kafkamq-redriven-from"
    logs.messages(
        FakeRecord(0, b"q", None, [("kafkamq-id", b"one")], NOW_MS),
        FakeRecord(1, b"q", None, [("kafkamq-id", b"one"), ("kafkamq-origin", origin)], NOW_MS + 1),
        FakeRecord(
            2, b"q", None, [(redriven, b"ns.dead-letters/0/0/0"), (redriven, b"//")], NOW_MS + 5
        ),
        FakeRecord(3, b"q", None, [("kafkamq-id", b"two")], NOW_MS + 6),
    )
    logs.letter(dead_letter(0, "no"))
    logs.commit()
    with lookups.reading(logs.path) as connection:
        for place in (
            *(place_of(MESSAGES, 0, offset) for offset in range(3)),
            place_of(LETTERS, 0, 0),
        ):
            found = [each["where"] for each in lookups.family(connection, place)]
            assert sorted(found) == ["0/0/0", "0/0/1", "0/0/2", "2/0/0"], place
        assert {each["where"] for each in lookups.find_messages(connection, "one")} == {
            "0/0/0",
            "0/0/1",
        }


def test_old_messages_are_forgotten_and_their_waiting_with_them(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "i")
    logs.messages(*(FakeRecord(offset, b"q") for offset in range(4096 + 10)))
    start = Marker(MarkerType.START, MessageId(0, 5), 1000, b"q", consumer_id="w")
    logs.marker(FakeRecord(0, None, encode_marker(start)))
    logs.commit()
    logs.fold.forget_chunks([0])
    for offset in range(20):
        logs.letter(dead_letter(offset, "no"))
    logs.fold.forget_letters(5)
    logs.commit()
    ((_, messages, waiting, letters, redriven),) = logs.rows("queue")
    assert (messages, waiting, letters, redriven) == (10, 10, 5, 0)
    assert len(logs.rows("pack")) == 10
    assert logs.rows("event") == []
    assert len(logs.rows("letter")) == 5


def test_markers_that_are_read_before_their_messages_are_not_old(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "i")
    start = Marker(MarkerType.START, MessageId(0, 5), 1000, b"q", consumer_id="w")
    logs.marker(FakeRecord(0, None, encode_marker(start), at_ms=NOW_MS))
    logs.commit()
    assert [last_ms for *_, last_ms in logs.rows("chunk")] == [NOW_MS], "by it chunks are forgotten"


def test_a_pack_that_another_process_has_written_into_is_damaged(tmp_path: Path) -> None:
    for _ in range(2):
        logs = Logs(tmp_path / "i")
        logs.messages(FakeRecord(0, b"q"), FakeRecord(1, b"q"))
        logs.commit()
    with pytest.raises(sqlite3.DatabaseError, match="twice"):
        Logs(tmp_path / "i").messages(FakeRecord(2, b"q"))


@pytest.mark.parametrize("harm", ["damaged", "empty", "older", "other"])
def test_an_index_that_cannot_be_used_is_built_again(tmp_path: Path, harm: str) -> None:
    logs = Logs(tmp_path / "i")
    logs.messages(FakeRecord(0, b"q"))
    logs.commit()
    logs.close()
    if harm == "damaged":
        with logs.path.open("r+b") as file:
            file.write(b"no database at all")
    elif harm == "empty":
        logs.path.write_bytes(b"")
    elif harm == "older":
        with sqlite3.connect(logs.path) as connection:
            connection.execute("UPDATE meta SET value = '0' WHERE field = 'version'")
    again = Logs(logs.path, "two" if harm == "other" else "one")
    assert again.rows("pack") == []
    assert (logs.path.stat().st_mode & 0o077, size_bytes(logs.path) > 0) == (0, True)
    again.close()
    with open_index(logs.path, "two" if harm == "other" else "one") as connection:
        assert connection.execute("SELECT count(*) FROM meta").fetchone() == (2,)


def test_hostile_records_stop_nothing(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "i")
    logs.messages(
        FakeRecord(0, None),
        FakeRecord(1, b"\xff\0\xfe" * 5000, None, [("h" * 9000, b"\xff"), ("kafkamq-id", b"\xff")]),
        FakeRecord(2, b"", None, [("kafkamq-redriven-from", b"//"), ("a", None)]),
    )
    logs.letter(FakeRecord(0))
    logs.marker(FakeRecord(0, None, b"\xff" * 100))
    logs.commit()
    assert len(logs.rows("pack")) == 3
    assert len(logs.rows("letter")) == 1


def test_a_ledger_key_names_its_letter() -> None:
    key = done_key(b"t" * 16, 3, 77)
    assert redriven_place(key, b"t" * 16) == (3, 77)
    assert redriven_place(done_key(b"", 3, 77), b"t" * 16) == (3, 77)
    assert redriven_place(key, b"u" * 16) is None
    for other in (None, b"", b"redrive/x", b"redrive//a/b", b"x/" + key, key + b"/1"):
        assert redriven_place(other, b"t" * 16) is None


def test_forms_of_errors_leave_numbers_out() -> None:
    assert form_of("Timeout: 17 of 0xdeadbeef\nsecond line") == "Timeout: # of #"
    assert form_of("order 1b4e28ba-2fa1-11d2-883f-0016d3cca427 failed") == "order # failed"
    assert len(form_of("x" * 10_000)) <= 120
    assert form_of("E: 1\r\nmore") == form_of("E: 2\rmore") == "E: #"


def test_every_outcome_has_a_name_on_the_time_line(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "i")
    logs.messages(FakeRecord(0, b"q"))
    for offset, outcome in enumerate(Outcome):
        end = Marker(MarkerType.END, MessageId(0, 0), outcome=outcome, reason=f"r{offset}")
        logs.marker(FakeRecord(offset, None, encode_marker(end), at_ms=NOW_MS + offset))
    logs.commit()
    with lookups.reading(logs.path) as connection:
        found = lookups.events(connection, place_of(MESSAGES, 0, 0))
    assert [each["what"] for each in found] == [outcome.name for outcome in Outcome]
    reasons = [f"r{offset}" for offset in range(1, len(Outcome))]
    assert [each["reason"] for each in found] == ["", *reasons]  # an ACK has none
