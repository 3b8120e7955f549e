"""Clients of Kafka for every shell: settings, errors, topics, transactions, settlement.

Below ``kafkamq.kafka`` and ``kafkamq.spark``, which never import each other.
"""
