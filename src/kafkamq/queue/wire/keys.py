"""Record keys of messages: ``queue_id``, or ``queue_id NUL user_key`` when the sender gave a key.

kafka-mq-go's clients know only the first form. A user key may hold NULs: the first one separates.
"""

from __future__ import annotations

from kafkamq.config import utf8
from kafkamq.errors import ConfigError

_SEPARATOR = b"\0"


def join_key(queue_id: str | bytes, user_key: str | bytes | None = None) -> bytes:
    """The record key of a message; None means no user key, an empty one is a key."""
    prefix = utf8(queue_id, name="queue_id") if isinstance(queue_id, str) else queue_id
    if not prefix or _SEPARATOR in prefix:
        raise ConfigError(f"queue_id is {queue_id!r}: it must not be empty nor hold a NUL")
    if user_key is None:
        return prefix
    if isinstance(user_key, str):
        return prefix + _SEPARATOR + utf8(user_key, name="key")
    if not isinstance(user_key, bytes):
        raise ConfigError(f"key is a {type(user_key).__name__}: it must be bytes or a text")
    return prefix + _SEPARATOR + user_key


def split_key(record_key: bytes | None) -> tuple[bytes, bytes | None]:
    """Queue id and user key of a record key; total.

    A record without a key belongs to no queue: its queue id is empty, which no queue's is.
    """
    if record_key is None:
        return b"", None
    queue_id, separator, user_key = record_key.partition(_SEPARATOR)
    return queue_id, user_key if separator else None
