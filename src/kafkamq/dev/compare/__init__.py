"""``kafkamq compare`` measures the backends and a plain consumer group on the same work.

``run.compare`` runs it. Its processes import this package too, so nothing heavy is imported here.
"""

from kafkamq.dev.compare.plan import Contender, Measured, Slow, Work, parse_range, parse_slow

__all__ = ["Contender", "Measured", "Slow", "Work", "parse_range", "parse_slow"]
