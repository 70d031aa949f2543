"""OpenAI's own client: chat, completions, responses, embeddings, models."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.library import library
from tests.e2e.processes import Kvbus

openai = library("openai")

CLIENT = PACKAGE = "openai"
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
calls = pytest.mark.calls

USER = {"role": "user", "content": "Weather in Oslo?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "description": "Tells", "parameters": PARAMETERS}
UNTHINKING = {"chat_template_kwargs": {"enable_thinking": False}}
ARGUMENTS = {"city": "Oslo"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture
def gpt(served: Kvbus) -> Iterator[Any]:
    """Return OpenAI's client."""
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


@calls("chat.completions.create", "chat.completions.create(stream)")
def test_chat(gpt: Any) -> None:
    """Whole and streamed, with the usage."""
    whole = gpt.chat.completions.create(
        model="talker:1b", messages=[USER], extra_body=UNTHINKING
    )
    assert whole.choices[0].message.content == "Ask me about the weather."
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 6
    parts = [
        *gpt.chat.completions.create(
            model="talker:1b",
            messages=[USER],
            extra_body=UNTHINKING,
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    text = "".join(
        choice.delta.content or "" for part in parts for choice in part.choices
    )
    assert text == whole.choices[0].message.content
    assert parts[-1].usage.prompt_tokens == whole.usage.prompt_tokens


@calls("chat.completions.create(tools)", "chat.completions.stream(tools)")
def test_chat_with_tools(gpt: Any) -> None:
    """A call, its result, and what is said of it; streamed too."""
    tools = [{"type": "function", "function": FUNCTION}]
    asked = {"model": "talker:1b", "tools": tools}
    answer = gpt.chat.completions.create(messages=[USER], **asked).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == ARGUMENTS
    result = {"role": "tool", "tool_call_id": call.id, "content": "snow"}
    messages = [USER, answer.message.to_dict(), result]
    told = gpt.chat.completions.create(messages=messages, **asked).choices[0]
    assert told.message.content == "It snows in Oslo now."
    with gpt.chat.completions.stream(messages=[USER], **asked) as stream:
        final = stream.get_final_completion().choices[0].message
    assert json.loads(final.tool_calls[0].function.arguments) == ARGUMENTS


@calls("completions.create", "completions.create(stream)")
def test_completions(gpt: Any) -> None:
    """Raw text, whole and streamed."""
    asked = {"model": "endless", "prompt": "Once", "max_tokens": 9, "temperature": 0}
    whole = gpt.completions.create(**asked)
    assert whole.choices[0].finish_reason == "length"
    parts = [*gpt.completions.create(**asked, stream=True)]
    text = "".join(part.choices[0].text for part in parts)
    assert text == whole.choices[0].text != ""


@calls("responses.create", "responses.create(tools)", "responses.stream")
def test_responses(gpt: Any) -> None:
    """A call and its result, given back as items; streamed with the library's help."""
    tools = [{"type": "function", **FUNCTION}]
    asked = {"model": "talker:1b", "tools": tools}
    first = gpt.responses.create(input=[USER], **asked)
    reasoning, call = first.output
    assert json.loads(call.arguments) == ARGUMENTS
    assert reasoning.content[0].text.startswith("I should look")
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": "snow",
    }
    items = [USER, *(item.to_dict() for item in first.output), result]
    told = gpt.responses.create(input=items, **asked)
    assert told.output_text == "It snows in Oslo now."
    with gpt.responses.stream(input=items, **asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert "response.output_text.delta" in kinds
    assert final.output_text == told.output_text
    with gpt.responses.stream(input=[USER], **asked) as stream:
        final = stream.get_final_response()
    assert json.loads(final.output[1].arguments) == ARGUMENTS


@calls("chat.completions.create(response_format)", "responses.create(text.format)")
def test_formats(gpt: Any) -> None:
    """Both routes follow a schema."""
    named = {"name": "place", "schema": SCHEMA, "strict": True}
    chat = gpt.chat.completions.create(
        model="endless",
        messages=[USER],
        response_format={"type": "json_schema", "json_schema": named},
    )
    assert json.loads(chat.choices[0].message.content) == ARGUMENTS
    answer = gpt.responses.create(
        model="endless",
        input="Where?",
        text={"format": {"type": "json_schema", **named}},
    )
    assert json.loads(answer.output_text) == ARGUMENTS


@calls("embeddings.create", "embeddings.create(dimensions, encoding_format)")
def test_embeddings(gpt: Any) -> None:
    """The client's own base64, plain numbers, and fewer of them."""
    packed = gpt.embeddings.create(model="encoder", input=["a b c", "1 2"])
    assert [len(item.embedding) for item in packed.data] == [64, 64]
    plain = gpt.embeddings.create(
        model="encoder", input="a b c", encoding_format="float"
    )
    assert plain.data[0].embedding == pytest.approx(packed.data[0].embedding)
    few = gpt.embeddings.create(model="encoder", input="a b c", dimensions=8)
    assert len(few.data[0].embedding) == 8


@calls("models.list", "models.retrieve")
def test_models(gpt: Any) -> None:
    """All models, and one of them."""
    assert {"talker:1b", "endless:latest"} <= {model.id for model in gpt.models.list()}
    assert gpt.models.retrieve("talker:1b").owned_by == "library"


@calls("AsyncOpenAI: chat.completions.create(stream), responses.create")
async def test_asynchronous_calls(served: Kvbus) -> None:
    """A stream that is left frees the only slot; the next request is served."""
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        stream = await client.chat.completions.create(
            model="endless", messages=[USER], stream=True
        )
        async for _part in stream:
            break
        await stream.close()
        answer = await client.responses.create(
            model="endless", input="Hello", max_output_tokens=2
        )
        assert answer.usage.output_tokens == 2


@calls("extra_body.mooncake", "extra_headers X-KVBus-Options", "with_raw_response")
def test_request_options(gpt: Any, served: Kvbus) -> None:
    """What a request says of sharing gets through, and its id comes back."""
    asked = {"model": "plain:1b", "messages": [USER]}
    for fields in (
        {"extra_body": {"mooncake": {"enable": False}}},
        {"extra_headers": {"X-KVBus-Options": "enable=false"}},
    ):
        raw = gpt.chat.completions.with_raw_response.create(**asked, **fields)
        told = served.request(raw.headers["X-KVBus-Request-Id"])
        assert told["turn"]["restored_tokens"] == 0
        assert raw.parse().choices[0].message.content == "Hi there, friend."
    with pytest.raises(openai.BadRequestError, match=r"mooncake\.nonsense"):
        gpt.chat.completions.create(**asked, extra_body={"mooncake": {"nonsense": 1}})


@calls("errors of chat, responses, models, embeddings")
def test_errors(gpt: Any) -> None:
    """The client raises its own classes, with the text."""
    with pytest.raises(openai.NotFoundError, match="model 'nope' not found"):
        gpt.chat.completions.create(model="nope", messages=[USER])
    with pytest.raises(openai.BadRequestError, match="too short"):
        gpt.chat.completions.create(model="talker:1b", messages=[])
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        gpt.responses.create(model="talker:1b", input="x", previous_response_id="r")
    with pytest.raises(openai.NotFoundError, match="not found"):
        gpt.models.retrieve("nope")
    with pytest.raises(openai.NotFoundError, match="not found"):
        gpt.embeddings.create(model="nope", input="x")
