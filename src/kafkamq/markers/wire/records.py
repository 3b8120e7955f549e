"""Trackers and workers keep these records of themselves: versioned JSON objects, read strictly.

- The status of a tracker in a marker partition (R24): key ``topic/partition`` of the compacted
  tracker topic. It drives TICKs (R4), ``stat`` and metrics.
- A sign of life of a tracker, or of one that stands by (R36): key ``topic/active`` or
  ``topic/standby/ENGINE`` there. Releases that know only statuses pass them.
- A ledger's entry (R15, R16, R22): metadata of the offset that each transaction commits. Kafka
  limits it to 4096 bytes, one of which confluent-kafka needs for the NUL that it appends.
- The position of a consumer group in the messages topic: in the compacted ledger. Kafka drops what
  an empty group has committed after ``offsets.retention.minutes``; these records stay.

Unknown fields are ignored, so that a release may add some. What cannot be written or read raises
``WireError``, a newer version's ``UnsupportedVersionError``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum

from kafkamq.errors import UnsupportedVersionError, WireError

_MAX_INT64 = 0x7FFF_FFFF_FFFF_FFFF
_MAX_TEXT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonForm:
    """One kind of object; its methods raise WireError, naming it and the field."""

    name: str
    # The version that this release writes, and the only one that it reads.
    version: int
    version_field: str
    max_bytes: int

    def write(self, values: Mapping[str, int | str | bool | None]) -> str:
        """Return the compact text, in ASCII; the values are checked already."""
        text = json.dumps({self.version_field: self.version, **values}, separators=(",", ":"))
        self._require_size(len(text))
        return text

    def read(self, text: str | bytes) -> dict[str, object]:
        """Return the fields, also unknown ones; a newer version is an UnsupportedVersionError."""
        self._require_size(len(text))
        try:
            found: object = json.loads(text)
        except (ValueError, RecursionError):
            raise WireError(f"{self.name} is not JSON") from None
        if not isinstance(found, dict):
            raise WireError(f"{self.name} is not a JSON object")
        version = self.number(found.get(self.version_field), "version")
        if version < self.version:
            raise WireError(f"{self.name} of version {version}, which never was")
        if version > self.version:
            raise UnsupportedVersionError(
                f"{self.name} has version {version}, this release reads {self.version}: "
                "upgrade kafkamq"
            )
        return found

    def number(self, value: object, field: str) -> int:
        """Return a number from 0 to 2^63 - 1."""
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INT64:
            raise WireError(f"{field} of {self.name} must be a number from 0 to 2^63 - 1")
        return value

    def optional(self, value: object, field: str) -> int | None:
        return None if value is None else self.number(value, field)

    def text(self, value: object, field: str) -> str:
        """Return a text of at most 1024 characters."""
        if not isinstance(value, str) or len(value) > _MAX_TEXT:
            raise WireError(
                f"{field} of {self.name} must be text of at most {_MAX_TEXT} characters"
            )
        return value

    def flag(self, value: object, field: str) -> bool:
        if not isinstance(value, bool):
            raise WireError(f"{field} of {self.name} must be true or false")
        return value

    def _require_size(self, size: int) -> None:
        if size > self.max_bytes:
            raise WireError(f"{self.name} of {size} bytes: {self.max_bytes} at most")


MAX_STATUS_BYTES = 16_384

_STATUS = JsonForm(name="a status", version=1, version_field="version", max_bytes=MAX_STATUS_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerStatus:
    """What one engine knows of one marker partition after a batch; times are log time (R1)."""

    topic: str
    partition: int
    engine: str
    epoch: int
    clock_ms: int = 0
    position: int = 0
    committable_offset: int = 0
    # What is open: held, waiting or due; of these, what is due and not settled; and of these, what
    # waits for logs that do not answer, or are not known (R18).
    entries: int = 0
    due: int = 0
    awaited: int = 0
    # The earliest end of a lease, a wait, an expiry or a carry time; None: there is none.
    deadline_ms: int | None = None
    # When a held deadline needs a TICK ahead of it; None: there is no such one.
    warn_ms: int | None = None
    # Since the engine's start: ENDs that came after their lease (R9), records that were passed
    # (R21), copies and dead letters.
    late_verdicts: int = 0
    malformed: int = 0
    redelivered: int = 0
    dead_lettered: int = 0
    batch: int = 0
    # False: it only reads, as its own TICK was not read yet (R17).
    is_live: bool = True
    lateness: str = ""


_TEXTS = ("topic", "engine", "lateness")
_OPTIONAL = ("deadline_ms", "warn_ms")
_FLAGS = ("is_live",)
_NUMBERS = tuple(
    field.name
    for field in fields(TrackerStatus)
    if field.name not in (*_TEXTS, *_OPTIONAL, *_FLAGS)
)


def status_key(topic: str, partition: int) -> bytes:
    return f"{topic}/{partition}".encode()


def decode_status_key(key: bytes | None) -> tuple[str, int]:
    """Topic and partition; also of a tombstone, whose value is null.

    Raises:
        WireError: the key has another form.
    """
    topic, slash, number = (key or b"").rpartition(b"/")
    if not slash or not number.isdigit() or len(number) > 10 or not topic.isascii():
        raise WireError("the key of a status is topic/partition")
    return topic.decode("ascii"), int(number)


def encode_status(status: TrackerStatus) -> bytes:
    values: dict[str, int | str | bool | None] = {}
    for field in fields(TrackerStatus):
        values[field.name] = _checked(getattr(status, field.name), field.name)
    return _STATUS.write(values).encode()


def decode_status(value: bytes | None) -> TrackerStatus:
    if not value:
        raise WireError("a status is empty")
    values = _STATUS.read(value)
    return TrackerStatus(
        topic=_STATUS.text(values.get("topic"), "topic"),
        engine=_STATUS.text(values.get("engine"), "engine"),
        lateness=_STATUS.text(values.get("lateness", ""), "lateness"),
        is_live=_STATUS.flag(values.get("is_live"), "is_live"),
        deadline_ms=_STATUS.optional(values.get("deadline_ms"), "deadline_ms"),
        warn_ms=_STATUS.optional(values.get("warn_ms"), "warn_ms"),
        **{name: _STATUS.number(values.get(name), name) for name in _NUMBERS},
    )


def _checked(value: object, name: str) -> int | str | bool | None:
    if name in _TEXTS:
        return _STATUS.text(value, name)
    if name in _OPTIONAL:
        return _STATUS.optional(value, name)
    return _STATUS.flag(value, name) if name in _FLAGS else _STATUS.number(value, name)


_SIGN = JsonForm(name="a sign of life", version=1, version_field="version", max_bytes=4096)


class SignKind(Enum):
    ACTIVE = "active"
    ENDED = "ended"
    STANDBY = "standby"
    # It stood by, and takes over now, unless another bid is before this one.
    BID = "bid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    topic: str
    kind: SignKind
    engine: str
    start: str
    # 0: the engine has none yet.
    epoch: int = 0
    number: int = 0


def sign_key(sign: Sign) -> bytes:
    """Return the record key: one for all that are active, one for each engine that stands by."""
    if sign.kind in (SignKind.ACTIVE, SignKind.ENDED):
        return f"{sign.topic}/active".encode()
    return f"{sign.topic}/standby/{sign.engine}".encode()


def is_sign_key(key: bytes | None) -> bool:
    """Return whether a record of the tracker topic is a sign, and no status."""
    return key is not None and (key.endswith(b"/active") or b"/standby/" in key)


def encode_sign(sign: Sign) -> bytes:
    return _SIGN.write(
        {
            "topic": _SIGN.text(sign.topic, "topic"),
            "kind": sign.kind.value,
            "engine": _SIGN.text(sign.engine, "engine"),
            "start": _SIGN.text(sign.start, "start"),
            "epoch": _SIGN.number(sign.epoch, "epoch"),
            "number": _SIGN.number(sign.number, "number"),
        }
    ).encode()


def decode_sign(value: bytes | None) -> Sign:
    if not value:
        raise WireError("a sign of life is empty")
    values = _SIGN.read(value)
    try:
        kind = SignKind(values.get("kind"))
    except ValueError:
        raise WireError("kind of a sign of life is unknown") from None
    return Sign(
        topic=_SIGN.text(values.get("topic"), "topic"),
        kind=kind,
        engine=_SIGN.text(values.get("engine"), "engine"),
        start=_SIGN.text(values.get("start"), "start"),
        epoch=_SIGN.number(values.get("epoch"), "epoch"),
        number=_SIGN.number(values.get("number"), "number"),
    )


MAX_METADATA_BYTES = 4095

_ENTRY = JsonForm(name="a ledger entry", version=1, version_field="v", max_bytes=MAX_METADATA_BYTES)
_ENTRY_NUMBERS = {"position": "p", "epoch": "e", "batch": "b", "rows_done": "r"}
_ENTRY_TEXTS = {"source_hash": "s", "engine": "i"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far an engine is in one marker partition."""

    position: int
    epoch: int
    batch: int = 0
    # How many actions of the batch are settled; a retry goes on behind them (R16).
    rows_done: int = 0
    source_hash: str = ""
    engine: str = ""


def encode_position(position: Position) -> str:
    fields: dict[str, int | str | bool | None] = {}
    for name, short in _ENTRY_NUMBERS.items():
        fields[short] = _ENTRY.number(getattr(position, name), name)
    for name, short in _ENTRY_TEXTS.items():
        fields[short] = _ENTRY.text(getattr(position, name), name)
    return _ENTRY.write(fields)


def decode_position(metadata: str | None) -> Position | None:
    """Return the reverse; None when nothing was committed there yet (no or empty metadata).

    One trailing NUL is stripped: confluent-kafka sends it.

    Raises:
        WireError: the text is not ours; ``UnsupportedVersionError`` for a newer version's.
    """
    text = (metadata or "").removesuffix("\0")
    if not text:
        return None
    fields = _ENTRY.read(text)
    return Position(
        position=_ENTRY.number(fields.get("p"), "position"),
        epoch=_ENTRY.number(fields.get("e"), "epoch"),
        batch=_ENTRY.number(fields.get("b"), "batch"),
        rows_done=_ENTRY.number(fields.get("r"), "rows_done"),
        source_hash=_ENTRY.text(fields.get("s"), "source_hash"),
        engine=_ENTRY.text(fields.get("i"), "engine"),
    )


_POSITION = JsonForm(name="a group's position", version=1, version_field="v", max_bytes=4096)


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """How far a group had come in one partition of a topic."""

    # 16 bytes; empty: the broker did not tell.
    topic_id: bytes
    offset: int
    # The broker's time of the last STARTs below it: those above were written after it.
    at_ms: int


def position_prefix(group: str) -> bytes:
    """Return what the record keys of a group begin with; the number of the partition follows."""
    return b"kafkamq-position\0%s\0" % group.encode()


def encode_group_position(position: GroupPosition) -> bytes:
    fields: dict[str, int | str | bool | None] = {
        "topic": position.topic_id.hex(),
        "offset": _POSITION.number(position.offset, "offset"),
        "at_ms": _POSITION.number(position.at_ms, "at_ms"),
    }
    return _POSITION.write(fields).encode()


def decode_group_position(value: bytes | None) -> GroupPosition:
    fields = _POSITION.read(value or b"")
    try:
        topic_id = bytes.fromhex(_POSITION.text(fields.get("topic"), "topic"))
    except ValueError:
        raise WireError("the topic of a group's position is no hexadecimal number") from None
    return GroupPosition(
        topic_id,
        _POSITION.number(fields.get("offset"), "offset"),
        _POSITION.number(fields.get("at_ms"), "at_ms"),
    )
