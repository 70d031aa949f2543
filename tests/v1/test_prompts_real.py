"""The prompt is found as the engine makes it, and shared between all routes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Kvbus
from tests.e2e.test_sharing import store_arguments
from tests.runners import running

TEXT = "The keeper wrote down the weather of every day. " * 40
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "description": "Tells", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
ANTHROPIC_TOOL = {
    "name": "get_weather",
    "description": "Tells",
    "input_schema": PARAMETERS,
}
USER = {"role": "user", "content": "Weather?"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "content": "Let me see.",
    "reasoning_content": "I look.",
    "tool_calls": [
        {
            "id": "a",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "snow"}

CHATS: dict[str, dict[str, Any]] = {
    "system": {"messages": [SYSTEM, USER]},
    "parts": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "One."},
                    {"type": "text", "text": "Two."},
                ],
            }
        ]
    },
    "tools": {"messages": [SYSTEM, USER], "tools": [TOOL], "tool_choice": "auto"},
    "result": {"messages": [USER, CALL, RESULT], "tools": [TOOL]},
    "unthinking": {
        "messages": [USER],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "effort": {"messages": [USER], "reasoning_effort": "none"},
    "schema": {
        "messages": [USER],
        "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
    },
    "prefilled": {
        "messages": [USER, {"role": "assistant", "content": "It is"}],
        "chat_template_kwargs": {"enable_thinking": False},
    },
}
MESSAGES: dict[str, dict[str, Any]] = {
    "system": {"system": "Be brief.", "messages": [USER]},
    "cache marks": {
        "system": [
            {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief."},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "One.", "cache_control": {"type": "x"}},
                    {"type": "text", "text": "Two."},
                ],
            }
        ],
    },
    "tools": {
        "tools": [ANTHROPIC_TOOL],
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I look.", "signature": ""},
                    {"type": "text", "text": "Let me see."},
                    {
                        "type": "tool_use",
                        "id": "a",
                        "name": "get_weather",
                        "input": {"city": "Oslo"},
                    },
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "snow"}
                ],
            },
        ],
    },
}
RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"input": "Weather?"},
    "instructions": {"instructions": "Be brief.", "input": [USER]},
    "items": {
        "instructions": "Be brief.",
        "tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}],
        "input": [
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "One."},
                    {"type": "input_text", "text": "Two."},
                ],
            },
            {"type": "reasoning", "summary": [], "encrypted_content": "I look."},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "See."}],
            },
            {
                "type": "function_call",
                "call_id": "a",
                "name": "get_weather",
                "arguments": '{"city": "Oslo"}',
            },
            {"type": "function_call_output", "call_id": "a", "output": "snow"},
        ],
    },
}
CASES = [
    *(("/v1/chat/completions", body) for body in CHATS.values()),
    *(("/v1/messages", body) for body in MESSAGES.values()),
    *(("/v1/responses", body) for body in RESPONSES.values()),
    ("/v1/completions", {"prompt": "Once upon a time"}),
    ("/v1/completions", {"prompt": ["Once upon a time"]}),
    ("/v1/completions", {"prompt": [5, 6, 7]}),
]


@pytest.mark.parametrize(("path", "body"), CASES)
def test_the_prompt_is_what_the_engine_makes_of_it(
    served: Kvbus, path: str, body: dict[str, Any]
) -> None:
    """As many tokens are believed as the engine counts."""
    request = {"model": "talker:1b", "max_tokens": 60, **body}
    if path == "/v1/responses":
        request["max_output_tokens"] = request.pop("max_tokens")
    answer = served.post(path, request)
    assert answer.status_code == 200, answer.text
    turn = turn_of(served, answer)
    engine = int(turn["reused_tokens"]) + int(turn["prefilled_tokens"])
    assert int(turn["prompt_tokens"]) == engine > 0


def test_counting_is_what_a_message_costs(served: Kvbus) -> None:
    """The count needs no slot and says what the engine will."""
    body = {"model": "talker:1b", "max_tokens": 1, **MESSAGES["tools"]}
    counted = served.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    usage = served.post("/v1/messages", body).json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_the_form_of_a_response_is_heeded(served: Kvbus) -> None:
    """A schema in OpenAI's new place binds the answer."""
    schema = {"type": "string", "enum": ["north", "south"]}
    text = {"format": {"type": "json_schema", "name": "side", "schema": schema}}
    body = {"model": "endless", "input": "Which?", "max_output_tokens": 20}
    answer = served.post("/v1/responses", {**body, "text": text}).json()
    (part,) = answer["output"][-1]["content"]
    assert json.loads(part["text"]) in schema["enum"]


def turn_of(kvbus: Kvbus, answer: httpx.Response) -> dict[str, str]:
    """Return the log's line of the turn that gave an answer."""
    request_id = answer.headers["X-KVBus-Request-Id"]
    kvbus.wait(lambda: f"event=turn id={request_id}" in kvbus.log_text(), what="a line")
    return next(turn for turn in kvbus.turns() if turn["id"] == request_id)


def ask_any(path: str, text: str) -> dict[str, Any]:
    """Make a body with which each route has the same prompt."""
    messages = [{"role": "user", "content": text}]
    body: dict[str, Any] = {"model": "talker:1b", "max_tokens": 8}
    if path == "/api/chat":
        options = {"num_predict": 8, "temperature": 0}
        return {**body, "messages": messages, "stream": False, "options": options}
    if path == "/v1/responses":
        return {"model": "talker:1b", "max_output_tokens": 8, "input": text}
    return {**body, "messages": messages}


ROUTES = ("/api/chat", "/v1/chat/completions", "/v1/messages", "/v1/responses")


async def ask_all(kvbus: Kvbus, *asked: tuple[str, str]) -> list[dict[str, str]]:
    """Send requests at once; return their turns in the same order."""
    async with httpx.AsyncClient(
        base_url=kvbus.url, trust_env=False, timeout=60
    ) as client:
        answers = await asyncio.gather(
            *(client.post(path, json=ask_any(path, text)) for path, text in asked)
        )
    assert [answer.status_code for answer in answers] == [200] * len(asked)
    return [turn_of(kvbus, answer) for answer in answers]


@pytest.mark.parametrize("first", ROUTES)
async def test_a_prefix_of_one_route_is_restored_for_another(
    served: Kvbus, first: str
) -> None:
    """Two requests at once: one finds its slot hot, the other has it restored."""
    second, third = [route for route in ROUTES if route != first][:2]
    text = f"{first} {TEXT}"
    commits = served.metric("kvbus_commits_total")
    await ask_all(served, (first, text + "One?"))
    served.wait_commits(commits + 1)
    turns = await ask_all(served, (second, text + "Two?"), (third, text + "Three?"))
    assert sorted(turn["decision"] for turn in turns) == ["keep_slot", "restore"]
    for turn in turns:
        assert int(turn["reused_tokens"]) > 1500
        assert int(turn["reused_tokens"]) >= int(turn["restored_tokens"])
    assert turns[0]["runner"] != turns[1]["runner"]


@pytest.mark.parametrize("slots", [1, 2])
async def test_nobody_slips_into_a_slot_that_was_restored_for_another(
    kvbus: Kvbus, model_arguments: list[str], slots: int
) -> None:
    """Prefixes that push one another out: each turn reuses just what it was given."""
    kvbus.start(
        *model_arguments[:2], "--slots", str(slots), "--ctx", "8192",
        "--response-headers", "true", "--restore", "always",
        *store_arguments("disk", kvbus),
    )  # fmt: skip
    texts = [f"{number} {TEXT}" for number in range(4)]
    for number, text in enumerate(texts):
        await ask_all(kvbus, (ROUTES[number], text))
        kvbus.wait_commits(number + 1)
    restored = 0
    for round_ in range(6):
        asked = [
            (ROUTES[(number + round_) % 4], f"{text} {round_}")
            for number, text in enumerate(texts)
        ]
        for turn in await ask_all(kvbus, *asked):
            given = max(int(turn["restored_tokens"]), int(turn["slot_tokens"]))
            assert int(turn["reused_tokens"]) == given > 1500, turn
            restored += turn["decision"] == "restore"
    assert restored >= 12


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_namespaces_do_not_share_a_slot(served: Kvbus, path: str) -> None:
    """The same prompt under another name is evaluated anew, on every route."""
    body = ask_any(path, f"{path} in namespaces {TEXT}")
    reused = []
    for namespace in ("a", "a", "b", "a", "b"):
        headers = {"X-KVBus-Options": f"namespace={path}{namespace}; write=false"}
        answer = httpx.post(
            f"{served.url}{path}",
            json=body,
            headers=headers,
            trust_env=False,
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        reused.append(int(turn_of(served, answer)["reused_tokens"]))
    assert reused[0] == reused[2] == 0
    assert min(reused[1], reused[3], reused[4]) > 1500


def test_the_engines_own_messages_route_forgets_its_slot(
    model_arguments: list[str],
) -> None:
    """Why /v1/messages is asked in chat words; may change with a later engine."""
    model = Path(model_arguments[1].partition("=")[2])
    used = []
    with running(model, parallel=2) as runner:
        for path in ("/v1/chat/completions", "/v1/messages"):
            messages = [{"role": "user", "content": f"{path} " * 50}]
            runner.post(path, max_tokens=1, messages=messages, id_slot=1)
            tasks = [slot.get("id_task") for slot in runner.get("/slots")]
            last = max(task for task in tasks if task is not None)
            used.append(tasks.index(last))
    assert used == [1, 0]
