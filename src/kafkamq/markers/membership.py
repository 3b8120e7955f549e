"""Here is a worker's membership: its group, how soon that notices a death, who else is in it.

A worker that is killed between a START and the commit of its offset leaves a message that the next
owner STARTs again. Where the first lease has ended by then, a tracker copies the message, whatever
the next owner does with it. So the group is to notice a death well before that (R5): its session
is shorter than the lease. ``Positions.overtaken`` finds those where it was not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import KafkaMQError
from kafkamq.markers.wire.interop import CONSUMER_GROUP_PREFIX
from kafkamq.queue.names import group_of_workers
from kafkamq.queue.namespace import Namespace
from kafkamq.transport.admin import Admin
from kafkamq.transport.group_consumer import COOPERATIVE, GroupConsumer, Owner
from kafkamq.transport.settings import is_new_protocol

MAX_POLL_INTERVAL_MS = 300_000
MIN_SESSION_MS = 6_000
"""Brokers refuse shorter ones: ``group.min.session.timeout.ms``, unless it was changed."""

MAX_SESSION_MS = 10_000
"""Where the redelivery timeout would allow more: what nobody had STARTed goes on after this."""

_GROUP_SESSION = "consumer.session.timeout.ms"
_BROKER_SESSION = "group.consumer.session.timeout.ms"
_BROKER_MIN = "group.consumer.min.session.timeout.ms"
_GROUP_BEAT = "consumer.heartbeat.interval.ms"
_BROKER_BEAT = "group.consumer.heartbeat.interval.ms"
_BROKER_MIN_BEAT = "group.consumer.min.heartbeat.interval.ms"
# Heartbeats in a session: one that is late must not cost the membership.
_BEATS = 3
_log = logging.getLogger(__name__)


def open_member(config: ServiceConfig, queue: QueueConfig, owner: Owner) -> GroupConsumer:
    return GroupConsumer(
        config,
        owner,
        [config.message_topic],
        group_id=group_of_workers(config, queue),
        # A group that others named may have members of other clients, which all know "range".
        strategy="range" if queue.group_id else COOPERATIVE,
        session_ms=session_ms_for(queue.redelivery_timeout_ms),
        socket_timeout_ms=10_000,
        # Nothing else sees a transaction's last record.
        enable_partition_eof=True,
    )


def max_idle_ms(settings: Mapping[str, object]) -> int:
    """Return how long a member may go without receiving, as Kafka has it for every consumer."""
    return int(str(settings.get("max.poll.interval.ms", MAX_POLL_INTERVAL_MS)))


# The session.


def session_ms_for(redelivery_timeout_ms: int) -> int:
    """Get the session of a queue's workers: 0.6 of its redelivery timeout, within 6 s and 10 s."""
    return max(MIN_SESSION_MS, min(MAX_SESSION_MS, _longest_ms(redelivery_timeout_ms)))


def _longest_ms(redelivery_timeout_ms: int) -> int:
    return redelivery_timeout_ms * 3 // 5


def session_problem(config: ServiceConfig, redelivery_timeout_ms: int) -> str:
    """Say what is wrong with a session that the user has set, and what to write; empty: nothing."""
    value = str(config.kafka.get("session.timeout.ms", ""))
    if not value.isdecimal():
        # None is set, or the client says what is wrong with it.
        return ""
    return _problem("session.timeout.ms", int(value), redelivery_timeout_ms, "or leave it out")


def broker_session_problems(
    config: ServiceConfig, broker: Mapping[str, str], redelivery_timeout_ms: int
) -> list[str]:
    """Say what a broker's settings do to the sessions of workers with this redelivery timeout."""
    if is_new_protocol(config.kafka):
        least_ms, name = _least(broker)
        end = "on the brokers: a worker sets its group's session as low as that"
        problem = _problem(name, least_ms, redelivery_timeout_ms, end)
        return [problem] if problem else []
    least_ms = int(broker.get("group.min.session.timeout.ms", str(MIN_SESSION_MS)))
    if "session.timeout.ms" in config.kafka or least_ms <= session_ms_for(redelivery_timeout_ms):
        return []
    return [
        f"group.min.session.timeout.ms is {least_ms}: brokers refuse workers, whose session is "
        f"{session_ms_for(redelivery_timeout_ms)} ms with a redelivery_timeout of "
        f"{redelivery_timeout_ms / 1000:g} s; set it lower, or the workers' session.timeout.ms to "
        f"{least_ms}"
    ]


def _problem(name: str, session_ms: int, redelivery_timeout_ms: int, end: str) -> str:
    wanted_ms = max(MIN_SESSION_MS, _longest_ms(redelivery_timeout_ms))
    if session_ms <= wanted_ms:
        return ""
    return (
        f"{name} is {session_ms}, more than 0.6 of redelivery_timeout "
        f"({redelivery_timeout_ms / 1000:g} s): what a killed worker had begun may be on its way "
        "back already when the next one gets its partitions, and comes as another delivery; set "
        f"redelivery_timeout to {session_ms / 600:g} or more, or {name} to {wanted_ms} {end}"
    )


def _least(broker: Mapping[str, str]) -> tuple[int, str]:
    """Return the shortest session that a group may have (KIP-848), and the setting that says so."""
    return max(
        (int(broker.get(_BROKER_MIN, "45000")), _BROKER_MIN),
        (int(broker.get(_BROKER_MIN_BEAT, "5000")) * _BEATS, f"{_BEATS} x {_BROKER_MIN_BEAT}"),
    )


def check_session(config: ServiceConfig, queue: QueueConfig) -> None:
    """Warn of a session that is too long; one that is the group's is made shorter, if possible.

    Waits for nothing. With ``exactly_once``, and at most once, no session is too long: no START is
    in the log without the offset behind it.
    """
    if queue.exactly_once or queue.is_at_most_once:
        return
    if is_new_protocol(config.kafka):
        threading.Thread(
            target=shorten_session, args=(config, queue), name="kafkamq-session", daemon=True
        ).start()
    else:
        _warn(queue, session_problem(config, queue.redelivery_timeout_ms))


def shorten_session(config: ServiceConfig, queue: QueueConfig) -> None:
    """Set the session of a queue's group (KIP-848), as far as the brokers allow; only ever shorter.

    A refusal is told with what the session is then.
    """
    group = group_of_workers(config, queue)
    timeout_ms = queue.redelivery_timeout_ms
    session_ms, name = 45_000, _BROKER_MIN
    try:
        with Admin(config) as admin:
            broker = admin.cluster().settings
            found = admin.group_settings(group)
            session_ms = int(found.get(_GROUP_SESSION, broker.get(_BROKER_SESSION, "45000")))
            beat_ms = int(found.get(_GROUP_BEAT, broker.get(_BROKER_BEAT, "5000")))
            least_ms, name = _least(broker)
            wanted_ms = max(least_ms, session_ms_for(timeout_ms))
            if wanted_ms < session_ms and session_ms > _longest_ms(timeout_ms):
                changes = {_GROUP_SESSION: str(wanted_ms)}
                if beat_ms * _BEATS > wanted_ms:
                    changes[_GROUP_BEAT] = str(wanted_ms // _BEATS)
                admin.set_group(group, changes)
                session_ms = wanted_ms
    except KafkaMQError as error:
        _log.warning(
            "the session of a group is not known, or stays as it is",
            extra={"group": group, "ms": session_ms, "error": str(error)},
        )
    end = f"on the group {group} (and {name} on the brokers as low as that)"
    _warn(queue, _problem(_GROUP_SESSION, session_ms, timeout_ms, end))


def _warn(queue: QueueConfig, problem: str) -> None:
    if problem:
        _log.warning("queue %r: %s", queue.queue_id, problem)


def look_for_mqgo_workers(namespace: Namespace, queue: QueueConfig) -> None:
    """Have a warning logged, once for each queue of a service; no waiting."""
    group = group_of_workers(namespace.config, queue)
    if namespace.is_first_look(queue.queue_id, group):
        threading.Thread(
            target=warn_of_mqgo_workers,
            args=(namespace.config, queue.queue_id, group),
            name="kafkamq-groups",
            daemon=True,
        ).start()


def warn_of_mqgo_workers(config: ServiceConfig, queue_id: str, group: str) -> None:
    """Say so when kafka-mq-go's workers are live on a queue, and not in the same group (R25).

    Asks the brokers. Who may not describe that group, or gets no answer, is told nothing.
    """
    theirs = CONSUMER_GROUP_PREFIX + queue_id
    if group == theirs:
        return
    try:
        with Admin(config) as admin:
            members = admin.group_assignments(theirs)
    except KafkaMQError as error:
        _log.debug("group not described", extra={"group": theirs, "error": str(error)})
        return
    if any(config.message_topic in topics for topics in members):
        _log.warning(
            "kafka-mq-go's workers are live on queue %r in the group %s, and this one is in %s: "
            "each gets every message; open the queue with group=%r to share it",
            queue_id,
            theirs,
            group,
            theirs,
        )
