"""What operators do: by forms, which work without JavaScript, and by the same as JSON.

The guard has let them pass, so each request is an operator's, on a page of ours.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any
from urllib.parse import parse_qs

from litestar import Request, post
from litestar.exceptions import HTTPException
from litestar.params import FromPath, JSONBody, RawBody
from litestar.response import Redirect

from kafkamq.errors import ConfigError, DeadlineExceededError, KafkaMQError, StateError
from kafkamq.queue.names import uuid7
from kafkamq.queue.service import Service
from kafkamq.transport.admin import Admin
from kafkamq.types import ScheduleToken
from kafkamq.web import lookups
from kafkamq.web.actions import Actions
from kafkamq.web.filters import FILTER_TEXTS, LetterFilter
from kafkamq.web.guard import MAX_FIELDS
from kafkamq.web.index import fold
from kafkamq.web.index.fold import OTHER
from kafkamq.web.index.follower import Index
from kafkamq.web.index.rows import LETTERS, MARKERS, place_of
from kafkamq.web.jobs import MAX_JOBS, STATES_AFTER, Action
from kafkamq.web.lookups import names_are_full, reading

MAX_SAMPLES = 20
MAX_NAME_CHARACTERS = 200
MAX_PAYLOAD_BYTES = 600_000  # as base64 it fits into a record of the actions topic
MAX_RATE = 1e6
_SENT_S = 30.0
_Request = Request[Any, Any, Any]


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """A job says which dead letters go back, and how fast; those that were redriven before stay."""

    filter: LetterFilter = field(default_factory=LetterFilter)
    everything: bool = False  # needed where nothing chooses
    name: str = ""
    rate: float = 0.0  # dead letters a second; 0: as fast as it goes


@dataclass(frozen=True, kw_only=True)
class NewState:
    """It says what is wanted of a job: pause, resume or cancel."""

    do: str


@dataclass(frozen=True, kw_only=True)
class NewMessage:
    """A message goes to a queue, with one of the two payloads."""

    queue: str
    payload: str = ""
    payload_base64: str = ""
    key: str = ""
    id: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def payload_bytes(self) -> bytes:
        return _payload(self.payload, self.payload_base64)


@dataclass(frozen=True, kw_only=True)
class NewPayload:
    """The payload that a job sends in the place of a dead letter's own."""

    payload: str = ""
    payload_base64: str = ""

    @property
    def payload_bytes(self) -> bytes:
        return _payload(self.payload, self.payload_base64)


@dataclass(frozen=True, slots=True)
class Written:
    """An action is in the topic; readers come to it when what is open there before it has ended."""

    id: str
    offset: int
    is_read: bool

    def answer(self) -> dict[str, Any]:
        """Return what the API says."""
        return {"id": self.id, "is_read": self.is_read}

    def shown(self) -> Redirect:
        """Lead to a page of jobs that was made after it, and says whether it is read."""
        return Redirect(f"/jobs?written={self.offset}", status_code=303)


class Operations:
    """It does what operators want, and writes each action before its effect; thread-safe."""

    def __init__(self, index: Index, actions: Actions) -> None:
        self._index = index
        self._config = index.config
        self._path = index.options.path
        self._actions = actions
        self._lock = threading.Lock()
        self._made: Service | None = None

    def close(self) -> None:
        with self._lock:
            if self._made is not None:
                self._made.close()

    @property
    def written(self) -> int:
        """Return the offset up to which actions were read: pages of another one are older."""
        return self._actions.version

    def _service(self) -> Service:
        with self._lock:
            if self._made is None:
                config = self._config
                self._made = Service(
                    config.bootstrap_servers, config.namespace, kafka=config.kafka, **config.topics
                )
            return self._made

    # ---- jobs

    def dry_run(self, chosen: LetterFilter) -> dict[str, Any]:
        """Return how many dead letters are meant, and the newest of them."""
        wanted = replace(chosen, redriven="no")
        with reading(self._path) as connection:
            if OTHER in (chosen.queue, chosen.reason, chosen.form) and names_are_full(connection):
                raise ConfigError(
                    f"{OTHER} stands for all names beyond the first {fold.MAX_NAMES:,}, which the"
                    " topic does not know: choose by a text of the error, a key or a header"
                )
            found, _ = lookups.letters(connection, wanted, before=0, limit=MAX_SAMPLES)
            count = lookups.count_letters(connection, wanted)
        is_everything = replace(chosen, redriven="").is_empty
        return {
            "filter": asdict(chosen),
            "is_everything": is_everything,
            "count": count,
            "samples": found,
        }

    def start(self, user: str, new: NewJob) -> Written:
        chosen = replace(new.filter, redriven="")
        if chosen.is_empty and not new.everything:
            raise ConfigError("the filter is empty: choose, or say everything")
        if not 0 <= new.rate <= MAX_RATE:
            raise ConfigError(f"rate is {new.rate}: it must be from 0 to {MAX_RATE:g}")
        more = {
            "name": new.name[:MAX_NAME_CHARACTERS],
            "filter": asdict(chosen),
            "rate": new.rate,
            "expected": self.dry_run(chosen)["count"],
        }
        return self._begin("redrive", user, more)

    def _begin(self, what: str, user: str, more: dict[str, Any]) -> Written:
        if self._actions.open_jobs >= MAX_JOBS:
            raise StateError(f"{MAX_JOBS:,} jobs have not ended: cancel some")
        topic = self._config.dead_letter_topic
        with Admin(self._config) as admin:
            found = admin.require_topic(topic)
            ends = {number: end for number, (end, _) in admin.log_ends(topic).items()}
        more |= {"ends": ends, "topic_id": found.topic_id.hex()}
        action = Action(what=what, id=uuid7(), user=user, more=more)
        return self._record(action)

    def _record(self, action: Action) -> Written:
        offset = self._actions.write(action)
        return Written(action.id, offset, self._actions.wait_for(offset))

    def change(self, user: str, id: str, do: str) -> Written:
        """Pause, resume or cancel a job."""
        if do not in STATES_AFTER:
            raise ConfigError(f"do is {do!r}: it must be one of {', '.join(STATES_AFTER)}")
        job = self._actions.job(id)
        if job is None:
            raise HTTPException(status_code=404, detail="no such job was read")
        if job.is_over:
            raise StateError(f"the job is {job.state}")
        return self._record(Action(what=do, id=id, user=user))

    def resend(self, user: str, where: tuple[int, int, int], payload: bytes) -> Written:
        """Send a dead letter again with another payload, as a job."""
        _, partition, offset = where
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ConfigError(f"the payload has {len(payload):,} bytes: {MAX_PAYLOAD_BYTES:,}")
        place = _place(where, LETTERS)
        with reading(self._path) as connection:
            letter = None if place is None else lookups.letter_at(connection, place)
        if letter is None:
            raise HTTPException(status_code=404, detail="there is no such dead letter")
        if letter["redriven_ms"]:
            raise StateError("it was redriven before")
        more = {
            "name": letter["id"][:MAX_NAME_CHARACTERS],
            "place": [partition, offset],
            "payload": base64.b64encode(payload).decode(),
            "expected": 1,
        }
        return self._begin("resend", user, more)

    # ---- messages

    def send(self, user: str, new: NewMessage) -> dict[str, Any]:
        """Send one message, and say where it is."""
        payload = new.payload_bytes
        producer = self._service().queue(new.queue).producer()
        more = {
            "queue": new.queue,
            "message_id": new.id,
            "key": new.key,
            "headers": sorted(new.headers),
            "bytes": len(payload),
        }

        def send() -> dict[str, Any]:
            delivery = producer.send(
                payload,
                key=new.key or None,
                id=new.id or None,
                headers={name: value.encode() for name, value in new.headers.items()} or None,
            )
            sent = delivery.result(_SENT_S)
            return {"id": sent.id, "where": f"0/{sent.partition}/{sent.offset}"}

        return self._do("send", user, more, send)

    def cancel(self, user: str, where: tuple[int, int, int]) -> dict[str, Any]:
        """Take back a delayed message."""
        _, partition, offset = where
        place = _place(where, MARKERS)
        with reading(self._path) as connection:
            found = None if place is None else lookups.messages_at(connection, [place]).get(place)
        if found is None:
            raise HTTPException(status_code=404, detail="there is no such delayed message")
        queue, shown = found["queue"], found["where"]

        def cancel() -> dict[str, Any]:
            token = ScheduleToken(queue, partition, offset)
            self._service().queue(queue).producer().cancel(token)
            return {"where": shown}

        more = {"queue": queue, "message_id": found["id"], "where": shown}
        return self._do("cancel-delayed", user, more, cancel)

    def _do(
        self, what: str, user: str, more: dict[str, Any], effect: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        id = uuid7()
        self._actions.write(Action(what=what, id=id, user=user, more=more))

        def tell(what: str, more: dict[str, Any]) -> None:
            # It is done or not, whether or not this process reads of it in time.
            self._actions.wait_for(
                self._actions.write(Action(what=what, id=id, user=user, more=more))
            )

        try:
            done = effect()
        except KafkaMQError as error:
            is_known = not isinstance(error, DeadlineExceededError)
            tell("failed" if is_known else "unknown", {"why": str(error)[:2000]})
            raise
        tell("done", done)
        return done


def _place(where: tuple[int, int, int], log: int) -> int | None:
    """Return the place; None: no record of this log can be there."""
    return place_of(*where) if where[0] == log else None


def _payload(text: str, encoded: str) -> bytes:
    if text and encoded:
        raise ConfigError("payload and payload_base64 are both given")
    try:
        return base64.b64decode(encoded, validate=True) if encoded else text.encode()
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ConfigError(f"the payload cannot be read: {error}") from None


def _require_known(names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse what is not known here: what it was to choose would be left out."""
    if unknown := sorted(set(names) - set(known)):
        raise ConfigError(f"a job has no {', '.join(unknown)[:200]}")


def _user(request: _Request) -> str:
    return str(request.scope["state"]["user"].name)


def _fields(body: bytes) -> dict[str, str]:
    """Return the fields of a form, with the line ends that their sender has."""
    try:
        found = parse_qs(body.decode("utf-8", "replace"), max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise ConfigError(f"the form cannot be read: {error}") from None
    return {name: values[0].replace("\r\n", "\n") for name, values in found.items()}


def _number(fields: Mapping[str, str], name: str) -> float:
    text = fields.get(name, "0")
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name} is {text[:80]!r}: it must be a number")
    return number


def _headers(text: str) -> dict[str, str]:
    """Read headers as people write them, ``name: value`` on each line."""
    found = {}
    for line in filter(str.strip, text.split("\n")):
        name, colon, value = line.partition(":")
        if not colon:
            raise ConfigError(f"a header is {line[:80]!r}: it must be NAME: VALUE")
        found[name.strip()] = value.strip()
    return found


def form_routes(operations: Operations) -> list[Any]:
    """Make what takes the pages' forms; answers lead to a page that shows what came of them."""

    @post("/jobs", sync_to_thread=True, include_in_schema=False)
    def start(request: _Request, body: RawBody) -> Any:
        fields = _fields(body)
        _require_known(fields, ("csrf", "everything", "name", "rate"))
        _require_known(request.query_params, FILTER_TEXTS)
        new = NewJob(
            # Browsers change line ends in fields, and none in an address.
            filter=LetterFilter.of_texts(request.query_params),
            everything="everything" in fields,
            name=fields.get("name", ""),
            rate=_number(fields, "rate"),
        )
        return operations.start(_user(request), new).shown()

    @post("/jobs/{id:str}", sync_to_thread=True, include_in_schema=False)
    def change(request: _Request, id: FromPath[str], body: RawBody) -> Any:
        return operations.change(_user(request), id, _fields(body).get("do", "")).shown()

    @post("/send", sync_to_thread=True, include_in_schema=False)
    def send(request: _Request, body: RawBody) -> Any:
        fields = _fields(body)
        texts = {name: fields.get(name, "") for name in ("queue", "payload", "key", "id")}
        new = NewMessage(**texts, headers=_headers(fields.get("headers", "")))
        operations.send(_user(request), new)
        return Redirect(f"/actions?written={operations.written}", status_code=303)

    place = "{log:int}/{partition:int}/{offset:int}"

    @post(f"/resend/{place}", sync_to_thread=True, include_in_schema=False)
    def resend(
        request: _Request,
        log: FromPath[int],
        partition: FromPath[int],
        offset: FromPath[int],
        body: RawBody,
    ) -> Any:
        payload = _fields(body).get("payload", "").encode("utf-8", "replace")
        return operations.resend(_user(request), (log, partition, offset), payload).shown()

    @post(f"/cancel/{place}", sync_to_thread=True, include_in_schema=False)
    def cancel(
        request: _Request, log: FromPath[int], partition: FromPath[int], offset: FromPath[int]
    ) -> Any:
        operations.cancel(_user(request), (log, partition, offset))
        return Redirect(f"/actions?written={operations.written}", status_code=303)

    return [start, change, send, resend, cancel]


def api_routes(operations: Operations) -> list[Any]:
    """Make the same for JSON; requests have the token of ``/api/state`` as ``X-CSRF-Token``."""

    @post("/api/jobs", sync_to_thread=True)
    def start(request: _Request, data: JSONBody[NewJob], body: RawBody) -> dict[str, Any]:
        """Begin to redrive what matches; the filter is that of /api/dead-letters."""
        sent = json.loads(body)
        _require_known(sent, [each.name for each in fields(NewJob)])
        _require_known(sent.get("filter", ()), [each.name for each in fields(LetterFilter)])
        return operations.start(_user(request), data).answer()

    @post("/api/jobs/{id:str}", sync_to_thread=True)
    def change(request: _Request, id: FromPath[str], data: JSONBody[NewState]) -> dict[str, Any]:
        """Pause, resume or cancel a job."""
        return operations.change(_user(request), id, data.do).answer()

    @post("/api/messages", sync_to_thread=True)
    def send(request: _Request, data: JSONBody[NewMessage]) -> dict[str, Any]:
        """Send one message to a queue of the namespace's messages topic."""
        return operations.send(_user(request), data)

    place = "{log:int}/{partition:int}/{offset:int}"

    @post(f"/api/resend/{place}", sync_to_thread=True)
    def resend(
        request: _Request,
        log: FromPath[int],
        partition: FromPath[int],
        offset: FromPath[int],
        data: JSONBody[NewPayload],
    ) -> dict[str, Any]:
        """Send a dead letter again with another payload, as a job."""
        where = (log, partition, offset)
        return operations.resend(_user(request), where, data.payload_bytes).answer()

    @post(f"/api/cancel/{place}", sync_to_thread=True)
    def cancel(
        request: _Request, log: FromPath[int], partition: FromPath[int], offset: FromPath[int]
    ) -> dict[str, Any]:
        """Take back a delayed message."""
        return operations.cancel(_user(request), (log, partition, offset))

    return [start, change, send, resend, cancel]
