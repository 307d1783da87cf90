from __future__ import annotations

import pytest

from tests.core.driving import Process, World
from tests.core.stepped import Effects


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def process(world: World) -> Process:
    """The first process of the world."""
    return world.first


@pytest.fixture
def effects() -> Effects:
    return Effects()
