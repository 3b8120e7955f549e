"""What makes a handler's body of a payload in the place of its annotation: functions, and schemas.

A ``SchemaRegistry`` has bodies in Avro, JSON Schema or Protobuf, framed as Confluent's serdes do.
A framed payload begins with a byte 0 and its schema's id (4 bytes, big-endian), or with 1 and the
schema's GUID (16 bytes); or the header ``__value_schema_id`` has one of these.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from kafkamq.config import Backoff, milliseconds
from kafkamq.errors import ConfigError, SchemaRegistryError
from kafkamq.queue.json_values import BodyError
from kafkamq.queue.rules.retry import backoff_delay_ms

_HEADER = "__value_schema_id"
# The bytes in front of the body, by the first of them.
_FRAMES = {0: 5, 1: 17}
_MAX_KNOWN = 10_000


Headers: TypeAlias = Sequence[tuple[str, bytes | None]]


@runtime_checkable
class Deserializer(Protocol):
    """Reads payloads; thread-safe, and with ``processes=`` it can be pickled."""

    def deserialize(self, payload: bytes, headers: Headers = ()) -> Any:
        """Return the body.

        Raises:
            BodyError: The payload is not what it should be: its message is rejected.
            SchemaRegistryError: What is needed to read it is not there now: its message waits.
        """

    def is_ready(self, payload: bytes, headers: Headers = ()) -> bool:
        """Return whether ``deserialize`` asks nobody, and so never waits."""


class BodyUnavailableError(SchemaRegistryError):
    """A body could not be read for want of the registry: no attempt of the message's."""


class _Function:
    def __init__(self, function: Callable[[bytes], Any]) -> None:
        self._function = function

    def deserialize(self, payload: bytes, headers: Headers = ()) -> Any:
        del headers
        try:
            return self._function(payload)
        except (BodyError, SchemaRegistryError):
            raise
        except Exception as error:  # noqa: BLE001 - of the user's own function
            raise BodyError(f"the deserializer refused it: {type(error).__name__}") from None

    def is_ready(self, payload: bytes, headers: Headers = ()) -> bool:
        del payload, headers
        return True


def deserializer_of(given: object) -> Deserializer | None:
    """Return what a user gave as ``deserializer``: one, a function of the payload, or None."""
    if given is None or isinstance(given, Deserializer):
        return given
    if not callable(given):
        raise ConfigError(
            f"deserializer is a {type(given).__name__}: give a schema of a SchemaRegistry, or a"
            " function of the payload"
        )
    return _Function(given)


class SchemaRegistry:
    """A registry with Confluent's HTTP interface; thread-safe, and can be pickled.

    Asks for each schema once: what it answered is kept in the process.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float | timedelta = 5.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Asks nothing.

        Args:
            url: ``http://host:port[/path]``; several, with commas, are tried in turn.
            timeout: s for the answer to a request.
            settings: Confluent's own properties of its client, verbatim; may hold secrets.

        Raises:
            ConfigError: A setting cannot work, or ``kafkamq[schemas]`` is not installed.
        """
        self._settings: dict[str, Any] = {
            # It is asked again where nobody is kept from other work.
            "max.retries": 0,
            **(settings or {}),
            "url": url,
            "timeout": milliseconds(timeout, name="timeout", minimum=1) / 1000,
        }
        self._begin()
        _confluent().make_client(self._settings).close()

    def _begin(self) -> None:
        urls = str(self._settings["url"]).split(",")
        self._name = ",".join(each.strip().rpartition("@")[2] for each in urls)
        self._lock = threading.Lock()
        self._client: tuple[int, Any] | None = None
        self.outage = Outage(self._name)

    def __getstate__(self) -> dict[str, Any]:
        return self._settings

    def __setstate__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._begin()

    def __repr__(self) -> str:
        return f"<SchemaRegistry at {self._name}>"

    def avro(
        self, schema: str | None = None, *, subject: str | None = None, register: bool = True
    ) -> Schema:
        """Avro: a body is a ``dict``, or what the schema says.

        Args:
            schema: In JSON: what is written, and what older and newer bodies are read as; None:
                each is read as it was written.
            subject: Under which ``serialize`` registers it; such as ``TOPIC-value``.
            register: Register it there; else it must be there.

        Raises:
            ConfigError: It is no schema.
        """
        return Schema(self, "avro", schema, subject, register=register)

    def json(
        self, schema: str | None = None, *, subject: str | None = None, register: bool = True
    ) -> Schema:
        """JSON Schema: a body is a ``dict``, or other JSON; as ``avro``."""
        return Schema(self, "json", schema, subject, register=register)

    def protobuf(
        self, message: type[Any], *, subject: str | None = None, register: bool = True
    ) -> Schema:
        """Protobuf: a body is a ``message``, a class that ``protoc`` has made; as ``avro``.

        The class says how to read it: only ``serialize`` asks the registry.
        """
        if not hasattr(message, "DESCRIPTOR"):
            raise ConfigError(f"message is {message!r}: give a class that protoc has made")
        return Schema(self, "protobuf", message, subject, register=register)

    @property
    def timeout_s(self) -> float:
        return float(self._settings["timeout"])

    def client(self) -> Any:
        with self._lock:
            if self._client is None or self._client[0] != os.getpid():
                self._client = os.getpid(), _confluent().make_client(self._settings)
            return self._client[1]


class Schema:
    """A format of bodies: a ``deserializer`` of handlers, and a serializer of what is sent.

    Thread-safe, and can be pickled. ``SchemaRegistry`` makes it.
    """

    def __init__(
        self, registry: SchemaRegistry, kind: str, definition: Any, subject: str | None, *,
        register: bool,
    ) -> None:  # fmt: skip
        self.registry = registry
        # One of avro, json and protobuf.
        self.kind = kind
        # The schema's text, or Protobuf's class; None: each body is read as it was written.
        self.definition = definition
        self._subject, self._register = subject, register
        self._begin()
        # It says what is wrong with the schema.
        self._reader()

    def _begin(self) -> None:
        self._asks_nobody = self.kind == "protobuf"
        self._known: set[bytes] = set()
        self._lock = threading.Lock()
        self._read: Callable[[bytes, Headers], Any] | None = None
        self._write: Callable[[Any], bytes] | None = None
        self._is_registered = False

    def __getstate__(self) -> tuple[Any, ...]:
        return self.registry, self.kind, self.definition, self._subject, self._register

    def __setstate__(self, given: tuple[Any, ...]) -> None:
        self.registry, self.kind, self.definition, self._subject, self._register = given
        self._begin()

    def __repr__(self) -> str:
        return f"<Schema of {self.kind} bodies in {self.registry!r}>"

    def newest(self) -> Schema:
        """Itself; or, where it has no definition, with that which its subject has now.

        Raises:
            ConfigError: It has no subject, the registry has none of that name, or its schema
                refers to others.
            SchemaRegistryError: The registry does not answer, or refuses.
        """
        subject = self._subject
        if self.definition is not None:
            return self
        if not subject:
            raise ConfigError(f"the {self.kind} schema has neither a definition nor a subject")
        client = self.registry.client()
        client.clear_latest_caches()
        try:
            found = self.registry.outage.ask(lambda: client.get_latest_version(subject))
        except BodyError as error:
            raise ConfigError(f"subject {subject!r}: {error}") from None
        if found.schema.references:
            names = ", ".join(each.name for each in found.schema.references)
            raise ConfigError(
                f"subject {subject!r}: its schema refers to those of {names}: give a definition "
                "that has all of them"
            )
        text = found.schema.schema_str
        return Schema(self.registry, self.kind, text, subject, register=self._register)

    def is_ready(self, payload: bytes, headers: Headers = ()) -> bool:
        """Return whether the payload's schema is here; or there is none, which is told at once."""
        try:
            return self._asks_nobody or _frame(payload, headers) in self._known
        except BodyError:
            return True

    def deserialize(self, payload: bytes, headers: Headers = ()) -> Any:
        """Return the body of a framed payload; the first of a schema asks the registry.

        Raises:
            BodyError: It has no frame, its schema is in no registry, or it does not parse.
            SchemaRegistryError: The registry does not answer, or refuses.
        """
        frame = _frame(payload, headers)
        if self._asks_nobody or frame in self._known:
            return self._reader()(payload, headers)
        body = self.registry.outage.ask(lambda: self._reader()(payload, headers))
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known.add(frame)
        return body

    def serialize(self, value: Any) -> bytes:
        """Return the framed payload of a value; the first one asks the registry, and may wait.

        Args:
            value: A ``dict``, a dataclass or a pydantic model; of Protobuf a message.

        Raises:
            ConfigError: It does not fit, the registry refuses the schema, or there is no subject.
            SchemaRegistryError: The registry does not answer, or refuses.
        """
        if value is None:
            raise ConfigError("the value is None: it has no schema; send None itself as a payload")
        if self._is_registered:
            return self._writer()(value)
        framed: bytes = self.registry.outage.ask(lambda: self._writer()(value))
        self._is_registered = True
        return framed

    def _reader(self) -> Callable[[bytes, Headers], Any]:
        with self._lock:
            if self._read is None:
                make, client = _confluent().make_reader, self.registry.client()
                self._read = _made(self.kind, make, client, self.definition)
            return self._read

    def _writer(self) -> Callable[[Any], bytes]:
        with self._lock:
            if self._write is None:
                if not self._subject or self.definition is None:
                    raise ConfigError(f"to write {self.kind} name its subject, and its schema")
                self._write = _made(
                    self.kind, _confluent().make_writer, self.registry.client(), self.definition,
                    self._subject, register=self._register,
                )  # fmt: skip
            return self._write


def _made(kind: str, make: Callable[..., Any], *given: Any, **named: Any) -> Any:
    try:
        return make(kind, *given, **named)
    except Exception as error:
        raise ConfigError(f"the {kind} schema cannot be used: {error}") from error


def _frame(payload: bytes, headers: Headers) -> bytes:
    for name, value in headers:
        if name == _HEADER and value is not None:
            return value
    size = _FRAMES.get(payload[0]) if payload else None
    if size is None or len(payload) < size:
        raise BodyError("the payload has no id of a schema in front")
    return payload[:size]


def _confluent() -> ModuleType:
    try:
        from kafkamq.queue.schemas import confluent
    except ImportError as error:
        raise ConfigError(
            f"a schema registry needs kafkamq[schemas]: pip install 'kafkamq[schemas]' ({error})"
        ) from error
    return confluent


_BACKOFF = Backoff(first=0.5, max=15.0, jitter=0.2)
_log = logging.getLogger(__name__)
T = TypeVar("T")


class Outage:
    """Asks a registry; after a failure only when its back-off is over. Thread-safe.

    Those who come meanwhile are told at once, so nobody waits for the same time-out twice.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._failures = 0
        self._until_s = 0.0
        self._error_text = ""

    def ask(self, question: Callable[[], T]) -> T:
        """Return what ``question`` returns; an error but ``SchemaRegistryError`` is an answer."""
        with self._lock:
            left_s = self._until_s - time.monotonic()
            error_text = self._error_text
        if left_s > 0:
            raise SchemaRegistryError(error_text, delay_s=left_s)
        try:
            answer = question()
        except SchemaRegistryError as error:
            error.delay_s = self._failed(str(error))
            raise
        except Exception:
            self._answered()
            raise
        self._answered()
        return answer

    def _answered(self) -> None:
        with self._lock:
            was_away, self._failures = self._failures > 0, 0
        if was_away:
            _log.info("the schema registry answers again", extra={"registry": self._name})

    def _failed(self, error_text: str) -> float:
        with self._lock:
            self._failures += 1
            is_first = self._failures == 1
            delay_s = backoff_delay_ms(_BACKOFF, self._failures, random.random()) / 1000
            self._until_s, self._error_text = time.monotonic() + delay_s, error_text
        if is_first:
            _log.warning(
                "a schema registry does not answer: messages wait for it",
                extra={"registry": self._name, "error": error_text},
            )
        return delay_s
