"""The ledger of a marker partition: offset metadata of each transaction (R15, R16, R22).

The offset that is committed is the tracker's committable one; the text beside it says which engine
wrote it and how far it had come. Kafka limits the text to 4096 bytes, one of which confluent-kafka
needs for the NUL that it appends.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from kafkamq.errors import UnsupportedVersionError, WireError

__all__ = ["MAX_METADATA_BYTES", "Position", "decode_position", "encode_position"]

MAX_METADATA_BYTES = 4095

_VERSION = 1
_MAX_INT64 = 0x7FFF_FFFF_FFFF_FFFF
_MAX_TEXT = 1024
_NUMBERS = {"position": "p", "epoch": "e", "batch": "b", "rows_done": "r"}
_TEXTS = {"source_hash": "s", "engine": "i"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far an engine is in one marker partition."""

    position: int  # the tracker's next_offset
    epoch: int  # of the engine: the later start has the larger one
    batch: int = 0  # number of the engine's batch
    rows_done: int = 0  # actions of that batch that are settled; a retry goes on behind them (R16)
    source_hash: str = ""  # of the source's end offsets of that batch
    engine: str = ""  # id of the engine


def encode_position(position: Position) -> str:
    """The metadata text.

    Raises:
        WireError: a number is outside 0 to 2^63 - 1, or a text is too long.
    """
    fields: dict[str, int | str] = {"v": _VERSION}
    for name, short in _NUMBERS.items():
        fields[short] = _number(getattr(position, name), name)
    for name, short in _TEXTS.items():
        fields[short] = _text(getattr(position, name), name)
    text = json.dumps(fields, separators=(",", ":"))
    if len(text) > MAX_METADATA_BYTES:  # json.dumps gives ASCII
        raise WireError(f"a ledger entry of {len(text)} bytes: {MAX_METADATA_BYTES} at most")
    return text


def decode_position(metadata: str | None) -> Position | None:
    """The reverse; None when nothing was committed there yet (no or empty metadata).

    One trailing NUL is stripped: confluent-kafka sends it.

    Raises:
        WireError: the text is not ours; ``UnsupportedVersionError`` for a newer version's.
    """
    text = (metadata or "").removesuffix("\0")
    if not text:
        return None
    if len(text) > MAX_METADATA_BYTES:
        raise WireError(f"a ledger entry of {len(text)} characters")
    try:
        fields: object = json.loads(text)
    except (ValueError, RecursionError):
        raise WireError("the ledger entry is not JSON") from None
    if not isinstance(fields, dict):
        raise WireError("the ledger entry is not a JSON object")
    version = _number(fields.get("v"), "v")
    if version < _VERSION:
        raise WireError(f"version {version} never was")
    if version > _VERSION:
        raise UnsupportedVersionError(
            f"the ledger entry has version {version}, this release reads version 1: upgrade kafkamq"
        )
    return Position(
        position=_number(fields.get("p"), "position"),
        epoch=_number(fields.get("e"), "epoch"),
        batch=_number(fields.get("b"), "batch"),
        rows_done=_number(fields.get("r"), "rows_done"),
        source_hash=_text(fields.get("s"), "source_hash"),
        engine=_text(fields.get("i"), "engine"),
    )


def _number(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INT64:
        raise WireError(f"{name} of a ledger entry must be a number from 0 to 2^63 - 1")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise WireError(f"{name} of a ledger entry must be text of at most {_MAX_TEXT} characters")
    return value
