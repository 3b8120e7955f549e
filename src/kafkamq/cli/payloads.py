"""Messages as JSON lines: what ``send --file`` reads and ``receive --json`` prints."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kafkamq.config import milliseconds, utf8
from kafkamq.errors import ConfigError
from kafkamq.queue.wire.headers import checked_headers, checked_id
from kafkamq.types import OutgoingMessage

MESSAGE_FIELDS = (
    "payload", "payload_base64", "json", "key", "key_base64", "headers", "delay", "ttl", "id",
)  # fmt: skip
MAX_LINE_BYTES = 64 * 1024 * 1024
# Printed by `receive --json` beside the fields above; read again without complaint.
_IGNORED_FIELDS = frozenset(
    ("queue_id", "delivery_count", "timestamp_ms", "partition", "offset", "verdict", "topic")
)


@dataclass(frozen=True, slots=True)
class Line:
    number: int
    message: OutgoingMessage
    extra: Mapping[str, Any]


def read_lines(
    lines: Iterable[str], *, source: str, extra_fields: Sequence[str] = ()
) -> Iterator[Line]:
    """Yields the message of each line that is not empty."""
    for number, line in enumerate(lines, start=1):
        if number == 1:
            # Editors of Windows write it in front.
            line = line.removeprefix("\ufeff")
        if line.strip():
            where = f"{source}, line {number}"
            fields = _object(line, where)
            extra = {name: fields.pop(name) for name in extra_fields if name in fields}
            known = *MESSAGE_FIELDS, *extra_fields
            if unknown := sorted(fields.keys() - set(known) - _IGNORED_FIELDS):
                raise ConfigError(
                    f"{where}: unknown field {unknown[0]!r}; known are {', '.join(known)}"
                )
            yield Line(number, _message(fields, where), extra)


def parse_header(text: str) -> tuple[str, bytes]:
    """``name=value`` of ``--header``."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--header {text!r}: write it as name=value")
    return name, utf8(value, name=f"--header {name!r}")


def _object(line: str, where: str) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise ConfigError(f"{where}: it is longer than {MAX_LINE_BYTES:,} characters")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f'{where}: write an object, for example {{"payload": "hello"}}')
    return value


def _message(fields: Mapping[str, Any], where: str) -> OutgoingMessage:
    given = [name for name in ("payload", "payload_base64", "json") if name in fields]
    if len(given) != 1:
        raise ConfigError(f"{where}: give one of payload, payload_base64 and json")
    if given == ["json"]:
        text = json.dumps(fields["json"], ensure_ascii=False, separators=(",", ":"))
        payload: bytes | None = _utf8(text, "payload", where)
    else:
        payload = _bytes(fields, "payload", where)
    ttl = fields.get("ttl")
    identity = fields.get("id")
    headers = _headers(fields.get("headers") or {}, where)
    try:
        if identity is not None:
            checked_id(identity)
        checked_headers(headers)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return OutgoingMessage(
        payload=payload,
        key=_bytes(fields, "key", where),
        headers=headers,
        delay=_seconds(fields.get("delay", 0.0), "delay", where),
        ttl=None if ttl is None else _seconds(ttl, "ttl", where),
        id=identity,
    )


def _bytes(fields: Mapping[str, Any], name: str, where: str) -> bytes | None:
    encoded = fields.get(f"{name}_base64")
    value = fields.get(name) if encoded is None else encoded
    if value is None:
        return None
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {name} must be a text; for a JSON value use the field json")
    if encoded is None:
        return _utf8(value, name, where)
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(f"{where}: {name}_base64 is no base64") from None


def _utf8(value: str, name: str, where: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{where}: {name} holds half a surrogate pair; use {name}_base64"
        ) from None


def _headers(value: object, where: str) -> dict[str, bytes]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: headers must be an object of texts")
    result = {}
    for name, item in value.items():
        if isinstance(item, dict) and item.keys() == {"base64"}:
            item = {"value_base64": item["base64"]}
        else:
            item = {"value": item}
        data = _bytes(item, "value", f"{where}, header {name!r}")
        if data is not None:
            result[name] = data
    return result


def _seconds(value: Any, name: str, where: str) -> float:
    milliseconds(value, name=f"{where}: {name}")
    return float(value)
