"""Names: groups and topics that more than one shell must know, ids of messages and consumers."""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Callable
from itertools import count

from kafkamq.config import QueueConfig, ServiceConfig


def group_of(config: ServiceConfig, queue_id: str) -> str:
    """Return the group of a queue's workers; no namespace or topic has a slash in its name."""
    return f"kafkamq/{config.namespace}/{queue_id}"


def group_of_workers(config: ServiceConfig, queue: QueueConfig) -> str:
    """Return the group that a queue's settings name, or else its own."""
    return queue.group_id or group_of(config, queue.queue_id)


def actions_topic(config: ServiceConfig) -> str:
    """Get the topic of what operators have done by ``kafkamq web``, made at their first action."""
    return f"{config.namespace}.actions"


def actions_group(config: ServiceConfig) -> str:
    """Return the group whose member that has the actions topic runs its jobs."""
    return f"kafkamq.{actions_topic(config)}"


# It is fast: ids are labels, not secrets.
_random = random.Random(os.urandom(32))
_TAILS = [f"{number:03x}" for number in range(4096)]
_Latest = tuple[int, int, Callable[[], str], str, "count[int]"]
_NEVER: _Latest = (0, 0, str, "", count())
# From and until when it holds (ns), its next id, and the head and blocks of all.
_latest = [_NEVER]


def _after_fork() -> None:
    _random.seed(os.urandom(32))
    _latest[0] = _NEVER


os.register_at_fork(after_in_child=_after_fork)


def uuid7() -> str:
    """Return a UUID of version 7: ordered by its making, with 61 random bits for each millisecond.

    Those of one millisecond count on from a random number (RFC 9562, section 6.2, method 1). They
    come in blocks, whose ids differ in their last digits only: these are taken from a table.
    """
    from_ns, until_ns, following, _, _ = _latest[0]
    if from_ns <= time.time_ns() < until_ns:
        try:
            return following()
        except StopIteration:
            pass
    return _begin()


def _begin() -> str:
    """Get the first id of a block: of a new millisecond, or of one that has more than a block."""
    time_ns = time.time_ns()
    from_ns, until_ns, _, head, blocks = _latest[0]
    if not from_ns <= time_ns < until_ns:
        time_ms, bits = time_ns // 1_000_000, _random.getrandbits(26)
        from_ns, until_ns, at = time_ms * 1_000_000, (time_ms + 1) * 1_000_000, f"{time_ms:012x}"
        head = f"{at[:8]}-{at[8:]}-{0x7000 | bits >> 14:04x}-{0x8000 | bits & 0x3FFF:04x}-"
        # Of 36 bits, which so do not come to their end.
        blocks = count(_random.getrandbits(35))
    following = map(f"{head}{next(blocks):09x}".__add__, _TAILS).__next__
    _latest[0] = from_ns, until_ns, following, head, blocks
    return following()


def new_consumer_id() -> str:
    return secrets.token_hex(12)
