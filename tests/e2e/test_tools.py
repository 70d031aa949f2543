"""Tools and thinking over a real llama-server that says what it was told to."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from tests.e2e.processes import Kvbus
from tests.e2e.test_sharing import TEXT, restart_runner, store_arguments
from tests.scripted_model import Script, write_scripted_model

CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
NEXT_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
SCRIPTS = {
    "tooler": Script(to_user=CALL, to_tool="It snows.", thinks=False),
    "thinker": Script(
        to_user=f"<think>\nI will look.\n</think>\n\nLet me see.\n{CALL}\n{NEXT_CALL}",
        to_tool="<think>\nSnow, it says.\n</think>\n\nIt snows in Oslo.",
        unthinking="Ask me about the weather.",
    ),
    "muser": Script(
        to_user="<think>\nAdd the two numbers.\n</think>\n\n4", knows_tools=False
    ),
    "plain": Script(to_user="Hi there.", knows_tools=False, thinks=False),
    "brooder": Script(to_user="<think>\nAnd so on, and so forth ", is_endless=True),
}
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
NOW = {"type": "function", "function": {"name": "now"}}
QUESTION = {"role": "user", "content": "Weather in Oslo?"}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "integer"}},
    "required": ["colour"],
}

METRICS = (
    '"total_duration":1,"load_duration":1,"prompt_eval_count":1,'
    '"prompt_eval_duration":1,"eval_count":1,"eval_duration":1'
)
CHAT_LINE = (
    '{"model":"m","created_at":"t","message":{"role":"assistant","content":"c"},'
    '"done":false}'
)
THINKING_LINE = CHAT_LINE.replace('"content":"c"', '"content":"","thinking":"t"')
CHAT_END = (
    '{"model":"m","created_at":"t","message":{"role":"assistant","content":""},'
    f'"done":true,"done_reason":"stop",{METRICS}}}'
)
CALL_END = CHAT_END.replace(
    '"content":""',
    '"content":"","tool_calls":[{"id":"i","function":{"index":0,"name":"n",'
    '"arguments":{"city":"Oslo"}}}]',
)
THOUGHT_WHOLE = CHAT_END.replace('"content":""', '"content":"4","thinking":"t"')
GENERATE_WHOLE = (
    f'{{"model":"m","created_at":"t","response":"r","done":true,"done_reason":"stop",'
    f"{METRICS}}}"
)
RENDERED = (
    '{"model":"m","created_at":"t","message":{"role":"","content":""},"done":false,'
    '"_debug_info":{"rendered_template":"t"}}'
)
"""What Ollama answers, field by field; values stand for their type."""


def shape(value: object) -> object:
    """Reduce a JSON value to its fields, their order and their types."""
    if isinstance(value, dict):
        return [(name, shape(inner)) for name, inner in value.items()]
    if isinstance(value, list):
        return [shape(inner) for inner in value[:1]]
    return type(value).__name__


def golden(line: str) -> object:
    """Return the shape of an example."""
    return shape(json.loads(line))


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the scripted models."""
    directory = tmp_path_factory.mktemp("scripted")
    return {
        name: write_scripted_model(directory / f"{name}.gguf", script)
        for name, script in SCRIPTS.items()
    }


@pytest.fixture(scope="module")
def served(scripted: dict[str, Path], cache_dir: Path) -> Iterator[Kvbus]:
    """Return one kvbus that serves all scripted models."""
    models = [
        argument
        for name, path in scripted.items()
        for argument in ("--model", f"{name}={path}")
    ]
    with Kvbus(cache_dir) as kvbus:
        kvbus.start(*models, "--ctx", "16384", *store_arguments("disk", kvbus))
        yield kvbus


def ask(kvbus: Kvbus, path: str, **body: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Send a request; return the lines of its answer, or its one object."""
    answer = kvbus.post(path, body)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def chat(kvbus: Kvbus, **body: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """Chat without a stream."""
    (answer,) = ask(kvbus, "/api/chat", stream=False, **body)
    return answer


def test_a_plain_chat_is_golden(served: Kvbus) -> None:
    """A model without tools or thinking streams text lines and one last line."""
    *lines, last = ask(served, "/api/chat", model="plain", messages=[QUESTION])
    assert [shape(line) for line in lines] == [golden(CHAT_LINE)] * 2
    assert shape(last) == golden(CHAT_END)
    assert "".join(line["message"]["content"] for line in lines) == "Hi there."


def test_a_thought_is_golden(served: Kvbus) -> None:
    """Not streamed, thinking and content are joined, each on its own."""
    answer = chat(served, model="muser", messages=[QUESTION], think="low")
    assert shape(answer) == golden(THOUGHT_WHOLE)
    assert answer["message"]["thinking"].strip() == "Add the two numbers."
    assert answer["message"]["content"] == "4"
    assert answer["eval_count"] == 8


def test_thinking_is_streamed_before_content(served: Kvbus) -> None:
    """Models that think do so unless told not to; no line has both."""
    *lines, last = ask(served, "/api/chat", model="muser", messages=[QUESTION])
    shapes = [shape(line) for line in lines]
    assert shapes == [golden(THINKING_LINE)] * 4 + [golden(CHAT_LINE)]
    assert shape(last) == golden(CHAT_END)


def test_a_call_is_golden(served: Kvbus) -> None:
    """A model that llama-server renders itself calls on the last line."""
    (line,) = ask(
        served, "/api/chat", model="tooler", messages=[QUESTION], tools=[WEATHER]
    )
    assert shape(line) == golden(CALL_END)
    (call,) = line["message"]["tool_calls"]
    assert len(call["id"]) == 32
    assert call["function"]["arguments"] == {"city": "Oslo"}


def test_thinking_and_two_calls(served: Kvbus) -> None:
    """All of it in one reply, streamed or not: thinking, text, calls in order."""
    tools = [WEATHER, NOW]
    *lines, last = ask(
        served, "/api/chat", model="thinker", messages=[QUESTION], tools=tools
    )
    assert [shape(line) for line in lines] == (
        [golden(THINKING_LINE)] * 3 + [golden(CHAT_LINE)] * 3
    )
    assert shape(last) == golden(CALL_END)
    whole = chat(served, model="thinker", messages=[QUESTION], tools=tools)
    for message in (last["message"], whole["message"]):
        functions = [call["function"] for call in message["tool_calls"]]
        assert functions == [
            {"index": 0, "name": "get_weather", "arguments": {"city": "Oslo"}},
            {"index": 1, "name": "now", "arguments": {}},
        ]
    assert list(whole["message"]) == ["role", "content", "thinking", "tool_calls"]
    assert whole["message"]["thinking"].strip() == "I will look."
    assert whole["message"]["content"].strip() == "Let me see."


def test_a_request_may_forbid_thinking(served: Kvbus) -> None:
    """`think: false` reaches the chat template."""
    answer = chat(served, model="thinker", messages=[QUESTION], think=False)
    assert answer["message"] == {
        "role": "assistant",
        "content": "Ask me about the weather.",
    }


def test_generate_thinks_too(served: Kvbus) -> None:
    """Not where it is raw: then the text is the model's own."""
    (answer,) = ask(served, "/api/generate", model="muser", prompt="2+2?", stream=False)
    assert (answer["response"], answer["thinking"].strip()) == (
        "4",
        "Add the two numbers.",
    )
    assert list(answer)[:5] == ["model", "created_at", "response", "thinking", "done"]
    (raw,) = ask(
        served,
        "/api/generate",
        model="muser",
        prompt="<|im_start|>assistant\n",
        raw=True,
        stream=False,
    )
    assert shape(raw) == golden(GENERATE_WHOLE)
    assert raw["response"] == SCRIPTS["muser"].to_user


@pytest.mark.parametrize("think", [True, False])
def test_formats_hold_while_the_engine_parses(served: Kvbus, think: bool) -> None:
    """A schema binds the content; the thinking before it is free."""
    answer = chat(
        served,
        model="thinker",
        messages=[QUESTION],
        format=SCHEMA,
        think=think,
        options={"num_predict": 2000},
    )
    assert isinstance(json.loads(answer["message"]["content"])["colour"], int)
    assert ("thinking" in answer["message"]) == think


def test_only_the_prompt_is_shown(served: Kvbus) -> None:
    """What would be evaluated is shown with the tools, and nothing is."""
    (answer,) = ask(
        served,
        "/api/chat",
        model="tooler",
        messages=[QUESTION],
        tools=[WEATHER],
        _debug_render_only=True,
    )
    assert shape(answer) == golden(RENDERED)
    assert "get_weather" in answer["_debug_info"]["rendered_template"]


@pytest.mark.parametrize("model", ["plain", "muser"])
def test_logprobs(served: Kvbus, model: str) -> None:
    """On both ways to a reply; each entry has its token, bytes and alternatives."""
    answer = chat(
        served, model=model, messages=[QUESTION], logprobs=True, top_logprobs=2
    )
    one = '{"token":"t","logprob":0.1,"bytes":[1],"top_logprobs":[{"token":"t",'
    one += '"logprob":0.1,"bytes":[1]}]}'
    assert shape(answer["logprobs"]) == [golden(one)]
    assert list(answer)[4:6] == ["done_reason", "logprobs"]
    text = b"".join(bytes(entry["bytes"]) for entry in answer["logprobs"]).decode()
    assert text.endswith(answer["message"]["content"])
    assert all(len(entry["top_logprobs"]) == 2 for entry in answer["logprobs"])
    *lines, _ = ask(served, "/api/generate", model=model, prompt="Hi", logprobs=True)
    assert lines
    for line in lines:
        (entry,) = line["logprobs"]
        assert list(entry) == ["token", "logprob", "bytes"]


def test_a_reply_is_cut_off_at_its_limit(served: Kvbus) -> None:
    """In the middle of a thought or a call: the reason is `length`, the call none."""
    thought = chat(
        served, model="muser", messages=[QUESTION], options={"num_predict": 3}
    )
    assert (thought["done_reason"], thought["eval_count"]) == ("length", 3)
    assert thought["message"]["thinking"].startswith("Add")
    call = chat(
        served,
        model="tooler",
        messages=[QUESTION],
        tools=[WEATHER],
        options={"num_predict": 4},
    )
    assert call["done_reason"] == "length"
    assert "tool_calls" not in call["message"]
    full = chat(
        served,
        model="brooder",
        messages=[QUESTION],
        options={"num_ctx": 200},
        shift=False,
    )
    assert full["done_reason"] == "length"
    assert full["prompt_eval_count"] + full["eval_count"] == 200


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"model": "plain", "tools": [WEATHER]},
            "registry.ollama.ai/library/plain:latest does not support tools",
        ),
        ({"model": "plain", "think": True}, '"plain" does not support thinking'),
        ({"model": "tooler", "think": "high"}, '"tooler" does not support thinking'),
        ({"model": "muser", "tools": [WEATHER]}, "does not support tools"),
        (
            {"model": "thinker", "messages": [{**QUESTION, "content": TEXT * 2}]},
            "exceeds the available context size",
        ),
    ],
)
def test_what_a_model_cannot_do_is_refused(
    served: Kvbus, fields: dict[str, Any], says: str
) -> None:
    """Status 400 and Ollama's own text, never silence."""
    answer = served.post("/api/chat", {"messages": [QUESTION], **fields})
    assert answer.status_code == 400
    assert says in answer.json()["error"]


def test_abilities_are_listed(served: Kvbus) -> None:
    """Clients learn from the lists what each model is able to do."""
    tags = httpx.get(f"{served.url}/api/tags", trust_env=False).json()["models"]
    assert {tag["name"]: tag["capabilities"] for tag in tags} == {
        "tooler:latest": ["completion", "tools"],
        "thinker:latest": ["completion", "tools", "thinking"],
        "muser:latest": ["completion", "thinking"],
        "plain:latest": ["completion"],
        "brooder:latest": ["completion", "tools", "thinking"],
    }
    shown = served.post("/api/show", {"model": "thinker"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert "<think>" in shown["template"]


def test_the_official_client_calls_a_tool(served: Kvbus) -> None:
    """Its own types take the reply, and its loop of tools comes to an end."""

    def get_weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: City name

        """
        return f"-3 C, snow in {city}"

    client = ollama.Client(served.url)
    messages: list[Any] = [QUESTION]
    first = client.chat("thinker", messages, tools=[get_weather], think="high")
    assert first.message.thinking
    assert first.message.tool_calls
    call = first.message.tool_calls[0].function
    messages += [
        first.message,
        {
            "role": "tool",
            "content": get_weather(**call.arguments),
            "tool_name": call.name,
        },
    ]
    parts = list(client.chat("thinker", messages, tools=[get_weather], stream=True))
    assert "".join(part.message.content or "" for part in parts) == "It snows in Oslo."
    assert "".join(part.message.thinking or "" for part in parts).strip() == (
        "Snow, it says."
    )
    assert not parts[-1].message.tool_calls
    assert parts[-1].done_reason == "stop"


@pytest.mark.parametrize(
    ("model", "answer", "feeds_back"),
    [("tooler", "It snows.", True), ("thinker", "It snows in Oslo.", False)],
)
def test_a_conversation_with_tools_keeps_its_kv(
    kvbus: Kvbus,
    scripted: dict[str, Path],
    model: str,
    answer: str,
    feeds_back: bool,
) -> None:
    """The slot is reused turn by turn, then another runner restores what it held.

    Calls are reused as well; a reply with thinking is not fed back as it was.
    """
    kvbus.start(
        "--model", f"{model}={scripted[model]}", "--runners", "2",
        "--restore", "always", "--block-size", "32",
        *store_arguments("disk", kvbus),
    )  # fmt: skip
    tools = [WEATHER, NOW]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": TEXT[:2000]},
        QUESTION,
    ]
    first = chat(kvbus, model=model, messages=messages, tools=tools)
    kvbus.wait_commits(1)
    result = {"role": "tool", "content": "-3 C, snow", "tool_name": "get_weather"}
    messages += [first["message"], result]
    second = chat(kvbus, model=model, messages=messages, tools=tools)
    assert second["message"]["content"] == answer
    kvbus.wait_commits(2)
    restart_runner(kvbus, int(kvbus.turns()[0]["runner"].rpartition("/")[2]))
    messages += [second["message"], {"role": "user", "content": "And now?"}]
    chat(kvbus, model=model, messages=messages, tools=tools)
    kvbus.asked = 3
    turns = kvbus.turns()
    assert [turn["decision"] for turn in turns] == ["recompute", "keep_slot", "restore"]

    def reusable(reply: dict[str, Any]) -> int:
        replied = reply["eval_count"] - 1 if feeds_back else 0
        return int(reply["prompt_eval_count"]) + replied

    assert int(turns[1]["reused_tokens"]) == reusable(first) > 2000
    assert int(turns[2]["restored_tokens"]) == reusable(second) // 32 * 32
    assert turns[2]["reused_tokens"] == turns[2]["restored_tokens"]


def test_a_client_that_leaves_ends_the_thought(served: Kvbus) -> None:
    """Its slot is free at once, though the thought has no end."""
    body = {"model": "brooder", "messages": [QUESTION]}
    with httpx.stream(
        "POST", f"{served.url}/api/chat", json=body, trust_env=False, timeout=30
    ) as answer:
        assert json.loads(next(answer.iter_lines()))["message"]["thinking"]
    short = chat(
        served, model="brooder", messages=[QUESTION], options={"num_predict": 2}
    )
    assert short["total_duration"] < 5e9


def test_a_runner_that_dies_ends_the_stream(
    kvbus: Kvbus, scripted: dict[str, Path]
) -> None:
    """The last line is an error, without `done`; the next request is served."""
    kvbus.start(
        "--model", f"brooder={scripted['brooder']}", "--ctx", "65536",
        *store_arguments("disk", kvbus),
    )  # fmt: skip
    body = {"model": "brooder", "messages": [QUESTION]}
    with httpx.stream(
        "POST", f"{kvbus.url}/api/chat", json=body, trust_env=False, timeout=30
    ) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines))["message"]["thinking"]
        os.kill(kvbus.runner_pids()[0], signal.SIGKILL)
        *_, last = lines
    assert list(json.loads(last)) == ["error"]
    assert "model runner has unexpectedly stopped" in json.loads(last)["error"]
    again = chat(
        kvbus, model="brooder", messages=[QUESTION], options={"num_predict": 2}
    )
    assert again["done_reason"] == "length"
