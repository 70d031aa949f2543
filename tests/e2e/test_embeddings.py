"""Embeddings of encoders, of chat models and of given servers, by real clients."""

import base64
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest

from tests.e2e.processes import Kvbus
from tests.e2e.test_attached import llama_server
from tests.e2e.test_sharing import TEXT
from tests.embedding_model import write_tiny_encoder
from tests.runners import running

ENCODER_CONTEXT = 64
NUMBERS = " ".join(map(str, range(100)))
"""A text of 100 tokens of the encoders here."""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny encoder."""
    path = tmp_path_factory.mktemp("encoder") / "encoder.gguf"
    return write_tiny_encoder(path, seed=1, context_length=ENCODER_CONTEXT)


def unit(vector: Any) -> np.ndarray[Any, np.dtype[np.float64]]:  # noqa: ANN401
    """Return a vector with length 1."""
    values = np.asarray(vector, dtype=np.float64)
    return values / np.linalg.norm(values)


def embed(kvbus: Kvbus, **body: Any) -> dict[str, Any]:  # noqa: ANN401
    """Ask /api/embed; returns the answer."""
    answer = kvbus.post("/api/embed", body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def direct(runner_post: Any, *inputs: str | list[int]) -> list[Any]:  # noqa: ANN401
    """Return the vectors that a llama-server makes of inputs, one by one."""
    return [
        runner_post("/v1/embeddings", input=item)["data"][0]["embedding"]
        for item in inputs
    ]


def test_an_encoder_by_all_routes(kvbus: Kvbus, encoder: Path) -> None:
    """The vectors are those of a llama-server, in order; cut as Ollama cuts."""
    texts = ["a b 17", "zz top", "7 8 9", "a b 17"]
    flags = ("--embeddings", "--batch-size", "64", "--ubatch-size", "64")
    with running(encoder, *flags, ctx_size=64, parallel=1) as runner:
        expected = direct(runner.post, *texts)
        cut = [2, *runner.post("/tokenize", content=NUMBERS)["tokens"][:62], 3]
        (expected_cut,) = direct(runner.post, cut)
        raw = runner.post("/v1/embeddings", input="a b 17", embd_normalize=-1)
    kvbus.start("--model", f"emb={encoder}", "--store", "none")
    client = ollama.Client(kvbus.url)
    made = client.embed("emb", texts)
    assert np.allclose(made.embeddings, expected, atol=1e-6)
    assert made.model == "emb"
    assert (made.prompt_eval_count, made.embeddings[0]) == (22, made.embeddings[3])
    assert made.total_duration is not None and made.total_duration > 0
    one = client.embed("emb", "a b 17")
    assert one.embeddings == [made.embeddings[0]]
    short = client.embed("emb", "a b 17", dimensions=5).embeddings[0]
    assert np.allclose(short, unit(expected[0][:5]), atol=1e-6)
    assert client.embed("emb", "").embeddings == []
    assert client.embed("emb", []).embeddings == []
    legacy = client.embeddings("emb", "a b 17").embedding
    assert np.allclose(legacy, expected[0], atol=1e-6)
    assert not np.allclose(legacy, raw["data"][0]["embedding"], atol=1e-2)
    assert client.embeddings("emb", "").embedding == []
    assert np.allclose(
        client.embed("emb", NUMBERS).embeddings, [expected_cut], atol=1e-6
    )
    with pytest.raises(ollama.ResponseError) as refused:
        client.embed("emb", ["a", NUMBERS], truncate=False)
    assert (refused.value.status_code, refused.value.error) == (
        400, "the input length exceeds the context length",
    )  # fmt: skip
    narrow = embed(kvbus, model="emb", input="7 8 9 10", options={"num_ctx": 5})
    assert np.allclose(narrow["embeddings"], [expected[2]], atol=1e-6)
    check_that_it_makes_no_text(kvbus, client)


def check_that_it_makes_no_text(kvbus: Kvbus, client: ollama.Client) -> None:
    """All generating routes refuse an encoder; it is listed as what it is."""
    assert client.show("emb").capabilities == ["embedding"]
    for path, body, what in (
        ("/api/chat", {"messages": [{"role": "user", "content": "x"}]}, "chat"),
        ("/api/generate", {"prompt": "x"}, "generate"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}]},
            "chat",
        ),
        ("/v1/completions", {"prompt": "x"}, "generate"),
        ("/v1/responses", {"input": "x"}, "chat"),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
            "chat",
        ),
    ):
        answer = kvbus.post(path, {"model": "emb", **body})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        text = error if isinstance(error, str) else error["message"]
        assert text == f'"emb" does not support {what}', path


def test_a_chat_model_keeps_its_slots_hot(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """Embeddings come from a process of their own, which comes and goes by itself."""
    texts = ["a b 17", "The keeper of the lighthouse", "x"]
    with running(models["tiny"], "--embeddings", "--pooling", "last") as runner:
        expected = direct(runner.post, *texts)
        slots = runner.get("/slots")
    assert slots
    kvbus.start("--model", f"tiny={models['tiny']}", "--store", "none")
    client = ollama.Client(kvbus.url)
    pids = kvbus.runner_pids()
    kvbus.generate("tiny", TEXT)
    first = client.embed("tiny", texts, keep_alive="1s")
    assert first.load_duration is not None and first.load_duration > 10_000_000
    for _ in range(3):
        made = client.embed("tiny", texts)
        assert np.allclose(made.embeddings, expected, atol=1e-6)
        kvbus.generate("tiny", TEXT)
        assert int(kvbus.turns()[-1]["reused_tokens"]) > 1700
    assert kvbus.runner_pids() == pids
    legacy = client.embeddings("tiny", texts[1]).embedding
    assert np.allclose(legacy, expected[1], atol=1e-6)
    assert kvbus.metric("kvbus_runner_failures_total") == 0
