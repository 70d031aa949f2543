"""Templates of families of models: what Ollama makes of them, letter for letter."""

import doctest
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from proxy.errors import RequestError
from proxy.ollama import model_template
from proxy.ollama.model_template import (
    Conversation,
    TooMuchTextError,
    reads,
    render_conversation,
    render_insert,
)
from proxy.ollama.protocol import ChatMessage, parse_chat
from tests.ollama.family_templates import (
    ALPACA,
    CHATML,
    FILLS_IN,
    GEMMA,
    LLAMA3,
    MISTRAL,
    QWEN,
    TYPES,
)

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather <now>",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {
                "unit": {"type": ["string", "null"], "enum": ["C", "F", 1]},
                "city": {"type": "string", "description": "City name"},
            },
        },
    },
}
PLAIN: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One"},
    {"role": "user", "content": "Two"},
    {"role": "assistant", "content": "Three"},
    {"role": "user", "content": "Four"},
]
CALL: dict[str, Any] = {
    "function": {"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}
}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '-3 "C"'},
]
TOOL_JSON = (
    '{"name":"get_weather","description":"Weather \\u003cnow\\u003e","parameters":'
    '{"type":"object","required":["city"],"properties":{"city":{"type":"string",'
    '"description":"City name"},"unit":{"type":["string","null"],"enum":["C","F",1]}}}}'
)


def conversation(
    messages: Sequence[Mapping[str, Any]],
    *tools: dict[str, Any],
    think: bool | str | None = None,
) -> Conversation:
    """Read a conversation as it comes from a client."""
    body = {"model": "m", "messages": messages, "tools": tools}
    wanted = parse_chat(json.dumps(body).encode())
    return Conversation(messages=wanted.conversation, tools=wanted.tools, think=think)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (
            CHATML,
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nOne\n\nTwo<|im_end|>\n"
            "<|im_start|>assistant\nThree<|im_end|>\n"
            "<|im_start|>user\nFour<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            LLAMA3,
            "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nOne\n\nTwo<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nThree<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nFour<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            MISTRAL,
            "[INST] One\n\nTwo[/INST] Three</s>[INST] Be brief.\n\nFour[/INST]",
        ),
        (
            GEMMA,
            "<bos><start_of_turn>user\nBe brief.\n\nOne\n\nTwo<end_of_turn>\n"
            "<start_of_turn>model\nThree<end_of_turn>\n"
            "<start_of_turn>user\nFour<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            QWEN,
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nOne\n\nTwo<|im_end|>\n"
            "<|im_start|>assistant\nThree<|im_end|>\n"
            "<|im_start|>user\nFour /no_think<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            ALPACA,
            "Be brief.\n\n### Instruction:\nOne\n\nTwo\n\n### Response:\nThree\n\n"
            "### Instruction:\nFour\n\n### Response:\n",
        ),
        (
            TYPES,
            'system="Be brief.";user="One\\n\\nTwo";assistant="Three";user="Four";',
        ),
    ],
)
async def test_conversations(template: str, prompt: str) -> None:
    """Neighbours of one role are one message; the prompt ends where a reply begins."""
    wanted = conversation(PLAIN, think=False)
    assert await render_conversation(template, wanted) == prompt


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (
            MISTRAL,
            '[INST] Weather?[/INST][TOOL_CALLS] [{"name": "get_weather", "arguments": '
            '{"city":"Oslo","days":2}}]</s>'
            '[TOOL_RESULTS] {"content": "-3 \\"C\\""}[/TOOL_RESULTS]',
        ),
        (
            QWEN,
            "<|im_start|>system\n\n# Tools\n<tools>\n"
            f'{{"type": "function", "function": {TOOL_JSON}}}\n</tools><|im_end|>\n'
            "<|im_start|>user\nWeather?<|im_end|>\n"
            '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": '
            '{"city":"Oslo","days":2}}\n</tool_call><|im_end|>\n'
            '<|im_start|>user\n<tool_response>\n-3 "C"\n</tool_response><|im_end|>\n'
            "<|im_start|>assistant\n",
        ),
        (
            TYPES,
            "\ncity: string, // string City name"
            "\nunit: string | null, // [string null] 0=C 1=F 2=1"
            'user="Weather?";assistant="";tool="-3 \\"C\\"";',
        ),
        (
            "{{ range .Messages }}{{ range .ToolCalls }}{{ range $name, $value :="
            " .Function.Arguments }}{{ $name }}={{ $value }} {{ end }}{{ end }}"
            "{{ end }}"
            "{{ .Tools }}",
            f'city=Oslo days=2 [{{"type":"function","function":{TOOL_JSON}}}]',
        ),
    ],
)
async def test_tools_and_their_calls(template: str, prompt: str) -> None:
    """Names of properties are sorted, as Go sorts them; numbers are as in JSON."""
    assert await render_conversation(template, conversation(TALK, TOOL)) == prompt


@pytest.mark.parametrize(
    ("think", "shown"),
    [
        (None, "false  false"),
        (False, "false  true"),
        (True, "true medium true"),
        ("high", "true high true"),
    ],
)
async def test_what_a_template_hears_of_thinking(
    think: bool | str | None, shown: str
) -> None:
    """Whether it is wanted, how much, and whether anybody has said so."""
    template = "{{ .Think }} {{ .ThinkLevel }} {{ .IsThinkSet }}{{ .Messages | len }}"
    wanted = conversation(PLAIN[:1], think=think)
    assert await render_conversation(template, wanted) == shown + "1"


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{{ .Prompt }}", "OneFour"),
        ("<{{ .Prompt }}>", "<One\n\nTwo>Three<Four>"),
        ("{{ .Prompt }}|{{ .Response }}!", "One\n\nTwo|Three!Four|"),
        (
            "{{ if .Prompt }}U:{{ .Prompt }}{{ else }}none{{ end }}"
            "{{ if true }}A:{{ .Response }}{{ else }}never{{ end }}{{ .System }}",
            "U:One\n\nTwoA:ThreeBe brief.U:FourA:",
        ),
        ('{{ .Prompt }}{{ .Response | printf "%s" }}x', "One\n\nTwoThreexFour"),
    ],
)
async def test_turn_by_turn(template: str, prompt: str) -> None:
    """Without `.Messages` each turn is written, the last one up to its reply."""
    made = await render_conversation(template, conversation(PLAIN))
    assert made == prompt.replace("OneFour", "One\n\nTwoThreeFour")


async def test_a_reply_that_has_begun_is_gone_on_with() -> None:
    """An assistant's message at the end stands open."""
    begun: list[dict[str, Any]] = [*PLAIN, {"role": "assistant", "content": "Fi"}]
    template = "{{ .Prompt }}|{{ .Response }}!"
    made = await render_conversation(template, conversation(begun))
    assert made == "One\n\nTwo|Three!Four|Fi"


async def test_a_suffix_has_its_place() -> None:
    """A template that reads it makes the prompt of fill-in-the-middle."""
    assert reads(FILLS_IN, "suffix")
    assert not reads(CHATML, "suffix")
    assert not reads("{{ .Suffix ", "suffix")
    prompt = await render_insert(FILLS_IN, prompt="a", suffix="b", think=None)
    assert prompt == "<PRE> a <SUF>b <MID>"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("a\nb{{ .Messages", "template: :2: unclosed action"),
        ("{{ foo .Messages }}", 'template: :1: function "foo" not defined'),
        (
            "{{ range .Messages }}\n{{ .Nope }}{{ end }}",
            'template: :2:3: executing "" at <.Nope>: '
            "can't evaluate field Nope in type *template.templateMessage",
        ),
        (
            '{{ define "a" }}{{ index .Messages 9 }}{{ end }}{{ template "a" . }}',
            'template: :1:19: executing "a" at <index .Messages 9>: '
            "error calling index: index out of range: 9",
        ),
        ('{{ template "a" }}{{ define "a" }}x{{ end }}', "undefined template"),
    ],
)
async def test_a_wrong_template_is_refused_with_its_place(
    template: str, says: str
) -> None:
    """Status 400, and Go's own words."""
    with pytest.raises(RequestError) as caught:
        await render_conversation(template, conversation(PLAIN))
    assert caught.value.status == 400
    assert caught.value.message.startswith(says)


async def test_too_much_text_is_told_apart() -> None:
    """Whoever may drop messages tries again with fewer."""
    long = ChatMessage(role="user", content="x" * 9_000_000)
    both = [long, replace(long, role="assistant")]
    wanted = Conversation(messages=both)
    with pytest.raises(TooMuchTextError):
        await render_conversation(CHATML, wanted)


def test_worked_examples() -> None:
    """The examples in the docstrings hold."""
    assert doctest.testmod(model_template).failed == 0
