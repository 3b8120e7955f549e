"""Who runs which tests: each worker has a kind of them that it takes first.

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

from collections.abc import Iterable, Sequence
from functools import cache

__all__ = ["FORK", "TOGETHER", "Units", "kinds_for"]

FORK = "TESTS_FORK"
"""In each process of `tests.forks`, the variable with its number, from 0 on."""

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


@cache
def _rank_of(unit: str) -> tuple[str, bool]:
    """Its kind, and whether it is a test that leaves no worker alone with much at the end."""
    kind = next((kind for kind, of in _FOLDERS.items() if unit.startswith(of)), _KAFKA)
    return kind, kind == _KAFKA and "::" in unit


class Units:
    """Files and tests that nobody has taken yet.

    In a kind slow tests come first, then names: ``unit`` and ``wire``, which are short, end it.
    """

    def __init__(self, nodeids: Sequence[str]) -> None:
        self._nodeids = nodeids
        self._left: dict[str, list[int]] = {}
        for index, nodeid in enumerate(nodeids):
            is_alone = nodeid.startswith(_ONE_BY_ONE) and not nodeid.startswith(TOGETHER)
            unit = nodeid if is_alone else nodeid.partition("::")[0]
            self._left.setdefault(unit, []).append(index)

    @property
    def left(self) -> int:
        return len(self._left)

    def has_rules_for(self, worker: int) -> bool:
        """Whether it begins with rules, beside others that do not."""
        return worker == RULES_FIRST and any(_rank_of(unit)[0] == _RULES for unit in self._left)

    def take(self, worker: int) -> list[int]:
        """The tests that a worker runs next, by their places; none when all are taken."""
        kinds = kinds_for(worker)

        def turn(unit: str) -> tuple[int, bool]:
            kind, is_short = _rank_of(unit)
            return kinds.index(kind), is_short

        return self._left.pop(min(self._left, key=turn)) if self._left else []

    def give_back(self, indices: Iterable[int]) -> None:
        """Have others run what a worker that died had not begun."""
        for index in indices:
            self._left[self._nodeids[index]] = [index]
