"""Inputs for embeddings: batches, and what is cut off."""

import doctest
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proxy.errors import RequestError
from proxy.llamacpp.client import LlamaServerClient
from proxy.llamacpp.embeddings import EmbeddingOptions, Input
from proxy.reuse import embedder
from proxy.reuse.embedder import MAX_BATCH_INPUTS, batches, cut, embed_fitting
from tests.models import write_tiny_llama
from tests.runners import running

OPTIONS = EmbeddingOptions()


@asynccontextmanager
async def serving(model: Path, *flags: str) -> AsyncIterator[LlamaServerClient]:
    """Run a llama-server with 256 tokens of context in embedding mode."""
    with running(model, "--embeddings", *flags, ctx_size=256, parallel=1) as runner:
        client = LlamaServerClient(url="http://runner", socket_path=runner.socket)
        try:
            yield client
        finally:
            await client.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny chat model."""
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "m.gguf", seed=1)


def test_the_examples_hold() -> None:
    """What the module's examples say is so."""
    assert doctest.testmod(embedder).failed == 0


def test_batches_hold_all_inputs_in_order() -> None:
    """No batch is empty or too long, one huge input is a batch of its own."""
    inputs: list[Input] = ["a" * 5, "b" * 50_000, [7] * 5_000, *["c"] * 150]
    found = list(batches(inputs))
    assert [item for batch in found for item in batch] == inputs
    assert all(0 < len(batch) <= MAX_BATCH_INPUTS for batch in found)
    assert [len(batch) for batch in found[:3]] == [1, 1, 1]
    assert list(batches([])) == []


def test_special_tokens_around_a_text_are_kept() -> None:
    """Before it, after it, on both sides, on none, and those that the text holds."""
    plain = [7, 8, 9]
    for before, after in (([], []), ([1], []), ([], [2]), ([1], [2])):
        kept = cut([*before, *plain, *after], plain, len(before) + 2 + len(after))
        assert kept == [*before, 7, 8, *after]
    assert cut([1, 7, 8, 2, 2], [7, 8, 2], 3) == [1, 7, 2]
    with pytest.raises(RequestError, match="input after truncation exceeds"):
        cut([1, *plain, 2], plain, 2)


async def test_a_causal_model_takes_one_token_less_than_its_context(
    model: Path,
) -> None:
    """The engine's complaint leads to the longest input that it takes."""
    async with serving(model, "--pooling", "last") as client:
        made = await embed_fitting(client, ["x", [9] * 500], OPTIONS)
        (expected,) = (await embed_fitting(client, [[9] * 255], OPTIONS)).vectors
        assert made.num_tokens == 256
        assert made.vectors[1].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
        with pytest.raises(RequestError, match="exceeds the context length"):
            await embed_fitting(
                client, ["x", [9] * 256], EmbeddingOptions(truncates=False)
            )


async def test_a_bound_of_the_request_is_kept_and_small_batches_are_noticed(
    model: Path,
) -> None:
    """The least of what the request, the batch and the context allow counts."""
    flags = ("--pooling", "mean", "--batch-size", "32")
    async with serving(model, *flags) as client:
        for asked, num_tokens in ((None, 32), (100, 32), (20, 20)):
            options = EmbeddingOptions(max_tokens=asked)
            made = await embed_fitting(client, ["x y z " * 100], options)
            assert made.num_tokens == num_tokens
        options = EmbeddingOptions(max_tokens=20, truncates=False)
        with pytest.raises(RequestError, match="exceeds the context length"):
            await embed_fitting(client, [[9] * 21], options)
