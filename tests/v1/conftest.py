"""A `kvbus serve` with a model that talks on demand and one that never ends."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import Kvbus
from tests.e2e.test_sharing import store_arguments
from tests.models import write_tiny_model
from tests.scripted_model import Script, write_scripted_model

SCRIPT = Script(
    to_user="<think>\nI should look first.\n</think>\n\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    to_tool="<think>\nSnow, it says.\n</think>\n\nIt snows in Oslo now.",
    unthinking="Ask me about the weather.",
)


@pytest.fixture(scope="session")
def model_arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the flags that serve both models."""
    directory = tmp_path_factory.mktemp("models")
    talker = write_scripted_model(directory / "talker.gguf", SCRIPT)
    endless = write_tiny_model(directory / "endless.gguf", seed=1, is_endless=True)
    return ["--model", f"talker:1b={talker}", "--model", f"endless={endless}"]


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache of model facts."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def served(model_arguments: list[str], cache_dir: Path) -> Iterator[Kvbus]:
    """Return one kvbus, two runners of one slot for each model."""
    with Kvbus(cache_dir) as kvbus:
        kvbus.start(
            *model_arguments, "--runners", "2", "--ctx", "8192",
            "--response-headers", "true", "--restore", "always",
            *store_arguments("disk", kvbus),
        )  # fmt: skip
        yield kvbus


@pytest.fixture
def kvbus(cache_dir: Path) -> Iterator[Kvbus]:
    """Return a kvbus that is not started yet, and end it after the test."""
    with Kvbus(cache_dir) as process:
        yield process
