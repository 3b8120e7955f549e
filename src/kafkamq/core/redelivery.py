"""Public names of :mod:`kafkamq.markers.rules.redelivery`."""

from kafkamq.markers.rules.redelivery import RedeliveryTracker

__all__ = ["RedeliveryTracker"]
