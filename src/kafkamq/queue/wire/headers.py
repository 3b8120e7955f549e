"""Here are the headers of messages, copies and dead letters.

Readers are strict and total: a header of ours that another sender filled with something else
counts as absent, it never stops anybody. The user's headers keep their order, their duplicates and
their null values through every copy. What a sender gives is checked here before anything of it
reaches Kafka's C client: that ends the process over a name that UTF-8 does not have.

In a topic that anybody writes to (R37, R38), a record of ours has the header
``kafkamq-written-for``: the stamp of a queue, namespace and topic. What stands before it is the
sender's, whatever it is called; what stands behind it is ours. Without the stamp of this very queue
and topic all headers are the sender's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from kafkamq.config import utf8
from kafkamq.errors import ConfigError, WireError
from kafkamq.types import DeadLetterReason, Header, Headers

ID = "kafkamq-id"
DELIVERY_COUNT = "kafkamq-delivery-count"
TTL_MS = "kafkamq-ttl-ms"
ORIGIN = "kafkamq-origin"
REASON = "kafkamq-reason"
ERROR = "kafkamq-error"
QUEUE_ID = "kafkamq-queue-id"
PAYLOAD_AT = "kafkamq-payload-at"
"""Of a dead letter whose payload did not fit: the place of the record that still has it (R11)."""

RESERVED = frozenset({ID, DELIVERY_COUNT, TTL_MS, ORIGIN, REASON, ERROR, QUEUE_ID, PAYLOAD_AT})
"""Names that senders cannot use; the last of a name counts."""

MAX_ERROR_BYTES = 4096
"""Error texts are cut at this many bytes of UTF-8 (R11)."""

_MAX_ID_BYTES = 4096
# A topic name has 249 bytes at most.
_MAX_ORIGIN_BYTES = 320
_MAX_DELIVERY_COUNT = 0x7FFF_FFFF
_MAX_INT64 = 0x7FFF_FFFF_FFFF_FFFF
JUDGED = frozenset({DELIVERY_COUNT, TTL_MS, ORIGIN})
"""What a message says that its next delivery is judged by; a first copy without a TTL has none."""

_OF_A_COPY = frozenset({DELIVERY_COUNT, ORIGIN})
_OF_A_DELIVERY = frozenset({DELIVERY_COUNT, ORIGIN, REASON, ERROR, QUEUE_ID, PAYLOAD_AT})


@dataclass(slots=True, unsafe_hash=True)
class Origin:
    """It says where the first copy of a message stands, and when the broker got it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int

    def encode(self) -> bytes:
        """Return it as a header value: ``topic/partition/offset/timestamp_ms`` in ASCII."""
        return f"{self.topic}/{self.partition}/{self.offset}/{self.timestamp_ms}".encode("ascii")

    @classmethod
    def decode(cls, value: bytes) -> Origin:
        parts = value.split(b"/") if len(value) <= _MAX_ORIGIN_BYTES else []
        if len(parts) != 4 or not parts[0] or not parts[0].isascii():
            raise WireError("an origin is topic/partition/offset/timestamp_ms")
        numbers = [_decimal(part) for part in parts[1:]]
        if -1 in numbers:
            raise WireError("an origin with a part that is no number")
        return cls(parts[0].decode("ascii"), *numbers)

    @classmethod
    def read(cls, value: bytes | None) -> Origin | None:
        """Decode a header's value, if it is an origin."""
        try:
            return cls.decode(value or b"")
        except WireError:
            return None


@dataclass(slots=True)
class MessageHeaders:
    """The headers of a message, ours read and the user's left as they were."""

    id: str = ""
    delivery_count: int = 1
    ttl_ms: int | None = None
    # None: this record is the first copy.
    origin: Origin | None = None
    user: Headers = ()


# It is shared: values of messages are never mutated.
_NOTHING = MessageHeaders()


def read_message_headers(headers: Iterable[tuple[str, bytes | None]] | None) -> MessageHeaders:
    """Reads the headers of a record, given as confluent-kafka gives them; total.

    ``user`` leaves out our own names, also where their value was unreadable.
    """
    if not headers:
        return _NOTHING
    result = MessageHeaders()
    user = []
    for name, value in headers:
        if name not in RESERVED:
            user.append((name, value))
        elif value is not None:
            _read_own(result, name, value)
    result.user = tuple(user)
    return result


def _read_own(result: MessageHeaders, name: str, value: bytes) -> None:
    if name == ID:
        if len(value) <= _MAX_ID_BYTES:
            result.id = value.decode("utf-8", "replace")
    elif name == DELIVERY_COUNT:
        count = _decimal(value)
        if 1 <= count <= _MAX_DELIVERY_COUNT:
            result.delivery_count = count
    elif name == TTL_MS:
        ttl_ms = _decimal(value)
        if ttl_ms >= 0:
            result.ttl_ms = ttl_ms
    elif name == ORIGIN:
        result.origin = Origin.read(value)


def _decimal(value: bytes) -> int:
    """Return an ASCII decimal without sign of at most 2^63 - 1, or -1."""
    if not value.isdigit() or len(value) > 19:
        # ``bytes.isdigit`` knows ASCII only.
        return -1
    number = int(value)
    return number if number <= _MAX_INT64 else -1


def message_headers(
    user: Iterable[tuple[str, bytes | None]] = (), *, id: str = "", ttl_ms: int | None = None
) -> Headers:
    """Return the headers of a message that is sent for the first time: the user's, then ours."""
    headers = list(user)
    if id:
        headers.append((ID, id.encode()))
    if ttl_ms is not None:
        headers.append((TTL_MS, b"%d" % ttl_ms))
    return tuple(headers)


def copy_headers(
    headers: Iterable[tuple[str, bytes | None]], *, delivery_count: int, origin: Origin | None
) -> Headers:
    """Get the headers of a copy (R14): those of the message, with its new count and its origin."""
    kept, known = _without(headers, _OF_A_COPY)
    first = known if known is not None else origin
    if first is not None:
        kept.append((ORIGIN, first.encode()))
    if delivery_count > 1:
        kept.append((DELIVERY_COUNT, b"%d" % delivery_count))
    return tuple(kept)


def dead_letter_headers(
    headers: Iterable[tuple[str, bytes | None]],
    *,
    reason: DeadLetterReason,
    error: str,
    delivery_count: int,
    origin: Origin,
    queue_id: str | bytes,
    payload_at: Origin | None = None,
) -> Headers:
    """Return the headers of a dead letter: those of the message, then why and whence it came.

    A message without an id gets its origin's place as one: the same for all of its copies.

    Args:
        headers: All headers of the message.
        error: Text for people, cut at 4 KiB (R11).
        origin: Where the message stands; used when it names no origin itself.
        payload_at: Set when the payload is not in the dead letter, but still there (R11).
    """
    kept, known = _without(headers, _OF_A_DELIVERY)
    first = origin if known is None else known
    if not any(name == ID and value for name, value in kept):
        kept.append((ID, f"{first.topic}/{first.partition}/{first.offset}".encode()))
    kept += (
        (REASON, reason.value.encode()),
        (ERROR, cut_text(error).encode()),
        (DELIVERY_COUNT, b"%d" % delivery_count),
        (ORIGIN, first.encode()),
        (QUEUE_ID, queue_id.encode() if isinstance(queue_id, str) else queue_id),
    )
    if payload_at is not None:
        kept.append((PAYLOAD_AT, payload_at.encode()))
    return tuple(kept)


def redrive_headers(headers: Iterable[tuple[str, bytes | None]]) -> Headers:
    return tuple([header for header in headers if header[0] not in _OF_A_DELIVERY])


def _without(
    headers: Iterable[tuple[str, bytes | None]], names: Set[str]
) -> tuple[list[tuple[str, bytes | None]], Origin | None]:
    """Return headers of other names, and the origin that was among the headers."""
    kept = []
    origin = None
    for name, value in headers:
        if name not in names:
            kept.append((name, value))
        elif name == ORIGIN and value is not None:
            origin = Origin.read(value)
    return kept, origin


def cut_text(text: str, max_bytes: int = MAX_ERROR_BYTES) -> str:
    """``text`` cut at ``max_bytes`` of UTF-8, between characters; lone surrogates become ``?``."""
    data = text[:max_bytes].encode("utf-8", "replace")
    return data[:max_bytes].decode("utf-8", "ignore")


def clean(reason: object) -> str:
    """Return a reason as it can be written: at most 4096 bytes, without lone surrogates."""
    return cut_text(reason if isinstance(reason, str) else repr(reason))


def reason_of(error: BaseException) -> str:
    """Return the kind of an error and what it says; never raises."""
    try:
        return clean(f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001 - of the user's own __str__: the verdict matters more
        return type(error).__name__


MAX_ID_BYTES = 1024
# The lengths of a name and a value.
_HEADER_OVERHEAD_BYTES = 8
_UUID_BYTES = 36
_INT64_DIGITS = 19
OWN_HEADER_BYTES = len(ID) + _UUID_BYTES + len(TTL_MS) + _INT64_DIGITS + 2 * _HEADER_OVERHEAD_BYTES
"""What ``kafkamq-id`` and ``kafkamq-ttl-ms`` add to a record at most, the id being a UUID."""


def checked_id(id: str) -> bytes:
    encoded = utf8(id, name="id")
    if not 0 < len(encoded) <= MAX_ID_BYTES:
        raise ConfigError(f"id is {id!r:.80}: it must be a text of 1-{MAX_ID_BYTES} bytes of UTF-8")
    return encoded


def checked_headers(headers: Mapping[str, bytes] | Headers | None) -> tuple[Headers, int]:
    """Return the sender's headers in their order, and the bytes that they add to a record.

    Raises:
        ConfigError: No mapping and no pairs; a name that is no text, holds a NUL or belongs to the
            protocol; a value that is not bytes. Names the header.
    """
    if headers is None:
        return (), 0
    pairs: object = tuple(headers.items()) if isinstance(headers, Mapping) else headers
    if not isinstance(pairs, tuple) or any(map(_is_no_pair, pairs)):
        raise ConfigError(
            f"headers is a {type(headers).__name__}: it must be a mapping of names to bytes, or a "
            "tuple of such pairs"
        )
    size = 0
    for name, value in pairs:
        encoded = utf8(name, name="the name of a header")
        if b"\0" in encoded:
            raise ConfigError(f"headers has {name!r}: a name must be free of NUL characters")
        if name in RESERVED:
            raise ConfigError(f"headers has {name!r}: names of the protocol cannot be sent")
        size += len(encoded) + payload_bytes(value, name=f"header {name!r}")
        size += _HEADER_OVERHEAD_BYTES
    return pairs, size


def _is_no_pair(header: object) -> bool:
    return not isinstance(header, tuple) or len(header) != 2


def payload_bytes(payload: bytes | None, *, name: str = "payload") -> int:
    """Return the size of a payload, or of a header's value."""
    if payload is None:
        return 0
    if not isinstance(payload, bytes):
        raise ConfigError(f"{name} is a {type(payload).__name__}: it must be bytes, or None")
    return len(payload)


WRITTEN_FOR = "kafkamq-written-for"
"""Its value is a stamp."""

THEIRS = "kafkamq-theirs-"
"""Before a sender's header that is called like one of ours, in dead letters."""

_LOG_ID_BYTES = 16
_OURS = RESERVED | {WRITTEN_FOR}


def stamp_of(topic_id: bytes, namespace: str, queue_id: str | bytes) -> bytes:
    """Return what records have that were written for a queue, into this topic and no other one."""
    queue = queue_id.encode() if isinstance(queue_id, str) else queue_id
    return b"%b/%b/%b" % (topic_id.hex().encode(), namespace.encode(), queue)


def log_id_of(topic_id: bytes, queue_id: str | bytes) -> bytes:
    """Return what markers name a topic by that is a queue (R13): each of its queues has its own.

    Two queues of one topic so never settle each other's messages. Empty: the topic's is not known.
    """
    if not topic_id:
        return b""
    queue = queue_id.encode() if isinstance(queue_id, str) else queue_id
    return hashlib.sha256(topic_id + queue).digest()[:_LOG_ID_BYTES]


def split_headers(headers: Sequence[Header], stamp: bytes) -> tuple[Headers, Headers]:
    """Return the sender's headers, and ours; without this stamp all are the sender's."""
    for at in range(len(headers) - 1, -1, -1):
        if headers[at] == (WRITTEN_FOR, stamp):
            return tuple(headers[:at]), tuple(headers[at + 1 :])
    return tuple(headers), ()


def read_stamped_headers(headers: Sequence[Header], stamp: bytes) -> MessageHeaders:
    """Read the headers of a record in a topic that anybody writes to; total."""
    theirs, ours = split_headers(headers, stamp)
    read = read_message_headers(ours)
    return MessageHeaders(read.id, read.delivery_count, read.ttl_ms, read.origin, theirs)


def is_of_another_queue(headers: Sequence[Header], stamp: bytes) -> bool:
    """Return whether a tracker wrote this copy for another queue of the same topic."""
    if not any(name == WRITTEN_FOR for name, _ in headers):
        return False
    topic = stamp[: stamp.index(b"/") + 1]
    for name, value in reversed(headers):
        if name == WRITTEN_FOR and value is not None and value.startswith(topic):
            _, ours = split_headers(headers, value)
            return value != stamp and any(of == ORIGIN for of, _ in ours)
    return False


def has_names_of_ours(headers: Sequence[Header]) -> bool:
    """Return whether a sender has called headers of its own like ours."""
    return any(name in _OURS for name, _ in headers)


def stamped(theirs: Sequence[Header], stamp: bytes, ours: Sequence[Header]) -> Headers:
    return (*theirs, (WRITTEN_FOR, stamp), *ours)


def stamped_copy_headers(
    headers: Sequence[Header], stamp: bytes, *, delivery_count: int, origin: Origin
) -> Headers:
    """Return a copy's headers: those of the sender untouched, then the stamp and ours."""
    theirs, ours = split_headers(headers, stamp)
    copied = copy_headers(ours, delivery_count=delivery_count, origin=origin)
    return stamped(theirs, stamp, copied)


def unstamped(headers: Sequence[Header], stamp: bytes) -> Headers:
    """Rename the sender's headers for a dead letter, whose headers of our names are ours."""
    theirs, ours = split_headers(headers, stamp)
    renamed = [
        (THEIRS + name if name in _OURS or name.startswith(THEIRS) else name, value)
        for name, value in theirs
    ]
    return (*renamed, *ours)


def restored(headers: Sequence[Header]) -> Headers:
    """Return a sender's headers as they were, of a dead letter that goes back into the topic."""
    return tuple((name.removeprefix(THEIRS), value) for name, value in headers)
