"""The pipeline on Spark: source, exactly-once sink, redelivery tracker and SQL views."""
