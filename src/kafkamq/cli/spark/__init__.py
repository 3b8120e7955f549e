"""These commands run Spark: SQL, replay and audit, and standalone clusters."""
