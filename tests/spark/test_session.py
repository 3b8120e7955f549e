"""The session of a process: taken as it is, but on no cluster but the right one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kafkamq.errors import ConfigError
from kafkamq.spark.session import build_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark]


def test_a_session_elsewhere_is_not_taken_for_the_cluster(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match=r"this process has a Spark session on local\[2\]: stop"):
        build_session(master="spark://127.0.0.1:7077")
    assert build_session(master="local[4]").sparkContext is spark.sparkContext
