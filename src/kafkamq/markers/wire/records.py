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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Generic, TypeAlias, TypeVar

from kafkamq.errors import UnsupportedVersionError, WireError

_MAX_INT64 = 0x7FFF_FFFF_FFFF_FFFF
_MAX_TEXT = 1024
Value = TypeVar("Value")
Check: TypeAlias = "Callable[[object, str], object]"
"""Returns a value, or raises WireError, naming the field of the object."""


def _number(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INT64:
        raise WireError(f"{what} must be a number from 0 to 2^63 - 1")
    return value


def _number_or_none(value: object, what: str) -> int | None:
    return None if value is None else _number(value, what)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise WireError(f"{what} must be text of at most {_MAX_TEXT} characters")
    return value


def _flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise WireError(f"{what} must be true or false")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonForm(Generic[Value]):
    """One kind of object; its methods raise WireError, naming it and the field."""

    name: str
    make: Callable[..., Value]
    # By attribute of the value: the name in the object, and what the attribute must be.
    fields: Mapping[str, tuple[str, Check]]
    max_bytes: int
    version_field: str = "version"
    # The version that this release writes, and the only one that it reads.
    version: int = 1

    def encode(self, value: Value) -> bytes:
        """Return compact text, in ASCII."""
        found: dict[str, object] = {self.version_field: self.version}
        for name, (short, check) in self.fields.items():
            found[short] = check(getattr(value, name), f"{name} of {self.name}")
        data = json.dumps(found, separators=(",", ":")).encode()
        self._require_size(len(data))
        return data

    def decode(self, data: str | bytes | None) -> Value:
        """Return the value; unknown fields are ignored."""
        if not data:
            raise WireError(f"{self.name} is empty")
        self._require_size(len(data))
        try:
            found: object = json.loads(data)
        except (ValueError, RecursionError):
            raise WireError(f"{self.name} is not JSON") from None
        if not isinstance(found, dict):
            raise WireError(f"{self.name} is not a JSON object")
        version = _number(found.get(self.version_field), f"version of {self.name}")
        if version < self.version:
            raise WireError(f"{self.name} of version {version}, which never was")
        if version > self.version:
            raise UnsupportedVersionError(
                f"{self.name} has version {version}, this release reads {self.version}: "
                "upgrade kafkamq"
            )
        values = {
            name: check(found.get(short), f"{name} of {self.name}")
            for name, (short, check) in self.fields.items()
        }
        return self.make(**values)

    def _require_size(self, size: int) -> None:
        if size > self.max_bytes:
            raise WireError(f"{self.name} of {size} bytes: {self.max_bytes} at most")


MAX_STATUS_BYTES = 16_384


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


_CHECKS: Mapping[str, Check] = {
    "topic": _text,
    "engine": _text,
    "deadline_ms": _number_or_none,
    "warn_ms": _number_or_none,
    "is_live": _flag,
}
_STATUS = JsonForm(
    name="a status",
    make=TrackerStatus,
    fields={
        each.name: (each.name, _CHECKS.get(each.name, _number)) for each in fields(TrackerStatus)
    },
    max_bytes=MAX_STATUS_BYTES,
)
encode_status, decode_status = _STATUS.encode, _STATUS.decode


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


class SignKind(str, Enum):
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


def _kind(value: object, what: str) -> SignKind:
    try:
        return SignKind(value)
    except ValueError:
        raise WireError(f"{what} is unknown") from None


_SIGN = JsonForm(
    name="a sign of life",
    make=Sign,
    fields={
        "topic": ("topic", _text),
        "kind": ("kind", _kind),
        "engine": ("engine", _text),
        "start": ("start", _text),
        "epoch": ("epoch", _number),
        "number": ("number", _number),
    },
    max_bytes=4096,
)
encode_sign, decode_sign = _SIGN.encode, _SIGN.decode

MAX_METADATA_BYTES = 4095


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


_ENTRY = JsonForm(
    name="a ledger entry",
    make=Position,
    fields={
        "position": ("p", _number),
        "epoch": ("e", _number),
        "batch": ("b", _number),
        "rows_done": ("r", _number),
        "source_hash": ("s", _text),
        "engine": ("i", _text),
    },
    max_bytes=MAX_METADATA_BYTES,
    version_field="v",
)


def encode_position(position: Position) -> str:
    return _ENTRY.encode(position).decode()


def decode_position(metadata: str | None) -> Position | None:
    """Return the reverse; None when nothing was committed there yet (no or empty metadata).

    One trailing NUL is stripped: confluent-kafka sends it.

    Raises:
        WireError: the text is not ours; ``UnsupportedVersionError`` for a newer version's.
    """
    text = (metadata or "").removesuffix("\0")
    return _ENTRY.decode(text) if text else None


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


def _topic_id(value: object, what: str) -> object:
    """Hexadecimal in the object, bytes in the value."""
    if isinstance(value, bytes):
        return value.hex()
    try:
        return bytes.fromhex(_text(value, "topic of a group's position"))
    except ValueError:
        raise WireError("the topic of a group's position is no hexadecimal number") from None


_POSITION = JsonForm(
    name="a group's position",
    make=GroupPosition,
    fields={
        "topic_id": ("topic", _topic_id),
        "offset": ("offset", _number),
        "at_ms": ("at_ms", _number),
    },
    max_bytes=4096,
    version_field="v",
)
encode_group_position, decode_group_position = _POSITION.encode, _POSITION.decode
