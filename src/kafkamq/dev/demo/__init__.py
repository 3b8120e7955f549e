"""``kafkamq demo`` has real traffic, a killed worker, and a verdict out of Kafka's logs.

``run.run_demo`` runs it. Its processes import this package too, so nothing heavy is imported here.
"""

from kafkamq.dev.demo.plan import DemoOptions, Kind, Planned, check_input, from_input, synthetic
from kafkamq.dev.demo.verdict import QueueResult, Verdict

__all__ = [
    "DemoOptions",
    "Kind",
    "Planned",
    "QueueResult",
    "Verdict",
    "check_input",
    "from_input",
    "synthetic",
]
