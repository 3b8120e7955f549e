"""Kafka in memory, under the interface of ``transport.port``; ``clients`` opens it by its name."""
