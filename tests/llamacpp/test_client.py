"""The client of a runner: foreign errors become ours."""

from pathlib import Path

import pytest

from proxy.errors import RunnerGone
from proxy.llamacpp.client import LlamaServerClient


async def test_a_closed_client_says_that_the_runner_is_gone(tmp_path: Path) -> None:
    """A turn may outlive the process of its slot, whose client is closed then."""
    client = LlamaServerClient(url="http://runner", socket_path=tmp_path / "r.sock")
    await client.close()
    assert not await client.is_healthy()
    with pytest.raises(RunnerGone):
        await client.tokenize("a", add_special=True)
    with pytest.raises(RunnerGone):
        async with client.stream_completion("/completion", {}):
            pass
