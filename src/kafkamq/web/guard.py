"""What every request passes first, and every answer gets: hosts, methods, users, headers.

It is the outermost layer, so that no answer goes around it. Who acts, by POST, is an operator, on a
page of ours (the browser says so in ``Origin``), and knows the token that our pages give this user.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import secrets
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from argon2 import PasswordHasher
from argon2.exceptions import Argon2Error, InvalidHashError

from kafkamq.web.options import OPERATOR, VIEWER, User, WebOptions

if TYPE_CHECKING:
    from litestar.types import ASGIApp, Message, Receive, Send

MAX_TARGET_BYTES = 8192
VERIFIED_S = 300.0
MAX_VERIFIED = 1000
MAX_CREDENTIALS_BYTES = 1024
MAX_HASHING = 2
MAX_BODY_BYTES = 1 << 20
MAX_FIELDS = 50
BODY_S = 30.0
TOKEN_FIELD, TOKEN_HEADER = "csrf", "x-csrf-token"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    # Without a policy forms would not say their origin.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_log = logging.getLogger(__name__)


class Passwords:
    """It checks passwords against argon2's hashes; thread-safe, and slow while it hashes."""

    def __init__(self, options: WebOptions) -> None:
        self._accounts = options.accounts
        self._hasher = PasswordHasher()
        self._nobody = self._hasher.hash("nobody has this one") if options.accounts else ""
        self._verified: OrderedDict[bytes, float] = OrderedDict()
        self._hashing = threading.BoundedSemaphore(MAX_HASHING)
        self._salt = secrets.token_bytes(32)

    def user(self, name: str, password: str) -> User | None:
        """Return the user; None: name or password is wrong, which takes as long to say."""
        account = self._accounts.get(name)
        wanted = self._nobody if account is None else account.password_hash
        kept = hashlib.blake2b(
            f"{name}\0{password}\0{wanted}".encode("utf-8", "replace"), key=self._salt
        ).digest()
        if self._verified.get(kept, 0.0) < time.monotonic():
            try:
                with self._hashing:
                    self._hasher.verify(wanted, password)
            except (Argon2Error, InvalidHashError):
                return None
            self._verified[kept] = time.monotonic() + VERIFIED_S
            while len(self._verified) > MAX_VERIFIED:
                self._verified.popitem(last=False)
        return None if account is None else User(name, account.role)


class Guard:
    def __init__(self, app: ASGIApp, options: WebOptions) -> None:
        self._app = app
        self._options = options
        self._passwords = Passwords(options)
        self._secret = secrets.token_bytes(32)

    def token(self, user: User) -> str:
        """Return what only pages that were given to this user know, while this process lives."""
        return hmac.new(self._secret, user.name.encode("utf-8", "replace"), "sha256").hexdigest()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it on with its user in the scope."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in _HEADERS}
                kept = [each for each in message.get("headers", ()) if each[0].lower() not in own]
                if not any(name.lower() == b"cache-control" for name, _ in kept):
                    kept.append((b"cache-control", b"no-store"))
                message["headers"] = [*kept, *_HEADERS]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await _answer(guarded, *refusal)
            return
        user = await self._user(scope)
        if user is None:
            _log.info("a request without a known user", extra={"client": scope.get("client")})
            challenge = (
                [(b"www-authenticate", b'Basic realm="kafkamq", charset="UTF-8"')]
                if self._options.accounts
                else []
            )
            await _answer(guarded, 401, "who are you?", challenge)
            return
        may_act = user.role == OPERATOR and not self._options.read_only
        state = scope.setdefault("state", {})
        state |= {"user": user, "csrf": self.token(user) if may_act else ""}
        if scope["method"] == "POST":
            body = await _body(receive)
            refusal = self._refusal_to_act(scope, user, body)
            if body is None or refusal is not None:
                refusal = refusal or (413, "the body is too long, or too slow")
                _log.warning("an action was refused", extra={"user": user.name, "why": refusal[1]})
                await _answer(guarded, *refusal)
                return
            receive = _replay(body, receive)
        await self._app(scope, receive, guarded)

    def _refusal_to_act(self, scope: Any, user: User, body: bytes | None) -> tuple[int, str] | None:
        if user.role != OPERATOR:
            return 403, "viewers may look, and not act"
        if not is_of_our_page(scope, self._options.allowed_hosts):
            return 403, "this comes from another page"
        if body is not None:
            given = _token_of(scope, body)
            if not hmac.compare_digest(given.encode(), self.token(user).encode()):
                return 403, "the page is too old: load it again (its token is not the one)"
        return None

    def _refusal(self, scope: Any) -> tuple[int, str] | None:
        allowed = ("GET", "HEAD") if self._options.read_only else ("GET", "HEAD", "POST")
        if scope["method"] not in allowed:
            return 405, "these pages only read" if self._options.read_only else "GET or POST"
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_TARGET_BYTES:
            return 414, "the address is too long"
        hosts = _all(scope, b"host")
        if len(hosts) != 1 or _host_of(hosts[0]) not in self._options.hosts:
            return 421, "this host is not served here; --allowed-host names it"
        return None

    async def _user(self, scope: Any) -> User | None:
        options = self._options
        if not options.authenticates:
            return User("local", OPERATOR)
        peer = (scope.get("client") or ("", 0))[0]
        if options.trusted_header and peer in options.trusted_proxies:
            named = _all(scope, options.trusted_header.lower().encode())
            if len(named) == 1 and named[0].strip():
                name = named[0].decode("utf-8", "replace").strip()
                return User(name, OPERATOR if name in options.operators else VIEWER)
        credentials = _all(scope, b"authorization")
        if options.accounts and len(credentials) == 1:
            pair = _basic(credentials[0])
            if pair is not None:
                return await asyncio.to_thread(self._passwords.user, *pair)
        return None


def _all(scope: Any, wanted: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name.lower() == wanted]


def _host_of(value: bytes) -> str:
    """Return the name in a ``Host`` header, without its port and the brackets of IPv6."""
    text = value.decode("ascii", "replace").casefold()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


def is_of_our_page(scope: Any, allowed_hosts: frozenset[str]) -> bool:
    """Return whether the browser says so; other clients say nothing, and need the token alone."""
    if any(site not in (b"same-origin", b"none") for site in _all(scope, b"sec-fetch-site")):
        return False
    origins = _all(scope, b"origin")
    if not origins:
        return True
    try:
        origin = urlsplit(origins[0].decode("ascii", "replace").casefold())
        name = origin.hostname or ""
    except ValueError:
        return False
    host = _all(scope, b"host")[0].decode("ascii", "replace").casefold()
    is_ours = origin.netloc == host or name in {each.casefold() for each in allowed_hosts}
    return len(origins) == 1 and bool(name) and is_ours


async def _body(receive: Receive) -> bytes | None:
    """Read the whole body; None: it is too long, too slow, or was broken off."""
    body = b""

    async def read() -> bytes | None:
        nonlocal body
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            body += message.get("body", b"")
            if len(body) > MAX_BODY_BYTES:
                return None
            if not message.get("more_body", False):
                return body

    try:
        return await asyncio.wait_for(read(), BODY_S)
    except asyncio.TimeoutError:
        return None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return what lets the application read the body that was read before it."""
    left: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return left.pop() if left else await receive()

    return again


def _token_of(scope: Any, body: bytes) -> str:
    """Return the token in the header, or in the form; empty: there is none."""
    named = _all(scope, TOKEN_HEADER.encode())
    if named:
        return named[0].decode("ascii", "replace") if len(named) == 1 else ""
    kinds = [each.partition(b";")[0].strip().lower() for each in _all(scope, b"content-type")]
    if kinds != [b"application/x-www-form-urlencoded"]:
        return ""
    try:
        found = parse_qs(body.decode("utf-8", "replace"), max_num_fields=MAX_FIELDS)
    except ValueError:
        return ""
    given = found.get(TOKEN_FIELD, [])
    return given[0] if len(given) == 1 else ""


def _basic(value: bytes) -> tuple[str, str] | None:
    scheme, _, rest = value.partition(b" ")
    if scheme.lower() != b"basic" or len(rest) > MAX_CREDENTIALS_BYTES:
        return None
    try:
        text = base64.b64decode(rest, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
    name, colon, password = text.partition(":")
    return (name, password) if colon else None


async def _answer(
    send: Send, status: int, text: str, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    body = f"{text}\n".encode()
    own = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
    await send(
        {"type": "http.response.start", "status": status, "headers": [*own, *(headers or [])]}
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})


def hash_password(password: str) -> str:
    """Return what stands in a password file for a password."""
    return PasswordHasher().hash(password)
