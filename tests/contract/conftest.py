"""Each backend's service serves all tests: they use queues of different names."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from tests.contract.worlds import WORLDS, World, world_of


@pytest.fixture(scope="session", params=WORLDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A service of each kind."""
    name = request.param
    bootstrap = "" if name.startswith("memory") else request.getfixturevalue("bootstrap")
    with world_of(name, bootstrap, f"{name}-{uuid.uuid4().hex[:8]}") as made:
        yield made
