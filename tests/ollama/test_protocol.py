"""Requests, from bytes to frozen values, and what is refused."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import RequestError
from proxy.ollama.abilities import check_supported
from proxy.ollama.options import parse_options
from proxy.ollama.protocol import (
    ChatMessage,
    check_model_given,
    is_unload,
    parse_chat,
    parse_format,
    parse_generate,
    parse_show,
)
from tests.fakes.scripted_turns import ScriptedModel, model_named


def body_of(**fields: Any) -> bytes:  # noqa: ANN401 - any JSON
    """Encode a body."""
    return json.dumps(fields).encode()


def test_generate_defaults() -> None:
    """A bare generate request streams, is not raw, and asks for nothing special."""
    request = parse_generate(b'{"model":"smol","prompt":"Hi"}')
    assert request.model == "smol"
    assert request.prompt == "Hi"
    assert request.stream
    assert not request.raw
    assert request.think is None
    assert request.keep_alive_seconds is None
    assert parse_format(request.format) is None
    assert request.messages() == [{"role": "user", "content": "Hi"}]


def test_generate_puts_the_system_text_first() -> None:
    """The system field becomes the first message."""
    request = parse_generate(body_of(model="m", prompt="Hi", system="Be brief."))
    assert [message["role"] for message in request.messages()] == ["system", "user"]


def test_chat_messages_keep_what_counts() -> None:
    """Roles are lower-cased, thinking is dropped, tool names go through."""
    request = parse_chat(
        body_of(
            model="m",
            keep_alive=-1,
            messages=[
                {"role": "USER", "content": "Hi"},
                {"role": "assistant", "content": "Yo", "thinking": "hm"},
                {"Role": "tool", "Content": "3", "tool_name": "f", "tool_call_id": "c"},
                {"role": "user"},
                None,
            ],
        )
    )
    assert request.keep_alive_seconds == math.inf
    assert request.conversation == (
        ChatMessage(role="user", content="Hi"),
        ChatMessage(role="assistant", content="Yo"),
        ChatMessage(role="tool", content="3", tool_name="f", tool_call_id="c"),
        ChatMessage(role="user", content=""),
        ChatMessage(role="", content=""),
    )
    assert request.messages()[2] == {
        "role": "tool",
        "content": "3",
        "name": "f",
        "tool_call_id": "c",
    }


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"stream": "no"},
            "json: cannot unmarshal string into Go struct field "
            "ChatRequest.stream of type bool",
        ),
        (
            {"model": 1},
            "json: cannot unmarshal number into Go struct field "
            "ChatRequest.model of type string",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "json: cannot unmarshal array into Go struct field "
            "ChatRequest.messages.content of type string",
        ),
        (
            {"messages": {}},
            "json: cannot unmarshal object into Go struct field "
            "ChatRequest.messages of type []api.Message",
        ),
        (
            {"messages": ["Hi"]},
            "json: cannot unmarshal string into Go struct field "
            "ChatRequest.messages of type object",
        ),
        (
            {"options": []},
            "json: cannot unmarshal array into Go struct field "
            "ChatRequest.options of type map[string]interface {}",
        ),
        (
            {"top_logprobs": 1.5},
            "json: cannot unmarshal number into Go struct field "
            "ChatRequest.top_logprobs of type int",
        ),
        ({"keep_alive": "90"}, 'time: missing unit in duration "90"'),
        (
            {"think": "hard"},
            'invalid think value: "hard" (must be true, false, "high", "medium", '
            '"low", or "max")',
        ),
        (
            {"think": 1},
            'think must be a boolean or string ("high", "medium", "low", "max", '
            "true, or false)",
        ),
    ],
)
def test_wrong_types_are_refused(fields: dict[str, Any], text: str) -> None:
    """A field of the wrong type is refused in the words of Go's decoder."""
    with pytest.raises(RequestError) as caught:
        parse_chat(body_of(**fields))
    assert (caught.value.status, caught.value.message) == (400, text)


def test_generate_refuses_a_context_of_strings() -> None:
    """The deprecated context is an array of integers or nothing."""
    with pytest.raises(RequestError, match=r"GenerateRequest\.context of type int"):
        parse_generate(body_of(model="m", context=["1"]))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"suffix": "}"},
            "registry.ollama.ai/library/smol:latest does not support insert",
        ),
        (
            {"raw": True, "system": "x"},
            "raw mode does not support template, system, or context",
        ),
        (
            {"raw": True, "context": [1]},
            "raw mode does not support template, system, or context",
        ),
        ({"think": True}, '"Smol" does not support thinking'),
        ({"think": "low"}, '"Smol" does not support thinking'),
        ({"images": ["aGk="]}, '"Smol" does not support images'),
        ({"top_logprobs": 21}, "top_logprobs must be between 0 and 20"),
        ({"top_logprobs": -1}, "top_logprobs must be between 0 and 20"),
    ],
)
def test_generate_refuses_what_is_not_served(fields: dict[str, Any], text: str) -> None:
    """A field that would have to be ignored is refused with status 400."""
    request = parse_generate(body_of(model="Smol", prompt="Hi", **fields))
    with pytest.raises(RequestError) as caught:
        check_supported(request, ScriptedModel())
    assert caught.value.status == 400
    assert caught.value.message.startswith(text)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"tools": [{"type": "function"}]},
            "registry.ollama.ai/library/smol:latest does not support tools",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "registry.ollama.ai/library/smol:latest does not support tools",
        ),
        ({"messages": [{"role": "user", "images": ["aGk="]}]}, '"Smol" does not'),
        ({"think": "max"}, '"Smol" does not support thinking'),
    ],
)
def test_chat_refuses_what_is_not_served(fields: dict[str, Any], text: str) -> None:
    """Tools, images and thinking are refused in Ollama's words."""
    request = parse_chat(body_of(model="Smol", **fields))
    with pytest.raises(RequestError) as caught:
        check_supported(request, ScriptedModel())
    assert caught.value.status == 400
    assert caught.value.message.startswith(text)


def test_unset_fields_are_no_reason_to_refuse() -> None:
    """Empty and null fields, as clients send them, are served."""
    request = parse_chat(
        body_of(
            model="m",
            messages=[
                {"role": "user", "content": "x", "images": None, "tool_calls": []}
            ],
            tools=[],
            think=False,
            format=None,
            logprobs=False,
            truncate=True,
            shift=False,
            width=512,
        )
    )
    check_supported(request, ScriptedModel())
    generate = parse_generate(
        body_of(model="m", prompt="x", suffix="", template="", context=[], images=[])
    )
    check_supported(generate, model_named("space/m:latest"))


def test_names_of_other_spaces_are_not_put_into_the_library() -> None:
    """A model of somebody's own space is named with that space."""
    request = parse_generate(body_of(model="m", prompt="x", suffix="y"))
    with pytest.raises(RequestError, match=r"^registry\.ollama\.ai/me/m:1 does not"):
        check_supported(request, model_named("me/m:1"))


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        (None, None),
        ("", None),
        ("json", {"type": "object"}),
        ({"type": "string"}, {"type": "string"}),
        ({}, {}),
    ],
)
def test_formats(value: object, schema: object) -> None:
    """Null and "" are free text, "json" is any object, an object is a schema."""
    assert parse_format(value) == schema


@pytest.mark.parametrize("value", ["xml", 1, [], True])
def test_bad_formats_are_refused(value: object) -> None:
    """Anything else is an error with Ollama's status 500."""
    with pytest.raises(RequestError, match="invalid format") as caught:
        parse_format(value)
    assert caught.value.status == 500


def test_each_route_has_its_words_for_a_missing_name() -> None:
    """Chat says what is required, generate looks for a model without a name."""
    with pytest.raises(RequestError) as caught:
        check_model_given(parse_chat(b"{}"))
    assert (caught.value.status, caught.value.message) == (400, "model is required")
    with pytest.raises(RequestError) as caught:
        check_model_given(parse_generate(b"null"))
    assert (caught.value.status, caught.value.message) == (404, "model '' not found")
    with pytest.raises(RequestError) as caught:
        parse_show(b"{}")
    assert (caught.value.status, caught.value.message) == (400, "model is required")


def test_show_takes_the_name_under_two_fields() -> None:
    """The older `name` is read where `model` is missing."""
    assert parse_show(b'{"name":"a"}').model == "a"
    assert parse_show(b'{"name":"a","model":"b","verbose":true}').model == "b"


def test_what_unloads() -> None:
    """Only an empty request with keep_alive 0 unloads."""
    assert is_unload(parse_generate(b'{"model":"m","keep_alive":0}'))
    assert is_unload(parse_chat(b'{"model":"m","messages":[],"keep_alive":"0"}'))
    assert not is_unload(parse_generate(b'{"model":"m"}'))
    assert not is_unload(parse_generate(b'{"model":"m","prompt":"x","keep_alive":0}'))


FIELD_NAMES = [
    "model",
    "prompt",
    "suffix",
    "system",
    "template",
    "context",
    "stream",
    "raw",
    "format",
    "images",
    "options",
    "keep_alive",
    "think",
    "truncate",
    "shift",
    "logprobs",
    "top_logprobs",
    "messages",
    "tools",
    "role",
    "content",
    "tool_calls",
    "tool_name",
    "num_ctx",
    "seed",
    "stop",
    "temperature",
    "use_mmap",
]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["json", "high", "5m"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(FIELD_NAMES) | st.text(), inner, max_size=4)
    ),
    max_leaves=12,
)
bodies = st.one_of(
    st.binary(),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(st.sampled_from(FIELD_NAMES), json_values).map(
        lambda value: json.dumps(value).encode() + b" tail"
    ),
)


@given(bodies)
def test_any_body_is_read_or_refused(body: bytes) -> None:
    """Whatever arrives, each step of reading it ends in a value or a RequestError."""
    for parse in (parse_generate, parse_chat):
        try:
            request = parse(body)
            check_model_given(request)
            check_supported(request, ScriptedModel())
            parse_options(request.options)
            parse_format(request.format)
        except RequestError as exc:
            status, text = exc.status, exc.message
        else:
            status, text = 200, request.model
        assert status in (200, 400, 404, 500)
        assert text.encode()
