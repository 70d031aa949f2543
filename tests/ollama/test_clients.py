"""The official Python client against the front."""

import asyncio
from collections.abc import AsyncGenerator

import ollama
import pytest

from proxy.errors import RunnerGone
from tests.fakes.scripted_turns import text_event
from tests.ollama.conftest import Front

MESSAGES = [{"role": "user", "content": "Say hi."}]


async def test_blocking_client(front: Front) -> None:
    """Lists, facts and both ways of both routes work with the blocking client."""

    def work(client: ollama.Client) -> None:
        (listed,) = client.list().models
        assert listed.model == "smol:latest"
        assert listed.details is not None
        assert listed.details.family == "llama"
        (running,) = client.ps().models
        assert running.context_length == 4096
        assert running.expires_at is not None
        shown = client.show("smol")
        assert shown.capabilities == ["completion"]
        assert shown.modelinfo

        whole = client.chat("smol", MESSAGES)
        assert whole.message.content == "Hi there."
        assert (whole.done, whole.done_reason) == (True, "stop")
        assert whole.prompt_eval_count == 27
        lines = list(client.chat("smol", MESSAGES, stream=True))
        assert "".join(line.message.content or "" for line in lines) == "Hi there."
        assert lines[-1].eval_duration == 55_817_000

        generated = client.generate("smol", "Say hi.", options={"seed": 1})
        assert generated.response == "Hi there."
        pieces = list(client.generate("smol", "Say hi.", stream=True))
        assert [piece.done for piece in pieces] == [False, False, True]
        assert client.generate("smol", keep_alive=0).done_reason == "unload"

    await asyncio.to_thread(work, ollama.Client(host=front.url))


async def test_async_client(front: Front) -> None:
    """Both ways of both routes work with the asynchronous client."""
    client = ollama.AsyncClient(host=front.url)
    whole = await client.chat("smol", MESSAGES, format="json", think=False)
    assert whole.message.content == "Hi there."
    stream = await client.chat("smol", MESSAGES, stream=True, keep_alive="10m")
    assert [line.done async for line in stream] == [False, False, True]
    generated = await client.generate("smol", "Say hi.", raw=True)
    assert generated.response == "Hi there."
    stream_of_pieces = await client.generate("smol", "Say hi.", stream=True)
    assert [piece.response async for piece in stream_of_pieces] == [
        "Hi",
        " there.",
        "",
    ]


async def test_errors_reach_the_client_as_text(front: Front) -> None:
    """Refusals and broken streams raise the client's own error with our text."""
    client = ollama.AsyncClient(host=front.url)
    with pytest.raises(ollama.ResponseError, match="model 'nope' not found") as caught:
        await client.chat("nope", MESSAGES)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="does not support tools"):
        await client.chat("smol", MESSAGES, tools=[{"type": "function"}])
    with pytest.raises(ollama.ResponseError, match="kvbus") as caught:
        await client.pull("smol")
    assert caught.value.status_code == 501
    front.turns.script = [text_event("Par"), RunnerGone("killed")]
    stream = await client.chat("smol", MESSAGES, stream=True)
    with pytest.raises(ollama.ResponseError, match="unexpectedly stopped"):
        _ = [line async for line in stream]


async def test_a_client_that_stops_reading_ends_the_turn(front: Front) -> None:
    """Leaving a stream of the asynchronous client frees the slot within a second."""
    front.turns.script = [text_event("Hi"), asyncio.Event()]
    client = ollama.AsyncClient(host=front.url)
    stream = await client.chat("smol", MESSAGES, stream=True)
    line = await anext(stream)
    assert line.message.content == "Hi"
    assert isinstance(stream, AsyncGenerator)
    await stream.aclose()
    async with asyncio.timeout(1):
        await front.turns.ended.wait()
    assert isinstance(front.turns.exit_reason, asyncio.CancelledError)
