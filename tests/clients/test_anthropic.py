"""Anthropic's own client: messages, streams, tools, counts, models."""

from collections.abc import Iterator
from typing import Any, Literal

import pytest

from tests.clients.library import library
from tests.e2e.processes import Kvbus

anthropic = library("anthropic")

CLIENT = PACKAGE = "anthropic"
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
calls = pytest.mark.calls

USER = {"role": "user", "content": "Weather in Oslo?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
ARGUMENTS = {"city": "Oslo"}


@pytest.fixture
def claude(served: Kvbus) -> Iterator[Any]:
    """Return Anthropic's client."""
    with anthropic.Anthropic(
        base_url=served.url, api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


@calls("messages.create", "messages.stream", "messages.count_tokens")
def test_messages(claude: Any) -> None:
    """Whole and streamed, with system text, cache marks and counts."""
    system = [
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    ]
    asked = {
        "model": "talker:1b",
        "max_tokens": 50,
        "system": system,
        "messages": [USER],
        "thinking": {"type": "disabled"},
    }
    whole = claude.messages.create(**asked)
    assert whole.content[0].text == "Ask me about the weather."
    assert (whole.stop_reason, whole.usage.output_tokens) == ("end_turn", 6)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    counted = claude.messages.count_tokens(
        model="talker:1b",
        system=system,
        messages=[USER],
        thinking={"type": "disabled"},
    )
    for usage in (whole.usage, final.usage):
        total = usage.input_tokens + usage.cache_read_input_tokens
        assert total == counted.input_tokens


@calls("messages.create(tools)", "messages.stream(tools)")
def test_messages_with_tools(claude: Any) -> None:
    """Thinking and a call, streamed, given back with the result."""
    tool = {"name": "get_weather", "description": "Tells", "input_schema": PARAMETERS}
    asked = {"model": "talker:1b", "max_tokens": 100, "tools": [tool]}
    with claude.messages.stream(messages=[USER], **asked) as stream:
        first = stream.get_final_message()
    thinking, call = first.content
    assert thinking.thinking.startswith("I should look")
    assert (call.type, call.input, first.stop_reason) == (
        "tool_use",
        ARGUMENTS,
        "tool_use",
    )
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "snow"}
    messages = [
        USER,
        {"role": "assistant", "content": [block.to_dict() for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    told = claude.messages.create(messages=messages, **asked)
    assert told.content[-1].text == "It snows in Oslo now."


@calls("messages.parse(output_format)")
def test_formats(claude: Any) -> None:
    """An object of a class."""
    place = library("pydantic").create_model(
        "Place", __config__={"extra": "forbid"}, city=(Literal["Oslo"], ...)
    )
    parsed = claude.messages.parse(
        model="endless", max_tokens=100, messages=[USER], output_format=place
    )
    assert parsed.parsed_output.city == "Oslo"


@calls("AsyncAnthropic: messages.stream")
async def test_asynchronous_calls(served: Kvbus) -> None:
    """A stream that is left frees the only slot; the next request is served."""
    async with anthropic.AsyncAnthropic(
        base_url=served.url, api_key="none", max_retries=0, timeout=60
    ) as client:
        asked = {"model": "endless", "messages": [USER]}
        async with client.messages.stream(**asked, max_tokens=5000) as stream:
            async for _text in stream.text_stream:
                break
        whole = await client.messages.create(**asked, max_tokens=2)
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 2)


@calls("models.list")
def test_models(claude: Any) -> None:
    """All models."""
    names = {model.id for model in claude.models.list()}
    assert {"talker:1b", "endless:latest"} <= names


@calls("errors of messages")
def test_errors(claude: Any) -> None:
    """The client raises its own classes, with the text."""
    with pytest.raises(anthropic.NotFoundError, match="model 'nope' not found"):
        claude.messages.create(model="nope", max_tokens=5, messages=[USER])
    with pytest.raises(anthropic.BadRequestError, match="messages is required"):
        claude.messages.create(model="talker:1b", max_tokens=5, messages=[])
