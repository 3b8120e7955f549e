"""The ledger of a marker partition: offset metadata of each transaction (R15, R16, R22).

The offset that is committed is the tracker's committable one; the text beside it says which engine
wrote it and how far it had come. Kafka limits the text to 4096 bytes, one of which confluent-kafka
needs for the NUL that it appends.
"""

from __future__ import annotations

from dataclasses import dataclass

from kafkamq.markers.wire.json_form import JsonForm

MAX_METADATA_BYTES = 4095

_FORM = JsonForm(name="a ledger entry", version=1, version_field="v", max_bytes=MAX_METADATA_BYTES)
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
    fields: dict[str, int | str | bool | None] = {}
    for name, short in _NUMBERS.items():
        fields[short] = _FORM.number(getattr(position, name), name)
    for name, short in _TEXTS.items():
        fields[short] = _FORM.text(getattr(position, name), name)
    return _FORM.write(fields)


def decode_position(metadata: str | None) -> Position | None:
    """The reverse; None when nothing was committed there yet (no or empty metadata).

    One trailing NUL is stripped: confluent-kafka sends it.

    Raises:
        WireError: the text is not ours; ``UnsupportedVersionError`` for a newer version's.
    """
    text = (metadata or "").removesuffix("\0")
    if not text:
        return None
    fields = _FORM.read(text)
    return Position(
        position=_FORM.number(fields.get("p"), "position"),
        epoch=_FORM.number(fields.get("e"), "epoch"),
        batch=_FORM.number(fields.get("b"), "batch"),
        rows_done=_FORM.number(fields.get("r"), "rows_done"),
        source_hash=_FORM.text(fields.get("s"), "source_hash"),
        engine=_FORM.text(fields.get("i"), "engine"),
    )
