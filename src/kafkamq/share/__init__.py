"""The ``share`` backend: Kafka's share groups (KIP-932)."""
