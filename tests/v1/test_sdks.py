"""The official clients of OpenAI and Anthropic, on real runners."""

import json
from typing import Any

import pytest

from tests.e2e.processes import Kvbus

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

pytestmark = pytest.mark.clients

USER = {"role": "user", "content": "Weather in Oslo?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "description": "Tells", "parameters": PARAMETERS}
UNTHINKING = {"chat_template_kwargs": {"enable_thinking": False}}
ARGUMENTS = {"city": "Oslo"}


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the clients ask no proxy of the machine's."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def gpt(served: Kvbus) -> Any:  # noqa: ANN401 - the library may be absent
    """Return OpenAI's client."""
    return openai.OpenAI(
        base_url=f"{served.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=60,
    )


@pytest.fixture
def claude(served: Kvbus) -> Any:  # noqa: ANN401 - the library may be absent
    """Return Anthropic's client."""
    return anthropic.Anthropic(
        base_url=served.url,
        api_key="none",
        max_retries=0,
        timeout=60,
    )


def test_chat(gpt: Any) -> None:  # noqa: ANN401
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


def test_chat_with_tools(gpt: Any) -> None:  # noqa: ANN401
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


def test_completions(gpt: Any) -> None:  # noqa: ANN401
    """Raw text, whole and streamed."""
    asked = {"model": "endless", "prompt": "Once", "max_tokens": 9, "temperature": 0}
    whole = gpt.completions.create(**asked)
    assert whole.choices[0].finish_reason == "length"
    parts = [*gpt.completions.create(**asked, stream=True)]
    text = "".join(part.choices[0].text for part in parts)
    assert text == whole.choices[0].text != ""


def test_responses(gpt: Any) -> None:  # noqa: ANN401
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


def test_messages(claude: Any) -> None:  # noqa: ANN401
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


def test_messages_with_tools(claude: Any) -> None:  # noqa: ANN401
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


def test_models(gpt: Any, claude: Any) -> None:  # noqa: ANN401
    """Both clients list the models."""
    names = {"talker:1b", "endless:latest"}
    assert {model.id for model in gpt.models.list()} == names
    assert gpt.models.retrieve("talker:1b").owned_by == "library"
    assert {model.id for model in claude.models.list()} == names


def test_errors(gpt: Any, claude: Any) -> None:  # noqa: ANN401
    """Each client raises its own class, with the text."""
    with pytest.raises(openai.NotFoundError, match="model 'nope' not found"):
        gpt.chat.completions.create(model="nope", messages=[USER])
    with pytest.raises(openai.BadRequestError, match="too short"):
        gpt.chat.completions.create(model="talker:1b", messages=[])
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        gpt.responses.create(model="talker:1b", input="x", previous_response_id="r")
    with pytest.raises(anthropic.NotFoundError, match="model 'nope' not found"):
        claude.messages.create(model="nope", max_tokens=5, messages=[USER])
    with pytest.raises(anthropic.BadRequestError, match="messages is required"):
        claude.messages.create(model="talker:1b", max_tokens=5, messages=[])
