"""The one place where clients of Kafka are made: librdkafka's, or those of a cluster in memory.

``bootstrap.servers`` that begins with ``memory://`` names a cluster that lives in this process, of
``kafkamq.transport.memory``; every other address is librdkafka's.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import Consumer as _Consumer
from confluent_kafka import KafkaException, ShareConsumer
from confluent_kafka import Producer as _Producer
from confluent_kafka.admin import AdminClient as _AdminClient

from kafkamq.errors import ConfigError, StateError
from kafkamq.transport.errors import ErrorWatch, kafka_error, raised_inside
from kafkamq.transport.port import AdminClient, Consumer, Producer
from kafkamq.transport.settings import is_secret

MEMORY = "memory://"
"""How the bootstrap servers of a cluster in memory begin; its name follows."""

_log = logging.getLogger("kafkamq.librdkafka")
Client = TypeVar("Client")


class _InterruptibleAdminClient(_AdminClient):
    """One whose question that workers ask again and again may be interrupted."""

    def describe_topics(self, *topics: Any, **options: Any) -> Any:
        try:
            return super().describe_topics(*topics, **options)
        except SystemError as error:  # Python runs signal handlers in the middle of it
            raise raised_inside(error) from None


def open_consumer(settings: Mapping[str, object], watch: ErrorWatch | None = None) -> Consumer:
    """A consumer, which connects by itself; raises ConfigError where its settings cannot be."""
    if _is_memory(settings):
        from kafkamq.transport.memory.consumer import Consumer as MemoryConsumer

        return _open(MemoryConsumer, settings, watch)
    return _open(_Consumer, settings, watch)


def open_producer(settings: Mapping[str, object], watch: ErrorWatch | None = None) -> Producer:
    """A producer, opened as a consumer is; transactional if the settings name an id."""
    if _is_memory(settings):
        from kafkamq.transport.memory.producer import Producer as MemoryProducer

        return _open(MemoryProducer, settings, watch)
    return _open(_Producer, settings, watch)


def open_admin(
    settings: Mapping[str, object], watch: ErrorWatch | None = None, *, quiet: bool = False
) -> AdminClient:
    """An admin client, as ``open_consumer`` opens a consumer; ``quiet``: it logs nothing."""
    if _is_memory(settings):
        from kafkamq.transport.memory.admin import AdminClient as MemoryAdminClient

        return _open(MemoryAdminClient, settings, watch)
    return _open(_InterruptibleAdminClient, settings, watch, quiet=quiet)


def open_share_consumer(settings: Mapping[str, object]) -> ShareConsumer:
    """A member of a share group; librdkafka's alone."""
    return ShareConsumer(dict(settings))


def _refuse_greenlets() -> None:
    """Where threads are greenlets, one that waits in a client stops all others, for ever."""
    patched: Any = sys.modules.get("gevent.monkey")
    if patched is not None and any(map(patched.is_module_patched, ("threading", "queue"))):
        raise StateError(
            "gevent has patched Python's threads or queues, which clients of Kafka need as they "
            "are: call gevent.monkey.patch_all(thread=False, queue=False)"
        )


def _is_memory(settings: Mapping[str, object]) -> bool:
    return str(settings.get("bootstrap.servers", "")).startswith(MEMORY)


def _open(
    make: Callable[..., Client],
    settings: Mapping[str, object],
    watch: ErrorWatch | None,
    *,
    quiet: bool = False,
) -> Client:
    """Refusals of the settings become ConfigErrors without secrets."""
    _refuse_greenlets()
    servers = str(settings.get("bootstrap.servers", ""))
    full = {**settings, "error_cb": watch if watch is not None else ErrorWatch(servers)}
    try:
        return make(full, logger=_NoLog() if quiet else ClientLog())
    except (KafkaException, TypeError, ValueError) as error:
        said = kafka_error(error).str() if isinstance(error, KafkaException) else str(error)
        for name, value in settings.items():
            if is_secret(name) and str(value):
                said = said.replace(str(value), "***")
        raise ConfigError(f"the kafka settings cannot work: {said}") from None


class ClientLog:
    """librdkafka's log lines as Python log records, each kind at most once in ten seconds."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def log(self, level: int, _format: str, *args: object) -> None:
        """Called by confluent_kafka with facility, client name and text."""
        facility, client, text = (*(str(arg) for arg in args), "", "", "")[:3]
        if facility == "CONFWARN":  # a property of another role: passed on purpose
            return
        if text.endswith(": retrying"):  # as every start does while a coordinator loads
            level = logging.DEBUG
        now = time.monotonic()
        if now - self._last.get(facility, -1e9) < 10.0:
            return
        self._last[facility] = now
        # A client that cannot connect goes on trying; who waits raises. So never above WARNING.
        _log.log(min(level, logging.WARNING), "%s: %s", facility, text, extra={"client": client})


class _NoLog:
    """For a client whose failures its caller tells."""

    def log(self, level: int, _format: str, *args: object) -> None:
        """Called as that of ``ClientLog``."""
