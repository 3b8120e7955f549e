"""The shape of the package that import-linter cannot see: no cycles, and backends by name."""

from __future__ import annotations

import inspect

import grimp
import pytest

import kafkamq.spark
from kafkamq.queue.backend import QueueBackend, load
from kafkamq.types import Backend


def test_no_modules_import_each_other() -> None:
    """Not even for types: who reads one of a cycle must read all of it."""
    graph = grimp.build_graph("kafkamq", cache_dir=None)
    waiting = {
        module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules
    }
    while True:  # in no cycle is who imports none of the rest, and whom none of it imports
        imported = {each for imports in waiting.values() for each in imports}
        ends = {
            module
            for module, imports in waiting.items()
            if not imports & waiting.keys() or module not in imported
        }
        if not ends:
            break
        for module in ends:
            del waiting[module]
    assert not {module: sorted(imports & waiting.keys()) for module, imports in waiting.items()}


@pytest.mark.parametrize("backend", Backend)
def test_each_backend_is_found_by_its_name(backend: Backend) -> None:
    """These imports are hidden from the linter on purpose, and from mypy."""
    found = load(backend)
    for name, wanted in inspect.getmembers(QueueBackend, inspect.isfunction):
        if not name.startswith("_"):
            own = inspect.signature(getattr(found, name))
            parameters = list(inspect.signature(wanted).parameters.values())[1:]  # without self
            assert list(own.parameters.values()) == parameters, name


def test_the_names_of_spark_are_listed_before_they_are_loaded() -> None:
    assert dir(kafkamq.spark) == sorted(kafkamq.spark.__all__)
