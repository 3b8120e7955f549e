"""What a batch whose rows go into a table fails with, where the table is not looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kafkamq.errors import ConfigError
from kafkamq.spark.tables import ORIGIN, insert_once, write_once

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
        insert_once(rows, "nowhere", ORIGIN)
    with pytest.raises(ConfigError, match="table nowhere cannot be read"):
        write_once(rows, "nowhere")
