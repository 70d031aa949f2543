"""langchain-ollama: chat models, completions, embeddings."""

from typing import Any, Literal

import pytest

from tests.clients.library import library
from tests.e2e.processes import Kvbus

langchain = library("langchain_ollama")
messages = library("langchain_core.messages")
pydantic = library("pydantic")

CLIENT = PACKAGE = "langchain-ollama"
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
calls = pytest.mark.calls


def get_weather(city: str) -> str:
    """Tell the weather."""
    return f"Snow in {city}"


@pytest.fixture
def chat(served: Kvbus) -> Any:
    """Return what makes a chat model."""

    def make(model: str, **fields: Any) -> Any:
        return langchain.ChatOllama(
            model=model, base_url=served.url, validate_model_on_init=True, **fields
        )

    return make


@calls("ChatOllama.invoke", "ChatOllama.stream", "ChatOllama.batch")
def test_chat(chat: Any) -> None:
    """Whole, streamed, and several at once, with the counts of tokens."""
    model = chat("plain:1b", temperature=0, num_ctx=4096, keep_alive="5m", seed=3)
    conversation = [("system", "Be brief."), ("human", "Hello")]
    whole = model.invoke(conversation)
    assert whole.content == "Hi there, friend."
    assert whole.response_metadata["done_reason"] == "stop"
    assert whole.usage_metadata["output_tokens"] == 4
    parts = [*model.stream(conversation)]
    assert "".join(part.content for part in parts) == whole.content
    several = model.batch(["Hello", "Hello again"])
    assert {answer.content for answer in several} == {whole.content}


@calls("ChatOllama.ainvoke", "ChatOllama.astream")
async def test_asynchronous_chat(chat: Any) -> None:
    """The same, asynchronously."""
    model = chat("plain:1b")
    assert (await model.ainvoke("Hello")).content == "Hi there, friend."
    text = [part.content async for part in model.astream("Hello")]
    assert "".join(text) == "Hi there, friend."


@calls("ChatOllama.bind_tools", "ChatOllama.bind_tools(stream)")
def test_tools(chat: Any) -> None:
    """A function is offered and called, and its result told; streamed too."""
    model = chat("tooler:1b").bind_tools([get_weather])
    question = messages.HumanMessage("Weather in Oslo?")
    answer = model.invoke([question])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})
    result = messages.ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])
    assert model.invoke([question, answer, result]).content == "It snows in Oslo."
    streamed = [call for part in model.stream([question]) for call in part.tool_calls]
    assert [call["args"] for call in streamed] == [{"city": "Oslo"}]


@calls("ChatOllama(reasoning)")
def test_reasoning(chat: Any) -> None:
    """Thinking stands beside the content, or is switched off."""
    answer = chat("muser:1b", reasoning=True).invoke("2 + 2?")
    thinking = answer.additional_kwargs["reasoning_content"]
    assert (thinking.strip(), answer.content) == ("Add the two numbers.", "4")
    quiet = chat("talker:1b", reasoning=False).invoke("Hello")
    assert quiet.content == "Ask me about the weather."


@calls("ChatOllama.with_structured_output (json_schema, function_calling, json_mode)")
def test_structured_output(chat: Any) -> None:
    """An object of a class, by a schema and by a call; and free JSON."""
    place = pydantic.create_model(
        "get_weather",
        __doc__="A place.",
        __config__={"extra": "forbid"},
        city=(Literal["Oslo"], ...),
    )
    by_schema = chat("endless").with_structured_output(place)
    assert by_schema.invoke("Where?").city == "Oslo"
    by_call = chat("tooler:1b").with_structured_output(place, method="function_calling")
    assert by_call.invoke("Where?").city == "Oslo"
    loose = chat("endless", format="json", num_predict=10).invoke("Where?").content
    assert loose.lstrip().startswith(("{", "["))


@calls("OllamaLLM.invoke", "OllamaLLM.stream", "OllamaLLM.ainvoke")
async def test_completion(served: Kvbus) -> None:
    """Text to text, whole and streamed."""
    model = langchain.OllamaLLM(model="plain:1b", base_url=served.url)
    assert model.invoke("Hello") == "Hi there, friend."
    assert "".join(model.stream("Hello")) == "Hi there, friend."
    assert await model.ainvoke("Hello") == "Hi there, friend."


@calls("OllamaEmbeddings.embed_query", "embed_documents", "aembed_documents")
async def test_embeddings(served: Kvbus) -> None:
    """One vector, several, and those asynchronously."""
    model = langchain.OllamaEmbeddings(model="encoder", base_url=served.url)
    query = model.embed_query("a b c")
    assert len(query) == 64
    documents = model.embed_documents(["a b c", "1 2 3"])
    assert documents[0] == pytest.approx(query)
    assert await model.aembed_documents(["1 2 3"]) == [pytest.approx(documents[1])]


@calls("what the model cannot, or is not there")
def test_errors(chat: Any, served: Kvbus) -> None:
    """The texts reach the caller."""
    error = library("ollama").ResponseError
    with pytest.raises(ValueError, match="`nope` not found"):
        chat("nope")
    unchecked = langchain.ChatOllama(model="nope", base_url=served.url)
    with pytest.raises(error, match="'nope' not found"):
        unchecked.invoke("Hello")
    with pytest.raises(error, match="does not support tools"):
        chat("plain:1b").bind_tools([get_weather]).invoke("Hello")
