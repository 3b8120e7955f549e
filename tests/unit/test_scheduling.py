"""Who takes which tests: each kind from the start, then whatever is left, but Spark last."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.scheduling import ByKind

KAFKA = ["tests/contract/test_queues.py::test_a", "tests/integration/test_cli.py::test_a"]
RULES = ["tests/model/test_claims.py::test_a", "tests/unit/test_clock.py::test_a"]
SPARK = [f"tests/spark/test_jobs.py::test_{name}" for name in "ab"]
TESTS = [*KAFKA, *RULES, *SPARK]


class Node:
    """A worker; it notes what it is given."""

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.given: list[str] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += [TESTS[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


def divide(*numbers: int) -> list[list[str]]:
    """What each of these workers is given; the first one does all of the rest by itself."""
    config: Any = SimpleNamespace(
        option=SimpleNamespace(loadscopereorder=True),
        getvalue=lambda name: ["popen"] * len(numbers),
    )
    scheduler = ByKind(config, None)
    nodes: list[Any] = [Node(number) for number in numbers]
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, TESTS)
    scheduler.schedule()
    for test in nodes[0].given:  # which grows
        scheduler.mark_test_complete(nodes[0], TESTS.index(test))
    return [node.given for node in nodes]


def test_each_kind_has_a_worker_from_the_start() -> None:
    assert divide(0, 1, 2) == [SPARK, RULES, KAFKA]
    assert divide(3, 4)[0] == [*SPARK, *RULES]


@pytest.mark.parametrize(
    ("number", "order"),
    [
        (0, [*SPARK, *KAFKA, *RULES]),
        (1, [*RULES, *KAFKA, *SPARK]),
        (2, [*KAFKA, *RULES, *SPARK]),
    ],
)
def test_what_a_worker_goes_on_with(number: int, order: list[str]) -> None:
    assert divide(number) == [order]
