"""What each backend can do: one table, for errors at start, the command and the document.

Who asks a backend for what it lacks is told which backends have it, before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from kafkamq.config import one_of
from kafkamq.errors import ConfigError
from kafkamq.types import Backend


class Feature(Enum):
    """What may be asked of a queue; the values are for people."""

    KEY_ORDER = "order by key"
    PARTITION_ORDER = "order by partition"
    NO_ORDER = "messages of one key or partition at the same time"
    DELAYED_SEND = "delayed sends"
    RETRY_DELAY = "delays before a retry"
    TTL = "TTL per message"
    DEAD_LETTERS = "dead letters"
    OWN_DEAD_LETTERS = "dead letters elsewhere than on Kafka"
    EXTEND = "extending a lease"
    TOKENS = "verdicts from elsewhere, by token"
    LONG_HANDLERS = "handlers longer than the lease"
    EXACTLY_ONCE = "exactly-once hand-out"
    AT_MOST_ONCE = "at-most-once delivery"
    PAUSE = "pausing"
    SHARED_PARTITIONS = "many workers per partition"
    SHARED_TOPIC = "many queues on one topic"
    OWN_TOPIC = "a topic of its own, or one that exists"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """One backend.

    Attributes:
        backend: Which; None: none of them.
        memory: Where it is remembered what is done.
        orders: What can stay in order, the default first.
        features: What it has.
        notes: What is to say about a feature that it has, or about one that it lacks.
        delivery_count: Who counts deliveries.
        max_workers: How far it scales.
        lease: How long a message is held without a sign of life.
        min_kafka: The oldest version of the brokers.
    """

    backend: Backend | None
    memory: str
    orders: tuple[str, ...]
    features: frozenset[Feature]
    notes: dict[Feature, str]
    delivery_count: str
    max_workers: str
    lease: str
    min_kafka: str


_EVERYWHERE = {Feature.DEAD_LETTERS}
_IN_ORDER = {
    Feature.NO_ORDER,
    Feature.RETRY_DELAY,
    Feature.EXTEND,
    Feature.LONG_HANDLERS,
    Feature.PAUSE,
    Feature.OWN_TOPIC,
    Feature.OWN_DEAD_LETTERS,
}
_HELD = "nothing to extend: a message is held as long as its consumer lives"

CAPABILITIES: dict[Backend, Capabilities] = {
    Backend.MARKERS: Capabilities(
        backend=Backend.MARKERS,
        memory="a topic of markers, folded by a tracker",
        orders=("unordered",),
        features=frozenset(
            _EVERYWHERE
            | {
                Feature.NO_ORDER,
                Feature.DELAYED_SEND,
                Feature.RETRY_DELAY,
                Feature.TTL,
                Feature.EXTEND,
                Feature.TOKENS,
                Feature.LONG_HANDLERS,
                Feature.EXACTLY_ONCE,
                Feature.AT_MOST_ONCE,
                Feature.PAUSE,
                Feature.SHARED_TOPIC,
                Feature.OWN_TOPIC,
            }
        ),
        notes={
            Feature.OWN_DEAD_LETTERS: "the tracker writes them in its transactions",
            Feature.EXTEND: "by itself while the worker lives, or by extend()",
            Feature.DELAYED_SEND: "on the namespace's topic",
            Feature.OWN_TOPIC: "one that exists, with the markers beside it",
            Feature.SHARED_PARTITIONS: "one worker per partition, thousands of messages in each",
        },
        delivery_count="the log",
        max_workers="as many processes as partitions, thousands of messages in each",
        lease="redelivery_timeout (10 s), renewed up to max_lease (12 h)",
        min_kafka="2.8",
    ),
    Backend.OFFSETS: Capabilities(
        backend=Backend.OFFSETS,
        memory="a map in the commits of a consumer group",
        orders=("key", "partition", "unordered"),
        features=frozenset(_EVERYWHERE | _IN_ORDER | {Feature.KEY_ORDER, Feature.PARTITION_ORDER}),
        notes={
            Feature.EXTEND: _HELD,
            Feature.EXACTLY_ONCE: "ParallelConsumer has it for results, in transactions",
        },
        delivery_count="the process; a restart begins again",
        max_workers="as many processes as partitions, thousands of messages in each",
        lease="the group's session.timeout.ms",
        min_kafka="2.8",
    ),
    Backend.SHARE: Capabilities(
        backend=Backend.SHARE,
        memory="the broker's share group (KIP-932)",
        orders=("unordered",),
        features=frozenset(
            _EVERYWHERE
            | {
                Feature.NO_ORDER,
                Feature.SHARED_PARTITIONS,
                Feature.OWN_TOPIC,
                Feature.OWN_DEAD_LETTERS,
            }
        ),
        notes={
            Feature.DEAD_LETTERS: "the broker's last delivery is kept for writing them",
            Feature.EXTEND: "the client cannot renew a lock",
        },
        delivery_count="the broker, less what this process gave back without handing it out",
        max_workers="200 members of a group (group.share.max.size)",
        lease="share.record.lock.duration.ms (15-60 s), not renewed",
        min_kafka="4.2",
    ),
    Backend.CLAIMS: Capabilities(
        backend=Backend.CLAIMS,
        memory="a coordination log (Marshal's protocol)",
        orders=("partition", "unordered"),
        features=frozenset(_EVERYWHERE | _IN_ORDER | {Feature.PARTITION_ORDER}),
        notes={Feature.EXTEND: _HELD, Feature.AT_MOST_ONCE: "kafkamq.claims.Consumer has it"},
        delivery_count="the process; a restart begins again",
        max_workers="one per partition, thousands of messages in each",
        lease="a claim goes stale after two heartbeats: redelivery_timeout",
        min_kafka="2.8",
    ),
}

PLAIN_GROUP = Capabilities(
    backend=None,
    memory="one offset per partition",
    orders=("partition",),
    features=frozenset({Feature.PAUSE, Feature.OWN_TOPIC, Feature.AT_MOST_ONCE}),
    notes={
        Feature.DEAD_LETTERS: "the application writes them",
        Feature.OWN_DEAD_LETTERS: "the application writes them",
        Feature.RETRY_DELAY: "the partition waits",
        Feature.LONG_HANDLERS: "up to max.poll.interval.ms",
        Feature.AT_MOST_ONCE: "if it commits before it works",
        Feature.EXACTLY_ONCE: "with the consumer's own transactions",
    },
    delivery_count="nobody",
    max_workers="one message at a time per partition",
    lease="session.timeout.ms and max.poll.interval.ms of the consumer",
    min_kafka="any",
)
"""A consumer group without kafkamq, for comparison."""

_ORDER_FEATURES = {
    "key": Feature.KEY_ORDER,
    "partition": Feature.PARTITION_ORDER,
    "unordered": Feature.NO_ORDER,
}


def backend_of(value: str | Backend) -> Backend:
    return one_of(Backend, "backend", value)


def order_feature(ordering: str) -> Feature:
    found = _ORDER_FEATURES.get(ordering)
    if found is None:
        known = ", ".join(repr(each) for each in _ORDER_FEATURES)
        raise ConfigError(f"ordering is {ordering!r}: it must be one of {known}")
    return found


def default_order(backend: Backend) -> str:
    """Return what stays in order when nobody says."""
    return CAPABILITIES[backend].orders[0]


def has(backend: Backend, feature: Feature) -> bool:
    return feature in CAPABILITIES[backend].features


def backends_with(features: Iterable[Feature]) -> tuple[Backend, ...]:
    wanted = frozenset(features)
    return tuple(each for each, found in CAPABILITIES.items() if wanted <= found.features)


def require(backend: Backend, feature: Feature, asked: str) -> None:
    """Checks that a backend has what is asked of it."""
    if has(backend, feature):
        return
    note = CAPABILITIES[backend].notes.get(feature)
    why = f" ({note})" if note else ""
    others = backends_with((feature,))
    names = " and ".join(
        filter(None, (", ".join(each.value for each in others[:-1]), others[-1].value))
    )
    has_it = "has" if len(others) == 1 else "have"
    raise ConfigError(
        f"{asked}: backend {backend.value!r} has no {feature.value}{why}; {names} {has_it} it"
    )


_NAMES = frozenset(each.value for each in Backend)


def heads() -> tuple[str, ...]:
    """Whom the table compares: the backends, and a consumer group without kafkamq."""
    return (*(each.value for each in Backend), "plain consumer group")


def rows() -> list[tuple[str, ...]]:
    """Return the table: a name, and what each of ``heads`` says to it."""
    every = [*(CAPABILITIES[each] for each in Backend), PLAIN_GROUP]
    found = [
        ("remembers in", *(each.memory for each in every)),
        ("keeps in order", *(_orders(each) for each in every)),
        ("delivers", *(_semantics(each) for each in every)),
    ]
    found += [
        (feature.value, *(_cell(each, feature) for each in every))
        for feature in Feature
        if feature not in _ORDER_FEATURES.values()
    ]
    found += [
        ("lease", *(each.lease for each in every)),
        ("deliveries counted by", *(each.delivery_count for each in every)),
        ("workers at most", *(each.max_workers for each in every)),
        ("Kafka from", *(each.min_kafka for each in every)),
    ]
    return found


def _orders(found: Capabilities) -> str:
    kept = [each for each in found.orders if each != "unordered"]
    return " or ".join(kept) if kept else "nothing"


def _semantics(found: Capabilities) -> str:
    return "at least once" + (", or at most once" if Feature.AT_MOST_ONCE in found.features else "")


def _cell(found: Capabilities, feature: Feature) -> str:
    answer = "yes" if feature in found.features else "no"
    note = found.notes.get(feature)
    return f"{answer}: {note}" if note else answer


def markdown_table() -> str:
    names = ("", *(f"`{name}`" if name in _NAMES else name for name in heads()))
    lines = [names, tuple("---" for _ in names), *rows()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
