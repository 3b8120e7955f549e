"""``kafkamq demo`` has real traffic, a killed worker, and a verdict out of Kafka's logs.

``run.run_demo`` runs it. Its processes import this package too, so nothing heavy is imported here.
"""
