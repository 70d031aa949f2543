"""Requests of Anthropic's and of OpenAI's Responses API as chats."""

from typing import Any

import pytest

from proxy.v1 import anthropic, responses

USER = {"role": "user", "content": "Hello"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def chat_of(**fields: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    """Convert a body of /v1/messages."""
    return anthropic.to_chat({"max_tokens": 9, "messages": [USER], **fields})


def test_sampling_has_other_names() -> None:
    """Known fields are carried over; those without a meaning for a chat are not."""
    chat = chat_of(
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stream=True,
        stop_sequences=["x"],
        metadata={"user_id": "u"},
        model="m",
    )
    assert chat == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stream": True,
        "stop": ["x"],
        "max_tokens": 9,
        "messages": [USER],
    }


def test_system_blocks_are_one_text() -> None:
    """Nothing stands between them; marks for a cache are no part of it."""
    blocks = [
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ]
    messages = chat_of(system=blocks)["messages"]
    assert messages == [{"role": "system", "content": "Be brief."}, USER]
    assert chat_of(system=None)["messages"] == [USER]


def test_a_stamp_that_changes_is_blanked() -> None:
    """Two requests that differ in it alone have the same prompt."""
    text = (
        "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={};You are"
    )
    first, second = (
        chat_of(system=[{"type": "text", "text": text.format(stamp)}])["messages"][0]
        for stamp in ("a5145", "0b1c2")
    )
    assert first == second
    assert first["content"].endswith("cch=fffff;You are")
    others = (
        "Tell me of cch=a5145; and so on",
        "x-anthropic-billing-header:" * 40_000,  # hours for a search that backtracks
    )
    for other in others:
        assert chat_of(system=other)["messages"][0]["content"] == other


def test_blocks_of_a_turn_with_tools() -> None:
    """Thoughts and calls belong to the assistant's message; results come after it."""
    messages = [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "s"},
                {"type": "text", "text": "Let me see."},
                {
                    "type": "tool_use",
                    "id": "a",
                    "name": "get",
                    "input": {"b": 1, "a": 2},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [
                        {"type": "text", "text": "sun"},
                        {"type": "text", "text": "ny"},
                    ],
                },
                {"type": "tool_result", "tool_use_id": "b", "content": "plain"},
                {"type": "tool_result", "tool_use_id": "c"},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    assert chat_of(messages=messages)["messages"] == [
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Let me see."}],
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "get", "arguments": '{"b":1,"a":2}'},
                }
            ],
            "reasoning_content": "I look.",
        },
        {"role": "user", "content": [{"type": "text", "text": "So?"}]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
        {"role": "tool", "tool_call_id": "b", "content": "plain"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
    ]


def test_images_of_both_kinds() -> None:
    """In a message, and in a tool's result."""
    data = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    link = {"type": "url", "url": "http://x/y.png"}
    blocks = [{"type": "image", "source": source} for source in (data, link)]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [blocks[0]]}
    user, tool = chat_of(messages=[{"role": "user", "content": [*blocks, result]}])[
        "messages"
    ]
    urls = [part["image_url"]["url"] for part in user["content"]]
    assert urls == ["data:image/png;base64,AAAA", "http://x/y.png"]
    assert tool["content"][1]["image_url"]["url"] == urls[0]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "get"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "new"}, None),
        ("auto", None),
    ],
)
def test_tools_and_their_choice(choice: object, expected: str | None) -> None:
    """A schema has another name; kinds of choice that are not known are dropped."""
    tool = {"name": "get", "description": "Gets", "input_schema": SCHEMA}
    chat = chat_of(tools=[tool], tool_choice=choice)
    function = {"name": "get", "description": "Gets", "parameters": SCHEMA}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat.get("tool_choice") == expected


def test_thinking() -> None:
    """A budget has another name, and without thinking the template is told so."""
    enabled = chat_of(thinking={"type": "enabled", "budget_tokens": 2000})
    assert enabled["thinking_budget_tokens"] == 2000
    disabled = chat_of(thinking={"type": "disabled"}, chat_template_kwargs={"x": 1})
    assert disabled["chat_template_kwargs"] == {"enable_thinking": False, "x": 1}
    assert "chat_template_kwargs" not in chat_of()


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        {"output_config": {"effort": "low"},
         "output_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)  # fmt: skip
def test_the_form_of_an_answer(fields: dict[str, Any]) -> None:
    """A schema, under the name that it has and the one that it had."""
    wrapped = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    assert chat_of(**fields)["response_format"] == wrapped
    for other in ({"output_config": {"effort": "low"}}, {"output_config": 1}):
        assert "response_format" not in chat_of(**other)


@pytest.mark.parametrize("message", ["text", None, {"role": "user"}, {"content": 5}])
def test_what_is_no_message_is_left_to_the_runner(message: object) -> None:
    """It knows what to say."""
    assert chat_of(messages=[message])["messages"] == [message]


def test_reasoning_comes_back_without_its_text() -> None:
    """Codex keeps the sealed text, or a summary; with neither there is nothing."""
    items = [
        {"type": "reasoning", "id": "a", "summary": [], "encrypted_content": "sealed"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "long"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": None},
    ]
    mended = responses.mend({"input": items})["input"]
    assert [item["content"][0]["text"] for item in mended] == [
        "sealed",
        "short",
        "long",
    ]
    assert all(isinstance(item["summary"], list) for item in mended)


def test_an_assistant_message_without_a_type() -> None:
    """The short form of a message is written out; all others stay as they are."""
    short = {"role": "assistant", "content": "Hi"}
    mended = responses.mend({"input": [USER, short]})["input"]
    assert mended == [USER, {"type": "message", **short}]
    assert responses.mend({"input": "Hi", "x": 1}) == {"input": "Hi", "x": 1}


def test_a_response_as_a_chat() -> None:
    """What one turn said is one message of the assistant."""
    chat = responses.to_chat(
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": "D"}]},
                {"type": "message", **USER},
                {"type": "reasoning", "content": [{"text": "I look."}]},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "See."}],
                },
                {
                    "type": "function_call",
                    "call_id": "c",
                    "name": "get",
                    "arguments": "{}",
                },
                {"type": "function_call_output", "call_id": "c", "output": "sunny"},
            ],
            "tools": [
                {"type": "function", "name": "get", "parameters": SCHEMA},
                {"type": "web_search"},
            ],
            "max_output_tokens": 9,
            "reasoning": {"effort": "low"},
        }
    )
    assert chat == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": [{"type": "text", "text": "D"}]},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {
                "role": "assistant",
                "reasoning_content": "I look.",
                "content": [{"type": "text", "text": "See."}],
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "get", "arguments": "{}"},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "get", "parameters": SCHEMA, "strict": True},
            }
        ],
        "max_tokens": 9,
        "reasoning_effort": "low",
    }


@pytest.mark.parametrize(
    "given", [None, 5, ["text"], [{}], [{"type": "new"}], [{"role": "user"}], {}]
)
def test_input_that_is_no_input_raises_nothing(given: object) -> None:
    """The runner refuses it in its own words."""
    mended = responses.mend({"input": given})
    assert "messages" in responses.to_chat(mended)
