"""Tiny models and a `kvbus serve` for end-to-end tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import Kvbus
from tests.models import write_tiny_model

Start = Callable[..., Kvbus]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return tiny models: four llamas of one shape."""
    directory = tmp_path_factory.mktemp("models")
    return {
        "tiny": write_tiny_model(directory / "tiny.gguf", seed=1),
        "endless": write_tiny_model(
            directory / "endless.gguf", seed=1, is_endless=True
        ),
        "longrope": write_tiny_model(
            directory / "longrope.gguf", seed=1, longrope_tokens=4096
        ),
        "other": write_tiny_model(directory / "other.gguf", seed=2),
    }


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache of model facts that all end-to-end tests share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def kvbus(cache_dir: Path) -> Iterator[Kvbus]:
    """Return a kvbus that is not started yet, and end it after the test."""
    with Kvbus(cache_dir) as process:
        yield process
