"""What the transport reads of Kafka's own protocol: pure."""
