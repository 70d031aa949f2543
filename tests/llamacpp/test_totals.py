"""What is read off answers that pass by: counts, and why they ended."""

import orjson
import pytest

from proxy.errors import RunnerGone
from proxy.llamacpp.totals import EngineTotals, TotalsScanner, read_timings

TIMINGS = {
    "cache_n": 26,
    "prompt_n": 1,
    "prompt_ms": 12.5,
    "predicted_n": 4,
    "predicted_ms": 50.0,
}
TOTALS = EngineTotals(
    cached_tokens=26,
    prefilled_tokens=1,
    decoded_tokens=4,
    prefill_seconds=0.0125,
    decode_seconds=0.05,
    finish_reason="stop",
)


def sse(*documents: object) -> bytes:
    """Write server-sent events with these data."""
    return b"".join(b"data: " + orjson.dumps(each) + b"\n\n" for each in documents)


def chunk(reason: str | None, **fields: object) -> dict[str, object]:
    """Make a chunk of a chat."""
    choice = {"index": 0, "delta": {}, "finish_reason": reason}
    return {"choices": [choice], **fields}


def scan(*pieces: bytes) -> EngineTotals | None:
    """Feed all pieces; nothing is known before the last one."""
    scanner = TotalsScanner()
    for piece in pieces:
        assert scanner.totals is None
        scanner.feed(piece)
    return scanner.totals


def test_a_streamed_chat() -> None:
    """The chunk with the reason has the counts too."""
    middle, last = sse(chunk(None)), sse(chunk("stop", timings=TIMINGS))
    assert scan(middle, last) == TOTALS


def test_a_streamed_chat_with_its_usage() -> None:
    """The reason comes one chunk before the counts."""
    usage = {"choices": [], "usage": {"prompt_tokens": 27}, "timings": TIMINGS}
    assert scan(sse(chunk(None)), sse(chunk("stop")), sse(usage)) == TOTALS


def test_several_events_at_once() -> None:
    """Whole events that came in one piece are all looked at."""
    done = b"data: [DONE]\n\n"
    assert scan(sse(chunk(None), chunk("stop", timings=TIMINGS)) + done) == TOTALS


def test_timings_of_each_token_are_not_the_last_ones() -> None:
    """With `timings_per_token` only the chunk with a reason counts."""
    early = {**TIMINGS, "predicted_n": 1}
    pieces = sse(chunk(None, timings=early)), sse(chunk("stop", timings=TIMINGS))
    assert scan(*pieces) == TOTALS


def test_an_answer_in_one_piece() -> None:
    """A chat completion that was not streamed."""
    assert scan(orjson.dumps(chunk("stop", timings=TIMINGS))) == TOTALS


def test_a_streamed_response() -> None:
    """The Responses API tells it in the event at the end."""
    created = {"type": "response.created", "response": {"status": "in_progress"}}
    last = {"type": "response.completed", "response": {"status": "completed"}}
    totals = scan(sse(created), sse({**last, "timings": TIMINGS}))
    assert totals is not None
    assert (totals.prompt_tokens, totals.finish_reason) == (27, "completed")


def test_a_response_in_one_piece() -> None:
    """There is only a usage: counts without times."""
    usage = {
        "input_tokens": 27,
        "output_tokens": 4,
        "input_tokens_details": {"cached_tokens": 26},
    }
    body = {"object": "response", "status": "completed", "usage": usage}
    assert scan(orjson.dumps(body)) == EngineTotals(
        cached_tokens=26,
        prefilled_tokens=1,
        decoded_tokens=4,
        finish_reason="completed",
    )


@pytest.mark.parametrize(
    "data",
    [
        sse({"error": {"message": "no"}}),
        b'data: {"timings": broken\n\n',
        b'data: ["timings"]\n\n',
        sse({"object": "response", "status": "completed", "usage": {}}),
        sse(chunk("stop")),
        sse({"choices": [{"text": 'it says "timings": 1', "finish_reason": None}]}),
        b": a comment\n\n",
        b"data: [DONE]\n\n",
        b"",
    ],
)
def test_what_tells_nothing(data: bytes) -> None:
    """Errors, comments, halves and text that looks alike make no totals."""
    assert scan(data) is None


@pytest.mark.parametrize(
    "timings", [{}, {**TIMINGS, "cache_n": None}, {**TIMINGS, "prompt_n": "x"}]
)
def test_timings_that_are_not_whole(timings: dict[str, object]) -> None:
    """An answer whose end cannot be read has not come to its end."""
    with pytest.raises(RunnerGone, match="lacks the timings"):
        read_timings(timings)
