"""A queue worked on by Spark: each message through a coroutine, its result into a topic, once.

    python examples/spark_queue.py localhost:9092 shop emails sent-emails file:///var/lib/emails

Output and acknowledgements are one transaction. Kill it at any moment, on any node, and start it
again: readers of the output that are `read_committed` see each result once.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from kafkamq import Nack, Reject
from kafkamq.config import ServiceConfig
from kafkamq.spark import StreamMessage, ack, map_messages, read_queue, register
from kafkamq.spark.session import build_session


async def deliver(message: StreamMessage) -> bytes | Nack | Reject:
    """Runs on the executors, some hundred at a time in each task."""
    if not message.payload:
        return Reject("no text")
    try:
        await asyncio.sleep(0.05)  # a mail server, for example
    except OSError as error:
        return Nack(delay=5.0, reason=str(error))
    return message.payload.upper()


def main() -> None:
    """Runs until Ctrl-C or SIGTERM."""
    servers, namespace, queue_id, topic, checkpoint = sys.argv[1:6]
    spark = build_session(app_name=f"queue {queue_id}", master="local[*]")
    register(spark, ServiceConfig(bootstrap_servers=servers, namespace=namespace))
    messages = read_queue(spark, queue_id, redelivery_timeout=60.0, max_rows=5_000)
    done = map_messages(messages, deliver, concurrency=500)
    rows = done.select(
        "ack_token",
        "verdict",
        "delay",
        "reason",
        done.user_key.alias("key"),
        done.result.alias("value"),
    )
    query = ack(rows, checkpoint=checkpoint, topic=topic)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        query.wait()
    except KeyboardInterrupt:
        query.stop()


if __name__ == "__main__":
    main()
