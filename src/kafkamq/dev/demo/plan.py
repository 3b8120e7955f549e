"""What the demo sends: which messages are poison, which are slow, which are delayed. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from kafkamq.errors import ConfigError
from kafkamq.types import OutgoingMessage

QUEUES = ("orders", "mails", "reports")
KIND_HEADER = "demo-kind"
POISON_SHARE = 0.01
SLOW_SHARE = 0.01
DELAYED_SHARE = 0.02
DELAY_RANGE_S = (2.0, 6.0)


class Kind(Enum):
    """How the demo's handler treats a message; travels in the header ``demo-kind``."""

    NORMAL = "normal"
    POISON = "poison"
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class Planned:
    """One message to send, and to which queue."""

    queue_id: str
    kind: Kind
    message: OutgoingMessage


def kind_of(value: bytes | None) -> Kind:
    """Return the kind that a header names; whatever it does not know is normal."""
    for kind in Kind:
        if value == kind.value.encode():
            return kind
    return Kind.NORMAL


def synthetic(count: int, seed: int) -> list[Planned]:
    """``count`` messages of the demo's own, the same for the same seed."""
    return list(
        _prepared(
            [
                (
                    None,
                    None,
                    OutgoingMessage(payload=b'{"number":%d}' % number, id=f"m-{number:06d}"),
                )
                for number in range(count)
            ],
            seed,
            may_delay=True,
        )
    )


def from_input(
    messages: Sequence[tuple[str | None, Kind | None, OutgoingMessage]], seed: int
) -> list[Planned]:
    """Return the user's messages; what names no queue or kind is dealt out."""
    return list(_prepared(messages, seed, may_delay=False))


def check_input(messages: Sequence[tuple[int, OutgoingMessage]], *, source: str) -> None:
    """Refuses what the verdict could not tell apart."""
    if not messages:
        raise ConfigError(f"{source}: it holds no message")
    seen: dict[str, int] = {}
    for line, message in messages:
        if message.id is None:
            continue
        if message.id in seen:
            raise ConfigError(
                f"{source}, line {line}: the id {message.id!r} was used in line "
                f"{seen[message.id]}; the demo follows messages by their ids, so give each its "
                "own or none"
            )
        seen[message.id] = line


def _prepared(
    messages: Sequence[tuple[str | None, Kind | None, OutgoingMessage]],
    seed: int,
    *,
    may_delay: bool,
) -> Iterator[Planned]:
    kinds, delays = _drawn(len(messages), seed, may_delay=may_delay)
    for number, (queue_id, own_kind, message) in enumerate(messages):
        kind = own_kind or kinds.get(number, Kind.NORMAL)
        headers = {**(message.headers or {}), KIND_HEADER: kind.value.encode()}
        yield Planned(
            queue_id or QUEUES[number % len(QUEUES)],
            kind,
            replace(message, headers=headers, delay=delays.get(number, message.delay)),
        )


def _drawn(count: int, seed: int, *, may_delay: bool) -> tuple[dict[int, Kind], dict[int, float]]:
    """Return which of ``count`` messages are special, some of each sort if there are enough."""
    chance = random.Random(seed)
    poison, slow, delayed = (
        max(1, round(count * share)) for share in (POISON_SHARE, SLOW_SHARE, DELAYED_SHARE)
    )
    picked = chance.sample(range(count), min(count, poison + slow + delayed))
    kinds = dict.fromkeys(picked[:poison], Kind.POISON)
    kinds |= dict.fromkeys(picked[poison : poison + slow], Kind.SLOW)
    delays = {}
    if may_delay:
        delays = {
            number: round(chance.uniform(*DELAY_RANGE_S), 3) for number in picked[poison + slow :]
        }
    return kinds, delays


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Everything but the messages."""

    engine: str = "spark"
    keep: bool = False
    cache_dir: Path | None = None
    java: str = "java"
    namespace: str = "demo"
    workers: int = 3
    concurrency: int = 32
    partitions: int = 4
    marker_partitions: int = 2
    redelivery_timeout: float = 2.5  # s
    slow_s: float = 3.5
    max_deliveries: int = 3
    backoff: Mapping[str, float] = field(
        default_factory=lambda: {"first": 0.5, "max": 1.0, "jitter": 0.2}
    )
    send_per_s: int = 4000
    kill_at: float = 0.5
    drain_timeout: float = 300.0  # s
    kafka: Mapping[str, str] = field(
        # A killed worker's partitions go to the others after this; Kafka's default is 45 s.
        default_factory=lambda: {"session.timeout.ms": "6000", "heartbeat.interval.ms": "1000"}
    )
