"""Status of a tracker in one marker partition: records of the compacted tracker topic (R24).

Key ``topic/partition`` of the marker partition, value JSON. It drives TICKs (R4), ``stat`` and
metrics. Unknown fields are ignored, so that a release may add some.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from kafkamq.errors import WireError
from kafkamq.markers.wire.json_form import JsonForm

MAX_STATUS_BYTES = 16_384

_FORM = JsonForm(name="a status", version=1, version_field="version", max_bytes=MAX_STATUS_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerStatus:
    """What one engine knows of one marker partition after a batch; times are log time (R1)."""

    topic: str  # of the markers
    partition: int
    engine: str  # id of the engine
    epoch: int  # of the engine (R22)
    clock_ms: int = 0  # the partition's clock
    position: int = 0  # next offset that the tracker will fold
    committable_offset: int = 0  # where a restart begins (R20)
    entries: int = 0  # open: held, waiting or due
    due: int = 0  # of these: due and not settled
    awaited: int = 0  # of these: their logs do not answer, or are not known (R18)
    deadline_ms: int | None = None  # earliest of lease, wait, expiry and carry time; None: nothing
    warn_ms: int | None = None  # when a held deadline needs a TICK ahead of it; None: no such one
    late_verdicts: int = 0  # ENDs that came after their lease (R9), since the engine's start
    malformed: int = 0  # records that were passed (R21), since the engine's start
    redelivered: int = 0  # copies since the engine's start
    dead_lettered: int = 0  # dead letters since the engine's start
    batch: int = 0  # number of the engine's batch
    is_live: bool = True  # False: it only reads, its own TICK was not read yet (R17)
    lateness: str = ""  # of this batch, as the engine writes it for its own metrics


_TEXTS = ("topic", "engine", "lateness")
_OPTIONAL = ("deadline_ms", "warn_ms")
_FLAGS = ("is_live",)
_NUMBERS = tuple(
    field.name
    for field in fields(TrackerStatus)
    if field.name not in (*_TEXTS, *_OPTIONAL, *_FLAGS)
)


def status_key(topic: str, partition: int) -> bytes:
    """The record key of a marker partition's status."""
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
    """The record value.

    Raises:
        WireError: a field is outside its range.
    """
    values: dict[str, int | str | bool | None] = {}
    for field in fields(TrackerStatus):
        values[field.name] = _checked(getattr(status, field.name), field.name)
    return _FORM.write(values).encode()


def decode_status(value: bytes | None) -> TrackerStatus:
    """The reverse of ``encode_status``.

    Raises:
        WireError: the value is not a status; ``UnsupportedVersionError`` for a newer version's.
    """
    if not value:
        raise WireError("a status is empty")
    values = {"awaited": 0, **_FORM.read(value)}  # which is younger than the others
    return TrackerStatus(
        topic=_FORM.text(values.get("topic"), "topic"),
        engine=_FORM.text(values.get("engine"), "engine"),
        lateness=_FORM.text(values.get("lateness", ""), "lateness"),
        is_live=_FORM.flag(values.get("is_live"), "is_live"),
        deadline_ms=_FORM.optional(values.get("deadline_ms"), "deadline_ms"),
        warn_ms=_FORM.optional(values.get("warn_ms"), "warn_ms"),
        **{name: _FORM.number(values.get(name), name) for name in _NUMBERS},
    )


def _checked(value: object, name: str) -> int | str | bool | None:
    if name in _TEXTS:
        return _FORM.text(value, name)
    if name in _OPTIONAL:
        return _FORM.optional(value, name)
    return _FORM.flag(value, name) if name in _FLAGS else _FORM.number(value, name)
