"""Kafka in memory, under the interface of ``transport.clients``, which opens it by its name."""

"""Kafka in memory has the interface of ``transport.clients``, which opens it by its name."""
