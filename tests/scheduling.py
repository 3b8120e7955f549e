"""How pytest-xdist divides the tests: each worker has a kind of them that it takes first.

Tests on Kafka mostly wait; those of the rules keep a core busy and wait for nothing; Spark is in
between, and a session takes longer to start and to get warm than most files need. So the three
kinds run beside each other from the start, and who has run out of his own helps another. Nobody
who has no Spark session yet starts one while there is something else to do.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

__all__ = ["ByKind", "kinds_for"]

_SPARK, _RULES, _KAFKA = "spark", "rules", "kafka"
_FOLDERS = {
    _SPARK: ("tests/spark/", "tests/e2e/test_demo_verdict.py"),
    _RULES: ("tests/model/", "tests/sim/", "tests/unit/", "tests/wire/"),
}
# Their fixtures are of the test, or of the session: one by one, they leave no long file to the end.
_ONE_BY_ONE = ("tests/spark/", "tests/model/", "tests/sim/")


def kinds_for(worker: int) -> tuple[str, str, str]:
    """What a worker takes, in its order: a third of them Spark, one the rules, the others Kafka."""
    if worker % 3 == 0:
        return _SPARK, _KAFKA, _RULES
    return (_RULES, _KAFKA, _SPARK) if worker == 1 else (_KAFKA, _RULES, _SPARK)


def _kind_of(unit: str) -> str:
    return next((kind for kind, of in _FOLDERS.items() if unit.startswith(of)), _KAFKA)


class ByKind(LoadFileScheduling):
    """In a kind by the order of names: ``unit`` and ``wire``, whose tests are short, end it."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False  # else those with the fewest tests would end it
        super().__init__(config, log)  # type: ignore[arg-type]

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(_ONE_BY_ONE) else super()._split_scope(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        kinds = kinds_for(int(node.gateway.id.removeprefix("gw")))
        first = min(self.workqueue, key=lambda unit: kinds.index(_kind_of(unit)))
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)
