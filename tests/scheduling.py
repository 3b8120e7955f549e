"""How pytest-xdist divides the tests: each worker has a kind of them that it takes first.

Tests on Kafka mostly wait; those of the rules keep a core busy and wait for nothing; Spark is in
between, and a session takes longer to start and to get warm than most files need. So two workers
begin with Spark and most with Kafka; one, which lets all others go first, fills with rules what
these leave of the cores, and the others do so when they are done with theirs. Nobody who has no
Spark session yet starts one while there is something else to do.

The end is near when nobody has more to take: what workers have before them then is all that is
left. So a kind begins with its slow tests (``conftest.py`` puts them first), and a worker has one
test before it beside the one that runs, not two.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

__all__ = ["ByKind", "TOGETHER", "kinds_for", "lets_others_go_first"]

# By their numbers, which also say who shares a broker.
SPARK_FIRST = (0, 3)
RULES_FIRST = 1
_SPARK, _RULES, _KAFKA = "spark", "rules", "kafka"
_FOLDERS = {
    _SPARK: ("tests/spark/", "tests/e2e/test_demo_verdict.py"),
    _RULES: ("tests/model/", "tests/sim/", "tests/unit/", "tests/wire/"),
}
# Their fixtures are of the test, or of the session: one by one, they leave no long file to the end.
# Of the many short files that a run ends with, these take longest, and mostly wait.
_ONE_BY_ONE = (
    "tests/spark/",
    "tests/model/",
    "tests/sim/",
    "tests/integration/",
    *(
        f"tests/unit/test_{name}.py"
        for name in (
            "batch_markers",
            "interrupts",
            "intake",
            "parallel_processes",
            "web_pages",
            "weight",
            "worker_session",
        )
    ),
    "tests/wire/test_message_batches.py",
)
TOGETHER = tuple(
    f"tests/integration/test_{name}.py"
    for name in (
        "local_kafka",
        "parallel_soak",
        "parallel_trouble",
        "queue_errors",
        "schemas",
        "security",
        "upgrade",
    )
)
"""Files there that share more than a session: mostly a broker of their own."""


def kinds_for(worker: int) -> tuple[str, str, str]:
    """What a worker takes, in its order."""
    if worker in SPARK_FIRST:
        return _SPARK, _RULES, _KAFKA
    return (_RULES, _KAFKA, _SPARK) if worker == RULES_FIRST else (_KAFKA, _RULES, _SPARK)


def lets_others_go_first(worker: int, nodeids: Iterable[str]) -> bool:
    """Whether it begins with rules, beside others that do not."""
    kinds = {_rank_of(nodeid)[0] for nodeid in nodeids}
    return worker == RULES_FIRST and {_RULES, _KAFKA} <= kinds


@cache
def _rank_of(unit: str) -> tuple[str, bool]:
    """Its kind, and whether it is a test that leaves no worker alone with much at the end."""
    kind = next((kind for kind, of in _FOLDERS.items() if unit.startswith(of)), _KAFKA)
    return kind, kind == _KAFKA and "::" in unit


class ByKind(LoadFileScheduling):
    """In a kind slow tests first, then by names: ``unit`` and ``wire``, which are short, end it."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False  # else those with the fewest tests would end it
        super().__init__(config, log)  # type: ignore[arg-type]

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(_ONE_BY_ONE) and not nodeid.startswith(TOGETHER):
            return nodeid
        return super()._split_scope(nodeid)

    def _reschedule(self, node: WorkerController) -> None:
        if not self.workqueue or self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        kinds = kinds_for(int(node.gateway.id.removeprefix("gw")))

        def turn(unit: str) -> tuple[int, bool]:
            kind, is_short = _rank_of(unit)
            return kinds.index(kind), is_short

        self.workqueue.move_to_end(min(self.workqueue, key=turn), last=False)
        super()._assign_work_unit(node)
