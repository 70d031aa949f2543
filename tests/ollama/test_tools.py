"""Tools and calls: what Ollama reads of them, and what the engine is told."""

import json
from typing import Any

import pytest

from proxy.errors import RequestError
from proxy.ollama.protocol import parse_chat
from proxy.ollama.tools import parse_tool

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather now",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {"city": {"type": "string", "description": "City name"}},
        },
    },
}


def chat_with(**fields: Any) -> bytes:  # noqa: ANN401 - any JSON
    """Make a body of /api/chat."""
    return json.dumps({"model": "m", **fields}).encode()


def test_a_tool_is_handed_on_as_it_is() -> None:
    """What Ollama knows of a tool reaches the engine, the order included."""
    assert json.dumps(parse_tool(WEATHER)["function"]["parameters"]["properties"]) == (
        '{"city": {"type": "string", "description": "City name"}}'
    )
    assert parse_tool(WEATHER) == WEATHER


def test_what_ollama_does_not_know_is_dropped() -> None:
    """Other keys reach no prompt, at any depth; nested schemas are kept."""
    tool = parse_tool(
        {
            "type": "function",
            "strict": True,
            "function": {
                "name": "f",
                "strict": True,
                "parameters": {
                    "type": "object",
                    "$defs": {"x": {"type": "string"}},
                    "additionalProperties": False,
                    "properties": {
                        "z": {"type": ["string", "null"], "default": "a"},
                        "a": {
                            "anyOf": [{"type": "integer", "minimum": 3}],
                            "enum": [1, 2],
                        },
                        "o": {
                            "type": "object",
                            "properties": {"i": {"type": "array", "items": {}}},
                            "required": ["i"],
                        },
                    },
                },
            },
        }
    )
    assert json.dumps(tool) == json.dumps(
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {
                    "type": "object",
                    "$defs": {"x": {"type": "string"}},
                    "properties": {
                        "z": {"type": ["string", "null"]},
                        "a": {"anyOf": [{"type": "integer"}], "enum": [1, 2]},
                        "o": {
                            "type": "object",
                            "properties": {"i": {"type": "array"}},
                            "required": ["i"],
                        },
                    },
                },
            },
        }
    )


def test_a_bare_tool_takes_no_arguments() -> None:
    """What a tool must have is filled in."""
    assert parse_tool({"function": {"name": "now"}}) == {
        "type": "function",
        "function": {
            "name": "now",
            "parameters": {"type": "object", "properties": {}},
        },
    }


def test_calls_and_results_in_the_engines_words() -> None:
    """Arguments become a string; names and ids of results go along."""
    call = {
        "id": "c1",
        "function": {"index": 1, "name": "f", "arguments": {"b": 1, "a": ["<", None]}},
    }
    request = parse_chat(
        chat_with(
            messages=[
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {
                    "role": "tool",
                    "content": "7",
                    "tool_name": "f",
                    "tool_call_id": "c1",
                },
            ]
        )
    )
    said, result = request.messages()
    assert said["tool_calls"] == [
        {
            "id": "c1",
            "index": 1,
            "type": "function",
            "function": {"name": "f", "arguments": '{"b":1,"a":["<",null]}'},
        }
    ]
    assert result == {
        "role": "tool",
        "content": "7",
        "name": "f",
        "tool_call_id": "c1",
    }
    (read_again,) = request.conversation[0].tool_calls
    assert read_again.to_client() == call


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"tools": {"a": 1}}, "ChatRequest.tools of type"),
        ({"tools": ["f"]}, "ChatRequest.tools"),
        ({"tools": [{"function": {"name": 1}}]}, "ChatRequest.tools.function.name"),
        (
            {"tools": [{"function": {"parameters": {"required": [1]}}}]},
            "tools.function.parameters.required of type string",
        ),
        (
            {"tools": [{"function": {"parameters": {"properties": {"x": 1}}}}]},
            "tools.function.parameters.properties",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"arguments": "{}"}}],
                    }
                ]
            },
            "messages.tool_calls.function.arguments of type map[string]interface {}",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": 1}]}]},
            "messages.tool_calls.function",
        ),
    ],
)
def test_wrong_types_are_refused(fields: dict[str, Any], where: str) -> None:
    """A wrong type anywhere in a tool or a call is a 400 that names the field."""
    with pytest.raises(RequestError) as caught:
        parse_chat(chat_with(**fields))
    assert caught.value.status == 400
    assert caught.value.message.startswith("json: cannot unmarshal ")
    assert where in caught.value.message
