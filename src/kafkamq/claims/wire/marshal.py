"""Marshal's coordination records are text fields joined by ``/``, no escaping.

    TYPE/version/time/instance/client/group/topic/partition[/extra]

``extra`` is the next offset to consume (Heartbeat, ReleasingPartition, ClaimingMessages) or the
epoch second until which a group is paused (ReleaseGroup); a ClaimingPartition has none. The number
of fields is exact for each type, so that nothing can be appended, and an id that holds a ``/``
makes every record of its owner unreadable: ``encode`` refuses it.

What is read is what the Go client reads. Its numbers are an optional sign and ASCII digits within
int64 (``+5``, ``007`` and ``-1`` are numbers, ``1_0``, `` 5`` and other scripts' digits are not);
its strings are bytes, so ``decode_value`` keeps what is not UTF-8 as surrogate escapes.

Sources: Marshal PROTOCOL.md, "Protocol Messages"; the ids, the version and ReleaseGroup's text are
as the Go client writes them.
"""

from __future__ import annotations

import hashlib
import re

from kafkamq.errors import ConfigError, WireError
from kafkamq.types import MarshalRecord, MarshalType

COORDINATION_TOPIC = "__marshal"
"""The topic that every Go client uses."""

VERSION = 1
"""What is written; read and never compared, as the peer does."""

MAX_RECORD_LENGTH = 2_000_000
"""Longer records are malformed: the Go client does not fetch them either."""

_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1
_NUMBER = re.compile(r"([+-]?)0*([0-9]{1,19})")
_BASE_FIELDS = 8
_TYPES = {type.value: type for type in MarshalType}


def decode(value: str) -> MarshalRecord:
    """Return one record from its text.

    Raises:
        WireError: the Go client would not read it either.
    """
    if len(value) > MAX_RECORD_LENGTH:
        raise WireError(f"a coordination record is longer than {MAX_RECORD_LENGTH} characters")
    fields = value.split("/", _BASE_FIELDS + 1)
    type = _TYPES.get(fields[0])
    if type is None:
        raise WireError("the type of a coordination record is unknown")
    expected = _BASE_FIELDS + (type is not MarshalType.CLAIMING_PARTITION)
    if len(fields) != expected:
        raise WireError(f"a {type.value} record has {expected} fields")
    record = MarshalRecord(
        type,
        version=_number(fields[1], "version"),
        time_s=_number(fields[2], "time"),
        instance=fields[3],
        client=fields[4],
        group=fields[5],
        topic=fields[6],
        partition=_number(fields[7], "partition"),
    )
    if type is MarshalType.RELEASE_GROUP:
        if record.topic or record.partition:
            raise WireError("a ReleaseGroup record names no topic and partition 0")
        record.expires_at_s = _number(fields[8], "expiry")
    elif type is not MarshalType.CLAIMING_PARTITION:
        record.offset = _number(fields[8], "offset")
    return record


def encode(record: MarshalRecord) -> str:
    """Return the text of one record, as the Go client would write it.

    Raises:
        WireError: no reader could read it: an id with a ``/``, a number outside int64, or a
            ReleaseGroup that names a topic.
    """
    for name in ("instance", "client", "group", "topic"):
        if "/" in getattr(record, name):
            raise WireError(f"{name} holds a '/', which separates the fields")
    for name in ("version", "time_s", "partition", "offset", "expires_at_s"):
        if not _MIN_INT64 <= getattr(record, name) <= _MAX_INT64:
            raise WireError(f"{name} is outside int64")
    text = (
        f"{record.type.value}/{record.version}/{record.time_s}/{record.instance}/{record.client}"
        f"/{record.group}/{record.topic}/{record.partition}"
    )
    if record.type is MarshalType.CLAIMING_PARTITION:
        pass
    elif record.type is MarshalType.RELEASE_GROUP:
        if record.topic or record.partition:
            raise WireError("a ReleaseGroup record names no topic and partition 0")
        text = f"{text}/{record.expires_at_s}"
    else:
        text = f"{text}/{record.offset}"
    if len(text) > MAX_RECORD_LENGTH:
        raise WireError(f"a coordination record is longer than {MAX_RECORD_LENGTH} characters")
    return text


def decode_value(value: bytes | None) -> MarshalRecord:
    """Return one record from a Kafka record's value; the reverse of ``encode_value``."""
    if value is None:
        raise WireError("a coordination record is null")
    if len(value) > MAX_RECORD_LENGTH:
        raise WireError(f"a coordination record is longer than {MAX_RECORD_LENGTH} bytes")
    return decode(value.decode("utf-8", "surrogateescape"))


def encode_value(record: MarshalRecord) -> bytes:
    """Return the value of a Kafka record; its key is null."""
    return _to_bytes(encode(record))


def coordination_partition(topic: str, n: int) -> int:
    """Partition of the coordination topic that holds all claims of ``topic``; ``n`` partitions.

    Only the topic's name counts. PROTOCOL hashes the partition as well; the Go code does not, and
    clients meet only where they agree.

    Raises:
        ConfigError: the coordination topic has no partition.
    """
    if n < 1:
        raise ConfigError(f"the coordination topic has {n} partitions: it must have at least 1")
    digest = hashlib.md5(_to_bytes(topic), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "little") % n


def _number(text: str, name: str) -> int:
    if len(text) < 19 and text.isdigit() and text.isascii():
        # This is nearly always so, and fast.
        return int(text)
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise WireError(f"{name} of a coordination record is not a whole number")
    number = int(match[1] + match[2])
    if not _MIN_INT64 <= number <= _MAX_INT64:
        raise WireError(f"{name} of a coordination record is outside int64")
    return number


def _to_bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise WireError("a coordination record holds text that is not Unicode") from None
