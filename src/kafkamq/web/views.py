"""The data of each page, which is what ``/api`` answers, too.

They are what the index knows. A payload is read from Kafka when a page shows it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kafkamq.config import ServiceConfig
from kafkamq.errors import StateError, WireError
from kafkamq.markers.overview import cluster_checks
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.transport.log_reader import RecordReader
from kafkamq.web import lookups
from kafkamq.web.filters import LetterFilter, name_number
from kafkamq.web.index.follower import Index
from kafkamq.web.index.live import Counts, Run
from kafkamq.web.index.rows import LETTERS, MARKERS, MESSAGES, place_of
from kafkamq.web.lookups import page_of, reading
from kafkamq.web.workers import Workers

PAGE_ROWS = 50
SHOWN_RUNS = 200
CHART_MINUTES = 60
HEALTH_S = 30.0
SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "queue": lambda row: row["queue"],
    "waiting": lambda row: -row["waiting"],
    "in_flight": lambda row: -row["in_flight"],
    "delayed": lambda row: -row["delayed"],
    "due": lambda row: -row["due"],
    "letters": lambda row: -row["letters"],
    "oldest": lambda row: row["oldest_ms"] or 1 << 62,
    "rate": lambda row: -row["sent_per_minute"],
}
MAX_SHOWN_BYTES = 65_536
MAX_JSON_BYTES = 1 << 20
FORMS = ("text", "json", "hex")
_TURN_S = 15.0
_READ_S = 10.0
_KEPT_S = 10.0
_MAX_KEPT = 16
_LINE = 16
_NOTHING = Counts()
_ORDER = {
    "START": 1,
    "DEAD LETTER": 3,
    "REDELIVERED": 4,
    "DEAD_LETTERED": 4,
    "ALREADY_ENDED": 4,
}
"""Of steps at the same time; a worker's verdicts are 2."""


class Views:
    """It reads the index for the pages; thread-safe."""

    def __init__(self, index: Index, workers: Workers | None = None) -> None:
        self._index = index
        self._workers = workers or Workers(())
        self._path = index.options.path
        self._health: tuple[float, list[dict[str, Any]]] = (-1e9, [])

    @property
    def version(self) -> int:
        """Return a number that is another one when something may have changed."""
        return self._index.picture.version

    def state(self) -> dict[str, Any]:
        """Return what every page says of the index."""
        picture = self._index.picture
        return {
            "namespace": self._index.config.namespace,
            "now_ms": round(time.time() * 1000),
            "version": picture.version,
            "is_caught_up": picture.is_caught_up,
            "error": picture.error,
            "behind": picture.behind,
            "made_ms": picture.made_ms,
            "index_bytes": picture.size_bytes,
        }

    def overview(self, *, search: str = "", sort: str = "", page: int = 1) -> dict[str, Any]:
        """Return a page of queues, with what they have."""
        minute = int(time.time()) // 60
        with reading(self._path) as connection:
            rows = self._queues(connection, minute)
            totals = {
                name: sum(row[name] for row in rows.values())
                for name in ("waiting", "in_flight", "delayed", "due", "letters")
            }
            wanted = search.casefold()
            found = [(row, at) for at, row in rows.items() if wanted in row["queue"].casefold()]
            sort = sort if sort in SORTS else "queue"
            found.sort(key=lambda each: (SORTS[sort](each[0]), each[0]["queue"]))
            shown, paging = page_of(found, page, PAGE_ROWS)
            first = minute - CHART_MINUTES + 1
            numbers = [number for _, number in shown]
            sent = lookups.sent_by_minute(connection, numbers, first, CHART_MINUTES)
            return paging | {
                "queues": [row | {"sent_by_minute": sent[number]} for row, number in shown],
                "sort": sort,
                "search": search,
                "totals": totals,
                "chart": _chart(connection, minute),
                "asks_workers": bool(self._workers.answers),
            }

    def _queues(
        self, connection: Any, minute: int, queue: int | None = None
    ) -> dict[int, dict[str, Any]]:
        rates, slots = lookups.rates(connection, minute - 1), self._workers.slots()
        made = {}
        for row in lookups.queue_rows(connection, queue):
            number, name, messages, waiting, letters, redriven = row
            counts = self._index.picture.counts.get(number, _NOTHING)
            sent, acked = rates.get(number, (0, 0))
            busy, count = slots.get(name, (None, None))
            made[number] = {
                "queue": name,
                "messages": messages,
                "waiting": max(0, waiting),
                "in_flight": counts.in_flight,
                "delayed": counts.delayed,
                "due": counts.due,
                "oldest_ms": counts.oldest_ms,
                "letters": letters - redriven,
                "redriven": redriven,
                "sent_per_minute": sent,
                "acked_per_minute": acked,
                "busy": busy,
                "slots": count,
            }
        return made

    def queue(self, name: str) -> dict[str, Any] | None:
        """Return one queue; None: no message of it was seen."""
        minute = int(time.time()) // 60
        picture = self._index.picture
        with reading(self._path) as connection:
            queue = name_number(connection, name)
            made = self._queues(connection, minute, queue).get(queue)
            if made is None:
                return None
            runs = [run for run in picture.runs if run.queue == queue]
            runs.sort(key=lambda run: run.left_ms)
            return made | {
                "open": _listed(connection, runs),
                "waiting_messages": lookups.waiting(connection, queue, PAGE_ROWS),
                "failures": lookups.letter_groups(connection, queue=queue, limit=20),
                "chart": _chart(connection, minute, queue),
            }

    def find(self, text: str) -> list[dict[str, Any]]:
        """Find messages and dead letters by id, key, or ``partition:offset``."""
        partition, colon, offset = text.strip().partition(":")
        with reading(self._path) as connection:
            found = []
            if colon and partition.isdecimal() and offset.isdecimal() and len(offset) < 14:
                place = place_of(MESSAGES, int(partition[:9]), int(offset))
                found = list(lookups.messages_at(connection, [place]).values())
            return found or lookups.find_messages(connection, text)

    def message(self, log: int, partition: int, offset: int) -> dict[str, Any] | None:
        """Return the life of the message that stands there; None: nothing is known of it."""
        if log not in (MESSAGES, MARKERS, LETTERS):
            return None
        place = place_of(log, partition, offset)
        picture = self._index.picture
        with reading(self._path) as connection:
            records = lookups.family(connection, place)
            shown = next((each for each in records if each["place"] == place), None)
            if shown is None:
                return None
            steps = [step for each in records for step in _steps(connection, each)]
        places = {each["place"] for each in records}
        now = [
            _run(run) | {"where": lookups.where_of(each)}
            for run in picture.runs
            for each in run.places()
            if each in places
        ]
        steps.sort(key=lambda step: (step["at_ms"], step["order"]))
        return {"message": shown, "records": records, "steps": steps, "open": now}

    def letters(self, chosen: LetterFilter, *, before: int = 0) -> dict[str, Any]:
        """Return a page of the dead letters that are meant, and what they have in common."""
        with reading(self._path) as connection:
            queue = name_number(connection, chosen.queue) if chosen.queue else None
            found, more = lookups.letters(connection, chosen, before=before, limit=PAGE_ROWS)
            return {
                "filter": asdict(chosen),
                "letters": found,
                "before": more,
                "groups": lookups.letter_groups(connection, queue=queue),
            }

    def workers(self, *, consumer: str = "", at: str = "") -> dict[str, Any]:
        """Return who holds what, and what the handlers of asked workers are at."""
        held: defaultdict[str, list[Run]] = defaultdict(list)
        for run in self._index.picture.runs:
            if run.consumer_id:
                held[run.consumer_id].append(run)
        with reading(self._path) as connection:
            numbers = sorted({run.queue for runs in held.values() for run in runs})
            names = lookups.names_of(connection, numbers[:5000])
            chosen = sorted(held.get(consumer, ()), key=lambda run: run.left_ms)
            listed = _listed(connection, chosen) if consumer else []
        workers: list[dict[str, Any]] = [
            {
                "consumer": consumer_id,
                "messages": sum(run.bits.bit_count() for run in runs),
                "queues": sorted({names.get(run.queue, "") for run in runs}),
                "begin_ms": min(run.begin_ms for run in runs),
                "left_ms": min(run.left_ms for run in runs),
            }
            for consumer_id, runs in held.items()
        ]
        workers.sort(key=lambda each: -each["messages"])
        return {
            "workers": workers[:500],
            "count": len(workers),
            "consumer": consumer,
            "open": listed,
            "at": at,
            "topic": self._index.config.message_topic,
            "asked": [
                {
                    "url": url,
                    "error": error_text,
                    "pools": [each for each in said.pools if consumer in ("", each.consumer)],
                }
                for url, (said, error_text) in self._workers.answers.items()
                if at in ("", url)
            ],
        }

    def trackers(self) -> dict[str, Any]:
        """Return what the tracker said last of each marker partition."""
        return {
            "markers": [
                {
                    **asdict(each),
                    "lag": each.status and max(0, each.position - each.status.position),
                }
                for each in self._index.picture.markers
            ]
        }

    def health(self) -> dict[str, Any]:
        """Return what ``kafkamq doctor`` says of the cluster, at most half a minute ago."""
        asked_s, checks = self._health
        if time.monotonic() - asked_s > HEALTH_S:
            found = cluster_checks(self._index.config)
            checks = [asdict(check) for check in found]
            self._health = (time.monotonic(), checks)
        return {"checks": checks, "ok": all(check["level"] != "refuse" for check in checks)}


def _run(run: Run) -> dict[str, Any]:
    return {
        "state": run.state,
        "consumer": run.consumer_id,
        "begin_ms": run.begin_ms,
        "left_ms": run.left_ms,
    }


def _listed(connection: Any, runs: list[Run]) -> list[dict[str, Any]]:
    """Return the first messages of these runs, each with what is known of it."""
    pairs: list[tuple[int, Run]] = []
    for run in runs:
        pairs += [(place, run) for place in run.places()]
        if len(pairs) >= SHOWN_RUNS:
            break
    pairs = pairs[:SHOWN_RUNS]
    known = lookups.messages_at(connection, [place for place, _ in pairs])
    return [known[place] | _run(run) for place, run in pairs if place in known]


def _steps(connection: Any, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the log says of one record, as steps of a time line."""
    step = {"where": record["where"], "consumer": "", "reason": "", "delay_ms": 0, "order": 0}
    if record["kind"] == "letter":
        first = {"what": "DEAD LETTER", "reason": f"{record['reason']}: {record['error']}"}
        steps = [step | first | {"at_ms": record["at_ms"], "order": _ORDER["DEAD LETTER"]}]
        if record["redriven_ms"]:
            steps.append(step | {"what": "REDRIVEN", "at_ms": record["redriven_ms"], "order": 9})
        return steps
    what = "DELAYED" if record["kind"] == "delayed" else "SENT"
    if record["redriven_from"]:
        what = "SENT AGAIN"
    elif record["origin"]:
        what = "COPY"
    steps = [step | {"what": what, "at_ms": record["at_ms"]}]
    marks = lookups.events(connection, record["place"])
    return steps + [step | mark | {"order": _ORDER.get(mark["what"], 2)} for mark in marks]


def _chart(connection: Any, last: int, queue: int | None = None) -> dict[str, Any]:
    """Return sixty minutes as columns of numbers; the last one is the newest."""
    first = last - CHART_MINUTES + 1
    by_minute = {row[0]: row[2:] for row in lookups.minutes(connection, first, last, queue)}
    columns = [by_minute.get(minute, (0,) * 7) for minute in range(first, last + 1)]
    names = ("sent", "started", "acked", "failed", "dead")
    series = {name: [column[i] for column in columns] for i, name in enumerate(names)}
    held_ms = [column[6] // column[5] if column[5] else 0 for column in columns]
    return {"first_ms": first * 60_000, **series, "held_ms": held_ms}


@dataclass(frozen=True, slots=True)
class Shown:
    """A payload is shown as text for people."""

    form: str
    text: str
    size_bytes: int
    is_cut: bool
    note: str = ""


class Payloads:
    """It reads one record at a time; thread-safe."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._topics = {
            MESSAGES: config.message_topic,
            MARKERS: config.marker_topic,
            LETTERS: config.dead_letter_topic,
        }
        self._readers: dict[int, RecordReader] = {}
        self._lock = threading.Lock()
        self._shown: OrderedDict[tuple[int, int, int, str], tuple[float, Shown]] = OrderedDict()

    def read(self, log: int, partition: int, offset: int, form: str) -> Shown:
        """Return the payload of the record there, as it was at most some seconds ago.

        A page that is open asks again and again, and Kafka is asked seldom.

        Raises:
            StateError: Others are being read for too long.
            BrokerError, DeadlineExceededError: It cannot be read.
        """
        if not self._lock.acquire(timeout=_TURN_S):
            raise StateError("other payloads are being read; try again")
        try:
            place = (log, partition, offset, form)
            read_s, shown = self._shown.get(place, (-_KEPT_S, None))
            if shown is None or time.monotonic() - read_s > _KEPT_S:
                shown = self._read(*place)
                self._shown[place] = (time.monotonic(), shown)
                while len(self._shown) > _MAX_KEPT:
                    self._shown.popitem(last=False)
            return shown
        finally:
            self._lock.release()

    def _read(self, log: int, partition: int, offset: int, form: str) -> Shown:
        if log not in self._readers:
            self._readers[log] = RecordReader(self._config, self._topics[log])
        record = self._readers[log].read(partition, offset, timeout_s=_READ_S)
        if record is None:
            return Shown(form, "", 0, False, "the record is gone: retention has deleted it")
        value = record.value()
        if log == MARKERS:
            try:
                value = decode_marker(value).value
            except WireError as error:
                return Shown(form, "", 0, False, str(error))
        return show(value, form)

    def close(self) -> None:
        with self._lock:
            for reader in self._readers.values():
                reader.close()


def show(value: bytes | None, form: str) -> Shown:
    """Show a payload, at most 64 KiB of it; what does not have the form is shown as text."""
    if value is None:
        return Shown(form, "", 0, False, "null: there is no payload")
    size, note = len(value), ""
    if form == "json":
        try:
            if size > MAX_JSON_BYTES:
                raise ValueError("too large")
            text = json.dumps(json.loads(value), indent=2, ensure_ascii=False)
            return Shown(form, text[:MAX_SHOWN_BYTES], size, len(text) > MAX_SHOWN_BYTES)
        except (ValueError, RecursionError):
            form, note = "text", "it is no JSON, or too large for it"
    part = value[:MAX_SHOWN_BYTES]
    if form == "hex":
        part = value[: MAX_SHOWN_BYTES // 4]
        return Shown(form, _hex(part), size, size > len(part))
    return Shown("text", part.decode("utf-8", "backslashreplace"), size, size > len(part), note)


def _hex(data: bytes) -> str:
    lines = []
    for first in range(0, len(data), _LINE):
        part = data[first : first + _LINE]
        text = "".join(chr(each) if 32 <= each < 127 else "." for each in part)
        lines.append(f"{first:08x}  {part.hex(' '):<{3 * _LINE}} {text}")
    return "\n".join(lines)
