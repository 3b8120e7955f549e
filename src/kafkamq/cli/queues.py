"""``create``, ``send`` and ``receive``: functions whose arguments are the command's options."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from enum import Enum
from itertools import islice
from typing import Annotated, Any

import typer

from kafkamq.cli import output
from kafkamq.cli.options import (
    TRACKER_HERE,
    Json,
    MetricsPort,
    Topic,
    connected,
    reading,
    serving_metrics,
    with_table,
)
from kafkamq.cli.payloads import parse_header, read_lines
from kafkamq.config import TOPICS, Options, QueueConfig, ServiceConfig, utf8, wait_seconds
from kafkamq.errors import ConfigError, KafkaMQError
from kafkamq.markers.overview import QueueSearch
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.message import Message
from kafkamq.queue.names import group_of, group_of_workers
from kafkamq.queue.producer import Delivery, Producer
from kafkamq.queue.service import Service
from kafkamq.runtime.signals import ENDING, stop_event
from kafkamq.transport.admin import require_brokers
from kafkamq.types import OutgoingMessage, SentMessage

SEND_BATCH = 1000
SEND_TIMEOUT_S = 60.0
RECEIVE_BATCH = 100
QueueId = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's id.")]
_SENT = ("id", "queue_id", "topic", "partition", "offset", "timestamp_ms")
_SHOWN = 10
_PAUSE_S = 0.5


def service(config: ServiceConfig) -> Service:
    return Service(config.bootstrap_servers, config.namespace, kafka=config.kafka, **config.topics)


@connected
@with_table("sizes", Options.partitions, Options.marker_partitions, Options.replication_factor)
def create(config: ServiceConfig, sizes: dict[str, Any], as_json: Json = False) -> None:
    """Create the topics of a namespace; what is there already stays as it is."""
    with service(config) as connection:
        require_brokers(config)
        connection.create_topics(**sizes)
    topics = {TOPICS[name].replace("-", "_"): topic for name, topic in config.topics.items()}
    if as_json:
        output.print_json({"namespace": config.namespace, "topics": topics})
    else:
        output.print_table("Topics", ("what", "topic"), list(topics.items()))
        output.note(f"Next: kafkamq send QUEUE 'hello', and {TRACKER_HERE} in another terminal.")


@connected
def send(
    config: ServiceConfig,
    queue_id: QueueId,
    payloads: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PAYLOAD]...", help="Payloads; each becomes a message."),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE.jsonl|-",
            help="File with a message per line, as JSON; - reads stdin.",
        ),
    ] = None,
    delay: Annotated[float, typer.Option(help="Seconds until the message can be received.")] = 0.0,
    ttl: Annotated[
        float | None, typer.Option(help="Seconds after which the message becomes a dead letter.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Messages of one key share a partition.")] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Header of the message; may be repeated."),
    ] = None,
    identity: Annotated[
        str | None,
        typer.Option("--id", help="Label of your own for the message; only with a single payload."),
    ] = None,
    topic: Topic = "",
    as_json: Json = False,
) -> None:
    """Send messages: arguments, or JSON lines from a file or stdin.

    A line is an object with payload (text), json (any value) or payload_base64, and optionally key,
    headers, delay, ttl and id.
    """
    if bool(payloads) == (file is not None):
        raise ConfigError("give either payloads or --file FILE.jsonl (- for stdin), not both")
    if file is not None:
        if delay or ttl is not None or key is not None or header or identity is not None:
            raise ConfigError("with --file, delay, ttl, key, headers and id stand in the lines")
        source = "stdin" if file == "-" else file
        with nullcontext(sys.stdin) if file == "-" else reading("--file", file) as lines:
            messages = (line.message for line in read_lines(lines, source=source))
            _send_all(config, queue_id, topic, messages, as_json=as_json)
        return
    assert payloads
    if identity is not None and len(payloads) > 1:
        raise ConfigError(f"--id names one message, and {len(payloads)} payloads are given")
    given = [
        OutgoingMessage(
            payload=utf8(payload, name="PAYLOAD"),
            key=key,
            headers=dict(map(parse_header, header or ())),
            delay=delay,
            ttl=ttl,
            id=identity,
        )
        for payload in payloads
    ]
    _send_all(config, queue_id, topic, iter(given), as_json=as_json)


def _send_all(
    config: ServiceConfig,
    queue_id: str,
    topic: str,
    messages: Iterator[OutgoingMessage],
    *,
    as_json: bool,
) -> None:
    """Sends in batches and waits for each; after an error it says how many Kafka has."""
    sent = 0
    failure: KafkaMQError | None = None
    with service(config) as connection:
        queue = connection.queue(queue_id, topic=topic or None)
        require_brokers(config)
        producer = queue.producer()
        with output.progress(f"Sending to {queue_id}", None) as tell:
            while failure is None:
                deliveries, refusal = _queue_batch(producer, messages)
                if not deliveries and refusal is None:
                    break
                confirmed, failure = _confirm(producer, deliveries)
                failure = refusal or failure
                for each in confirmed if as_json else ():
                    facts = {name: getattr(each, name) for name in _SENT}
                    output.print_json({**facts, "delayed": each.schedule is not None})
                sent += len(confirmed)
                tell(sent)
    if failure is not None:
        output.note(f"{sent:,} messages were sent before the error; they are in the queue.")
        raise failure
    if not as_json:
        output.note(f"Sent {sent:,} {'message' if sent == 1 else 'messages'} to {queue_id}.")


def _queue_batch(
    producer: Producer, messages: Iterator[OutgoingMessage]
) -> tuple[list[Delivery], KafkaMQError | None]:
    """Return the sends of one batch, and why there are no more of them, if something went wrong."""
    deliveries: list[Delivery] = []
    try:
        for message in islice(messages, SEND_BATCH):
            deliveries += producer.send_many((message,))
    except KafkaMQError as error:
        return deliveries, error
    return deliveries, None


def _confirm(
    producer: Producer, deliveries: Sequence[Delivery]
) -> tuple[list[SentMessage], KafkaMQError | None]:
    """What is in Kafka, and the first failure of the rest."""
    confirmed: list[SentMessage] = []
    failure: KafkaMQError | None = None
    try:
        producer.flush(SEND_TIMEOUT_S)
    except KafkaMQError as error:
        failure = error
    for delivery in deliveries:
        try:
            confirmed.append(delivery.result(0.0 if failure else SEND_TIMEOUT_S))
        except KafkaMQError as error:  # noqa: PERF203 - the others may be there
            failure = failure or error
    return confirmed, failure


class Verdict(Enum):
    """What ``receive`` does with what it printed."""

    ACK = "ack"
    NACK = "nack"
    REJECT = "reject"


@connected
@with_table(
    "settings", Options.redelivery_timeout, Options.max_deliveries, Options.group,
    Options.batch_markers, Options.delivery,
)  # fmt: skip
def receive(
    config: ServiceConfig,
    settings: dict[str, Any],
    queue_id: QueueId,
    count: Annotated[int, typer.Option("--count", "-c", min=1, help="Messages to receive.")] = 1,
    ack: Annotated[
        bool, typer.Option("--ack", help="Acknowledge what was received (the default).")
    ] = False,
    nack: Annotated[bool, typer.Option("--nack", help="Give it back, after --delay.")] = False,
    reject: Annotated[
        bool, typer.Option("--reject", help="Send what was received to the dead letters.")
    ] = False,
    delay: Annotated[
        float | None,
        typer.Option(help="Seconds until --nack brings it back; default: the back-off."),
    ] = None,
    reason: Annotated[str, typer.Option(help="Reason of --nack or --reject.")] = "",
    timeout: Annotated[
        float, typer.Option(help="End after this many seconds without a message.")
    ] = 10.0,
    follow: Annotated[bool, typer.Option("--follow", help="Receive until Ctrl-C.")] = False,
    topic: Topic = "",
    metrics_port: MetricsPort = None,
    as_json: Json = False,
) -> None:
    """Receive messages, print them, and then give a verdict on each: ack, unless told otherwise."""
    chosen = [verdict for verdict, given in zip(Verdict, (ack, nack, reject), strict=True) if given]
    if len(chosen) > 1:
        raise ConfigError("give one of --ack, --nack and --reject")
    verdict = chosen[0] if chosen else Verdict.ACK
    _check_verdict(verdict, delay, reason, settings["delivery"])
    wanted = None if follow else count
    patience = math.inf if follow else wait_seconds(timeout, name="--timeout")

    def handle(message: Message) -> None:
        _show(message, verdict, as_json=as_json)
        if verdict is Verdict.ACK:
            message.ack()
        elif verdict is Verdict.NACK:
            message.nack(delay=delay, reason=reason)
        else:
            message.reject(reason)

    with (
        stop_event(ENDING) as stopping,
        serving_metrics(metrics_port),
        service(config) as connection,
    ):
        queue = connection.queue(queue_id, topic=topic or None, **settings)
        require_brokers(config)
        received = 0
        if is_used(config, queue.config, stopping, patience):
            with queue.consumer() as consumer:
                received = _receive(consumer, handle, stopping, wanted, patience)
    if not received and not follow and not as_json:
        output.note(f"No message in {queue_id} within {timeout:g} s.")


def _receive(
    consumer: Consumer,
    handle: Callable[[Message], None],
    stopping: threading.Event,
    wanted: int | None,
    patience: float,
) -> int:
    """Handles so many messages, or all until it is stopped or none has come for too long."""
    received = 0
    silent_since = time.monotonic()
    try:
        while not stopping.is_set() and (wanted is None or received < wanted):
            size = RECEIVE_BATCH if wanted is None else min(wanted - received, RECEIVE_BATCH)
            messages = consumer.receive_many(size, 0.5)
            rest = deque(messages)
            try:
                while rest:
                    handle(rest[0])
                    rest.popleft()
            finally:
                # What an interrupt or a closed pipe leaves goes back at once, uncounted.
                consumer.put_back(rest)
            received += len(messages)
            now = time.monotonic()
            if messages:
                silent_since = now
            elif now - silent_since > patience:
                break
    except KeyboardInterrupt:
        output.note("Stopping: what was printed is settled, the rest goes back.")
    consumer.flush()
    return received


def _check_verdict(verdict: Verdict, delay: float | None, reason: str, delivery: str) -> None:
    if verdict is Verdict.REJECT and not reason:
        raise ConfigError("--reject needs --reason TEXT: it stands in the dead letter")
    if verdict is not Verdict.ACK and delivery != Options.delivery.default:
        raise ConfigError(f"--{verdict.value} is too late with --delivery {delivery}")
    if delay is not None and verdict is not Verdict.NACK:
        raise ConfigError("--delay belongs to --nack: the others bring nothing back")
    if reason and verdict is Verdict.ACK:
        raise ConfigError("--reason belongs to --nack and --reject")


def _show(message: Message, verdict: Verdict, *, as_json: bool) -> None:
    if not as_json:
        again = f"  (delivery {message.delivery_count})" if message.delivery_count > 1 else ""
        sys.stdout.write(f"{output.text_of(message.payload)}{again}\n")
        sys.stdout.flush()
        return
    output.print_json(
        {
            "id": message.id,
            **output.bytes_fields("payload", message.payload),
            **output.bytes_fields("key", message.key),
            "headers": output.headers_object(message.headers),
            "queue_id": message.queue_id,
            "delivery_count": message.delivery_count,
            "timestamp_ms": message.timestamp_ms,
            "partition": message.message_id.partition,
            "offset": message.message_id.offset,
            "verdict": verdict.value,
        }
    )


def is_used(
    config: ServiceConfig, queue: QueueConfig, stopping: threading.Event, patience: float
) -> bool:
    """Return whether to consume a queue: at once if it was ever used, or when its first message
    comes.

    Until then there is a warning and no group, so that a mistyped name leaves nothing behind.
    """
    if queue.topic:
        # Its topic is asked for by that name.
        return True
    deadline_s = time.monotonic() + patience
    with QueueSearch(config, queue.queue_id, group_of_workers(config, queue)) as search:
        if _is_known(search):
            return True
        _warn(config, queue.queue_id, search.others)
        try:
            while time.monotonic() < deadline_s and not stopping.wait(_PAUSE_S):
                if search.has_new_message():
                    return True
        except KeyboardInterrupt:
            output.note("Stopping.")
    return False


def warn_of_unused(config: ServiceConfig, queue_id: str, group: str = "") -> None:
    """Say so when nothing was ever sent to a queue of markers."""
    with QueueSearch(config, queue_id, group or group_of(config, queue_id)) as search:
        if not _is_known(search):
            _warn(config, queue_id, search.others)


def _is_known(search: QueueSearch) -> bool:
    """Where that cannot be asked, the command itself says why."""
    try:
        return search.is_used()
    except KafkaMQError:
        return True


def _warn(config: ServiceConfig, queue_id: str, others: tuple[str, ...]) -> None:
    names = ", ".join(others[:_SHOWN]) + (", ..." if len(others) > _SHOWN else "")
    seen = f"; queues there: {names}" if names else ""
    output.note(f"warning: nothing was ever sent to {queue_id} in {config.namespace}{seen}")
