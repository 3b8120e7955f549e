"""``kafkamq compare`` measures the backends and a plain consumer group on the same work.

``run.compare`` runs it. Its processes import this package too, so nothing heavy is imported here.
"""
