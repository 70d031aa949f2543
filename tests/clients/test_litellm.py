"""LiteLLM: its ways to Ollama (`ollama/`, `ollama_chat/`), OpenAI and Anthropic."""

import json
from typing import Any, Literal

import pytest

from tests.clients.library import is_installed, library
from tests.e2e.processes import Kvbus

CLIENT = PACKAGE = "litellm"
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
calls = pytest.mark.calls

if not is_installed(PACKAGE):
    pytest.skip("litellm is not installed", allow_module_level=True)

HELLO = [{"role": "user", "content": "Hello"}]
QUESTION = {"role": "user", "content": "Weather in Oslo?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "T", "parameters": PARAMETERS},
}


@pytest.fixture(scope="module")
def litellm(environment: None) -> Any:
    """Import it, when the environment forbids it to fetch its table of prices."""
    module = library("litellm")
    module.telemetry = False
    module.num_retries = 0
    return module


@pytest.fixture(params=["ollama", "ollama_chat", "openai", "anthropic"])
def way(request: pytest.FixtureRequest, litellm: Any, served: Kvbus) -> Any:
    """Return each way to complete."""
    provider = request.param
    base = f"{served.url}/v1" if provider == "openai" else served.url

    def complete(model: str, conversation: Any = HELLO, **fields: Any) -> Any:
        return litellm.completion(
            f"{provider}/{model}",
            messages=conversation,
            api_base=base,
            api_key="none",
            timeout=60,
            max_tokens=200,
            **fields,
        )

    complete.provider = provider  # type: ignore[attr-defined]
    return complete


@calls("completion", "completion(stream)", "by ollama, ollama_chat, openai, anthropic")
def test_completion(way: Any) -> None:
    """Whole and streamed, with the usage."""
    whole = way("plain:1b", temperature=0)
    assert whole.choices[0].message.content == "Hi there, friend."
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == 4
    parts = [*way("plain:1b", stream=True)]
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == "Hi there, friend."


@calls("completion(tools)", "by ollama_chat, openai, anthropic")
def test_tools(way: Any) -> None:
    """A call, its result, and what is said of it; streamed too."""
    if way.provider == "ollama":
        pytest.skip("litellm asks for a text in JSON on this way, not for a call")
    answer = way("tooler:1b", [QUESTION], tools=[TOOL]).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "snow"}
    conversation = [QUESTION, answer.message.model_dump(), result]
    told = way("tooler:1b", conversation, tools=[TOOL]).choices[0].message
    assert told.content == "It snows in Oslo."
    parts = [*way("tooler:1b", [QUESTION], tools=[TOOL], stream=True)]
    arguments = "".join(
        call.function.arguments or ""
        for part in parts
        for call in part.choices[0].delta.tool_calls or ()
    )
    assert json.loads(arguments) == {"city": "Oslo"}


@calls("completion(response_format)")
def test_response_format(way: Any) -> None:
    """An object by a schema."""
    if way.provider == "anthropic":
        pytest.skip("litellm asks for a call of a tool there: see test_tools")
    place = library("pydantic").create_model(
        "Place", __config__={"extra": "forbid"}, city=(Literal["Oslo"], ...)
    )
    said = way("endless", response_format=place).choices[0].message.content
    assert json.loads(said) == {"city": "Oslo"}


@calls("completion(reasoning_effort)")
def test_reasoning(way: Any) -> None:
    """Thinking is told apart on each way."""
    if way.provider == "anthropic":
        pytest.skip("litellm asks only models that it knows by name to think there")
    message = way("muser:1b", reasoning_effort="low").choices[0].message
    assert message.content == "4"
    assert message.reasoning_content.strip() == "Add the two numbers."


@calls("acompletion(stream)", "embedding", "aembedding", "responses")
async def test_the_other_calls(litellm: Any, served: Kvbus) -> None:
    """An asynchronous stream, embeddings in two ways, and responses."""
    stream = await litellm.acompletion(
        "ollama_chat/plain:1b", messages=HELLO, api_base=served.url, stream=True
    )
    text = [part.choices[0].delta.content or "" async for part in stream]
    assert "".join(text) == "Hi there, friend."
    native = litellm.embedding(
        "ollama/encoder", input=["a b c", "1"], api_base=served.url
    )
    assert [len(item["embedding"]) for item in native.data] == [64, 64]
    again = await litellm.aembedding(
        "openai/encoder", input=["a b c"], api_base=f"{served.url}/v1", api_key="none"
    )
    assert again.data[0]["embedding"] == pytest.approx(native.data[0]["embedding"])
    answer = litellm.responses(
        "Hello", "openai/plain:1b", api_base=f"{served.url}/v1", api_key="none"
    )
    assert answer.output[-1].content[0].text == "Hi there, friend."


@calls("what the model cannot, or is not there")
def test_errors(way: Any, litellm: Any) -> None:
    """The texts reach the caller."""
    with pytest.raises(litellm.exceptions.NotFoundError, match="'nope' not found"):
        way("nope")
