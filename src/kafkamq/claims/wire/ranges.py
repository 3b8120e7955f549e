"""Records of range claims: text fields joined by ``/``, in the manner of Marshal's, but never on
its topic: an unknown type there misleads Go clients.

    TYPE/2/seen/instance/client/group/topic/partition/first/next/frontier

The sender has read the log before offset ``seen``. ``first`` and ``next`` are the half-open range;
``frontier`` is the first offset that nobody has claimed yet, as the sender knows it. A RangeBeat of
a member that holds nothing has the range 0-0.
"""

from __future__ import annotations

import re

from kafkamq.errors import WireError
from kafkamq.types import RangeRecord, RangeType

__all__ = ["RANGE_TOPIC", "RangeRecord", "RangeType", "decode_range", "encode_range"]

RANGE_TOPIC = "kafkamq.ranges"
_MAX_BYTES = 10_000
_FIELDS = 11
_VERSION = 2  # before it a record did not say what its sender had read
_NUMBER = re.compile(rb"[0-9]{1,18}")
_TYPES = {type.value.encode(): type for type in RangeType}


def encode_range(record: RangeRecord) -> bytes:
    """Encode the value of a Kafka record, whose key is null."""
    ids = (record.instance, record.client, record.group, record.topic)
    numbers = (record.seen, record.partition, record.first, record.next, record.frontier)
    if any("/" in text for text in ids):
        raise WireError("an id holds a '/', which separates the fields")
    if any(not 0 <= number < 10**18 for number in numbers):
        raise WireError("a number of a range record is negative or too large")
    fields = (
        *(record.type.value, _VERSION, record.seen, *ids),
        *(record.partition, record.first, record.next, record.frontier),
    )
    return "/".join(map(str, fields)).encode()


def decode_range(value: bytes | None) -> RangeRecord:
    """Decode the value of a Kafka record."""
    if value is None or len(value) > _MAX_BYTES:
        raise WireError("a range record is null or too long")
    fields = value.split(b"/", _FIELDS)
    type = _TYPES.get(fields[0])
    if type is None or len(fields) != _FIELDS:
        raise WireError("the type or the number of fields of a range record is unknown")
    if not all(_NUMBER.fullmatch(fields[at]) for at in (1, 2, 7, 8, 9, 10)):
        raise WireError("a range record holds a number that is none")
    if int(fields[1]) < _VERSION:
        raise WireError("a range record is of a version that is not read any more")
    try:
        instance, client, group, topic = (fields[at].decode() for at in (3, 4, 5, 6))
    except UnicodeDecodeError:
        raise WireError("a range record is not UTF-8") from None
    return RangeRecord(
        type,
        instance=instance,
        client=client,
        group=group,
        topic=topic,
        partition=int(fields[7]),
        first=int(fields[8]),
        next=int(fields[9]),
        frontier=int(fields[10]),
        seen=int(fields[2]),
    )
