"""How pytest-xdist divides the tests: by files, one worker for Spark, the shortest files last.

A Spark session takes longer to start and to get warm than most files need, and two of them keep
all cores of a small machine busy; other tests mostly wait. So one worker takes the files on Spark,
beside those that wait, and the others help it when nothing else is left.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

__all__ = ["OneForSpark"]

_ON_SPARK = ("tests/spark/", "tests/e2e/test_demo_verdict.py")


class OneForSpark(LoadFileScheduling):
    """Files in the order of their names: ``unit`` and ``wire``, whose tests are short, end it."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False  # else those with the fewest tests would end it
        super().__init__(config, log)  # type: ignore[arg-type]

    def _assign_work_unit(self, node: WorkerController) -> None:
        is_for_spark = node is self.nodes[0]
        for file in self.workqueue:
            if file.startswith(_ON_SPARK) is is_for_spark:
                self.workqueue.move_to_end(file, last=False)
                break
        super()._assign_work_unit(node)
