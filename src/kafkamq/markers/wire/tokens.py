"""Tokens of messages: what a verdict that is given elsewhere must know, as text (R34).

A token is ``k1.`` and, in base64 for URLs without padding, big-endian numbers, four texts with
their lengths before them, and a CRC-32 of all that. It holds no secret: a client that may write
markers may give verdicts. Its text is canonical: one token has one text.
"""

from __future__ import annotations

import base64
import binascii
import struct
from dataclasses import dataclass
from zlib import crc32

from kafkamq.errors import ConfigError
from kafkamq.types import MessageId

MAX_TOKEN_CHARACTERS = 4096
"""A queue's id has 1024 bytes at most, a namespace 249: some 2000 characters are the longest."""

_VERSION = "k1."
_NUMBERS = struct.Struct(">iqiiqiq")
_LENGTH = struct.Struct(">H")
_CHECK = struct.Struct(">I")
_TEXTS = 4
_SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageToken:
    """One delivery of one message.

    Attributes:
        namespace: Of the queue.
        queue_id: The queue.
        message_id: Which copy: topic id, leader epoch, partition and offset.
        marker_partition: Where its START is, and its END must go (R7, R26).
        start_offset: Of its START there.
        holder_id: Who holds it: a consumer, or the hold that ``Message.hold`` made.
        delivery_count: Which delivery it is; the back-off of a nack goes by it.
        message_ms: Broker time of a message whose START has no payload (R28); -1: it has.
    """

    namespace: str
    queue_id: str
    message_id: MessageId
    marker_partition: int
    start_offset: int
    holder_id: str
    delivery_count: int = 1
    message_ms: int = -1

    def encode(self) -> str:
        """Return its text: characters of URLs and file names alone."""
        one = self.message_id
        data = _NUMBERS.pack(
            one.partition,
            one.offset,
            one.leader_epoch,
            self.marker_partition,
            self.start_offset,
            self.delivery_count,
            self.message_ms,
        )
        for text in (
            self.namespace.encode(),
            self.queue_id.encode(),
            one.topic_id,
            self.holder_id.encode(),
        ):
            data += _LENGTH.pack(len(text)) + text
        data += _CHECK.pack(crc32(data))
        return _VERSION + base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def decode_token(text: str) -> MessageToken:
    """Return what ``MessageToken.encode`` gave.

    Raises:
        ConfigError: It is no token, damaged, or of a newer version.
    """
    if not isinstance(text, str):
        raise ConfigError(f"token is a {type(text).__name__}: it must be the text message.token")
    if len(text) > MAX_TOKEN_CHARACTERS:
        raise ConfigError(
            f"token has {len(text)} characters: it must have {MAX_TOKEN_CHARACTERS} at most"
        )
    try:
        token = _decode(text)
    except (ValueError, struct.error, binascii.Error):
        token = None
    if token is None or token.encode() != text:
        raise ConfigError(f"token begins with {text[:_SHOWN]!r}: {_why(text)}")
    return token


def _why(text: str) -> str:
    version = text.partition(".")[0]
    if version[:1] == "k" and version[1:].isdecimal() and version + "." != _VERSION:
        return "it is of another version of kafkamq: upgrade who reads it"
    return "it is damaged, or no token of a message (message.token gives them)"


def _decode(text: str) -> MessageToken | None:
    if not text.startswith(_VERSION):
        return None
    body = text[len(_VERSION) :].encode("ascii")
    data = base64.urlsafe_b64decode(body + b"=" * (-len(body) % 4))
    found, at = data[: -_CHECK.size], _NUMBERS.size
    if _CHECK.unpack(data[-_CHECK.size :])[0] != crc32(found):
        return None
    partition, offset, epoch, route, start_offset, count, message_ms = _NUMBERS.unpack_from(found)
    texts = []
    for _ in range(_TEXTS):
        (length,) = _LENGTH.unpack_from(found, at)
        at += _LENGTH.size + length
        texts.append(found[at - length : at])
    namespace, queue_id, topic_id, holder_id = texts
    is_sound = (
        min(partition, offset, epoch, route, start_offset, count) >= 0
        and message_ms >= -1
        and len(topic_id) in (0, 16)
        and at == len(found)
    )
    if not is_sound:
        return None
    return MessageToken(
        namespace=namespace.decode(),
        queue_id=queue_id.decode(),
        message_id=MessageId(partition, offset, topic_id, epoch),
        marker_partition=route,
        start_offset=start_offset,
        holder_id=holder_id.decode(),
        delivery_count=count,
        message_ms=message_ms,
    )
