"""Who takes which tests: Spark or Kafka from the start, then whatever is left, but Spark last."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.scheduling import TOGETHER, Units
from tests.waiting import within

FILES = [f"tests/integration/test_security.py::test_{name}" for name in "ab"]
ALONE = [f"tests/integration/test_cli.py::test_{name}" for name in "ab"]
KAFKA = [*FILES, *ALONE]
RULES = ["tests/model/test_claims.py::test_a", "tests/unit/test_clock.py::test_a"]
SPARK = [f"tests/spark/test_jobs.py::test_{name}" for name in "ab"]
TESTS = [*ALONE, *FILES, *RULES, *SPARK]


def divide(*numbers: int) -> list[list[str]]:
    """What these workers take, each once, and the first one then does all of the rest by itself."""
    units = Units(TESTS)
    given = [units.take(number) for number in numbers]
    while more := units.take(numbers[0]):
        given[0] += more
    return [[TESTS[index] for index in indices] for indices in given]


def test_spark_and_kafka_begin() -> None:
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


def test_what_a_worker_that_died_had_before_it_is_run_by_others() -> None:
    units = Units(TESTS)
    taken = units.take(1)
    units.give_back(taken[1:])
    others = [index for _ in range(units.left) for index in units.take(1)]
    assert sorted(taken[:1] + others) == list(range(len(TESTS)))
    assert units.take(1) == []


TRIED = """
import os, pathlib, warnings, pytest

@pytest.fixture(scope="session")
def number():
    pathlib.Path(f"began-{os.getpid()}").touch()
    yield os.environ["TESTS_FORK"]
    pathlib.Path(f"ended-{os.getpid()}").touch()

@pytest.mark.parametrize("n", range(20))
def test_it(n, number, tmp_path):
    print("said", n)
    warnings.warn(f"of {number}")
    assert n != 7
    if n == 11 and "dies" in __file__:
        os._exit(3)
"""


def test_forks_run_all_tests_and_tell_of_them(tmp_path: Path) -> None:
    """A process that dies is a failure of its test alone."""
    for name in ("dies", "lives"):
        Path(tmp_path, f"test_{name}.py").write_text(TRIED, encoding="utf-8")
    plugins = ("-p", "tests.forks", "-p", "no:cacheprovider", "-p", "no:kafkamq")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "--forks", "3", "--rootdir", tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=within(60),
    )
    assert done.returncode == 1, done.stderr
    assert "3 failed, 37 passed" in done.stdout
    assert re.search(r"process \d+ ended at test_dies.py::test_it\[11\]", done.stdout)
    assert "said 7" in done.stdout
    assert "said 6" not in done.stdout
    assert "UserWarning: of " in done.stdout
    began, ended = (len(list(tmp_path.glob(f"{what}-*"))) for what in ("began", "ended"))
    assert (began >= 2, began - ended) == (True, 1), "all fixtures but those of who died are ended"


def test_tests_that_share_a_fixture_are_of_one_worker() -> None:
    """Else each worker would set it up that gets one of them: a broker, for most."""
    files = sorted(Path(__file__).parents[1].glob("integration/test_*.py"))
    shared = re.compile(r'scope="module"|def test_\w+\([^)]*\b(schema_registry|kafka_cluster)\b')
    sharing = [path for path in files if shared.search(path.read_text(encoding="utf-8"))]
    assert tuple(f"tests/integration/{path.name}" for path in sharing) == TOGETHER
