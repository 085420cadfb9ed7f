"""What tests of graphs share."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture(scope="session")
def xla_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("xla")


@pytest.fixture
def xla_cache(xla_folder: Path) -> Iterator[None]:
    """XLA compiles a graph once in a session: checks build executors of the same few modules again and again."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", str(xla_folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
