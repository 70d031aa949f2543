"""Embeddings of real llama-servers, and what their answers are read as."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import orjson
import pytest

from proxy.errors import UpstreamError
from proxy.llamacpp.client import LlamaServerClient
from proxy.llamacpp.embeddings import (
    Input,
    InputTooLongError,
    check_makes_embeddings,
    embed,
    is_embedding_model,
    needs_whole_batch,
    pooling_flag,
    read_embeddings,
)
from proxy.llamacpp.gguf_facts import ModelFacts, read_facts
from tests.embedding_model import Encoder, write_tiny_encoder
from tests.models import write_tiny_llama
from tests.runners import Runner, running

CONTEXT_TOKENS = 64


@asynccontextmanager
async def client_of(runner: Runner) -> AsyncIterator[LlamaServerClient]:
    """Speak to a runner over its socket."""
    client = LlamaServerClient(url="http://runner", socket_path=runner.socket)
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Run a tiny encoder in embedding mode."""
    path = write_tiny_encoder(tmp_path_factory.mktemp("model") / "e.gguf", seed=1)
    with running(path, "--embeddings", ctx_size=CONTEXT_TOKENS, parallel=1) as runner:
        yield runner


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny chat model."""
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "m.gguf", seed=1)


def facts_with(facts: ModelFacts, architecture: str, pooling: int | None) -> ModelFacts:
    """Return facts of another architecture and kind of pooling."""
    metadata = {} if pooling is None else {f"{architecture}.pooling_type": pooling}
    return replace(facts, architecture=architecture, metadata=metadata)


def test_which_models_make_embeddings_alone(llama: Path) -> None:
    """Encoders, and whatever has a kind of pooling in its file."""
    facts = read_facts(llama)
    cases = [
        # architecture, pooling, alone, flag, in one batch
        ("llama", None, False, "last", False),
        ("bert", 1, True, None, True),
        ("bert", None, True, "mean", True),
        ("nomic-bert", 0, True, "mean", True),
        ("qwen3", 3, True, None, False),
        ("qwen3", 0, True, "last", False),
        ("llama", 1, True, None, True),
    ]
    for architecture, pooling, is_alone, flag, is_whole in cases:
        case = facts_with(facts, architecture, pooling)
        assert is_embedding_model(case) == is_alone, case
        assert pooling_flag(case) == flag, case
        assert needs_whole_batch(case) == is_whole, case


async def test_vectors_are_those_that_the_server_shows_as_numbers(
    encoder: Runner,
) -> None:
    """Order, values and token count; texts and token ids are the same input."""
    inputs: list[Input] = ["a b 17", [2, 5, 6, 48, 3], "zz top"]
    shown = encoder.post("/v1/embeddings", input=inputs)
    async with client_of(encoder) as client:
        made = await embed(client, inputs, is_raw=False)
        raw = await embed(client, inputs[:1], is_raw=True)
    numbers = np.array([entry["embedding"] for entry in shown["data"]], np.float32)
    assert np.array_equal(np.array(made.vectors), numbers)
    assert made.num_tokens == shown["usage"]["prompt_tokens"]
    assert np.array_equal(made.vectors[0], made.vectors[1])
    assert not np.array_equal(made.vectors[0], made.vectors[2])
    assert np.linalg.norm(made.vectors[0]) == pytest.approx(1.0)
    length = np.linalg.norm(raw.vectors[0])
    assert length != pytest.approx(1.0)
    assert np.allclose(raw.vectors[0] / length, made.vectors[0], atol=1e-6)


async def test_the_context_of_an_encoder_can_be_filled(encoder: Runner) -> None:
    """As many tokens as the context has are taken, one more is too long."""
    async with client_of(encoder) as client:
        full = await embed(client, [[5] * CONTEXT_TOKENS], is_raw=False)
        assert full.num_tokens == CONTEXT_TOKENS
        with pytest.raises(InputTooLongError) as caught:
            await embed(client, ["a", [5] * (CONTEXT_TOKENS + 1)], is_raw=False)
    assert (caught.value.status, caught.value.max_tokens) == (400, CONTEXT_TOKENS)


async def test_errors_tell_their_cause_in_words(llama: Path, encoder: Runner) -> None:
    """A server without embeddings, one that averages in small batches, bad ids."""
    async with client_of(encoder) as client:
        with pytest.raises(UpstreamError) as caught:
            await embed(client, [[99_999_999]], is_raw=False)
        assert (caught.value.status, caught.value.body) == (
            400, "Prompt contains invalid tokens",
        )  # fmt: skip
        await check_makes_embeddings(client)
    with running(llama) as runner:
        async with client_of(runner) as client:
            for ask in (
                check_makes_embeddings(client),
                embed(client, ["a"], is_raw=False),
            ):
                with pytest.raises(UpstreamError) as caught:
                    await ask
                assert caught.value.status == 501
                assert "does not support embeddings" in caught.value.body
                assert "{" not in caught.value.body
    flags = ("--embeddings", "--pooling", "mean", "--batch-size", "32")
    with running(llama, *flags) as runner:
        async with client_of(runner) as client:
            with pytest.raises(InputTooLongError) as too_long:
                await embed(client, [[5] * 33], is_raw=False)
            assert too_long.value.max_tokens == 32
            assert (await embed(client, [[5] * 32], is_raw=False)).num_tokens == 32


@pytest.mark.parametrize("architecture", ["bert", "nomic-bert"])
def test_encoders_make_no_text(architecture: Encoder, tmp_path: Path) -> None:
    """The engine refuses to generate, whatever the architecture."""
    path = write_tiny_encoder(
        tmp_path / "e.gguf", seed=1, architecture=architecture,
        pooling=gguf.PoolingType.CLS,
    )  # fmt: skip
    with running(path, "--embeddings", ctx_size=64, parallel=1) as runner:
        assert runner.post("/v1/embeddings", input="a")["usage"]["total_tokens"] == 3
        answer = runner.try_post("/completion", prompt="a", n_predict=1)
        assert (answer.status_code, "logits" in answer.text) == (500, True)


def test_answers_that_hold_no_embeddings_are_an_error() -> None:
    """What is damaged is the runner's fault; vectors come in the inputs' order."""
    usage = {"prompt_tokens": 4}
    entries = [{"index": 1, "embedding": [3.0]}, {"index": 0, "embedding": [0.5, None]}]
    made = read_embeddings(orjson.dumps({"data": entries, "usage": usage}))
    assert np.isnan(made.vectors[0]).any()
    assert made.vectors[1].tolist() == [3.0]
    for broken in (
        b"", b"[]", b"{}", b'{"data": [{"index": 0, "embedding": {}}], "usage": {}}',
        b'{"data": [{"index": 0, "embedding": "#"}], "usage": {"prompt_tokens": 1}}',
        b'{"data": [{"index": 0, "embedding": "AAA="}], "usage": {"prompt_tokens": 1}}',
    ):  # fmt: skip
        with pytest.raises(UpstreamError) as caught:
            read_embeddings(broken)
        assert caught.value.status == 502
