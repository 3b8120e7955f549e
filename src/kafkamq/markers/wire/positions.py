"""The ledger's records of where a consumer group is in the messages topic.

Kafka drops what an empty group has committed after ``offsets.retention.minutes``. These records of
the compacted ledger stay: one per group and partition, the latest of which counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from kafkamq.errors import WireError
from kafkamq.markers.wire.json_form import JsonForm

_FORM = JsonForm(name="a group's position", version=1, version_field="v", max_bytes=4096)


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """How far a group had come in one partition of a topic."""

    topic_id: bytes  # 16 bytes; empty: the broker did not tell
    offset: int  # the next one, as committed
    at_ms: int  # broker time of the last STARTs below it: those above were written after it


def position_prefix(group: str) -> bytes:
    """What the record keys of a group begin with; the number of the partition follows."""
    return b"kafkamq-position\0%s\0" % group.encode()


def encode_group_position(position: GroupPosition) -> bytes:
    """The record value.

    Raises:
        WireError: A number is outside 0 to 2^63 - 1.
    """
    fields: dict[str, int | str | bool | None] = {
        "topic": position.topic_id.hex(),
        "offset": _FORM.number(position.offset, "offset"),
        "at_ms": _FORM.number(position.at_ms, "at_ms"),
    }
    return _FORM.write(fields).encode()


def decode_group_position(value: bytes | None) -> GroupPosition:
    """The reverse.

    Raises:
        WireError: The value is none; ``UnsupportedVersionError`` for a newer version's.
    """
    fields = _FORM.read(value or b"")
    try:
        topic_id = bytes.fromhex(_FORM.text(fields.get("topic"), "topic"))
    except ValueError:
        raise WireError("the topic of a group's position is no hexadecimal number") from None
    return GroupPosition(
        topic_id,
        _FORM.number(fields.get("offset"), "offset"),
        _FORM.number(fields.get("at_ms"), "at_ms"),
    )
