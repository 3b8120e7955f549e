"""What operators do: by forms, which work without JavaScript, and by the same as JSON.

The guard has let them pass, so each request is an operator's, on a page of ours.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from litestar import Request, post
from litestar.di import NamedDependency
from litestar.exceptions import HTTPException
from litestar.params import FromPath, JSONBody, RawBody
from litestar.response import Redirect

from kafkamq.errors import ConfigError, DeadlineExceededError, KafkaMQError, StateError
from kafkamq.queue.dead_letters import DeadLetter
from kafkamq.queue.names import uuid7
from kafkamq.queue.service import Service
from kafkamq.transport.admin import Admin
from kafkamq.types import ScheduleToken
from kafkamq.web import lookups
from kafkamq.web.actions import Actions
from kafkamq.web.filters import LetterFilter, require_known
from kafkamq.web.guard import MAX_FIELDS, TOKEN_FIELD
from kafkamq.web.index import fold
from kafkamq.web.index.fold import OTHER
from kafkamq.web.index.follower import Index
from kafkamq.web.index.rows import LETTERS, MARKERS, MESSAGES, place_of
from kafkamq.web.jobs import MAX_JOBS, MAX_RATE, STATES_AFTER, Action
from kafkamq.web.lookups import names_are_full, reading
from kafkamq.web.runner import messages_of

MAX_SAMPLES = 20
MAX_DRY_RUN_S = 20.0
MAX_NAME_CHARACTERS = 200
MAX_PAYLOAD_BYTES = 600_000
_SENT_S = 30.0
_ID = re.compile(r"[A-Za-z0-9_-]{0,64}")
PLACE = "{log:int}/{partition:int}/{offset:int}"
Where = tuple[int, int, int]
"""The log, partition and offset of an address with a ``PLACE``: ``where_of``."""
_Request = Request[Any, Any, Any]
_New = TypeVar("_New", bound="NewJob | NewState | NewPayload")


def where_of(log: FromPath[int], partition: FromPath[int], offset: FromPath[int]) -> Where:
    return log, partition, offset


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """A job says which dead letters go back, or which messages go again, and how fast.

    Dead letters that were redriven before stay. Of two jobs with the same id the second is none.
    """

    kind: str = "redrive"
    id: str = ""
    filter: LetterFilter = field(default_factory=LetterFilter)
    everything: bool = False
    name: str = ""
    # Dead letters a second; 0: as fast as it goes.
    rate: float = 0.0


@dataclass(frozen=True, kw_only=True)
class NewState:
    do: str = ""


@dataclass(frozen=True, kw_only=True)
class NewPayload:
    """The payload that a job sends in the place of a dead letter's own."""

    payload: str = ""
    payload_base64: str = ""

    def as_bytes(self) -> bytes:
        text, encoded = self.payload, self.payload_base64
        if text and encoded:
            raise ConfigError("payload and payload_base64 are both given")
        try:
            return base64.b64decode(encoded, validate=True) if encoded else text.encode()
        except (binascii.Error, UnicodeEncodeError) as error:
            raise ConfigError(f"the payload cannot be read: {error}") from None


@dataclass(frozen=True, kw_only=True)
class NewMessage(NewPayload):
    queue: str = ""
    key: str = ""
    id: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Written:
    """An action is in the topic; readers come to it when what is open there before it has ended."""

    id: str
    offset: int
    is_read: bool

    def answer(self) -> dict[str, Any]:
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
        # A dry run of a replay reads Kafka for long, in a thread that pages wait for.
        self._reading = threading.Lock()
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

    def dry_run(self, kind: str, chosen: LetterFilter) -> dict[str, Any]:
        """Return how many dead letters or messages are meant, and the newest of them."""
        said = {"kind": kind, "id": uuid7(), "filter": asdict(chosen.of_kind(kind))}
        if kind == "replay":
            if not self._reading.acquire(blocking=False):
                raise StateError(
                    f"another dry run of a replay is under way: ask again in {MAX_DRY_RUN_S:g} s"
                )
            try:
                return said | {"is_everything": False} | self._dry_run_of_replay(chosen)
            finally:
                self._reading.release()
        wanted = replace(chosen, redriven="no")
        with reading(self._path) as connection:
            if OTHER in (chosen.queue, chosen.reason, chosen.form) and names_are_full(connection):
                raise ConfigError(
                    f"{OTHER} stands for all names beyond the first {fold.MAX_NAMES:,}, which the"
                    " topic does not know: choose by a text of the error, a key or a header"
                )
            found, _ = lookups.letters(connection, wanted, before=0, limit=MAX_SAMPLES)
            count = lookups.count_letters(connection, wanted)
        return said | {
            "is_everything": replace(chosen, redriven="").is_empty,
            "count": count,
            "samples": found,
            "is_whole": True,
        }

    def _dry_run_of_replay(self, chosen: LetterFilter) -> dict[str, Any]:
        """Read the messages themselves, for some seconds at most."""
        last_s, ends = time.monotonic() + MAX_DRY_RUN_S, self._ends(of_messages=True)
        count, newest, is_whole = 0, deque[DeadLetter](maxlen=MAX_SAMPLES), True
        try:
            source = messages_of(self._config, chosen, ends["ends"], ends["marker_ends"])
            for each in replace(source, until_s=last_s).read(self._config):
                count += 1
                newest.append(each)
        except DeadlineExceededError:
            if time.monotonic() < last_s:
                raise
            is_whole = False
        samples = [
            {
                "kind": "message",
                "where": f"{MESSAGES}/{each.partition}/{each.offset}",
                "queue": each.queue_id,
                "at_ms": each.timestamp_ms,
                "id": each.id,
                "key": lookups.text_of(each.user_key),
                "attempt": each.delivery_count,
                "origin": None,
                "redriven_from": None,
            }
            for each in reversed(newest)
        ]
        return {"count": count, "samples": samples, "is_whole": is_whole}

    def _ends(self, *, of_messages: bool) -> dict[str, Any]:
        """Return what a job that begins now keeps: where the logs end that it reads, and an id."""
        config = self._config
        logs = {"ends": config.dead_letter_topic}
        if of_messages:
            logs = {"ends": config.message_topic, "marker_ends": config.marker_topic}
        with Admin(config) as admin:
            topic_id = admin.require_topic(logs["ends"]).topic_id.hex()
            found = {
                name: {number: end for number, (end, _) in admin.log_ends(topic).items()}
                for name, topic in logs.items()
            }
        return {**found, "topic_id": topic_id}

    def start(self, user: str, new: NewJob) -> Written:
        chosen = replace(new.filter, redriven="")
        if chosen.is_empty and not new.everything:
            raise ConfigError("the filter is empty: choose, or say everything")
        if not 0 <= new.rate <= MAX_RATE:
            raise ConfigError(f"rate is {new.rate}: it must be from 0 to {MAX_RATE:g}")
        if not _ID.fullmatch(new.id):
            raise ConfigError(f"id is {new.id[:80]!r}: it must have at most 64 letters and digits")
        if self._actions.job(new.id) is not None:
            raise StateError("this job has begun before: see the page of jobs")
        more = {
            "name": new.name[:MAX_NAME_CHARACTERS],
            "filter": asdict(chosen),
            "rate": new.rate,
            "expected": self.dry_run(new.kind, chosen)["count"],
        }
        return self._begin(new.kind, user, more, new.id)

    def _begin(self, what: str, user: str, more: dict[str, Any], id: str = "") -> Written:
        if self._actions.open_jobs >= MAX_JOBS:
            raise StateError(f"{MAX_JOBS:,} jobs have not ended: cancel some")
        more |= self._ends(of_messages=what == "replay")
        return self._record(Action(what=what, id=id or uuid7(), user=user, more=more))

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

    def resend(self, user: str, where: Where, payload: bytes) -> Written:
        """Send a dead letter again with another payload, as a job."""
        _, partition, offset = where
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ConfigError(f"the payload has {len(payload):,} bytes: {MAX_PAYLOAD_BYTES:,}")
        place = place_of(*where) if where[0] == LETTERS else None
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
        payload = new.as_bytes()
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

    def cancel(self, user: str, where: Where) -> dict[str, Any]:
        """Take back a delayed message."""
        _, partition, offset = where
        place = place_of(*where) if where[0] == MARKERS else None
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


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"rate is {text[:80]!r}: it must be a number") from None


def _headers(text: str) -> dict[str, str]:
    """Read headers as people write them, ``name: value`` on each line."""
    found = {}
    for line in filter(str.strip, text.split("\n")):
        name, colon, value = line.partition(":")
        if not colon:
            raise ConfigError(f"a header is {line[:80]!r}: it must be NAME: VALUE")
        found[name.strip()] = value.strip()
    return found


def _yes(text: str) -> bool:
    if text != "yes":
        raise ConfigError(f"everything is {text[:80]!r}: it must be yes")
    return True


_READ: Mapping[str, Callable[[str], Any]] = {
    "rate": _number,
    "everything": _yes,
    "headers": _headers,
}
"""What fields of forms mean that are no texts."""


def _of_form(kind: type[_New], body: bytes, **more: Any) -> _New:
    """Make it of the fields of a form, with the line ends that their sender has."""
    try:
        pairs = parse_qsl(body.decode("utf-8", "replace"), max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise ConfigError(f"the form cannot be read: {error}") from None
    known = {each.name for each in fields(kind)} - more.keys()
    require_known([name for name, _ in pairs], (*known, TOKEN_FIELD))
    for name, text in pairs:
        if name in known:
            more[name] = _READ.get(name, str)(text.replace("\r\n", "\n"))
    return kind(**more)


def _of_json(meant: _New, said: Any) -> _New:
    """Return it; a name in the JSON that its type does not have is refused."""
    require_known(said, [each.name for each in fields(meant)])
    for name, value in said.items():
        if is_dataclass(getattr(meant, name)):
            _of_json(getattr(meant, name), value)
    return meant


def _user(request: _Request) -> str:
    return str(request.scope["state"]["user"].name)


def form_routes(operations: Operations) -> list[Any]:
    """Make what takes the pages' forms; answers lead to a page that shows what came of them."""

    @post("/jobs", sync_to_thread=True, include_in_schema=False)
    def start(request: _Request, body: RawBody) -> Any:
        # Browsers change line ends in fields, and none in an address.
        chosen = LetterFilter.of_texts(request.query_params)
        return operations.start(_user(request), _of_form(NewJob, body, filter=chosen)).shown()

    @post("/jobs/{id:str}", sync_to_thread=True, include_in_schema=False)
    def change(request: _Request, id: FromPath[str], body: RawBody) -> Any:
        return operations.change(_user(request), id, _of_form(NewState, body).do).shown()

    @post("/send", sync_to_thread=True, include_in_schema=False)
    def send(request: _Request, body: RawBody) -> Any:
        operations.send(_user(request), _of_form(NewMessage, body))
        return Redirect(f"/actions?written={operations.written}", status_code=303)

    @post(f"/resend/{PLACE}", sync_to_thread=True, include_in_schema=False)
    def resend(request: _Request, where: NamedDependency[Where], body: RawBody) -> Any:
        payload = _of_form(NewPayload, body).as_bytes()
        return operations.resend(_user(request), where, payload).shown()

    @post(f"/cancel/{PLACE}", sync_to_thread=True, include_in_schema=False)
    def cancel(request: _Request, where: NamedDependency[Where]) -> Any:
        operations.cancel(_user(request), where)
        return Redirect(f"/actions?written={operations.written}", status_code=303)

    return [start, change, send, resend, cancel]


def api_routes(operations: Operations) -> list[Any]:
    """Make the same for JSON; requests have the token of ``/api/state`` as ``X-CSRF-Token``."""

    @post("/api/jobs", sync_to_thread=True)
    def start(request: _Request, data: JSONBody[NewJob], body: RawBody) -> dict[str, Any]:
        """Begin a job that redrives or replays, by a filter of /api/redrive or /api/replay."""
        return operations.start(_user(request), _of_json(data, json.loads(body))).answer()

    @post("/api/jobs/{id:str}", sync_to_thread=True)
    def change(
        request: _Request, id: FromPath[str], data: JSONBody[NewState], body: RawBody
    ) -> dict[str, Any]:
        """Pause, resume or cancel a job."""
        do = _of_json(data, json.loads(body)).do
        return operations.change(_user(request), id, do).answer()

    @post("/api/messages", sync_to_thread=True)
    def send(request: _Request, data: JSONBody[NewMessage], body: RawBody) -> dict[str, Any]:
        """Send one message to a queue of the namespace's messages topic."""
        return operations.send(_user(request), _of_json(data, json.loads(body)))

    @post(f"/api/resend/{PLACE}", sync_to_thread=True)
    def resend(
        request: _Request, where: NamedDependency[Where], data: JSONBody[NewPayload], body: RawBody
    ) -> dict[str, Any]:
        """Send a dead letter again with another payload, as a job."""
        payload = _of_json(data, json.loads(body)).as_bytes()
        return operations.resend(_user(request), where, payload).answer()

    @post(f"/api/cancel/{PLACE}", sync_to_thread=True)
    def cancel(request: _Request, where: NamedDependency[Where]) -> dict[str, Any]:
        """Take back a delayed message."""
        return operations.cancel(_user(request), where)

    return [start, change, send, resend, cancel]
