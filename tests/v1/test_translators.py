"""A chat in Anthropic's words, and events of Responses made whole."""

from typing import Any

import orjson

from proxy.v1.messages_answer import MessagesAnswer
from proxy.v1.responses_answer import ResponsesAnswer
from proxy.v1.translators import Unchanged, read_events

TIMINGS = {"cache_n": 20, "prompt_n": 7, "predicted_n": 4}


def chunks(*deltas: dict[str, Any], reason: str = "stop") -> bytes:
    """Write a streamed chat."""
    choices = [{"delta": delta, "finish_reason": None} for delta in deltas]
    documents: list[dict[str, Any]] = [
        {"model": "m", "choices": [choice]} for choice in choices
    ]
    last = {"choices": [{"delta": {}, "finish_reason": reason}], "timings": TIMINGS}
    lines = [b"data: " + orjson.dumps(each) + b"\n\n" for each in [*documents, last]]
    return b"".join(lines) + b"data: [DONE]\n\n"


def call(index: int, *, arguments: str, **fields: str) -> dict[str, Any]:
    """Make a delta with a piece of a tool call."""
    function = {"arguments": arguments}
    if "name" in fields:
        function["name"] = fields.pop("name")
    return {"tool_calls": [{"index": index, "function": function, **fields}]}


def names(stream: bytes) -> list[str]:
    """Return the names of the events; each is also the `type` of its data."""
    found = [
        line.removeprefix(b"event: ").decode()
        for line in stream.split(b"\n")
        if line.startswith(b"event: ")
    ]
    assert found == [event["type"] for event in read_events(stream)]
    return found


def test_text_as_a_message() -> None:
    """The golden order of events, and the counts at both ends."""
    stream = MessagesAnswer(num_prompt_tokens=27).events(
        chunks(
            {"role": "assistant", "content": None}, {"content": "Hi"}, {"content": "."}
        )
    )
    assert names(stream) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    events = [*read_events(stream)]
    start = events[0]["message"]
    assert start["id"].startswith("msg_")
    assert len(start["id"]) == 28
    assert start | {"id": ""} == {
        "id": "",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 27, "output_tokens": 0},
    }
    assert events[1]["content_block"] == {"type": "text", "text": ""}
    assert events[2] == {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": "Hi"},
    }
    assert events[5]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[5]["usage"] == {
        "input_tokens": 7,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 20,
        "output_tokens": 4,
    }


def test_thinking_text_and_calls_are_blocks_of_their_own() -> None:
    """Each is closed before the next opens, whatever pieces the stream comes in."""
    stream = chunks(
        {"reasoning_content": "I "},
        {"reasoning_content": "think"},
        {"content": "Let me see."},
        call(0, name="now", arguments="", id="a", type="function"),
        call(0, arguments="{}"),
        call(1, name="get", arguments='{"x"', id="b", type="function"),
        call(1, arguments=":1}"),
        reason="tool_calls",
    )
    answer = MessagesAnswer(num_prompt_tokens=27)
    pieces = [part + b"\n\n" for part in stream.split(b"\n\n") if part]
    translated = b"".join(map(answer.events, pieces))
    blocks: dict[int, dict[str, Any]] = {}
    open_block = None
    for event in read_events(translated):
        match event["type"]:
            case "content_block_start":
                assert open_block is None
                open_block = event["index"]
                blocks[open_block] = {**event["content_block"], "said": ""}
            case "content_block_delta":
                assert event["index"] == open_block
                *_, said = event["delta"].values()
                blocks[event["index"]]["said"] += said
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
            case _:
                assert open_block is None
    assert [*blocks] == [0, 1, 2, 3]
    kinds = [(block["type"], block["said"]) for block in blocks.values()]
    assert kinds == [
        ("thinking", "I think"),
        ("text", "Let me see."),
        ("tool_use", "{}"),
        ("tool_use", '{"x":1}'),
    ]
    assert (blocks[3]["id"], blocks[3]["name"], blocks[3]["input"]) == ("b", "get", {})
    *_, delta, stop = read_events(translated)
    assert delta["delta"]["stop_reason"] == "tool_use"
    assert stop == {"type": "message_stop"}


def test_a_whole_chat_as_a_message() -> None:
    """Blocks in the same order; arguments that broke off are none."""
    message = {
        "reasoning_content": "I think",
        "content": "Let me see.",
        "tool_calls": [
            {"id": "a", "function": {"name": "get", "arguments": '{"x": 1}'}},
            {"id": "b", "function": {"name": "get", "arguments": '{"x'}},
        ],
    }
    choice = {"message": message, "finish_reason": "length"}
    body = {"model": "m", "choices": [choice], "timings": TIMINGS}
    answer = MessagesAnswer(num_prompt_tokens=0).whole(orjson.dumps(body))
    whole = orjson.loads(answer)
    assert whole["content"] == [
        {"type": "thinking", "thinking": "I think", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "a", "name": "get", "input": {"x": 1}},
        {"type": "tool_use", "id": "b", "name": "get", "input": {}},
    ]
    assert whole["stop_reason"] == "max_tokens"
    assert whole["usage"]["cache_read_input_tokens"] == 20
    assert (whole["type"], whole["role"], whole["model"]) == (
        "message",
        "assistant",
        "m",
    )


def test_an_error_within_a_stream() -> None:
    """The engine's error event becomes the route's, and nothing says "complete"."""
    error = (
        b'data: {"error":{"code":500,"message":"no room","type":"server_error"}}\n\n'
    )
    stream = MessagesAnswer(num_prompt_tokens=0).events(error)
    (event,) = read_events(stream)
    assert event["type"] == "error"
    assert event["error"] == {"type": "api_error", "message": "no room"}
    (event,) = read_events(ResponsesAnswer(model="m").events(error))
    assert (event["type"], event["message"]) == ("error", "no room")
    assert Unchanged().events(error) == error


def test_comments_reach_the_client() -> None:
    """They keep a client patient; what they are mixed with comes without them."""
    comment = b": prefill\n\n"
    assert Unchanged().events(comment) == comment
    assert ResponsesAnswer(model="m").events(comment) == comment
    answer = MessagesAnswer(num_prompt_tokens=0)
    assert answer.events(comment) == comment
    assert (
        names(answer.events(comment + chunks({"content": "x"})))[0] == "message_start"
    )


def test_each_route_has_an_event_for_a_stream_that_breaks_off() -> None:
    """What the clients' libraries raise."""
    (event,) = read_events(Unchanged().failure("dead"))
    assert event["error"]["message"] == "dead"
    stream = MessagesAnswer(num_prompt_tokens=0).failure("dead")
    assert names(stream) == ["error"]
    assert names(ResponsesAnswer(model="m").failure("dead")) == ["error"]


def responses_events(*events: dict[str, Any]) -> list[dict[str, Any]]:
    """Complete events of the Responses API."""
    lines = [
        f"event: {event['type']}\n".encode() + b"data: " + orjson.dumps(event) + b"\n\n"
        for event in events
    ]
    answer = ResponsesAnswer(model="m")
    stream = b"".join(map(answer.events, lines))
    assert names(stream)
    return [*read_events(stream)]


def test_events_of_a_response_get_their_places() -> None:
    """Numbers count all events; indexes follow the items, also when they end late."""
    item = {"id": "fc", "type": "function_call", "name": "now", "arguments": "{}"}
    reasoning = {"id": "rs", "type": "reasoning"}
    events = responses_events(
        {"type": "response.created", "response": {"id": "r", "status": "in_progress"}},
        {"type": "response.in_progress", "response": {"id": "r"}},
        {"type": "response.output_item.added", "item": reasoning},
        {"type": "response.reasoning_text.delta", "item_id": "rs", "delta": "I"},
        {"type": "response.output_item.added", "item": item},
        {"type": "response.function_call_arguments.delta", "item_id": "fc"},
        {"type": "response.output_item.done", "item": reasoning},
        {"type": "response.output_item.done", "item": item},
        {"type": "response.completed", "response": {"id": "r"}},
    )
    assert [event["sequence_number"] for event in events] == [*range(10)]
    assert [(event["type"][9:], event.get("output_index")) for event in events] == [
        ("created", None),
        ("in_progress", None),
        ("output_item.added", 0),
        ("reasoning_text.delta", 0),
        ("output_item.added", 1),
        ("function_call_arguments.delta", 1),
        ("output_item.done", 0),
        ("function_call_arguments.done", 1),
        ("output_item.done", 1),
        ("completed", None),
    ]
    assert events[0]["response"]["output"] == []
    assert events[0]["response"]["id"] == "r"
    assert events[3]["content_index"] == 0
    assert events[7]["arguments"] == "{}"
