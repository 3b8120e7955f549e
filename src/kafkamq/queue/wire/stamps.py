"""What tells kafkamq's own records in a topic that anybody writes to (R37, R38).

A record of ours has the header ``kafkamq-written-for``: the stamp of a queue, namespace and topic.
What stands before it is the sender's, whatever it is called; what stands behind it is ours. Without
the stamp of this very queue and topic all headers are the sender's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kafkamq.queue.wire.headers import (
    ORIGIN,
    RESERVED,
    MessageHeaders,
    Origin,
    copy_headers,
    read_message_headers,
)
from kafkamq.types import Header, Headers

WRITTEN_FOR = "kafkamq-written-for"
"""Its value is a stamp."""

THEIRS = "kafkamq-theirs-"
"""Before a sender's header that is called like one of ours, in dead letters."""

_LOG_ID_BYTES = 16
_OURS = RESERVED | {WRITTEN_FOR}


def stamp_of(topic_id: bytes, namespace: str, queue_id: str | bytes) -> bytes:
    """What records have that were written for a queue, into this topic and no other one."""
    queue = queue_id.encode() if isinstance(queue_id, str) else queue_id
    return b"%b/%b/%b" % (topic_id.hex().encode(), namespace.encode(), queue)


def log_id_of(topic_id: bytes, queue_id: str | bytes) -> bytes:
    """By which markers name a topic that is a queue (R13): each of its queues has its own.

    Two queues of one topic so never settle each other's messages. Empty: the topic's is not known.
    """
    if not topic_id:
        return b""
    queue = queue_id.encode() if isinstance(queue_id, str) else queue_id
    return hashlib.sha256(topic_id + queue).digest()[:_LOG_ID_BYTES]


def split_headers(headers: Sequence[Header], stamp: bytes) -> tuple[Headers, Headers]:
    """The sender's headers, and ours; without this stamp all are the sender's."""
    for at in range(len(headers) - 1, -1, -1):
        if headers[at] == (WRITTEN_FOR, stamp):
            return tuple(headers[:at]), tuple(headers[at + 1 :])
    return tuple(headers), ()


def read_stamped_headers(headers: Sequence[Header], stamp: bytes) -> MessageHeaders:
    """As ``read_message_headers``, of a record in a topic that anybody writes to; total."""
    theirs, ours = split_headers(headers, stamp)
    read = read_message_headers(ours)
    return MessageHeaders(read.id, read.delivery_count, read.ttl_ms, read.origin, theirs)


def is_of_another_queue(headers: Sequence[Header], stamp: bytes) -> bool:
    """Whether a tracker wrote this copy for another queue of the same topic."""
    if not any(name == WRITTEN_FOR for name, _ in headers):
        return False
    topic = stamp[: stamp.index(b"/") + 1]
    for name, value in reversed(headers):
        if name == WRITTEN_FOR and value is not None and value.startswith(topic):
            _, ours = split_headers(headers, value)
            return value != stamp and any(of == ORIGIN for of, _ in ours)
    return False


def has_names_of_ours(headers: Sequence[Header]) -> bool:
    """Whether a sender has called headers of its own like ours."""
    return any(name in _OURS for name, _ in headers)


def stamped(theirs: Sequence[Header], stamp: bytes, ours: Sequence[Header]) -> Headers:
    """The headers of a record of ours."""
    return (*theirs, (WRITTEN_FOR, stamp), *ours)


def stamped_copy_headers(
    headers: Sequence[Header], stamp: bytes, *, delivery_count: int, origin: Origin
) -> Headers:
    """As ``copy_headers``: those of the sender untouched, then the stamp and ours."""
    theirs, ours = split_headers(headers, stamp)
    copied = copy_headers(ours, delivery_count=delivery_count, origin=origin)
    return stamped(theirs, stamp, copied)


def unstamped(headers: Sequence[Header], stamp: bytes) -> Headers:
    """For a dead letter, whose headers of our names are ours: the sender's are renamed."""
    theirs, ours = split_headers(headers, stamp)
    renamed = [
        (THEIRS + name if name in _OURS or name.startswith(THEIRS) else name, value)
        for name, value in theirs
    ]
    return (*renamed, *ours)


def restored(headers: Sequence[Header]) -> Headers:
    """A sender's headers as they were, of a dead letter that goes back into the topic."""
    return tuple((name.removeprefix(THEIRS), value) for name, value in headers)
