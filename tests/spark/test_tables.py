"""What a batch whose rows go into a table fails with, where the table is not looked at."""

from __future__ import annotations

from logging.handlers import BufferingHandler
from typing import TYPE_CHECKING

import pytest
from pyspark.logger import PySparkLogger
from pyspark.sql.functions import lit, nullif

from kafkamq.errors import ConfigError
from kafkamq.spark.tables import ORIGIN, Table, insert_once, write_once

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_a_table_that_cannot_be_read_does_not_hide_why_its_batch_failed(
    spark: SparkSession,
) -> None:
    rows = spark.sql(
        "SELECT 't' AS origin_topic, 0 AS origin_partition, now() AS origin_timestamp,"
        " CAST(raise_error('the rows are lost') AS BIGINT) AS origin_offset, 'x' AS ack_token"
    )
    with pytest.raises(Exception, match="the rows are lost"):
        insert_once(rows, Table("nowhere", ORIGIN, is_iceberg=False))
    printed = BufferingHandler(100)
    logger = PySparkLogger.getLogger("SQLQueryContextLogger")
    logger.addHandler(printed)
    try:
        with pytest.raises(ConfigError, match="table nowhere cannot be read"):
            write_once(rows, "nowhere")
    finally:
        logger.removeHandler(printed)
    assert printed.buffer == [], "PySpark's own words, plan and stack"


def test_a_row_without_an_origin_is_refused(spark: SparkSession) -> None:
    rows = spark.sql(
        "SELECT 't' AS origin_topic, id AS origin_partition, id AS origin_offset,"
        " now() AS origin_timestamp, string(id) AS ack_token FROM range(3)"
    )
    for name in ("origin_partition", "origin_offset"):
        lacking = rows.withColumn(name, nullif(rows[name], lit(0)))
        with pytest.raises(ConfigError, match=r"^a row has no origin"):
            insert_once(lacking, Table("nowhere", ORIGIN, is_iceberg=False))


def test_a_verdict_in_other_letters_is_refused(spark: SparkSession) -> None:
    rows = spark.sql(
        "SELECT 't' AS origin_topic, 0 AS origin_partition, 1L AS origin_offset,"
        " now() AS origin_timestamp, 'x' AS ack_token, 'reject' AS VERDICT"
    )
    with pytest.raises(ConfigError, match="a column VERDICT: write verdict, or rename it"):
        insert_once(rows, Table("nowhere", ORIGIN, is_iceberg=False))


def test_a_table_of_iceberg_is_refused_on_spark_4_2_by_name_with_what_to_do(
    spark: SparkSession,
) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.catalog.ice", "org.apache.iceberg.spark.SparkCatalog")
    rows = session.sql("SELECT 'x' AS ack_token")
    with pytest.raises(
        ConfigError, match=r"Iceberg has no runtime for Spark 4\.2 yet: use a Delta"
    ) as said:
        write_once(rows, "ice.shop.done")
    assert "write_once() on Spark 4.1" in str(said.value)
