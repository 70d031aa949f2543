"""The official Python client, blocking and asynchronous: every method."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest

from tests.clients.library import library
from tests.e2e.processes import Kvbus

ollama = library("ollama")

CLIENT, PACKAGE = "ollama (Python)", "ollama"
pytestmark = pytest.mark.clients
calls = pytest.mark.calls

HELLO = [{"role": "user", "content": "Hello"}]
QUESTION = {"role": "user", "content": "Weather in Oslo?"}
ENDLESS = {"num_predict": -1, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "size": {"enum": [1, 2]}},
    "required": ["mood", "size"],
    "additionalProperties": False,
}
NOUL = {"type": "noul", "instructions": "Is it so?"}
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAA"
    "AABJRU5ErkJggg=="
)


def get_weather(city: str) -> str:
    """Tell the weather.

    Args:
      city: Where.
    """
    return f"Snow in {city}"


class Waiting:
    """An asynchronous client that is waited for: the same calls, results at once."""

    def __init__(self, host: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = ollama.AsyncClient(host=host)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = self._loop.run_until_complete(method(*args, **kwargs))
            if isinstance(result, AsyncGenerator):
                return self._items(result)
            return result

        return call

    def _items(self, stream: AsyncGenerator[Any, None]) -> Iterator[Any]:
        try:
            while True:
                yield self._loop.run_until_complete(anext(stream))
        except StopAsyncIteration:
            return
        finally:
            self._loop.run_until_complete(stream.aclose())

    def end(self) -> None:
        """Close the client and its loop."""
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


@pytest.fixture(params=["Client", "AsyncClient"])
def client(request: pytest.FixtureRequest, served: Kvbus) -> Iterator[Any]:
    """Return each of both clients."""
    if request.param == "Client":
        with ollama.Client(host=served.url) as blocking:
            yield blocking
        return
    waiting = Waiting(served.url)
    yield waiting
    waiting.end()


@calls("list", "show", "ps")
def test_lists(client: Any) -> None:
    """All models, their abilities, and those that are loaded."""
    listed = {model.model: model for model in client.list().models}
    assert set(listed) == {
        "talker:1b", "tooler:1b", "muser:1b", "plain:1b",
        "endless:latest", "encoder:latest",
    }  # fmt: skip
    assert listed["talker:1b"].details.format == "gguf"
    assert listed["talker:1b"].size > 0
    shown = client.show("talker:1b")
    assert set(shown.capabilities) == {"completion", "tools", "thinking"}
    assert shown.modelinfo["general.architecture"] == "llama"
    assert "<tool_call>" in shown.template
    assert client.show("encoder").capabilities == ["embedding"]
    assert "insert" in client.show("endless").capabilities
    client.generate("plain:1b")
    loaded = {model.model: model for model in client.ps().models}
    assert loaded["plain:1b"].context_length == 8192
    assert loaded["plain:1b"].expires_at is not None


@calls("generate", "generate(stream)", "generate(raw, context, suffix, template)")
def test_generate(client: Any) -> None:
    """Whole and streamed, with a conversation by its context, raw, and a gap."""
    whole = client.generate("plain:1b", "Hello", system="Be brief.")
    assert (whole.response, whole.done_reason) == ("Hi there, friend.", "stop")
    assert whole.eval_count == 4
    parts = [*client.generate("plain:1b", "Hello", stream=True)]
    assert "".join(part.response for part in parts) == whole.response
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    again = client.generate("plain:1b", "More", context=whole.context)
    assert again.response == whole.response
    assert again.context[: len(whole.context)] == whole.context
    options = {"num_predict": 5, "temperature": 0, "stop": ["nowhere"]}
    raw = client.generate("endless", "Once", raw=True, options=options)
    assert (raw.eval_count, raw.done_reason, raw.context) == (5, "length", None)
    filled = client.generate("endless", "def f(", suffix="return 1", options=options)
    assert filled.eval_count == 5
    shaped = client.generate(
        "plain:1b",
        "Hello",
        template="<|im_start|>user\n{{ .Prompt }}<|im_end|>\n<|im_start|>assistant\n",
    )
    assert shaped.response == whole.response
    scored = client.generate("plain:1b", "Hello", logprobs=True, top_logprobs=2)
    assert [len(entry.top_logprobs) for entry in scored.logprobs] == [2] * 3


@calls("generate() to load", "keep_alive", "generate(keep_alive=0)")
def test_loading(client: Any) -> None:
    """A model is loaded and freed by empty requests."""
    assert client.generate("muser:1b", keep_alive="10m").done_reason == "load"
    assert "muser:1b" in {model.model for model in client.ps().models}
    assert client.generate("muser:1b", keep_alive=0).done_reason == "unload"
    assert "muser:1b" not in {model.model for model in client.ps().models}
    assert client.chat("muser:1b", []).done_reason == "load"


@calls("chat", "chat(stream)", "chat(logprobs)")
def test_chat(client: Any) -> None:
    """Whole and streamed; a conversation goes on."""
    whole = client.chat("plain:1b", HELLO, options=ollama.Options(seed=7))
    assert whole.message.content == "Hi there, friend."
    assert whole.message.role == "assistant"
    parts = [*client.chat("plain:1b", HELLO, stream=True)]
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert parts[-1].prompt_eval_count == whole.prompt_eval_count
    longer = client.chat("plain:1b", [*HELLO, whole.message, QUESTION])
    assert longer.prompt_eval_count > whole.prompt_eval_count
    scored = client.chat("plain:1b", HELLO, logprobs=True, top_logprobs=1)
    assert "".join(entry.token for entry in scored.logprobs) == whole.message.content


@calls("chat(tools)", "chat(tools, stream)")
def test_tools(client: Any) -> None:
    """A Python function is offered and called, and its result told."""
    asked = {"model": "talker:1b", "tools": [get_weather]}
    answer = client.chat(messages=[QUESTION], **asked)
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == (
        "get_weather",
        {"city": "Oslo"},
    )
    result = {
        "role": "tool",
        "tool_name": call.function.name,
        "content": get_weather(**call.function.arguments),
    }
    messages = [QUESTION, answer.message, result]
    told = client.chat(messages=messages, **asked)
    assert told.message.content == "It snows in Oslo now."
    streamed = [*client.chat(messages=[QUESTION], stream=True, **asked)]
    found = [
        call.function.arguments
        for part in streamed
        for call in part.message.tool_calls or ()
    ]
    assert found == [{"city": "Oslo"}]
    with pytest.raises(ollama.ResponseError, match="does not support tools"):
        client.chat("plain:1b", HELLO, tools=[get_weather])


@calls("chat(think)", "generate(think)")
def test_thinking(client: Any) -> None:
    """Thinking is told apart, may be switched off, and comes first in a stream."""
    mused = client.chat("muser:1b", HELLO, think=True).message
    assert mused.thinking.strip() == "Add the two numbers."
    assert mused.content == "4"
    parts = [*client.chat("muser:1b", HELLO, think="high", stream=True)]
    kinds = [bool(part.message.thinking) for part in parts]
    assert kinds == sorted(kinds, reverse=True)
    assert "".join(part.message.thinking or "" for part in parts) == mused.thinking
    quiet = client.chat("talker:1b", HELLO, think=False).message
    assert (quiet.thinking, quiet.content) == (None, "Ask me about the weather.")
    generated = client.generate("muser:1b", "Hello", think=True)
    assert (generated.thinking, generated.response) == (mused.thinking, "4")
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        client.chat("plain:1b", HELLO, think=True)


@calls("chat(format)", "generate(format)")
def test_format(client: Any) -> None:
    """Both routes follow a schema."""
    said = client.chat("endless", HELLO, format=SCHEMA).message.content
    assert json.loads(said)["mood"] in ("good", "bad")
    said = client.generate("endless", "Hello", format=SCHEMA).response
    assert json.loads(said)["size"] in (1, 2)
    options = {"num_predict": 20}
    loose = client.chat("endless", HELLO, format="json", options=options)
    assert loose.message.content.lstrip().startswith(("{", "["))


@calls("generate(images)", "chat(images)")
def test_images_are_refused(client: Any) -> None:
    """A model without a projector says that it has none."""
    with pytest.raises(ollama.ResponseError, match="does not support images"):
        client.generate("plain:1b", "What is this?", images=[PIXEL])
    message = {"role": "user", "content": "What is this?", "images": [PIXEL]}
    with pytest.raises(ollama.ResponseError, match="does not support images"):
        client.chat("plain:1b", [message])


@calls("embed", "embeddings")
def test_embeddings(client: Any) -> None:
    """Vectors of one text and of several, of an encoder and of a chat model."""
    one = client.embed("encoder", "a b c")
    several = client.embed("encoder", ["a b c", "1 2"], dimensions=16)
    assert len(one.embeddings[0]) == 64
    assert [len(vector) for vector in several.embeddings] == [16, 16]
    older = client.embeddings("encoder", "a b c")
    assert len(older.embedding) == 64
    assert len(client.embed("plain:1b", "Hello").embeddings) == 1
    too_long = " ".join(["a"] * 100)
    assert client.embed("encoder", too_long).embeddings
    with pytest.raises(ollama.ResponseError, match="exceeds"):
        client.embed("encoder", too_long, truncate=False)
    with pytest.raises(ollama.ResponseError, match="does not support chat"):
        client.chat("encoder", HELLO)


@calls("pull", "push", "create", "copy", "delete", "create_blob", "systemone")
def test_management_is_refused(client: Any, tmp_path: Any) -> None:
    """Each call raises the client's error with advice, streamed ones too."""
    blob = tmp_path / "blob"
    blob.write_bytes(b"GGUF")
    asked: list[Callable[[], Any]] = [
        lambda: client.pull("plain:1b"),
        lambda: [*client.pull("plain:1b", stream=True)],
        lambda: client.push("plain:1b"),
        lambda: [*client.push("plain:1b", stream=True)],
        lambda: client.create("new", from_="plain:1b"),
        lambda: [*client.create("new", from_="plain:1b", stream=True)],
        lambda: client.copy("plain:1b", "new"),
        lambda: client.delete("plain:1b"),
        lambda: client.create_blob(blob),
    ]
    for ask in asked:
        with pytest.raises(ollama.ResponseError, match="--model") as caught:
            ask()
        assert caught.value.status_code == 501
    if hasattr(ollama.Client, "systemone"):
        with pytest.raises(ollama.ResponseError, match="not served") as caught:
            client.systemone("plain:1b", "A text", {"q": NOUL})
        assert caught.value.status_code == 501


@calls("404 of every call with a model")
def test_unknown_models(client: Any) -> None:
    """Each call tells the name that is not there."""
    asked: list[Callable[[], Any]] = [
        lambda: client.show("nope"),
        lambda: client.generate("nope", "x"),
        lambda: client.chat("nope", HELLO),
        lambda: [*client.chat("nope", HELLO, stream=True)],
        lambda: client.embed("nope", "x"),
    ]
    for ask in asked:
        with pytest.raises(ollama.ResponseError, match=r"nope.? not found") as caught:
            ask()
        assert caught.value.status_code == 404


@calls("a stream whose runner is killed")
def test_an_error_in_mid_stream(client: Any, served: Kvbus) -> None:
    """The stream raises the client's error, and the next request is served."""
    stream = client.generate("endless", "Once", stream=True, options=ENDLESS)
    assert next(stream).response
    os.kill(served.runner_pid("endless:latest"), signal.SIGKILL)
    with pytest.raises(ollama.ResponseError, match="unexpectedly stopped"):
        _ = [*stream]
    options = {"num_predict": 2}
    assert client.generate("endless", "Once", options=options).eval_count == 2


@calls("a stream that is left")
def test_leaving_a_stream(client: Any, served: Kvbus) -> None:
    """A client that stops reading frees the only slot for the next request."""
    stream = client.chat("endless", HELLO, stream=True, options=ENDLESS)
    assert next(stream).message.content
    stream.close()
    after = client.chat("endless", HELLO, options={"num_predict": 2})
    assert after.eval_count == 2
    model = next(
        model
        for model in served.status()["models"]
        if model["name"] == "endless:latest"
    )
    assert model["waiting"] == 0
