"""Replies that the engine has parsed, over scripted turns: golden lines, faults."""

import asyncio
import json
from typing import Any

import pytest

from proxy.errors import RunnerGone, UpstreamError
from proxy.llamacpp.props import RunnerProps
from proxy.ollama.backend import CHAT_PATH
from tests.fakes.scripted_turns import call_event, chat_event
from tests.ollama.conftest import Front

CHAT = {"model": "smol", "messages": [{"role": "user", "content": "Weather in Oslo?"}]}
TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]
CALL_ID = "Zk3pQ0aLw8RtYv1BnM5cXs7DfGh2JkUe"
START = chat_event(role="assistant", content=None)
THOUGHT = [chat_event(reasoning_content=text) for text in ("Add the ", "two numbers.")]
CALL = [
    call_event(0, '{"city":', name="get_weather", call_id=CALL_ID),
    call_event(0, '"Oslo"}'),
]


@pytest.fixture(autouse=True)
def able(front: Front) -> None:
    """Have the model think and call tools."""
    front.model.props = RunnerProps("<think></think>", True, frozenset())


async def lines_of(front: Front, route: str = "/api/chat", **fields: Any) -> list[Any]:  # noqa: ANN401
    """Send a request; return the lines of the answer without what always differs."""
    async with front.session.post(
        front.url + route, json={**CHAT, **fields}
    ) as response:
        assert response.status == 200
        lines = [json.loads(line) async for line in response.content]
    for line in lines:
        line.pop("created_at", None)
        line.pop("total_duration", None)
        line.pop("load_duration", None)
    return lines


END = {
    "done": True,
    "done_reason": "stop",
    "prompt_eval_count": 27,
    "prompt_eval_duration": 12_240_000,
    "eval_count": 4,
    "eval_duration": 55_817_000,
}


async def test_a_stream_of_thinking_text_and_a_call(front: Front) -> None:
    """Thinking, then content, then everything else on the last line."""
    front.turns.script = [
        START,
        *THOUGHT,
        chat_event(content="Let me see."),
        *CALL,
        chat_event("tool_calls"),
    ]

    def line(**message: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": "", **message}
        return {"model": "smol", "message": message, "done": False}

    call = {
        "id": CALL_ID,
        "function": {"index": 0, "name": "get_weather", "arguments": {"city": "Oslo"}},
    }
    assert await lines_of(front, tools=TOOLS) == [
        line(thinking="Add the "),
        line(thinking="two numbers."),
        line(content="Let me see."),
        {
            "model": "smol",
            "message": {"role": "assistant", "content": "", "tool_calls": [call]},
            **END,
        },
    ]
    assert front.turns.requests[0].path == CHAT_PATH
    assert front.observer.outcomes[0].done_reason == "stop"


async def test_without_a_stream_all_is_in_one_object(front: Front) -> None:
    """Each kind is joined by itself, on either route."""
    front.turns.script = [START, *THOUGHT, chat_event(content="4"), chat_event("stop")]
    message = {"role": "assistant", "content": "4", "thinking": "Add the two numbers."}
    assert await lines_of(front, stream=False) == [
        {"model": "smol", "message": message, **END}
    ]
    (line,) = await lines_of(front, "/api/generate", prompt="2+2?", stream=False)
    context = "".join(map(chr, line.pop("context")))
    assert context.endswith("\n<think>\nAdd the two numbers.\n</think>\n\n4")
    assert line == {
        "model": "smol",
        "response": "4",
        "thinking": "Add the two numbers.",
        **END,
    }


async def test_a_call_alone_has_a_first_token(front: Front) -> None:
    """Clients see one line only; the time to it is that of the first piece."""
    front.turns.script = [START, *CALL, chat_event("tool_calls")]
    (line,) = await lines_of(front, tools=TOOLS)
    assert len(line["message"]["tool_calls"]) == 1
    assert len(front.observer.first_tokens) == 1


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ([RunnerGone("killed")], "model runner has unexpectedly stopped: killed"),
        ([], "model runner has unexpectedly stopped: its answer broke off"),
        ([UpstreamError(500, "Failed to parse")], "Failed to parse"),
        ([{"error": {"code": 500, "message": "oom"}}], '{"error":{"code":500,'),
        ([{"choices": [None]}], "model runner has unexpectedly stopped: it sent"),
        (
            [call_event(0, "{", name="now"), chat_event("tool_calls")],
            'llama-server returned invalid tool call arguments for "now"',
        ),
    ],
)
async def test_a_reply_that_breaks(front: Front, end: list[Any], text: str) -> None:
    """After the first line an error is the last one; before it, it has a status."""
    front.turns.script = [START, *THOUGHT, *end]
    *lines, last = await lines_of(front)
    assert len(lines) == 2
    assert list(last) == ["error"]
    assert last["error"].startswith(text)
    assert front.turns.exit_reason is not None
    front.turns.script = [START, *end]
    async with front.session.post(front.url + "/api/chat", json=CHAT) as response:
        assert response.status == 500
        assert (await response.json())["error"].startswith(text)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("begun", [[], [START], [START, *THOUGHT], [START, *CALL]])
async def test_a_client_that_leaves_ends_the_turn(
    front: Front, begun: list[Any], stream: bool
) -> None:
    """Wherever the reply stands, a dropped connection cancels its turn."""
    front.turns.script = [*begun, asyncio.Event()]
    task = asyncio.create_task(
        front.session.post(front.url + "/api/chat", json={**CHAT, "stream": stream})
    )
    async with asyncio.timeout(5):
        await front.turns.is_stuck.wait()
        if stream and begun[1:2] == THOUGHT[:1]:
            response = await task
            assert await response.content.readline()
            response.close()
        else:
            task.cancel()
    async with asyncio.timeout(1):
        await front.turns.ended.wait()
        await front.observer.num_finished.acquire()
    assert isinstance(front.turns.exit_reason, asyncio.CancelledError)
    assert front.turns.turns[0].is_closed
    assert front.observer.outcomes[0].status == 499
