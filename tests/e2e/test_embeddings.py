"""Embeddings of encoders, of chat models and of given servers, by real clients."""

import base64
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import pytest

from tests.e2e.processes import Kvbus, children_of
from tests.e2e.test_attached import llama_server
from tests.e2e.test_sharing import TEXT
from tests.embedding_model import write_tiny_encoder
from tests.runners import running

ENCODER_CONTEXT = 64
NUMBERS = " ".join(map(str, range(100)))
"""A text of 100 tokens of the encoders here."""


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the clients ask no proxy of the machine's."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


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
    assert (made.total_duration or 0) > 0
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


def companion_pids(kvbus: Kvbus) -> list[int]:
    """Return the pids of the runner for embeddings: guard and engine."""
    return [
        pid
        for pid in children_of(kvbus.pid)
        if b"--embeddings" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def loaded_names(kvbus: Kvbus) -> list[str]:
    """Return the models that /api/ps lists."""
    answer = httpx.get(f"{kvbus.url}/api/ps", trust_env=False, timeout=10)
    return [model["name"] for model in answer.json()["models"]]


def test_a_chat_model_keeps_its_slots_hot(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """Embeddings come from a process of their own, started by the first of them."""
    texts = ["a b 17", "The keeper of the lighthouse", "x"]
    flags, context = ("--embeddings", "--pooling", "last"), 2560
    with running(models["tiny"], *flags, ctx_size=context, parallel=1) as runner:
        expected = direct(runner.post, *texts)
        token_ids = runner.post("/tokenize", content=TEXT * 2)["tokens"]
        (expected_cut,) = direct(runner.post, token_ids[: context - 1])
    kvbus.start(
        "--model", f"tiny={models['tiny']}", "--store", "none", "--ctx", str(context)
    )
    client = ollama.Client(kvbus.url)
    pids = kvbus.runner_pids()
    kvbus.generate("tiny", TEXT)
    assert companion_pids(kvbus) == []
    first = client.embed("tiny", texts)
    assert (first.load_duration or 0) > 10_000_000
    for _ in range(3):
        made = client.embed("tiny", texts)
        assert np.allclose(made.embeddings, expected, atol=1e-6)
        kvbus.generate("tiny", TEXT)
        assert int(kvbus.turns()[-1]["reused_tokens"]) > 1700
    assert kvbus.runner_pids() == pids
    legacy = client.embeddings("tiny", texts[1]).embedding
    assert np.allclose(legacy, expected[1], atol=1e-6)
    long = client.embed("tiny", ["x", TEXT * 2])
    assert np.allclose(long.embeddings, [expected[2], expected_cut], atol=1e-6)
    with pytest.raises(ollama.ResponseError) as refused:
        client.embeddings("tiny", TEXT * 2)
    assert (refused.value.status_code, refused.value.error) == (
        500, "the input length exceeds the context length",
    )  # fmt: skip
    assert client.show("tiny").capabilities == ["completion"]
    assert kvbus.metric("kvbus_runner_failures_total") == 0


def test_the_process_for_embeddings_comes_and_goes(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """It ends with its keep-alive or with the model, and a dead one is replaced."""
    kvbus.start("--model", f"tiny={models['tiny']}", "--store", "none")
    expected = embed(kvbus, model="tiny", input="x")["embeddings"]
    os.kill(companion_pids(kvbus)[0], signal.SIGKILL)
    assert embed(kvbus, model="tiny", input="x")["embeddings"] == expected
    assert kvbus.metric("kvbus_runner_failures_total") == 1
    assert embed(kvbus, model="tiny", input="x", keep_alive=0)["embeddings"] == expected
    kvbus.wait(lambda: not companion_pids(kvbus), what="the end of the companion")
    assert loaded_names(kvbus) == ["tiny:latest"]
    assert embed(kvbus, model="tiny")["embeddings"] == []
    assert companion_pids(kvbus)
    answer = kvbus.post("/api/generate", {"model": "tiny", "keep_alive": 0})
    assert answer.json()["done_reason"] == "unload"
    assert (companion_pids(kvbus), loaded_names(kvbus)) == ([], [])
    assert embed(kvbus, model="tiny", input="x")["embeddings"] == expected
    assert loaded_names(kvbus) == ["tiny:latest"]
    assert kvbus.status()["models"][0]["runners"][0]["ready"] is False


@pytest.mark.clients
def test_openai_s_client(kvbus: Kvbus, encoder: Path) -> None:
    """Texts, token ids, both encodings, dimensions, usage and errors."""
    openai = pytest.importorskip("openai")
    kvbus.start("--model", f"emb={encoder}", "--store", "none")
    expected = embed(kvbus, model="emb", input=["a b 17", "x"])["embeddings"]
    with openai.OpenAI(base_url=f"{kvbus.url}/v1", api_key="-", max_retries=0) as sdk:
        create = sdk.embeddings.create
        made = create(model="emb", input=["a b 17", "x"])  # base64 by itself
        assert np.allclose(
            [entry.embedding for entry in made.data], expected, atol=1e-7
        )
        assert [entry.index for entry in made.data] == [0, 1]
        assert (made.object, made.model) == ("list", "emb")
        assert (made.usage.prompt_tokens, made.usage.total_tokens) == (8, 8)
        ids = [2, 5, 6, 48, 3]
        for given in ("a b 17", ids, [ids], [ids, [2, 28, 3]]):
            answer = create(model="emb", input=given, encoding_format="float")
            assert np.allclose(answer.data[0].embedding, expected[0], atol=1e-7), given
        short = create(model="emb", input="a b 17", dimensions=4).data[0].embedding
        assert np.allclose(short, unit(expected[0][:4]), atol=1e-6)
        assert len(create(model="emb", input=NUMBERS).data[0].embedding) == 64
        assert len(create(model="emb", input="").data) == 1
        with pytest.raises(openai.NotFoundError, match="try pulling it first") as none:
            create(model="nope", input="x")
        assert none.value.type == "not_found_error"
        with pytest.raises(openai.BadRequestError, match="invalid tokens"):
            create(model="emb", input=[99_999_999])
    body = {"model": "emb", "input": "x", "encoding_format": "base64"}
    reply = kvbus.post("/v1/embeddings", body).json()
    packed = base64.b64decode(reply["data"][0]["embedding"])
    assert np.frombuffer(packed, dtype="<f4").tolist() == pytest.approx(expected[1])


def test_many_inputs_and_a_client_that_leaves(kvbus: Kvbus, encoder: Path) -> None:
    """They come in order; when nobody waits any more the rest is not computed."""
    kvbus.start("--model", f"emb={encoder}", "--store", "none")
    texts = [f"{number % 200} {number // 200}" for number in range(300)]
    made = embed(kvbus, model="emb", input=texts)
    for number in (0, 63, 64, 299):
        one = embed(kvbus, model="emb", input=texts[number])["embeddings"]
        assert np.allclose(made["embeddings"][number], one[0], atol=1e-6)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{kvbus.url}/api/embed",
            json={"model": "emb", "input": ["1 2 3 4 5 6 7 8 9"] * 50_000},
            timeout=httpx.Timeout(10, read=0.5),
            trust_env=False,
        )
    started = time.monotonic()
    embed(kvbus, model="emb", input="x")
    assert time.monotonic() - started < 3.0
    gone = 'kvbus_requests_total{route="/api/embed",status="499"} 1.0'
    kvbus.wait(
        lambda: gone in httpx.get(f"{kvbus.url}/metrics", trust_env=False).text,
        what="the count of the client that left",
    )


def test_given_servers(kvbus: Kvbus, encoder: Path, models: dict[str, Path]) -> None:
    """One in embedding mode works; one that was started without says so clearly."""
    with (
        llama_server(encoder, "--embeddings", "--ctx-size", "64", alias="emb") as one,
        llama_server(models["tiny"], alias="chat") as other,
    ):
        kvbus.start("--upstream", one, "--upstream", other, "--store", "none")
        expected = httpx.post(
            f"{one}/v1/embeddings", json={"input": "a b 17"}, trust_env=False
        ).json()["data"][0]["embedding"]
        made = embed(kvbus, model="emb", input=["a b 17", NUMBERS])
        assert np.allclose(made["embeddings"][0], expected, atol=1e-6)
        assert ollama.Client(kvbus.url).show("emb").capabilities == ["embedding"]
        refusal = (
            "This server does not support embeddings. Start it with `--embeddings`"
        )
        for path, status in (("/api/embed", 501), ("/api/embeddings", 500)):
            answer = kvbus.post(path, {"model": "chat", "input": "x", "prompt": "x"})
            assert (answer.status_code, answer.json()) == (status, {"error": refusal})
        answer = kvbus.post("/v1/embeddings", {"model": "chat", "input": "x"})
        assert answer.status_code == 501
        assert answer.json()["error"]["message"] == refusal


def test_a_given_server_that_does_both(kvbus: Kvbus, models: dict[str, Path]) -> None:
    """Embeddings wait for idle slots; what they have emptied is not taken for hot."""
    flags = ("--embeddings", "--pooling", "last", "--parallel", "2", "--cache-ram", "0")
    with llama_server(models["endless"], *flags, alias="both") as url:
        kvbus.start("--upstream", url, "--store", "none")
        expected = embed(kvbus, model="both", input=["x", "y"])["embeddings"]
        answers: list[dict[str, Any]] = []

        def chat() -> None:
            answers.append(kvbus.generate("both", "Go on", num_predict=500))

        chats = [threading.Thread(target=chat) for _ in range(2)]
        for thread in chats:
            thread.start()
        for _ in range(5):
            assert (
                embed(kvbus, model="both", input=["x", "y"])["embeddings"] == expected
            )
        for thread in chats:
            thread.join(60)
        assert [answer["eval_count"] for answer in answers] == [500, 500]
        assert answers[0]["response"] == answers[1]["response"]
        kvbus.generate("both", TEXT)
        for inputs, kept in (("x", True), (["x", "y"], False), ("x", True)):
            embed(kvbus, model="both", input=inputs)
            kvbus.generate("both", TEXT)
            turn = kvbus.turns()[-1]
            # what was believed of the slot is what the engine found in it
            believed, found = int(turn["slot_tokens"]), int(turn["reused_tokens"])
            assert (believed > 2000, found > 2000) == (kept, kept), turn
