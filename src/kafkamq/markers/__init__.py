"""The ``markers`` backend: one topic for all queues, with markers beside it."""
