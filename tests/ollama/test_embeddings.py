"""What requests for embeddings say, and how replies and refusals look."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import ClientSession, web

from proxy.errors import RequestError, RunnerGone, UpstreamError
from proxy.go_json import to_json
from proxy.llamacpp.embeddings import EmbeddingOptions
from proxy.ollama.embedding_handlers import EmbeddingsApi
from proxy.ollama.embeddings import (
    embed_reply,
    keeps_length,
    of_unit_length,
    parse_embed,
    parse_embeddings,
)
from tests.fakes.scripted_turns import (
    FACTS,
    RecordingObserver,
    ScriptedCatalog,
    ScriptedEmbedder,
    ScriptedModel,
)

URL = str


@pytest.fixture
def embedder() -> ScriptedEmbedder:
    """Return what makes the embeddings."""
    return ScriptedEmbedder()


@pytest.fixture
def observer() -> RecordingObserver:
    """Return the observer of the front."""
    return RecordingObserver()


@pytest.fixture
async def url(
    embedder: ScriptedEmbedder, observer: RecordingObserver
) -> AsyncIterator[URL]:
    """Serve the routes for one model, `smol`."""
    model = ScriptedModel(embedder=embedder)
    app = web.Application()
    app.add_routes(EmbeddingsApi(ScriptedCatalog(model), observer=observer).routes())
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=1
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def ask(url: URL, path: str, body: Any) -> tuple[int, Any]:  # noqa: ANN401 - JSON
    """Post a body; returns status and answer."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    async with ClientSession() as session, session.post(url + path, data=data) as reply:
        return reply.status, orjson.loads(await reply.read())


async def test_what_embed_asks_and_answers(
    url: URL, embedder: ScriptedEmbedder, observer: RecordingObserver
) -> None:
    """Inputs and settings reach the model; the reply has Ollama's fields in order."""
    body = {
        "model": "Smol", "input": ["ab", "cde"], "truncate": False, "dimensions": 2,
        "keep_alive": "90s", "options": {"num_ctx": 512, "temperature": None},
    }  # fmt: skip
    status, reply = await ask(url, "/api/embed", body)
    assert status == 200
    fields = ["model", "embeddings", "total_duration", "load_duration"]
    assert list(reply) == [*fields, "prompt_eval_count"]
    assert reply["model"] == "Smol"
    assert reply["embeddings"] == [[1.0, 0.0], [1.0, 0.0]]
    assert reply["prompt_eval_count"] == 5
    assert type(reply["total_duration"]) is int
    options = EmbeddingOptions(truncates=False, max_tokens=512)
    assert embedder.asked == [(["ab", "cde"], options)]
    assert embedder.uses == [90.0]
    (outcome,) = observer.outcomes
    assert (outcome.route, outcome.model) == ("/api/embed", "smol:latest")
    assert (outcome.status, outcome.num_prompt_tokens) == (200, 5)


@pytest.mark.parametrize("given", [{}, {"input": ""}, {"input": []}, {"input": None}])
async def test_nothing_to_embed_loads_the_model(
    url: URL, embedder: ScriptedEmbedder, given: dict[str, Any]
) -> None:
    """The model is used, and the reply has no metrics."""
    status, reply = await ask(url, "/api/embed", {"model": "smol", **given})
    assert (status, reply) == (200, {"model": "smol", "embeddings": []})
    assert (embedder.asked, embedder.uses) == ([], [None])
    assert await ask(url, "/api/embeddings", {"model": "smol"}) == (
        200, {"embedding": []},
    )  # fmt: skip


async def test_the_legacy_route(url: URL, embedder: ScriptedEmbedder) -> None:
    """One prompt, never cut; the vector is as the runner made it."""
    body = {"model": "smol", "prompt": "ab"}
    status, reply = await ask(url, "/api/embeddings", body)
    assert (status, reply) == (200, {"embedding": [3.0, 0.0, 4.0]})
    assert embedder.asked == [(["ab"], EmbeddingOptions(truncates=False))]


EMBED, LEGACY = "/api/embed", "/api/embeddings"
MISSING = {"error": 'model "nope" not found, try pulling it first'}


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        (EMBED, b"", 400, "missing request body"),
        (LEGACY, b"", 400, "missing request body"),
        (EMBED, {"input": "x"}, 404, "model '' not found"),
        (LEGACY, {"prompt": "x"}, 400, "model is required"),
        (EMBED, {"model": "nope", "input": "x"}, 404, MISSING["error"]),
        (LEGACY, {"model": "nope", "prompt": "x"}, 404, MISSING["error"]),
        (EMBED, {"model": "smol", "input": 5}, 400, "invalid input type"),
        (EMBED, {"model": "smol", "input": ["a", 5]}, 400, "invalid input type"),
        (EMBED, {"model": "smol", "input": [None]}, 400, "invalid input type"),
        (
            EMBED, {"model": "smol", "dimensions": "2"}, 400,
            "json: cannot unmarshal string into Go struct field "
            "EmbedRequest.dimensions of type int",
        ),
        (
            LEGACY, {"model": "smol", "prompt": ["x"]}, 400,
            "json: cannot unmarshal array into Go struct field "
            "EmbeddingRequest.prompt of type string",
        ),
        (
            EMBED, {"model": "smol", "input": "x", "options": {"num_ctx": "9"}}, 500,
            'option "num_ctx" must be of type integer',
        ),
        (
            EMBED, {"model": "smol", "keep_alive": "9"}, 400,
            'time: missing unit in duration "9"',
        ),
    ],
)  # fmt: skip
async def test_mistakes(
    url: URL,
    path: str,
    body: Any,  # noqa: ANN401 - JSON
    status: int,
    error: str,
) -> None:
    """Each gets Ollama's status and text."""
    assert await ask(url, path, body) == (status, {"error": error})


@pytest.mark.parametrize(
    ("failure", "status", "error"),
    [
        (RequestError(400, "the input length exceeds ..."), 400, "the input length"),
        (UpstreamError(501, "This server does not"), 501, "This server does not"),
        (RunnerGone("killed"), 500, "model runner has unexpectedly stopped: killed"),
    ],
)
async def test_failures(
    url: URL, embedder: ScriptedEmbedder, failure: Exception, status: int, error: str
) -> None:
    """The runner's status and words; the legacy route says 500 to all of them."""
    embedder.failure = failure
    got, reply = await ask(url, EMBED, {"model": "smol", "input": "x"})
    assert (got, reply["error"][: len(error)]) == (status, error)
    got, reply = await ask(url, LEGACY, {"model": "smol", "prompt": "x"})
    assert (got, reply["error"][: len(error)]) == (500, error)


async def test_vectors_that_are_no_numbers(
    url: URL, embedder: ScriptedEmbedder
) -> None:
    """They are an error, and never a JSON null."""
    embedder.vector = (1.0, float("nan"))
    text = {"error": "embedding contains NaN or Inf values"}
    assert await ask(url, EMBED, {"model": "smol", "input": "x"}) == (400, text)
    assert await ask(url, LEGACY, {"model": "smol", "prompt": "x"}) == (500, text)


async def test_a_client_that_leaves_ends_the_work(
    url: URL, embedder: ScriptedEmbedder, observer: RecordingObserver
) -> None:
    """The task is cancelled, and the observer hears of it."""
    embedder.gate = asyncio.Event()
    request = asyncio.create_task(ask(url, EMBED, {"model": "smol", "input": "x"}))
    await embedder.is_stuck.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    async with asyncio.timeout(5):
        await observer.num_finished.acquire()
    (outcome,) = observer.outcomes
    assert (outcome.status, outcome.error) == (499, "ClientGone")


async def test_a_big_reply_is_written_beside_the_loop(
    url: URL, embedder: ScriptedEmbedder
) -> None:
    """More than a megabyte of vectors looks like any other reply."""
    embedder.vector = tuple([1.0] + [0.0] * 1023)
    body = {"model": "smol", "input": ["x"] * 300}
    status, reply = await ask(url, EMBED, body)
    assert (status, len(reply["embeddings"])) == (200, 300)
    assert {tuple(vector[:2]) for vector in reply["embeddings"]} == {(1.0, 0.0)}


def test_what_is_not_given_has_ollama_s_defaults() -> None:
    """Names in any case; null is not given."""
    wanted = parse_embed(b'{"MODEL": "m", "Input": "x", "truncate": null}')
    assert (wanted.model, wanted.inputs, wanted.truncates) == ("m", ("x",), True)
    assert (wanted.dimensions, wanted.keep_alive_seconds) == (0, None)
    assert parse_embeddings(b'{"model": "m", "prompt": "x"}').inputs == ("x",)


def test_vectors_get_length_1() -> None:
    """Whole or cut; a zero vector stays one, more dimensions than there are do not."""
    vectors = [np.array(v, np.float32) for v in ([3.0, 4.0, 12.0], [0.0, 0.0, 0.0])]
    whole = of_unit_length(vectors)
    assert np.allclose(whole[0], np.array([3.0, 4.0, 12.0]) / 13)
    assert whole[0].dtype == np.float32
    assert whole[1].tolist() == [0.0, 0.0, 0.0]
    assert np.allclose(of_unit_length(vectors, 2)[0], [0.6, 0.8])
    for dimensions in (0, 3, 4, -1):
        assert np.array_equal(of_unit_length(vectors, dimensions)[0], whole[0])


def test_numbers_are_written_as_float32() -> None:
    """The fewest digits that tell a float32 apart, and names as Go escapes them."""
    reply = embed_reply("<m>", [np.array([0.1, 1 / 3], dtype=np.float32)])
    assert to_json(reply) == (
        b'{"model":"\\u003cm\\u003e","embeddings":[[0.1,0.33333334]]}'
    )


def test_whose_vectors_keep_their_length() -> None:
    """Those that Ollama's runners once gave raw on the legacy route."""
    cases = [
        # architecture, metadata, tokenizer, kept
        ("bert", {"bert.pooling_type": 1}, "bert", False),
        (
            "bert",
            {"bert.pooling_type": 1, "bert.normalize_embeddings": False},
            "bert",
            True,
        ),
        ("bert", {"bert.pooling_type": 1}, "t5", True),
        ("bert", {}, "t5", False),
        ("nomic-bert", {"nomic-bert.pooling_type": 1}, "bert", True),
        ("qwen3", {"qwen3.pooling_type": 3}, "gpt2", False),
    ]
    for architecture, metadata, tokenizer, is_kept in cases:
        facts = replace(
            FACTS,
            architecture=architecture,
            metadata=metadata,
            tokenizer_model=tokenizer,
        )
        assert keeps_length(facts) == is_kept, facts
