"""One mapping goes from our settings to librdkafka's properties, for every role of a client.

``ServiceConfig.kafka`` holds Kafka's own property names and wins over our defaults; what the
protocol's guarantees rest on belongs to kafkamq and cannot be set. Properties of another role (a
consumer's at a producer) are passed as well: librdkafka ignores them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError

MAX_START_MS = 30_000  # R5
# Each step of ours gives up sooner; the transaction of a killed process goes on until then.
MAX_TRANSACTION_MS = 60_000
# A KEEPALIVE that waits for longer costs leases.
MAX_RECONNECT_MS = 1000
# librdkafka's most: the topics' own limits decide.
_MAX_MESSAGE_BYTES = 1_000_000_000

_EVERYWHERE: dict[str, object] = {
    "client.id": "kafkamq",
    # A returned broker is used at once (R5).
    "reconnect.backoff.max.ms": MAX_RECONNECT_MS,
    "socket.keepalive.enable": True,
}
_CONSUMER: dict[str, object] = {
    # librdkafka's 1000 caps batched reading at 150-245k/s.
    "fetch.queue.backoff.ms": 3,
    # This is as fast as 1,000,000, with a third of the memory.
    "queued.min.messages": 20_000,
}
_PRODUCER: dict[str, object] = {
    "message.timeout.ms": MAX_START_MS,
    "linger.ms": 1,
    "message.max.bytes": _MAX_MESSAGE_BYTES,
}
_TRANSACTIONAL: dict[str, object] = {
    **_PRODUCER,
    # What a dead producer holds readers back (R22).
    "transaction.timeout.ms": 10_000,
    # librdkafka wants it to be no longer than ``transaction.timeout.ms``.
    "message.timeout.ms": 10_000,
    # A transaction right behind another one is refused until that one's markers are written;
    # librdkafka's 100 ms would be the cost of every transaction.
    "retry.backoff.ms": 10,
    # Connections that rest are closed by brokers, and by what stands before them. When the last
    # one is, librdkafka bootstraps again: it drops the brokers that it knew, and a commit of
    # offsets waits for the one that it remembers as the group's coordinator, mostly without end
    # (librdkafka issue 5511). ``TransactionalProducer.init`` bootstraps again in any case.
    "metadata.recovery.strategy": "none",
}
# What stays whatever the user sets.
_READS: dict[str, object] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "isolation.level": "read_committed",
    # With ``earliest`` a reader passes over deleted records in silence.
    "auto.offset.reset": "error",
}
_WRITES: dict[str, object] = {"enable.idempotence": True, "acks": "all"}

_OWNED = {
    "bootstrap.servers": "give it as bootstrap_servers",
    "metadata.broker.list": "give it as bootstrap_servers",
    "group.id": "queues and trackers name their groups themselves",
    "group.instance.id": "replicas of one process would take it from each other",
    "transactional.id": "one per marker partition (R22)",
    "enable.auto.commit": "an offset is committed when its STARTs are in the log (R5)",
    "auto.commit.enable": "an offset is committed when its STARTs are in the log (R5)",
    "enable.auto.offset.store": "offsets are committed explicitly (R5)",
    "auto.offset.reset": "a position outside the log is an error, never a jump (R23)",
    "isolation.level": "every reader is read_committed",
    "enable.idempotence": "every producer is idempotent",
    "acks": "every producer waits for all replicas",
    "request.required.acks": "every producer waits for all replicas",
    "partitioner": "the protocol chooses partitions (R26)",
    "enable.partition.eof": "trackers and readers set it",
    "enable.gapless.guarantee": "the protocol does not need it",
    "delivery.report.only.error": "every delivery report is read (R9)",
    "error_cb": "errors are raised by the call that waits",
    "on_delivery": "delivery reports are read by kafkamq",
    "logger": "use the Python logger 'kafkamq.librdkafka'",
}

_JAVA_ONLY = {
    "sasl.jaas.config": "set sasl.username and sasl.password instead",
    "sasl.login.callback.handler.class": "set sasl.oauthbearer.method instead",
    "sasl.client.callback.handler.class": "set sasl.mechanism instead",
    "ssl.truststore.location": "set ssl.ca.location to a PEM file instead",
    "ssl.truststore.password": "ssl.ca.location (PEM) needs none; remove it",
    "ssl.truststore.type": "ssl.ca.location is always PEM; remove it",
    "ssl.truststore.certificates": "set ssl.ca.pem instead",
    "ssl.keystore.type": "ssl.keystore.location is always PKCS#12; remove it",
    "ssl.keystore.key": "set ssl.key.pem instead",
    "ssl.keystore.certificate.chain": "set ssl.certificate.pem instead",
    "ssl.protocol": "librdkafka negotiates it; remove it",
    "ssl.enabled.protocols": "librdkafka negotiates them; remove it",
    "security.providers": "librdkafka has none; remove it",
    "key.serializer": "keys are bytes; remove it",
    "value.serializer": "payloads are bytes; remove it",
    "key.deserializer": "keys are bytes; remove it",
    "value.deserializer": "payloads are bytes; remove it",
    "max.poll.records": "use receive_many(n), or the queue's max_in_flight",
    "fetch.max.wait.ms": "set fetch.wait.max.ms instead",
    "buffer.memory": "set queue.buffering.max.kbytes instead",
    "max.block.ms": "every call has a timeout argument; remove it",
    "send.buffer.bytes": "set socket.send.buffer.bytes instead",
    "receive.buffer.bytes": "set socket.receive.buffer.bytes instead",
    "default.api.timeout.ms": "every call has a timeout argument; remove it",
    "interceptor.classes": "Java classes cannot run here; remove it",
    "metric.reporters": "Java classes cannot run here; remove it",
}

_SECRET = re.compile(
    r"password|secret|passphrase|credential|private|jaas|ssl\.key|sasl\.oauthbearer\.config|token$",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    return bool(_SECRET.search(name))


def is_new_protocol(settings: Mapping[str, object]) -> bool:
    """Return whether groups are Kafka 4's (KIP-848), whose brokers set what members would."""
    # librdkafka reads it so.
    return str(settings.get("group.protocol", "")).lower() == "consumer"


def size_limit(config: ServiceConfig, topic: str) -> str:
    """Return what a record of this topic may have been too large for, for people."""
    own = config.kafka.get("message.max.bytes")
    limit = f"max.message.bytes of {topic}"
    return limit if own is None else f"{limit}, or message.max.bytes ({own}) in the kafka settings"


def consumer_settings(config: ServiceConfig, *, group_id: str, **ours: object) -> dict[str, object]:
    """Properties of a read_committed consumer without automatic commits."""
    return _settings(config, _CONSUMER, _READS, group_id=group_id, **ours)


def producer_settings(config: ServiceConfig, **ours: object) -> dict[str, object]:
    """Properties of an idempotent producer (acks=all) outside of transactions."""
    return _settings(config, _PRODUCER, _WRITES, **ours)


def transactional_settings(
    config: ServiceConfig, *, transactional_id: str, **ours: object
) -> dict[str, object]:
    """Properties of a transactional producer; message timeouts end within the transaction's.

    A transaction of a killed process holds readers back until its timeout, so the user's is bounded
    by a minute; but not where the caller proposes one, whose transactions may take long.
    """
    ids = {"transactional_id": transactional_id}
    settings = _settings(config, _TRANSACTIONAL, _WRITES, **ids, **ours)
    if "transaction_timeout_ms" not in ours:
        _cap(settings, "transaction.timeout.ms", MAX_TRANSACTION_MS)
    # librdkafka refuses a longer one; a user who set it for the other producers means no harm.
    _cap_timeout(settings, settings["transaction.timeout.ms"])
    return settings


def marker_settings(config: ServiceConfig, **ours: object) -> dict[str, object]:
    """``producer_settings`` with failure within 30 s (R5, R12), and quick reconnects."""
    settings = producer_settings(config, **ours)
    _cap_timeout(settings, MAX_START_MS)
    for name in ("reconnect.backoff.ms", "reconnect.backoff.max.ms"):
        _cap(settings, name, MAX_RECONNECT_MS)
    return settings


def _cap_timeout(settings: dict[str, object], limit: object) -> None:
    for name in ("message.timeout.ms", "delivery.timeout.ms"):
        value = settings.get(name)
        if value is not None and not 0 < _int(value) <= _int(limit):
            # 0 means that it has no end.
            settings[name] = limit


def _cap(settings: dict[str, object], name: str, limit: int) -> None:
    if _int(settings.get(name, 0)) > limit:
        settings[name] = limit


def admin_settings(config: ServiceConfig, **ours: object) -> dict[str, object]:
    return _settings(config, {}, {}, **ours)


def share_settings(config: ServiceConfig, *, group_id: str, **ours: object) -> dict[str, object]:
    """Return settings for ``ShareConsumer``: explicit acks, no properties of consumers."""
    fixed = {"share.acknowledgement.mode": "explicit"}
    return _settings(config, {}, fixed, group_id=group_id, **ours)


def _int(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        return 0


_ALIASES = {
    "compression.codec": "compression.type",
    "queue.buffering.max.ms": "linger.ms",
    "delivery.timeout.ms": "message.timeout.ms",
}


def _settings(
    config: ServiceConfig,
    defaults: Mapping[str, object],
    fixed: Mapping[str, object],
    **underscored: object,
) -> dict[str, object]:
    ours = {name.replace("_", "."): value for name, value in underscored.items()}
    for name, value in config.kafka.items():
        if name in _JAVA_ONLY:
            raise ConfigError(f"kafka property {name} is Java's: {_JAVA_ONLY[name]}")
        if name in _OWNED:
            shown = "***" if is_secret(name) else repr(value)
            raise ConfigError(
                f"kafka property {name} ({shown}) belongs to kafkamq: {_OWNED[name]}; remove it"
            )
    settings = {**_EVERYWHERE, **defaults}
    settings.update({name: value for name, value in ours.items() if name not in _OWNED})
    for name, value in config.kafka.items():
        if name in _ALIASES:
            # These are two names of one property: librdkafka takes the last one set.
            settings.pop(_ALIASES[name], None)
        settings[name] = value
    settings.update(fixed)
    settings.update({name: value for name, value in ours.items() if name in _OWNED})
    settings["bootstrap.servers"] = config.bootstrap_servers
    return settings
