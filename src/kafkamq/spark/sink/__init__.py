"""The sink that writes a stream into queues, exactly once."""
