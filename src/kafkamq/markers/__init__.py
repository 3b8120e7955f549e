"""The ``markers`` backend has one topic for all queues, with markers beside it."""
