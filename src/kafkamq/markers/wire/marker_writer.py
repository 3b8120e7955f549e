"""Hand-written encoders of the markers that are written once per message.

The bytes mean what the generated code would write (a property test compares them), at a fraction
of its cost: fields that are the same for every message of a queue are encoded once. Field tags are
``number << 3 | wire type`` as varints; a field with its proto3 default is not written, so version 0
and type START never are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from kafkamq.errors import WireError
from kafkamq.queue.wire.headers import cut_text
from kafkamq.types import Headers, MessageId, Outcome

MAX_MARKER_BYTES = 17 * 1024 * 1024
"""Largest marker that is decoded: one transaction's 16 MiB (R16) and room for what goes with it."""

MAX_DURATION_MS = 10 * 366 * 86_400_000
"""Longest timeout, delay or lease that is believed: ten years."""

MAX_ID_CHARACTERS = 1024
"""Longest consumer or engine id that is believed; trackers keep them in memory."""

MAX_COUNT = 0x7FFF_FFFF
"""Largest delivery count, partition or leader epoch."""

MAX_INT64 = 0x7FFF_FFFF_FFFF_FFFF
"""Largest offset, time or engine epoch."""

# Varints by 14-bit digits: _LAST ends one, _MORE has the continuation bit in both bytes.
_LAST = [bytes((n,)) if n < 128 else bytes((n & 127 | 128, n >> 7)) for n in range(1 << 14)]
_MORE = [bytes((n & 127 | 128, n >> 7 | 128)) for n in range(1 << 14)]

_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{0,249}")
_END_TYPE = b"\x10\x01"
_VERSION_2 = b"\x08\x02"
_KEEPALIVE_TYPE = b"\x10\x02"
_SCHEDULE_TYPE = b"\x10\x10"
_TICK_TYPE = b"\x10\x11"
_FIRST = b"\x80\x01\x01"
_BY_REFERENCE = b"\xa8\x01\x01"
_NULL_VALUE = b"\xc8\x01\x01"
_CARRIED_FORWARD = b"\xe0\x01\x01"
_OF_SCHEDULE = b"\xe8\x01\x01"
_OUTCOME = {outcome: b"\xb0\x01" + bytes((outcome,)) if outcome else b"" for outcome in Outcome}


def varint(value: int) -> bytes:
    """``value`` as a protobuf varint.

    Raises:
        WireError: it is negative or over 2^63 - 1; nothing on this wire is.
    """
    if 0 <= value < 16384:
        return _LAST[value]
    return _MORE[value & 16383] + _high_digits(value >> 14)


@lru_cache(maxsize=4096)
def _high_digits(value: int) -> bytes:
    """What follows the first 14 bits: the same for 16,384 neighbours, so it is remembered."""
    if not 0 <= value <= MAX_INT64 >> 14:
        raise WireError("cannot encode a number outside 0 to 2^63 - 1")
    digits = []
    while value >= 16384:
        digits.append(_MORE[value & 16383])
        value >>= 14
    digits.append(_LAST[value])
    return b"".join(digits)


def number(tag: bytes, value: int) -> bytes:
    return tag + varint(value) if value else b""


def blob(tag: bytes, value: bytes) -> bytes:
    return tag + varint(len(value)) + value if value else b""


def _duration(value_ms: int) -> bytes:
    """Field 4. One that readers would not believe must not be written: they would pass it."""
    if value_ms > MAX_DURATION_MS:
        raise WireError(f"cannot encode a duration of {value_ms} ms: {MAX_DURATION_MS} at most")
    return b"\x20" + varint(value_ms) if value_ms else b""


def _lease(value_ms: int) -> bytes:
    if value_ms > MAX_DURATION_MS:
        raise WireError(f"cannot encode a lease of {value_ms} ms: {MAX_DURATION_MS} at most")
    return number(b"\xd8\x01", value_ms)


def topic_name(name: str) -> str:
    """The name, if a topic can have it, or none.

    Raises:
        WireError: it is another text.
    """
    if name in (".", "..") or _TOPIC_NAME.fullmatch(name) is None:
        raise WireError("a message_topic that is no name of a topic")
    return name


def _message_topic(name: str) -> bytes:
    """R37: older readers stop at it, as they would look for the messages elsewhere."""
    return _VERSION_2 + blob(b"\x8a\x02", topic_name(name).encode()) if name else b""


def _count(tag: bytes, value: int) -> bytes:
    if value > MAX_COUNT:
        raise WireError(f"cannot encode a count of {value}: {MAX_COUNT} at most")
    return number(tag, value)


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_MARKER_BYTES:
        raise WireError(f"a marker of {len(data)} bytes is too large: {MAX_MARKER_BYTES} at most")
    return data


@lru_cache(maxsize=1024)
def _consumer(consumer_id: str) -> bytes:
    if len(consumer_id) > MAX_ID_CHARACTERS:
        raise WireError(f"cannot encode an id of {len(consumer_id)} characters")
    return blob(b"\x9a\x01", consumer_id.encode())


@lru_cache(maxsize=4096)
def _identity(partition: int, topic_id: bytes, leader_epoch: int) -> tuple[list[bytes], bytes]:
    """A message id around its offset, the same for a whole topic partition.

    What stands before the offset, by the offset's size in bytes, and what stands after it.
    """
    if not 0 <= partition <= MAX_COUNT or not 0 <= leader_epoch <= MAX_COUNT:
        raise WireError("cannot encode a partition or leader epoch outside 0 to 2^31 - 1")
    if len(topic_id) not in (0, 16):
        raise WireError(f"cannot encode a topic_id of {len(topic_id)} bytes: it has 16, or none")
    before = number(b"\x08", partition)
    after = blob(b"\x82\x01", topic_id) + number(b"\x88\x01", leader_epoch)
    size = len(before) + len(after)  # with the offset below 128 in any case: 6 + 10 + 25
    offsets = [b"\x1a%c%b\x10" % (size + 1 + each, before) for each in range(10)]
    return [b"\x1a%c%b" % (size, before), *offsets[1:]], after


def _message_id(message_id: MessageId) -> bytes:
    return encode_identity(
        message_id.partition, message_id.offset, message_id.topic_id, message_id.leader_epoch
    )


def encode_identity(partition: int, offset: int, topic_id: bytes, leader_epoch: int) -> bytes:
    """A message's identity as its markers hold it, for those who write several of them.

    Field 3, always written: an id of partition 0, offset 0 is there, but empty.
    """
    before, after = _identity(partition, topic_id, leader_epoch)
    if not offset:
        return before[0] + after
    middle = varint(offset)
    return before[len(middle)] + middle + after


def identity_encoder(
    partition: int, offset: int, topic_id: bytes, leader_epoch: int
) -> Callable[[int], bytes]:
    """``encode_identity`` by the offset alone, for offsets with the same ``offset // 16384``."""
    before, after = _identity(partition, topic_id, leader_epoch)
    if offset < 16384:  # here the digits differ in number
        return lambda small: encode_identity(partition, small, topic_id, leader_epoch)
    high = _high_digits(offset >> 14)
    start, end = before[2 + len(high)], high + after
    return lambda near: start + _MORE[near & 16383] + end


def _headers(headers: Sequence[tuple[str, bytes | None]]) -> bytes:
    parts: list[bytes] = []
    for name, value in headers:
        if value is None:  # null is absent, an empty value is written
            parts.append(_before_value(name, -1))
        elif len(name) <= _REMEMBERED and len(value) <= _REMEMBERED:
            parts += (_remembered_before_value(name, len(value)), value)
        else:
            parts += (_before_value(name, len(value)), value)
    return b"".join(parts)


def _before_value(name: str, value_size: int) -> bytes:
    """Everything of a header but its value; ``value_size`` -1: it has none."""
    encoded = name.encode() if name.isascii() else _encoded_name(name)
    body = b"\x0a%b%b" % (varint(len(encoded)), encoded) if encoded else b""
    if value_size >= 0:
        body += b"\x12" + varint(value_size)
    return b"\x8a\x01" + varint(len(body) + max(0, value_size)) + body


_REMEMBERED = 64  # characters of a name, and bytes of a value, that are worth it
_remembered_before_value = lru_cache(maxsize=1024)(_before_value)


def _encoded_name(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise WireError("cannot encode a header whose name is not Unicode text") from None


class StartEncoder:
    """Encodes the STARTs of one consumer of one queue; keep it while those settings last."""

    __slots__ = (
        "_before_sized",
        "_before_value",
        "_constant",
        "_header",
        "_key",
        "_size",
        "_time_field",
        "_time_ms",
        "names_topic",
    )

    def __init__(
        self,
        *,
        consumer_id: str = "",
        redeliver_after_ms: int,
        max_deliveries: int = 0,
        max_lease_ms: int = 0,
        message_topic: str = "",
    ) -> None:
        self._constant = b"".join(
            (
                _duration(redeliver_after_ms),
                _consumer(consumer_id),
                _count(b"\xd0\x01", max_deliveries),
                _lease(max_lease_ms),
                _message_topic(message_topic),
            )
        )
        self.names_topic = bool(message_topic)  # which is a version of its own (R37)
        # Most messages of a queue have the same key, and those of a request the same time.
        self._key = b""
        self._before_value = self._constant
        self._size = -1  # of the value that _before_sized is for
        self._before_sized = b""
        self._time_ms = 0
        self._time_field = b""
        self._header = "", 0, b""  # name, size of the value, and what stands before that

    def encode(
        self,
        message_id: MessageId,
        key: bytes,
        value: bytes | None,
        *,
        delivery_count: int = 1,
        headers: Headers = (),
        expires_at_ms: int = 0,
        message_timestamp_ms: int = 0,
        by_reference: bool = False,
    ) -> bytes:
        """The START of one message.

        Args:
            message_id: Identity of the message record.
            key: Its whole record key.
            value: Its payload; None: null. Not written when ``by_reference``.
            delivery_count: 1 at the first delivery.
            headers: All headers of the record.
            expires_at_ms: Broker time; 0: never.
            message_timestamp_ms: Of the record; 0 or negative: unknown.
            by_reference: The payload stays in the message record (R11).

        Raises:
            WireError: a number is outside its range, or it is too large for any reader.
        """
        return _bounded(
            self.encode_known(
                _message_id(message_id),
                key,
                value,
                delivery_count,
                headers,
                expires_at_ms,
                message_timestamp_ms,
                by_reference,
            )
        )

    def encode_known(
        self,
        identity: bytes,
        key: bytes,
        value: bytes | None,
        delivery_count: int,
        headers: Sequence[tuple[str, bytes | None]],
        expires_at_ms: int,
        message_timestamp_ms: int,
        by_reference: bool,
    ) -> bytes:
        """``encode`` of any size, for who has the identity from ``encode_identity`` already."""
        if key != self._key:
            self._key, self._before_value = key, self._constant + blob(b"\x2a", key)
            self._size = -1
        if message_timestamp_ms != self._time_ms:
            known = message_timestamp_ms > 0
            self._time_field = b"\xa0\x01" + varint(message_timestamp_ms) if known else b""
            self._time_ms = message_timestamp_ms
        size = len(value) if value else 0
        if delivery_count == 1 and 0 < size < 16384 and not by_reference and not expires_at_ms:
            if size != self._size:
                self._size, self._before_sized = size, self._before_value + b"\x32" + _LAST[size]
            # The id alone, as a rule.
            name, header = headers[0] if len(headers) == 1 else ("", None)
            if header and (name != self._header[0] or len(header) != self._header[1]):
                self._header = name, len(header), _before_value(name, len(header))
            return b"".join(  # nearly all are like this
                (
                    identity,
                    self._before_sized,
                    value or b"",
                    _FIRST,
                    self._header[2] if header else b"",
                    header or _headers(headers),
                    self._time_field,
                )
            )
        parts = [identity, self._before_value]
        if by_reference:
            parts.append(_BY_REFERENCE)
        elif value is None:
            parts.append(_NULL_VALUE)
        elif value:
            parts += (b"\x32", varint(size), value)
        parts.append(_FIRST if delivery_count == 1 else _count(b"\x80\x01", delivery_count))
        if headers:
            parts.append(_headers(headers))
        if expires_at_ms:
            parts += (b"\x90\x01", varint(expires_at_ms))
        parts.append(self._time_field)
        return b"".join(parts)


def encode_start(
    message_id: MessageId,
    key: bytes,
    value: bytes | None,
    *,
    redeliver_after_ms: int,
    consumer_id: str = "",
    delivery_count: int = 1,
    headers: Headers = (),
    expires_at_ms: int = 0,
    message_timestamp_ms: int = 0,
    by_reference: bool = False,
    max_deliveries: int = 0,
    max_lease_ms: int = 0,
    message_topic: str = "",
) -> bytes:
    """One START; ``StartEncoder`` is the quicker form for many of one consumer."""
    encoder = StartEncoder(
        consumer_id=consumer_id,
        redeliver_after_ms=redeliver_after_ms,
        max_deliveries=max_deliveries,
        max_lease_ms=max_lease_ms,
        message_topic=message_topic,
    )
    return encoder.encode(
        message_id,
        key,
        value,
        delivery_count=delivery_count,
        headers=headers,
        expires_at_ms=expires_at_ms,
        message_timestamp_ms=message_timestamp_ms,
        by_reference=by_reference,
    )


def encode_bare_start(
    message_id: MessageId, key: bytes, value: bytes, *, redeliver_after_ms: int
) -> bytes:
    """A START with the fields that kafka-mq-go knows, and no others.

    Raises:
        WireError: a number is outside its range.
    """
    parts = (
        _message_id(message_id),
        _duration(redeliver_after_ms),
        blob(b"\x2a", key),
        blob(b"\x32", value),
    )
    return _bounded(b"".join(parts))


def encode_end(
    message_id: MessageId,
    outcome: Outcome,
    *,
    consumer_id: str = "",
    redeliver_after_ms: int = 0,
    reason: str = "",
    of_schedule: bool = False,
) -> bytes:
    """An END (R8).

    Args:
        message_id: Identity of the message, or of the SCHEDULE.
        outcome: The verdict.
        consumer_id: Who gives it.
        redeliver_after_ms: The delay of a NACK; not written otherwise.
        reason: Text for people, cut at 4 KiB of UTF-8 (R11).
        of_schedule: ``message_id`` names a SCHEDULE.

    Raises:
        WireError: a number is outside its range.
    """
    return encode_known_end(
        _message_id(message_id), outcome, consumer_id, redeliver_after_ms, reason, of_schedule
    )


def encode_known_end(
    identity: bytes,
    outcome: Outcome,
    consumer_id: str,
    redeliver_after_ms: int = 0,
    reason: str = "",
    of_schedule: bool = False,
) -> bytes:
    """``encode_end``, for who has the identity from ``encode_identity`` already."""
    data = _END_TYPE + identity + _OUTCOME[outcome] + _consumer(consumer_id)
    if redeliver_after_ms and outcome is Outcome.NACK:
        data += _duration(redeliver_after_ms)
    if reason:
        data += blob(b"\xc2\x01", cut_text(reason).encode())
    return data + _OF_SCHEDULE if of_schedule else data


def encode_keepalive(
    message_id: MessageId | None, *, consumer_id: str = "", redeliver_after_ms: int
) -> bytes:
    """A KEEPALIVE of one message, or with None of all leases of ``consumer_id`` (R7).

    Raises:
        WireError: neither is given, or a number is outside its range.
    """
    if message_id is None and not consumer_id:
        raise WireError("cannot encode a KEEPALIVE that names neither a message nor a consumer")
    name = b"" if message_id is None else _message_id(message_id)
    return encode_known_keepalive(name, consumer_id, redeliver_after_ms)


def encode_known_keepalive(identity: bytes, consumer_id: str, redeliver_after_ms: int) -> bytes:
    """``encode_keepalive``, for who has the identity from ``encode_identity`` already."""
    return _KEEPALIVE_TYPE + identity + _duration(redeliver_after_ms) + _consumer(consumer_id)


def encode_schedule(
    key: bytes,
    value: bytes | None,
    *,
    redeliver_after_ms: int,
    headers: Headers = (),
    expires_at_ms: int = 0,
    consumer_id: str = "",
    first: MessageId | None = None,
) -> bytes:
    """A SCHEDULE: a message that is not in the queue before ``redeliver_after_ms`` have passed.

    Args:
        key: The whole record key.
        value: The payload; None: null.
        redeliver_after_ms: The delay; of one carried forward, what remains of it (R19).
        headers: All headers of the message.
        expires_at_ms: Broker time; 0: never.
        consumer_id: Who wrote it.
        first: Of one carried forward: marker partition and offset of its first record.

    Raises:
        WireError: a number is outside its range.
    """
    parts = [_SCHEDULE_TYPE]
    if first is not None:
        parts.append(_message_id(first) + _CARRIED_FORWARD)
    parts += (_duration(redeliver_after_ms), blob(b"\x2a", key))
    parts.append(_NULL_VALUE if value is None else blob(b"\x32", value))
    parts += (_headers(headers), number(b"\x90\x01", expires_at_ms), _consumer(consumer_id))
    return _bounded(b"".join(parts))


def encode_tick(engine_id: str, engine_epoch: int) -> bytes:
    """A TICK of an engine (R4, R17)."""
    return _TICK_TYPE + _consumer(engine_id) + number(b"\xf8\x01", engine_epoch)
