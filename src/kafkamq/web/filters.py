"""Which dead letters or messages are meant: one filter, and everything that is read out of it.

An address, a form or a record says it; pages choose rows of the database by it, and jobs records of
the topic. Both mean the same dead letters.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

from kafkamq.errors import ConfigError
from kafkamq.queue.dead_letters import DeadLetter
from kafkamq.web.index.rows import (
    LETTERS,
    MAX_ERROR_CHARACTERS,
    MAX_KEY_BYTES,
    MAX_OFFSET,
    MAX_PARTITION,
    form_of,
    pack_headers,
    place_of,
)

MAX_TIME_MS = 1 << 53
MAX_PLACES = 500
_LOWER = {ord(letter): letter.lower() for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Dead letters, or messages, are meant that have all of this; what is empty does not choose.

    Raises:
        ConfigError: A time or a place is none, or ``redriven`` or ``state`` is another word.
    """

    queue: str = ""
    reason: str = ""
    form: str = ""
    text: str = ""
    key: str = ""
    header: str = ""
    since_ms: int = 0
    until_ms: int = 0
    # "yes" or "no"; empty: both.
    redriven: str = ""
    # Of single ones in their topic: "0:17,2:5" is partition and offset.
    places: str = ""
    state: str = ""

    def __post_init__(self) -> None:
        for name in ("since_ms", "until_ms"):
            value = getattr(self, name)
            if not 0 <= value <= MAX_TIME_MS:
                raise ConfigError(f"{name} is {value}: it must be from 0 to {MAX_TIME_MS:g}")
        if self.redriven not in ("", "yes", "no"):
            raise ConfigError(f"redriven is {self.redriven[:80]!r}: it must be yes or no")
        if self.state not in ("", "done"):
            raise ConfigError(f"state is {self.state[:80]!r}: it must be done")
        places_in(self.places)

    @classmethod
    def of_texts(cls, texts: Mapping[str, str], *, beside: Iterable[str] = ()) -> LetterFilter:
        """Read what an address says: ``since_ms`` in milliseconds, or ``since`` in UTC.

        Raises:
            ConfigError: A time cannot be read, or a name is there twice, or not known and not one
                of ``beside``; without it others would be meant.
        """
        known = [each.name for each in fields(cls)]
        require_known(texts, (*known, "since", "until", *beside))
        found: dict[str, Any] = {}
        for each in fields(cls):
            text = texts.get(each.name, "")
            if not each.name.endswith("_ms"):
                found[each.name] = text
            elif text:
                if not (text.isascii() and text.isdecimal()) or len(text) > 16:
                    raise ConfigError(
                        f"{each.name} is {text[:80]!r}: it must be a time in milliseconds"
                    )
                found[each.name] = int(text)
            else:
                name = each.name.removesuffix("_ms")
                found[each.name] = _moment_ms(name, texts.get(name, ""))
        return cls(**found)

    @classmethod
    def of_record(cls, found: Mapping[str, Any]) -> LetterFilter:
        """Read what an action's record says.

        Raises:
            ValueError: It says something that is not known here: without it others would be meant.
        """
        kinds = {each.name: type(each.default) for each in fields(cls)}
        for name, value in found.items():
            if type(value) is not kinds.get(name):
                raise ValueError(f"{name} is {value!r}")
        return cls(**found)

    def of_kind(self, kind: str) -> LetterFilter:
        """Return it, for a redrive or a replay.

        Raises:
            ConfigError: Jobs of this kind, of which there may be none, do not choose so.
        """
        others = {
            "redrive": ("state",),
            "replay": ("reason", "form", "text", "redriven", "places"),
        }.get(kind)
        if others is None:
            raise ConfigError(f"kind is {kind[:80]!r}: it must be redrive or replay")
        if wrong := [name for name in others if getattr(self, name)]:
            raise ConfigError(f"a {kind} does not choose by {', '.join(wrong)}")
        if kind == "replay" and not self.queue:
            raise ConfigError("queue is empty: say whose messages go again")
        return self

    @property
    def is_empty(self) -> bool:
        return self == LetterFilter()

    def conditions(
        self, connection: sqlite3.Connection
    ) -> tuple[str, str, tuple[list[Any], list[Any]]]:
        """Return SQL that an index serves, SQL that looks at each row, and the values of both."""
        inner, outer = [], []
        values: tuple[list[Any], list[Any]] = ([], [])
        for column in ("queue", "reason", "form"):
            if wanted := getattr(self, column):
                inner.append(f"AND {column} = ?")
                values[0].append(name_number(connection, wanted))
        if self.key:
            inner.append("AND key = ?")
            values[0].append(self.key.encode("utf-8", "replace"))
        if self.places:
            places = [place_of(LETTERS, *each) for each in places_in(self.places)]
            inner.append(f"AND letter.place IN ({','.join('?' * len(places))})")
            values[0].extend(places)
        for sign, bound in ((">=", self.since_ms), ("<", self.until_ms)):
            if bound:
                outer.append(f"AND at_ms {sign} ?")
                values[1].append(bound)
        for column, text in (("error", self.text), ("CAST(headers AS TEXT)", self.header)):
            if text:
                outer.append(f"AND instr(lower({column}), lower(?)) > 0")
                values[1].append(text)
        if self.redriven:
            negation = "" if self.redriven == "yes" else "NOT"
            outer.append(
                f"AND {negation} EXISTS (SELECT 1 FROM redriven d WHERE d.place = letter.place)"
            )
        return " ".join(inner), " ".join(outer), values

    def means(self, letter: DeadLetter) -> bool:
        """Return whether a dead letter is meant, whatever became of it, as ``conditions`` do."""
        if self.places and (letter.partition, letter.offset) not in places_in(self.places):
            return False
        if self.key:
            key = None if letter.user_key is None else letter.user_key[:MAX_KEY_BYTES]
            if key != self.key.encode("utf-8", "replace"):
                return False
        headers = pack_headers(letter.headers) if self.header else b""
        return (
            self.queue in ("", letter.queue_id)
            and self.reason in ("", letter.reason)
            and (not self.form or self.form == form_of(letter.error))
            and letter.timestamp_ms >= self.since_ms
            and (not self.until_ms or letter.timestamp_ms < self.until_ms)
            and _lower(self.text) in _lower(letter.error[:MAX_ERROR_CHARACTERS])
            and _lower(self.header) in _lower(headers.decode("utf-8", "replace"))
        )


def require_known(names: Collection[str], known: Iterable[str]) -> None:
    """Refuse what is not known here, or is there twice: what it was to choose would be left out."""
    if unknown := sorted(set(names) - set(known)):
        raise ConfigError(f"there is no {', '.join(unknown)[:200]} here")
    if len(names) > len(set(names)):
        raise ConfigError("a name is there twice: say it once")


@lru_cache(maxsize=64)
def places_in(text: str) -> frozenset[tuple[int, int]]:
    """Read partitions and offsets; none is in an empty text.

    Raises:
        ConfigError: One is no place, or they are too many.
    """
    found = set()
    for each in text.split(",", MAX_PLACES - 1) if text else ():
        partition, _, offset = each.partition(":")
        if not (_is_number(partition, MAX_PARTITION) and _is_number(offset, MAX_OFFSET)):
            raise ConfigError(
                f"places has {each[:80]!r}: they must be as 0:17,2:5, at most {MAX_PLACES}"
            )
        found.add((int(partition), int(offset)))
    return frozenset(found)


def _is_number(text: str, most: int) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= most


def name_number(connection: sqlite3.Connection, text: str) -> int:
    """Return the number of a name; -1: the index has no such name."""
    found = connection.execute("SELECT number FROM name WHERE text = ?", (text,)).fetchone()
    return -1 if found is None else int(found[0])


def _lower(text: str) -> str:
    """Lower the letters that SQLite lowers: those of ASCII."""
    return text.translate(_LOWER)


def _moment_ms(name: str, text: str) -> int:
    """Read a time as browsers write it; one without a zone is in UTC, as the pages show times."""
    if not text:
        return 0
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{name} is {text[:80]!r}: it must be as 2026-01-31T12:00") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return round(moment.timestamp() * 1000)
