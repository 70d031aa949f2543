"""llama-index-llms-ollama and llama-index-embeddings-ollama."""

from typing import Any, Literal

import pytest

from tests.clients.library import library
from tests.e2e.processes import Kvbus

llms = library("llama_index.llms.ollama")
embeddings = library("llama_index.embeddings.ollama")
core_llms = library("llama_index.core.llms")
tools = library("llama_index.core.tools")
prompts = library("llama_index.core.prompts")
pydantic = library("pydantic")

CLIENT = PACKAGE = "llama-index-llms-ollama"
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
calls = pytest.mark.calls


def get_weather(city: str) -> str:
    """Tell the weather."""
    return f"Snow in {city}"


@pytest.fixture
def llm(served: Kvbus) -> Any:
    """Return what makes a model with the library's own settings."""

    def make(model: str, **fields: Any) -> Any:
        return llms.Ollama(
            model=model, base_url=served.url, request_timeout=60, **fields
        )

    return make


@calls("complete", "stream_complete", "acomplete")
async def test_complete(llm: Any) -> None:
    """Text to text; the context that it asks for is all that the model was made for."""
    model = llm("plain:1b")
    assert model.complete("Hello").text == "Hi there, friend."
    assert model.get_context_window() == 131072
    parts = [*model.stream_complete("Hello")]
    assert parts[-1].text == "Hi there, friend."
    assert (await model.acomplete("Hello")).text == "Hi there, friend."


@calls("chat", "stream_chat", "achat", "astream_chat")
async def test_chat(llm: Any) -> None:
    """Whole and streamed, in both ways."""
    model = llm("plain:1b", context_window=4096, keep_alive="5m")
    conversation = [
        core_llms.ChatMessage(role="system", content="Be brief."),
        core_llms.ChatMessage(role="user", content="Hello"),
    ]
    whole = model.chat(conversation)
    assert whole.message.content == "Hi there, friend."
    assert whole.raw["usage"]["completion_tokens"] == 4
    deltas = [part.delta for part in model.stream_chat(conversation)]
    assert "".join(deltas) == whole.message.content
    assert (await model.achat(conversation)).message.content == whole.message.content
    stream = await model.astream_chat(conversation)
    assert "".join([part.delta async for part in stream]) == whole.message.content


@calls("chat_with_tools", "stream_chat_with_tools", "predict_and_call")
def test_tools(llm: Any) -> None:
    """A function is offered, called, and its result told."""
    model = llm("tooler:1b")
    tool = tools.FunctionTool.from_defaults(fn=get_weather)
    answer = model.chat_with_tools([tool], user_msg="Weather in Oslo?")
    (call,) = model.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Oslo"})
    result = core_llms.ChatMessage(
        role="tool",
        content=get_weather(**call.tool_kwargs),
        additional_kwargs={"tool_call_id": call.tool_id},
    )
    question = core_llms.ChatMessage(role="user", content="Weather in Oslo?")
    history = [question, answer.message, result]
    told = model.chat_with_tools([tool], chat_history=history)
    assert told.message.content == "It snows in Oslo."
    *_, last = model.stream_chat_with_tools([tool], user_msg="Weather in Oslo?")
    (call,) = model.get_tool_calls_from_response(last)
    assert call.tool_kwargs == {"city": "Oslo"}
    assert str(model.predict_and_call([tool], "Weather in Oslo?")) == "Snow in Oslo"


@calls("chat(thinking)")
def test_thinking(llm: Any) -> None:
    """Thinking is a block of its own."""
    question = [core_llms.ChatMessage(role="user", content="2 + 2?")]
    message = llm("muser:1b", thinking=True).chat(question).message
    thinking = [
        block.content for block in message.blocks if block.block_type == "thinking"
    ]
    assert [text.strip() for text in thinking] == ["Add the two numbers."]
    assert message.content == "4"
    quiet = llm("talker:1b", thinking=False).chat(question).message
    assert quiet.content == "Ask me about the weather."


@calls("structured_predict", "as_structured_llm", "json_mode")
def test_structured_output(llm: Any) -> None:
    """An object of a class, and free JSON."""
    place = pydantic.create_model(
        "Place", __config__={"extra": "forbid"}, city=(Literal["Oslo"], ...)
    )
    prompt = prompts.PromptTemplate("Where?")
    assert llm("endless").structured_predict(place, prompt).city == "Oslo"
    structured = llm("endless").as_structured_llm(place)
    assert structured.complete("Where?").raw.city == "Oslo"
    loose = llm(
        "endless", json_mode=True, additional_kwargs={"num_predict": 10}
    ).complete("Where?")
    assert loose.text.lstrip().startswith(("{", "["))


@calls("get_query_embedding", "get_text_embedding_batch", "aget_text_embedding")
async def test_embeddings(served: Kvbus) -> None:
    """One vector, several, and one asynchronously."""
    model = embeddings.OllamaEmbedding(model_name="encoder", base_url=served.url)
    query = model.get_query_embedding("a b c")
    assert len(query) == 64
    several = model.get_text_embedding_batch(["a b c", "1 2 3"])
    assert several[0] == pytest.approx(query)
    assert await model.aget_text_embedding("1 2 3") == pytest.approx(several[1])


@calls("what the model cannot, or is not there")
def test_errors(llm: Any) -> None:
    """The texts reach the caller."""
    error = library("ollama").ResponseError
    with pytest.raises(error, match="'nope' not found"):
        llm("nope").complete("Hello")
    tool = tools.FunctionTool.from_defaults(fn=get_weather)
    with pytest.raises(error, match="does not support tools"):
        llm("plain:1b").chat_with_tools([tool], user_msg="Hello")
    with pytest.raises(error, match="num_ctx 131072 is larger than"):
        llm("plain:1b").complete("Hello " * 9000)
