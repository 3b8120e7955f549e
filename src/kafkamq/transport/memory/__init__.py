"""Kafka in memory has the interface of ``transport.clients``, which opens it by its name."""
