"""What every request passes first, and every answer gets: hosts, methods, users, headers.

It is the outermost layer, so that no answer goes around it. The pages only read: other methods than
GET and HEAD are refused, so there is no form that could be forged.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
import secrets
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from argon2 import PasswordHasher
from argon2.exceptions import Argon2Error, InvalidHashError

from kafkamq.web.options import OPERATOR, VIEWER, User, WebOptions

if TYPE_CHECKING:
    from litestar.types import ASGIApp, Message, Receive, Send

MAX_TARGET_BYTES = 8192  # path and query
VERIFIED_S = 300.0  # a password that was right is not hashed again for so long
MAX_VERIFIED = 1000
MAX_CREDENTIALS_BYTES = 1024
MAX_HASHING = 2  # at a time: each takes 64 MiB
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_log = logging.getLogger(__name__)


class Passwords:
    """Checks passwords against argon2's hashes; thread-safe, blocks while it hashes."""

    def __init__(self, options: WebOptions) -> None:
        self._accounts = options.accounts
        self._hasher = PasswordHasher()
        self._nobody = self._hasher.hash("nobody has this one") if options.accounts else ""
        self._verified: OrderedDict[bytes, float] = OrderedDict()
        self._hashing = threading.BoundedSemaphore(MAX_HASHING)
        self._salt = secrets.token_bytes(32)

    def user(self, name: str, password: str) -> User | None:
        """The user; None: name or password is wrong, and it took as long as if it were right."""
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
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, options: WebOptions) -> None:
        self._app = app
        self._options = options
        self._passwords = Passwords(options)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it on with its user in the scope."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websocket: the server closes it

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
        scope.setdefault("state", {})["user"] = user
        await self._app(scope, receive, guarded)

    def _refusal(self, scope: Any) -> tuple[int, str] | None:
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "these pages only read"
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
    """The name in a ``Host`` header, without its port; an IPv6 address without brackets."""
    text = value.decode("ascii", "replace").casefold()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


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
    """What stands in a password file for a password."""
    return PasswordHasher().hash(password)
