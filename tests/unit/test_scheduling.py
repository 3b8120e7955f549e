"""Who takes which tests: Spark or Kafka from the start, then whatever is left, but Spark last."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.scheduling import TOGETHER, ByKind, lets_others_go_first

FILES = [f"tests/integration/test_security.py::test_{name}" for name in "ab"]
ALONE = [f"tests/integration/test_cli.py::test_{name}" for name in "ab"]
KAFKA = [*FILES, *ALONE]
RULES = ["tests/model/test_claims.py::test_a", "tests/unit/test_clock.py::test_a"]
SPARK = [f"tests/spark/test_jobs.py::test_{name}" for name in "ab"]
TESTS = [*ALONE, *FILES, *RULES, *SPARK]


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


def test_spark_and_kafka_begin_with_one_test_before_them() -> None:
    assert divide(0, 2) == [[*SPARK, *RULES, *ALONE], FILES]
    assert divide(3, 4) == divide(0, 2)


@pytest.mark.parametrize(
    ("number", "order"),
    [
        (0, [*SPARK, *RULES, *KAFKA]),
        (1, [*RULES, *KAFKA, *SPARK]),
        (2, [*KAFKA, *RULES, *SPARK]),
    ],
)
def test_what_a_worker_goes_on_with(number: int, order: list[str]) -> None:
    assert divide(number) == [order]


def test_who_begins_with_rules_lets_those_go_first_that_do_not() -> None:
    assert lets_others_go_first(1, TESTS)
    assert not lets_others_go_first(1, RULES)
    assert not lets_others_go_first(1, KAFKA)
    assert not lets_others_go_first(2, TESTS)


def test_tests_that_share_a_fixture_are_of_one_worker() -> None:
    """Else each worker would set it up that gets one of them: a broker, for most."""
    files = sorted(Path(__file__).parents[1].glob("integration/test_*.py"))
    shared = re.compile(r'scope="module"|def test_\w+\([^)]*\b(schema_registry|kafka_cluster)\b')
    sharing = [path for path in files if shared.search(path.read_text(encoding="utf-8"))]
    assert tuple(f"tests/integration/{path.name}" for path in sharing) == TOGETHER
