"""Queues as acknowledged streams."""
