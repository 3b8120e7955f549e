"""Tables that a declarative pipeline of Spark keeps: deliveries that ended, and counts of them.

Run: spark-pipelines run --spec examples/pipeline.yml

It reads the brokers' addresses and the namespace from KAFKAMQ_BOOTSTRAP_SERVERS and
KAFKAMQ_NAMESPACE. Each run takes in what ended since the one before.
"""

import os

from pyspark import pipelines
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import count

spark = SparkSession.active()


@pipelines.table
def ended_deliveries() -> DataFrame:
    return (
        spark.readStream.format("kafkamq")
        .option("kafka.bootstrap.servers", os.environ["KAFKAMQ_BOOTSTRAP_SERVERS"])
        .option("namespace", os.environ["KAFKAMQ_NAMESPACE"])
        .option("view", "deliveries")
        .load()
    )


@pipelines.materialized_view
def outcomes() -> DataFrame:
    ended = spark.read.table("ended_deliveries")
    return ended.groupBy("queue_id", "outcome").agg(count("*").alias("deliveries"))
