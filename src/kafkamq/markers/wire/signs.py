"""Signs of life of trackers, and of those that stand by: records of the tracker topic (R36).

Key ``topic/active`` for trackers, ``topic/standby/ID`` for one that stands by; value JSON. Releases
that know only statuses pass them. Unknown fields are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kafkamq.errors import WireError
from kafkamq.markers.wire.json_form import JsonForm

_FORM = JsonForm(name="a sign of life", version=1, version_field="version", max_bytes=4096)


class SignKind(Enum):
    """What a tracker says of itself."""

    ACTIVE = "active"
    ENDED = "ended"  # it was active, and has stopped on purpose
    STANDBY = "standby"
    BID = "bid"  # it stood by, and takes over now, unless another bid is before this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """One sign of life."""

    topic: str  # of the markers
    kind: SignKind
    engine: str  # id of the engine (R22)
    start: str  # of this start of it; no other has it
    epoch: int = 0  # of the engine; 0: it has none yet
    number: int = 0  # counts the signs of a start that stands by


def sign_key(sign: Sign) -> bytes:
    """The record key: one for all that are active, one for each engine that stands by."""
    if sign.kind in (SignKind.ACTIVE, SignKind.ENDED):
        return f"{sign.topic}/active".encode()
    return f"{sign.topic}/standby/{sign.engine}".encode()


def is_sign_key(key: bytes | None) -> bool:
    """Whether a record of the tracker topic is a sign, and no status."""
    return key is not None and (key.endswith(b"/active") or b"/standby/" in key)


def encode_sign(sign: Sign) -> bytes:
    """The record value.

    Raises:
        WireError: A field is outside its range.
    """
    return _FORM.write(
        {
            "topic": _FORM.text(sign.topic, "topic"),
            "kind": sign.kind.value,
            "engine": _FORM.text(sign.engine, "engine"),
            "start": _FORM.text(sign.start, "start"),
            "epoch": _FORM.number(sign.epoch, "epoch"),
            "number": _FORM.number(sign.number, "number"),
        }
    ).encode()


def decode_sign(value: bytes | None) -> Sign:
    """The reverse of ``encode_sign``.

    Raises:
        WireError: The value is no sign; ``UnsupportedVersionError`` for a newer version's.
    """
    if not value:
        raise WireError("a sign of life is empty")
    values = _FORM.read(value)
    try:
        kind = SignKind(values.get("kind"))
    except ValueError:
        raise WireError("kind of a sign of life is unknown") from None
    return Sign(
        topic=_FORM.text(values.get("topic"), "topic"),
        kind=kind,
        engine=_FORM.text(values.get("engine"), "engine"),
        start=_FORM.text(values.get("start"), "start"),
        epoch=_FORM.number(values.get("epoch"), "epoch"),
        number=_FORM.number(values.get("number"), "number"),
    )
