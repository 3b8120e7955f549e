"""The server: it follows the logs, and answers with pages and their JSON.

Each page shows what ``/api`` answers at the same address. ``acting.py`` has what is done by POST.
"""

from __future__ import annotations

import secrets
import socket
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import count, repeat
from typing import Any

import uvicorn
from litestar import Litestar, MediaType, Request, Response, Router, get
from litestar.di import NamedDependency, Provide
from litestar.exceptions import HTTPException
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.params import FromQuery
from litestar.response import Redirect
from litestar.static_files import create_static_files_router

from kafkamq import __version__
from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, KafkaMQError, StateError
from kafkamq.web.acting import PLACE, Operations, Where, api_routes, form_routes, where_of
from kafkamq.web.actions import Actions
from kafkamq.web.filters import LetterFilter
from kafkamq.web.guard import MAX_BODY_BYTES, Guard, is_of_our_page
from kafkamq.web.index.follower import Index, IndexOptions
from kafkamq.web.index.rows import LETTERS
from kafkamq.web.options import OPERATOR, User, WebOptions
from kafkamq.web.rendering import STATIC, render
from kafkamq.web.runner import Runner
from kafkamq.web.views import FORMS, Payloads, Views
from kafkamq.web.workers import Workers

STILL_S = 2.0
CHANGING_S = 0.25
MAX_SHOWN = 200
MAX_CONNECTIONS = 500
STOP_S = 5
# Making a page takes no more than a tenth of a core.
_REST = 10
_Request = Request[Any, Any, Any]
_Data = dict[str, Any]


@contextmanager
def serving(
    config: ServiceConfig, options: WebOptions, index_options: IndexOptions
) -> Iterator[str]:
    """Follow the logs and serve the pages while the block runs, and yield their address.

    Raises:
        ConfigError: The address cannot be listened on, or another process has this index.
    """
    listening = _listen(options.host, options.port)
    index = Index(config, index_options)
    actions = Actions(config)
    runner = Runner(config, actions)
    server = _Server(
        uvicorn.Config(
            build_app(index, options, actions),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            # The guard looks at the peer itself.
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=STOP_S,
            ws="none",
        )
    )
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listening]}, name="kafkamq-web", daemon=True
    )
    try:
        index.start()
    except ConfigError:
        listening.close()
        raise
    actions.start()
    if not options.read_only:
        runner.start()
    thread.start()
    try:
        host = f"[{options.host}]" if ":" in options.host else options.host
        yield f"http://{host}:{listening.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(2 * STOP_S)
        runner.close()
        actions.close()
        index.close()
        listening.close()


class _Server(uvicorn.Server):
    """It runs beside the main thread, to which signals go."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them as they are."""
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error}") from None


@dataclass(frozen=True, slots=True)
class _Shown:
    """A page was made, and is shown to all who ask for it while it is fresh."""

    text: str
    status: int
    tag: str
    versions: tuple[int, int]
    made_s: float
    rest_s: float

    def is_fresh(self, versions: tuple[int, int]) -> bool:
        is_same = versions == self.versions
        least_s = STILL_S if is_same else min(STILL_S, max(CHANGING_S, self.rest_s))
        return time.monotonic() - self.made_s < least_s

    def answer(self, request: _Request) -> Response[Any]:
        if request.headers.get("x-seen") == self.tag:
            return Response(None, status_code=204)
        return _html(self.text, self.status)


class Site:
    """It has what the handlers of one application need."""

    def __init__(self, index: Index, options: WebOptions, actions: Actions) -> None:
        self.workers = Workers(options.workers)
        self.views = Views(index, self.workers)
        self.actions = actions
        self.operations = Operations(index, actions)
        self.payloads = Payloads(index.config)
        self._options = options
        self._shown: OrderedDict[tuple[str, str], _Shown] = OrderedDict()
        self._making: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._tags = map("{}-{}".format, repeat(secrets.token_hex(4)), count())

    def page(self, request: _Request, template: str, make: Callable[[], _Data | None]) -> Any:
        """Answer with a page of what ``make`` returns; None: there is no such thing.

        Viewers share it while it is fresh. One that has it already gets nothing.
        """
        user: User = request.scope["state"]["user"]
        key = (f"{request.url.path}?{request.url.query}", f"{user.role} {user.name}")
        with self._lock:
            shown = self._shown.get(key)
            if shown is not None and (key in self._making or shown.is_fresh(self._versions)):
                return shown.answer(request)
            self._making.add(key)
        try:
            began_s, versions, tag = time.monotonic(), self._versions, next(self._tags)
            data = make()
            values = self._values(request, data) | {"tag": tag}
            text = render("missing.html" if data is None else template, values)
            made_s = time.monotonic()
            status = 404 if data is None else 200
            shown = _Shown(text, status, tag, versions, made_s, _REST * (made_s - began_s))
        finally:
            with self._lock:
                self._making.discard(key)
        with self._lock:
            self._shown[key] = shown
            while len(self._shown) > MAX_SHOWN:
                self._shown.popitem(last=False)
        return shown.answer(request)

    @property
    def _versions(self) -> tuple[int, int]:
        return self.views.version, self.actions.version

    def close(self) -> None:
        self.workers.close()
        self.payloads.close()
        self.operations.close()

    def _values(self, request: _Request, data: _Data | None) -> _Data:
        return {
            # Empty: this user does not act.
            "csrf": request.scope["state"]["csrf"],
            "page": data or {},
            "state": self.views.state(),
            "tag": "",
            "user": request.scope["state"]["user"],
            "path": request.url.path,
            "address": request.url.path + (f"?{request.url.query}" if request.url.query else ""),
            "authenticates": self._options.authenticates,
            "version": __version__,
        }

    def fail(self, request: _Request, status: int, text: str) -> Response[Any]:
        """Answer with an error, as a page or as JSON."""
        if request.url.path.startswith("/api"):
            return Response({"error": text}, status_code=status)
        try:
            values = self._values(request, {"status": status, "text": text})
        except KeyError:
            return Response(text, status_code=status, media_type=MediaType.TEXT)
        return _html(render("failure.html", values), status)

    def message(self, request: _Request, where: Where, form: str) -> _Data | None:
        """Return a message's page, with its payload if one of ``FORMS`` is asked for."""
        data = self.views.message(*where)
        if data is None:
            return None
        user: User = request.scope["state"]["user"]
        may_look = user.role == OPERATOR or not self._options.hides_payloads
        payload = None
        if form in FORMS and may_look:
            payload = self.payloads.read(*where, form)
        return data | {"payload": payload, "may_look": may_look, "form": form}

    def require_operator(self, request: _Request) -> None:
        """Refuse viewers what is only there to be done, and other sites what takes long."""
        if not request.scope["state"]["csrf"]:
            raise HTTPException(status_code=403, detail="this is for operators alone")
        if not is_of_our_page(request.scope, self._options.allowed_hosts):
            raise HTTPException(status_code=403, detail="another page asks: open it from this one")

    def resend(self, request: _Request, where: Where) -> _Data | None:
        """Return a dead letter's payload as text to be edited, for those who may send it."""
        self.require_operator(request)
        data = self.message(request, where, "text") if where[0] == LETTERS else None
        if data is None or data["message"]["redriven_ms"]:
            return None
        return data


def build_app(index: Index, options: WebOptions, actions: Actions) -> Guard:
    """Make the application; its caller starts and closes index and actions."""
    site = Site(index, options, actions)
    # Litestar (2.25) registers handlers that share a path twice, unless they come as a router.
    routes = Router(
        path="/",
        route_handlers=[
            *_pages(site),
            *_action_pages(site),
            *_more(site),
            *form_routes(site.operations),
            *api_routes(site.operations),
        ],
        dependencies={"where": Provide(where_of, sync_to_thread=False)},
    )
    app = Litestar(
        route_handlers=[
            routes,
            create_static_files_router(path="/static", directories=[STATIC]),
        ],
        openapi_config=OpenAPIConfig(
            title="kafkamq",
            version=__version__,
            path="/api/openapi",
            render_plugins=[JsonRenderPlugin(path="/openapi.json")],
        ),
        exception_handlers={
            sqlite3.Error: lambda request, error: site.fail(
                request, 503, "The index is being made. This takes as long as reading the topics."
            ),
            ConfigError: lambda request, error: site.fail(request, 400, str(error)),
            StateError: lambda request, error: site.fail(request, 409, str(error)),
            KafkaMQError: lambda request, error: site.fail(request, 502, str(error)),
            HTTPException: lambda request, error: site.fail(
                request, error.status_code, error.detail
            ),
        },
        on_startup=[site.workers.start],
        on_shutdown=[site.close],
        request_max_body_size=MAX_BODY_BYTES,
        # The program that starts this one says what is logged.
        logging_config=None,
    )
    return Guard(app, options)


def _html(text: str, status: int = 200) -> Response[str]:
    return Response(text, media_type=MediaType.HTML, status_code=status)


def _both(
    site: Site, addresses: tuple[str, str], template: str, make: Callable[..., _Data | None]
) -> list[Any]:
    """Return the handlers of a page, and of its JSON: what ``make`` returns of a request.

    They have the parameters that ``make`` has, and raise what it raises.
    """

    @wraps(make)
    def page(request: _Request, **asked: Any) -> Any:
        return site.page(request, template, lambda: make(request, **asked))

    @wraps(make)
    def api(request: _Request, **asked: Any) -> _Data:
        data = make(request, **asked)
        if data is None:
            raise HTTPException(status_code=404, detail="nothing is known of it")
        return data

    page.__annotations__["return"], api.__annotations__["return"] = Any, _Data
    shown, said = addresses
    return [
        get(shown, sync_to_thread=True, include_in_schema=False)(page),
        get(said, sync_to_thread=True)(api),
    ]


def _pages(site: Site) -> list[Any]:
    views = site.views
    place = f"message/{PLACE}"

    def queues(
        request: _Request,
        search: FromQuery[str] = "",
        sort: FromQuery[str] = "",
        page: FromQuery[int] = 1,
    ) -> _Data | None:
        """Queues and what they have, 50 a page."""
        return views.overview(search=search, sort=sort, page=page)

    def queue(request: _Request, name: FromQuery[str]) -> _Data | None:
        """Return one queue: what is open, what waits, why messages failed."""
        return views.queue(name)

    def message(
        request: _Request, where: NamedDependency[Where], payload: FromQuery[str] = ""
    ) -> _Data | None:
        """Return a message's life; log is 0 messages, 1 markers (a delayed one), 2 dead letters."""
        return site.message(request, where, payload)

    def letters(request: _Request, before: FromQuery[int] = 0) -> _Data | None:
        """Dead letters by the fields of a job's filter, which are parameters here."""
        chosen = LetterFilter.of_texts(request.query_params, beside=("before",))
        return views.letters(chosen.of_kind("redrive"), before=before)

    def workers(
        request: _Request, consumer: FromQuery[str] = "", at: FromQuery[str] = ""
    ) -> _Data | None:
        """Return who holds what; and what handlers are at, of those that are asked: all, those of
        a consumer, or those at one of the addresses.
        """
        return views.workers(consumer=consumer, at=at)

    def trackers(request: _Request) -> _Data | None:
        """Return what the tracker said last of each marker partition."""
        return views.trackers()

    def health(request: _Request) -> _Data | None:
        """Return what ``kafkamq doctor`` says of the cluster."""
        return views.health()

    return [
        *_both(site, ("/", "/api/queues"), "overview.html", queues),
        *_both(site, ("/queue", "/api/queue"), "queue.html", queue),
        *_both(site, (f"/{place}", f"/api/{place}"), "message.html", message),
        *_both(site, ("/dead-letters", "/api/dead-letters"), "letters.html", letters),
        *_both(site, ("/workers", "/api/workers"), "workers.html", workers),
        *_both(site, ("/trackers", "/api/trackers"), "trackers.html", trackers),
        *_both(site, ("/health", "/api/health"), "health.html", health),
    ]


def _action_pages(site: Site) -> list[Any]:
    """Make the pages of what was and is being done, and those from which it is begun."""

    def dry_run(request: _Request) -> _Data | None:
        """Return how many dead letters a job with this filter would send back, and up to 20."""
        site.require_operator(request)
        texts = request.query_params.copy()
        marked = texts.popall("place", [])
        if marked:
            # Checkboxes send them; an empty one says that there are some.
            texts["places"] = ",".join(filter(None, marked))
            if not texts["places"]:
                raise ConfigError("no dead letter is chosen: mark some")
        return site.operations.dry_run("redrive", LetterFilter.of_texts(texts))

    def dry_run_of_replay(request: _Request) -> _Data | None:
        """Return how many messages of a queue a replay with this filter would send again, and up
        to 20 of them; not whole where that took too long.
        """
        site.require_operator(request)
        return site.operations.dry_run("replay", LetterFilter.of_texts(request.query_params))

    def jobs(
        request: _Request, page: FromQuery[int] = 1, written: FromQuery[int] = -1
    ) -> _Data | None:
        """Jobs and how far they are, 50 a page; those that have not ended come first."""
        return site.actions.jobs(page, written)

    def trail(request: _Request, before: FromQuery[int] = 0) -> _Data | None:
        """Return what operators have done, the newest first."""
        return site.actions.entries(before)

    @get("/send", sync_to_thread=True, include_in_schema=False)
    def send(request: _Request, queue: FromQuery[str] = "") -> Any:
        return site.page(request, "send.html", lambda: {"queue": queue})

    @get(f"/resend/{PLACE}", sync_to_thread=True, include_in_schema=False)
    def resend(request: _Request, where: NamedDependency[Where]) -> Any:
        return site.page(request, "resend.html", lambda: site.resend(request, where))

    return [
        *_both(site, ("/redrive", "/api/redrive"), "redrive.html", dry_run),
        *_both(site, ("/replay", "/api/replay"), "redrive.html", dry_run_of_replay),
        *_both(site, ("/jobs", "/api/jobs"), "jobs.html", jobs),
        *_both(site, ("/actions", "/api/actions"), "actions.html", trail),
        send,
        resend,
    ]


def _more(site: Site) -> list[Any]:
    """Make what is no page and its JSON."""
    views = site.views

    @get("/find", sync_to_thread=True, include_in_schema=False)
    def find(request: _Request, q: FromQuery[str] = "") -> Any:
        found = views.find(q) if q.strip() else []
        if len(found) == 1:
            return Redirect(f"/message/{found[0]['where']}")
        return site.page(request, "find.html", lambda: {"q": q, "found": found})

    @get("/api/find", sync_to_thread=True)
    def api_find(q: FromQuery[str]) -> _Data:
        """Return messages and dead letters by id, key, or partition:offset."""
        return {"found": views.find(q)}

    @get("/api/state", sync_to_thread=True)
    def state(request: _Request) -> _Data:
        """Return how far the index is; for operators the X-CSRF-Token that each POST needs."""
        return views.state() | {"csrf": request.scope["state"]["csrf"]}

    return [find, api_find, state]
