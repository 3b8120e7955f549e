"""Clients of Kafka for every shell: settings, errors, topics, transactions."""
