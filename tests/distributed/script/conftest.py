"""A world of its own for every test: what one weaves is nothing to the next."""

from collections.abc import Iterator

import pytest

from weft.distributed.place import LaunchedPlace
from weft.distributed.script.world.world import World, use_world


@pytest.fixture(autouse=True)
def own_world() -> Iterator[None]:
    with use_world(World(LaunchedPlace())):
        yield
