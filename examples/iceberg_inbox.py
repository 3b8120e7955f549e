"""Writes a queue's messages into an Iceberg table, each once however often it is delivered.

    pip install kafkamq 'pyspark>=4.1,<4.2'
    spark-submit --packages org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0 \
        examples/iceberg_inbox.py localhost:9092 shop orders /var/lib/lake

Iceberg has no runtime for Spark 4.2 yet, and Spark 4.1 cannot read a queue as a stream: so a worker
receives the messages, up to 10,000 at a time. They are acknowledged when they are in the table.
Kill it at any moment, and start it again: what the table has is not written a second time.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from kafkamq import Message, Service, Worker
from kafkamq.spark import rows_of, write_once

TABLE = """
CREATE TABLE IF NOT EXISTS lake.shop.done (
    origin_topic STRING, origin_partition INT, origin_offset BIGINT, origin_timestamp TIMESTAMP,
    value STRING
) USING iceberg
"""


def main() -> None:
    """Works until it is asked to stop."""
    servers, namespace, queue_id, warehouse = sys.argv[1:5]
    catalog = "spark.sql.catalog.lake"
    spark = (
        SparkSession.builder.config(catalog, "org.apache.iceberg.spark.SparkCatalog")
        .config(f"{catalog}.type", "hadoop")
        .config(f"{catalog}.warehouse", warehouse)
        .getOrCreate()
    )
    spark.sql(TABLE)

    def store(messages: list[Message]) -> None:
        """An exception gives all of them back."""
        rows = rows_of(spark, messages)
        write_once(rows.withColumn("value", rows.value.cast("string")), "lake.shop.done")
        print(f"{len(messages)} messages", flush=True)

    with Service(servers, namespace) as service:
        queue = service.queue(queue_id, max_in_flight=20_000)
        queue.handler(batch_size=10_000, batch_linger=1.0)(store)
        Worker(service).run()


if __name__ == "__main__":
    main()
