"""Events to pieces of a reply, calls of tools and totals."""

import json
from typing import Any

import pytest

from proxy.errors import RunnerGone, UpstreamError
from proxy.ollama.events import NOTHING, EventReader, Piece, TurnTotals, join
from tests.fakes.scripted_turns import call_event, chat_event, last_event, text_event


def read(event: dict[str, Any]) -> Piece:
    """Read one event of a completion."""
    return EventReader(is_chat=False).read(event)


def totals_of(event: dict[str, Any]) -> TurnTotals:
    """Read the last event of a completion."""
    reader = EventReader(is_chat=False)
    reader.read(event)
    assert reader.totals is not None
    return reader.totals


def test_the_last_event_gives_the_totals() -> None:
    """All prompt tokens are counted, reused or not; durations are nanoseconds."""
    totals = totals_of(last_event(cache_n=26, prompt_n=1))
    assert totals == TurnTotals(
        done_reason="stop",
        num_prompt_tokens=27,
        num_cached_tokens=26,
        num_decoded_tokens=4,
        prefill_ns=12_240_000,
        decode_ns=55_817_000,
    )


@pytest.mark.parametrize(
    ("stop_type", "reason"), [("eos", "stop"), ("word", "stop"), ("limit", "length")]
)
def test_done_reasons(stop_type: str, reason: str) -> None:
    """Only a limit is `length`; an end of text and a stop string are `stop`."""
    totals = totals_of(last_event(stop_type=stop_type))
    assert totals.done_reason == reason


@pytest.mark.parametrize(
    "timings",
    [
        None,
        {},
        {"cache_n": "a"},
        7,
        {
            "cache_n": 1,
            "prompt_n": 1,
            "predicted_n": 1,
            "prompt_ms": float("inf"),
            "predicted_ms": 1,
        },
    ],
)
def test_a_last_event_without_timings_is_a_broken_runner(timings: object) -> None:
    """Counts are never invented."""
    with pytest.raises(RunnerGone):
        totals_of({"stop": True, "timings": timings})


def test_error_events_are_the_runners_refusal() -> None:
    """An error inside the stream keeps its code and becomes a string."""
    error = {"code": 400, "message": "no", "type": "invalid_request_error"}
    with pytest.raises(UpstreamError) as caught:
        read({"error": error})
    assert caught.value.status == 400
    assert json.loads(caught.value.body) == {"error": error}
    with pytest.raises(UpstreamError) as caught:
        read({"error": "text"})
    assert caught.value.status == 500
    with pytest.raises(RunnerGone):
        read({"content": None})
    assert read(text_event("x")) == Piece("x")


def test_chunks_of_a_chat_give_text_and_thinking() -> None:
    """The opening chunk adds nothing; the last one has reason and totals."""
    reader = EventReader(is_chat=True)
    assert reader.read(chat_event(role="assistant", content=None)) is NOTHING
    assert reader.read(chat_event(reasoning_content="Hm.")) == Piece("", "Hm.")
    assert reader.read(chat_event(content="Hi")) == Piece("Hi")
    assert reader.read({"choices": [], "usage": {}}) is NOTHING
    assert reader.totals is None
    assert reader.read(chat_event("stop")) is NOTHING
    assert reader.totals is not None
    assert reader.totals.done_reason == "stop"
    assert reader.totals.num_prompt_tokens == 27
    assert not reader.tool_calls


def test_calls_are_put_together() -> None:
    """Two calls come in pieces; they are whole, in order, after the last event."""
    reader = EventReader(is_chat=True)
    events = [
        call_event(0, "{", name="get_weather", call_id="aa"),
        call_event(0, '"city": "Oslo"}'),
        call_event(1, "", name="now", call_id="bb"),
    ]
    assert [reader.read(event) for event in events] == [NOTHING] * 3
    assert reader.has_calls
    assert not reader.tool_calls
    reader.read(chat_event("tool_calls"))
    assert [each.to_client() for each in reader.tool_calls] == [
        {
            "id": "aa",
            "function": {
                "index": 0,
                "name": "get_weather",
                "arguments": {"city": "Oslo"},
            },
        },
        {"id": "bb", "function": {"index": 1, "name": "now", "arguments": {}}},
    ]
    assert reader.totals is not None
    assert reader.totals.done_reason == "stop"


def test_a_call_that_was_cut_off_is_left_out() -> None:
    """At the limit half a call is none; otherwise what is no JSON is an error."""
    half = call_event(1, '{"city": "Os', name="get_weather")
    reader = EventReader(is_chat=True)
    reader.read(call_event(0, "{}", name="now"))
    reader.read(half)
    reader.read(chat_event("length"))
    assert [call.name for call in reader.tool_calls] == ["now"]
    assert reader.totals is not None
    assert reader.totals.done_reason == "length"
    reader = EventReader(is_chat=True)
    reader.read(half)
    with pytest.raises(UpstreamError, match="invalid tool call arguments"):
        reader.read(chat_event("tool_calls"))


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"choices": 1},
        {"choices": [{}]},
        {"choices": [{"delta": None}]},
        {"choices": [{"delta": {"tool_calls": [{}]}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    ],
)
def test_chunks_of_an_unknown_shape_are_a_broken_runners(event: dict[str, Any]) -> None:
    """Nothing is guessed out of a chunk that is none."""
    with pytest.raises(RunnerGone):
        EventReader(is_chat=True).read(event)


ENGINE_LOGPROB = {
    "id": 9,
    "token": "Hi",
    "bytes": [72, 105],
    "logprob": -0.1,
    "top_logprobs": [
        {"id": 9, "token": "Hi", "bytes": [72, 105], "logprob": -0.1},
        {"id": 2, "token": "", "bytes": [], "logprob": -3.5},
    ],
}


@pytest.mark.parametrize("is_chat", [True, False])
def test_logprobs_are_as_ollama_has_them(is_chat: bool) -> None:
    """No ids; bytes where there are some; alternatives where they were asked for."""
    if is_chat:
        event = chat_event(content="Hi")
        event["choices"][0]["logprobs"] = {"content": [ENGINE_LOGPROB]}
    else:
        event = {**text_event("Hi"), "completion_probabilities": [ENGINE_LOGPROB]}
    plain = {"token": "Hi", "logprob": -0.1, "bytes": [72, 105]}
    assert EventReader(is_chat=is_chat).read(event) == Piece("Hi", "", (plain,))
    piece = EventReader(is_chat=is_chat, num_top_logprobs=2).read(event)
    assert piece.logprobs == (
        {**plain, "top_logprobs": [plain, {"token": "", "logprob": -3.5}]},
    )
    assert join([piece, Piece(" you", "hm")]) == Piece("Hi you", "hm", piece.logprobs)
