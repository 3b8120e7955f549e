"""What the pages ask of the database; each answer is bounded, and of one moment."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from heapq import nlargest
from pathlib import Path
from typing import Any, TypeVar

from kafkamq.types import Outcome
from kafkamq.web.filters import LetterFilter
from kafkamq.web.index import fold
from kafkamq.web.index.fold import END_BASE, STARTED
from kafkamq.web.index.packs import PACK_OFFSETS, Pack, places_of, unpack_events
from kafkamq.web.index.rows import (
    CHUNK_BITS,
    CHUNK_OFFSETS,
    LETTERS,
    MESSAGES,
    split_place,
    unpack_headers,
)
from kafkamq.web.index.schema import open_reader

_T = TypeVar("_T")
MAX_FAMILY = 200
MAX_FOUND = 100
MAX_CHUNKS_SEARCHED = 50
MAX_LETTERS_SEARCHED = 100_000
_LETTER = (
    "letter.number, place, q.text, at_ms, id, key, r.text, f.text, error, attempt, origin, headers,"
    " (SELECT at_ms FROM redriven WHERE redriven.place = letter.place)"
)
_LETTER_FROM = (
    " JOIN name q ON q.number = queue JOIN name r ON r.number = reason"
    " JOIN name f ON f.number = form "
)


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a connection for one answer, in one transaction.

    Raises:
        sqlite3.Error: There is no index yet, or it is being made.
    """
    with closing(open_reader(path)) as connection:
        connection.execute("BEGIN")
        yield connection


def page_of(rows: Sequence[_T], page: int, size: int) -> tuple[Sequence[_T], dict[str, Any]]:
    """Return the rows of a page, the nearest that there is, and which page of how many it is."""
    pages = max(1, -(-len(rows) // size))
    page = min(max(1, page), pages)
    shown = rows[(page - 1) * size : page * size]
    return shown, {"count": len(rows), "page": page, "pages": pages}


def text_of(data: bytes | None) -> str | None:
    """Return bytes as text for people; what is no UTF-8 is written as escapes."""
    return None if data is None else data.decode("utf-8", "backslashreplace")


def where_of(place: int) -> str:
    """Return a place as ``LOG/PARTITION/OFFSET``, the tail of a page's address."""
    log, partition, offset = split_place(place)
    return f"{log}/{partition}/{offset}"


def names_of(connection: sqlite3.Connection, numbers: Sequence[int]) -> dict[int, str]:
    asked = f"SELECT number, text FROM name WHERE number IN ({_marks(numbers)})"
    return dict(connection.execute(asked, numbers))


def names_are_full(connection: sqlite3.Connection) -> bool:
    """Return whether further names are counted as ``OTHER``."""
    return int(connection.execute("SELECT count(*) FROM name").fetchone()[0]) >= fold.MAX_NAMES


def queue_rows(
    connection: sqlite3.Connection, queue: int | None = None
) -> list[tuple[int, str, int, int, int, int]]:
    """Return number, name, messages, waiting, dead letters and those redriven, of queues."""
    where, values = ("", ()) if queue is None else ("WHERE queue = ?", (queue,))
    return connection.execute(
        "SELECT queue, text, messages, waiting, letters, redriven FROM queue"
        f" JOIN name ON number = queue {where}",
        values,
    ).fetchall()


def minutes(
    connection: sqlite3.Connection, first: int, last: int, queue: int | None = None
) -> list[tuple[int, ...]]:
    """Return minute, queue and what ``minute`` has beside, of one queue or of all (0)."""
    if queue is None:
        return connection.execute(
            "SELECT minute, 0, sum(sent), sum(started), sum(acked), sum(failed), sum(dead),"
            " sum(timed), sum(held_ms) FROM minute WHERE minute BETWEEN ? AND ? GROUP BY minute",
            (first, last),
        ).fetchall()
    return connection.execute(
        "SELECT * FROM minute WHERE minute BETWEEN ? AND ? AND queue = ?",
        (first, last, queue),
    ).fetchall()


def sent_by_minute(
    connection: sqlite3.Connection, queues: Sequence[int], first: int, count: int
) -> dict[int, list[int]]:
    """Return how many messages of each of these queues were sent in so many minutes."""
    found = {queue: [0] * count for queue in queues}
    # Both are named one by one: the key finds each, whatever the number of other queues.
    minutes = range(first, first + count)
    for minute, queue, sent in connection.execute(
        f"SELECT minute, queue, sent FROM minute WHERE minute IN ({_marks(minutes)})"
        f" AND queue IN ({_marks(queues)})",
        (*minutes, *queues),
    ):
        found[queue][minute - first] = sent
    return found


def _marks(values: Sequence[int]) -> str:
    return ",".join("?" * len(values))


def rates(connection: sqlite3.Connection, minute: int) -> dict[int, tuple[int, int]]:
    """Return how many messages were sent and acked in a minute, by queue."""
    return {
        queue: (sent, acked)
        for queue, sent, acked in connection.execute(
            "SELECT queue, sent, acked FROM minute WHERE minute = ?", (minute,)
        )
    }


def waiting(connection: sqlite3.Connection, queue: int, limit: int) -> list[dict[str, Any]]:
    """Return messages of a queue that were not STARTed, those of the oldest chunks first."""
    found: list[int] = []
    for first, started, place, bits, packed in connection.execute(
        "SELECT chunk << ?1, started, place, bits, queues FROM"
        " (SELECT chunk, started FROM chunk WHERE waiting > 0 ORDER BY chunk LIMIT ?2)"
        " JOIN pack ON place >= chunk << ?1 AND place < chunk + 1 << ?1",
        (CHUNK_BITS, MAX_CHUNKS_SEARCHED),
    ):
        queues = array("I", packed)
        if queue in queues:
            places = places_of(place, int.from_bytes(bits, "little"))
            left = ~int.from_bytes(started, "little")
            found += [
                each
                for each, its in zip(places, queues, strict=False)
                if its == queue and left >> (each - first) & 1
            ]
            if len(found) >= limit:
                break
    return list(messages_at(connection, found[:limit]).values())


def messages_at(connection: sqlite3.Connection, places: Sequence[int]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    wanted = set(places)
    for first in sorted({place & -PACK_OFFSETS for place in places}):
        for row in connection.execute(
            "SELECT * FROM pack WHERE place BETWEEN ? AND ?", (first, first + PACK_OFFSETS - 1)
        ):
            pack = Pack(*row)
            for index, place in enumerate(pack.places()):
                if place in wanted:
                    found[place] = _message(connection, pack, place, index)
    return found


def find_messages(connection: sqlite3.Connection, text: str) -> list[dict[str, Any]]:
    """Find first copies and dead letters with this id or key, the newest first."""
    data = text.encode("utf-8", "replace")
    found = messages_at(connection, _places_of(connection, data)) if data else {}
    for column in ("id", "key"):
        # As the index has them: the ends of what is not null.
        for row in connection.execute(
            f"SELECT {_LETTER} FROM letter {_LETTER_FROM}"
            f" WHERE substr({column}, -5) = substr(?1, -5) AND {column} = ?1"
            f" AND {column} IS NOT NULL ORDER BY at_ms DESC LIMIT ?2",
            (data, MAX_FOUND),
        ):
            found[row[1]] = _letter(row)
    return sorted(found.values(), key=lambda each: -each["at_ms"])[:MAX_FOUND]


def _places_of(connection: sqlite3.Connection, data: bytes) -> list[int]:
    """Return the newest messages with this id or key, from the packs with the newest ones on."""
    found: set[tuple[int, int]] = set()
    for place, last_ms in connection.execute(
        "SELECT place, last_ms FROM pack ORDER BY last_ms DESC"
    ).fetchall():
        if len(found) >= MAX_FOUND:
            found = set(nlargest(MAX_FOUND, found))
            if min(found)[0] > last_ms:
                break
        ids, keys = connection.execute(
            "SELECT ids, keys FROM pack WHERE place = ?", (place,)
        ).fetchone()
        if data in ids or data in keys:
            (row,) = connection.execute("SELECT * FROM pack WHERE place = ?", (place,))
            pack = Pack(*row)
            found |= {
                (at_ms, each)
                for each, at_ms, id_, key in zip(
                    pack.places(), pack.times, pack.ids, pack.keys, strict=False
                )
                if data == id_ or data == key[1:]
            }
    return [place for _, place in found]


def family(connection: sqlite3.Connection, place: int) -> list[dict[str, Any]]:
    """Find all records of the message at a place: copies, dead letters, redriven copies."""
    found: dict[int, dict[str, Any]] = {}
    asked, wanted = set(), [place]
    while wanted and len(found) < MAX_FAMILY:
        here = wanted.pop()
        if here in asked:
            continue
        asked.add(here)
        found.update(messages_at(connection, [here]))
        for row in connection.execute(
            "SELECT place, origin, letter FROM copy"
            " WHERE place = ?1 OR origin = ?1 OR letter = ?1 LIMIT ?2",
            (here, MAX_FAMILY),
        ):
            wanted += [each for each in row if each is not None]
        for row in connection.execute(
            f"SELECT {_LETTER} FROM letter {_LETTER_FROM} WHERE place = ?1 OR origin = ?1 LIMIT ?2",
            (here, MAX_FAMILY),
        ):
            found[row[1]] = _letter(row)
            wanted += [row[1], *(() if row[10] is None else (row[10],))]
    return sorted(found.values(), key=lambda each: (each["at_ms"], each["place"]))


def events(connection: sqlite3.Connection, place: int) -> list[dict[str, Any]]:
    """Return what markers say of the message at a place, in the order of their times."""
    chunk, at = divmod(place, CHUNK_OFFSETS)
    found = []
    for (packed,) in connection.execute("SELECT events FROM event WHERE chunk = ?", (chunk,)):
        for marker, at_ms, first, kind, consumer, reason, delay_ms, bits in unpack_events(packed):
            if first <= at and bits >> at - first & 1:
                names = names_of(connection, [consumer, reason])
                found.append(
                    {
                        "what": "START" if kind == STARTED else Outcome(kind - END_BASE).name,
                        "at_ms": at_ms,
                        "consumer": names.get(consumer, ""),
                        "reason": names.get(reason, ""),
                        "delay_ms": delay_ms,
                        "marker": where_of(marker),
                    }
                )
    return sorted(found, key=lambda each: each["at_ms"])


def letter_groups(
    connection: sqlite3.Connection, *, queue: int | None = None, limit: int = 50
) -> list[dict[str, Any]]:
    """Return groups of dead letters that are alike, the most numerous first."""
    where, values = ("", ()) if queue is None else ("WHERE queue = ?", (queue,))
    names = ("queue", "reason", "form", "letters", "redriven", "first_ms", "last_ms")
    rows = connection.execute(
        "SELECT q.text, r.text, f.text, letters, redriven, first_ms, last_ms FROM letter_group"
        f" {_LETTER_FROM} {where} ORDER BY letters - redriven DESC LIMIT ?",
        (*values, limit),
    )
    return [dict(zip(names, row, strict=True)) for row in rows]


def letters(
    connection: sqlite3.Connection, chosen: LetterFilter, *, before: int, limit: int
) -> tuple[list[dict[str, Any]], int]:
    """Return dead letters, the newest first, and the number to go on before; 0: that is all.

    ``before``: A letter's number; 0: from the newest on.
    """
    inner, outer, values = chosen.conditions(connection)
    last = before or (1 << 62)
    newest = connection.execute(
        "SELECT min(number), count(*) FROM (SELECT number FROM letter WHERE number < ?"
        f" {inner} ORDER BY number DESC LIMIT ?)",
        (last, *values[0], MAX_LETTERS_SEARCHED),
    ).fetchone()
    rows = connection.execute(
        f"SELECT {_LETTER} FROM letter {_LETTER_FROM} WHERE letter.number < ?"
        f" AND letter.number >= ? {inner} {outer} ORDER BY letter.number DESC LIMIT ?",
        (last, newest[0] or 0, *values[0], *values[1], limit + 1),
    ).fetchall()
    found = [_letter(row) for row in rows[:limit]]
    if len(rows) > limit:
        return found, rows[limit - 1][0]
    return found, newest[0] if newest[1] == MAX_LETTERS_SEARCHED else 0


def count_letters(connection: sqlite3.Connection, chosen: LetterFilter) -> int:
    """Count the dead letters that are meant, however many that are."""
    inner, outer, values = chosen.conditions(connection)
    found = connection.execute(
        f"SELECT count(*) FROM letter WHERE 1 {inner} {outer}", (*values[0], *values[1])
    ).fetchone()
    return int(found[0])


def letter_at(connection: sqlite3.Connection, place: int) -> dict[str, Any] | None:
    row = connection.execute(
        f"SELECT {_LETTER} FROM letter {_LETTER_FROM} WHERE place = ?", (place,)
    ).fetchone()
    return None if row is None else _letter(row)


def _message(connection: sqlite3.Connection, pack: Pack, place: int, index: int) -> dict[str, Any]:
    queue, key = pack.queues[index], pack.keys[index]
    attempt, origin, letter = connection.execute(
        "SELECT attempt, origin, letter FROM copy WHERE place = ?", (place,)
    ).fetchone() or (1, None, None)
    return {
        "kind": "message" if split_place(place)[0] == MESSAGES else "delayed",
        "place": place,
        "where": where_of(place),
        "queue": names_of(connection, [queue])[queue],
        "at_ms": pack.times[index],
        "id": text_of(pack.ids[index]),
        "key": text_of(key[1:]) if key else None,
        "attempt": attempt,
        "origin": None if origin is None else where_of(origin),
        "redriven_from": None if letter is None else where_of(letter),
        "headers": unpack_headers(pack.headers[index]),
    }


def _letter(row: Sequence[Any]) -> dict[str, Any]:
    number, place, queue, at_ms, id_, key, reason, form, error, attempt, origin, headers, done = row
    assert split_place(place)[0] == LETTERS, "of the dead letters topic"
    return {
        "kind": "letter",
        "number": number,
        "place": place,
        "where": where_of(place),
        "queue": queue,
        "at_ms": at_ms,
        "id": text_of(id_) or "",
        "key": text_of(key),
        "reason": reason,
        "form": form,
        "error": error,
        "attempt": attempt,
        "origin": None if origin is None else where_of(origin),
        "headers": unpack_headers(headers),
        "redriven_ms": done,
    }
