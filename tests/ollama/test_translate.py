"""Events to replies, and options to a completion body."""

import doctest
import json
from typing import Any

import pytest

from proxy.errors import RequestError, RunnerGone, UpstreamError
from proxy.ollama import translate
from proxy.ollama.options import SamplingOptions
from proxy.ollama.translate import ReplyKind
from tests.fakes.scripted_turns import last_event, text_event

TIME_NS = 1_796_112_000_161_000_000


def completion_body(limit: int = 100, **options: Any) -> dict[str, Any]:  # noqa: ANN401
    """Build the body for a prompt of ten tokens."""
    return translate.completion_body(
        SamplingOptions(**options), num_prompt_tokens=10, limit=limit, json_schema=None
    )


def test_all_sampling_values_are_sent() -> None:
    """Nothing is left to llama-server's own defaults, which differ."""
    assert completion_body() == {
        "n_predict": 90,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repeat_last_n": 64,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 0xFFFFFFFF,
        "stop": [],
    }


@pytest.mark.parametrize(
    ("num_predict", "sent"), [(-1, 90), (-2, 90), (0, 90), (5, 5), (90, 90), (91, 90)]
)
def test_a_reply_ends_with_the_context(num_predict: int, sent: int) -> None:
    """However many tokens are wanted, prompt and reply fit into the context."""
    assert completion_body(num_predict=num_predict)["n_predict"] == sent


def test_values_are_put_into_the_engines_ranges() -> None:
    """-1 for the whole context, 64-bit numbers and empty stops reach no runner."""
    body = completion_body(
        repeat_last_n=-1, top_k=2**40, seed=2**32 + 7, stop=("", "END")
    )
    assert body["repeat_last_n"] == 100
    assert body["top_k"] == 2**31 - 1
    assert body["seed"] == 7
    assert body["stop"] == ["END"]


def test_a_schema_is_sent_as_such() -> None:
    """`format` reaches llama-server as its json_schema."""
    body = translate.completion_body(
        SamplingOptions(), num_prompt_tokens=1, limit=9, json_schema={"type": "object"}
    )
    assert body["json_schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("num_ctx", "limit"), [(None, 4096), (0, 4096), (2048, 2048), (4096, 4096)]
)
def test_num_ctx_narrows_the_context(num_ctx: int | None, limit: int) -> None:
    """A request may ask for less context than the slot has."""
    options = SamplingOptions(num_ctx=num_ctx)
    assert translate.context_limit(options, context_tokens=4096) == limit


def test_num_ctx_cannot_widen_the_context() -> None:
    """Asking for more is refused, and the text names both numbers."""
    with pytest.raises(RequestError, match=r"num_ctx 8192 .* 4096") as caught:
        translate.context_limit(SamplingOptions(num_ctx=8192), context_tokens=4096)
    assert caught.value.status == 400


def test_prompts_that_do_not_fit_are_refused() -> None:
    """A prompt needs room for one token of reply; the text names both numbers."""
    translate.check_tokens_fit(9, limit=10)
    with pytest.raises(RequestError, match=r"longer than the context length.* 10 .*10"):
        translate.check_tokens_fit(10, limit=10)


def test_texts_that_cannot_fit_never_reach_the_tokenizer() -> None:
    """The bytes alone can tell that a text is too long, whatever its tokens."""
    translate.check_text_fits("x" * 160, limit=10, longest_token_bytes=16)
    translate.check_text_fits("x" * 10**6, limit=10, longest_token_bytes=0)
    with pytest.raises(RequestError, match=r"at least 11 tokens.* 10"):
        translate.check_text_fits("ä" * 81, limit=10, longest_token_bytes=16)


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        (1_796_112_000_000_000_000, "2026-12-01T08:00:00Z"),
        (1_796_112_000_161_000_000, "2026-12-01T08:00:00.161Z"),
        (1_796_112_000_000_000_001, "2026-12-01T08:00:00.000000001Z"),
        (1_796_112_000_141_009_110, "2026-12-01T08:00:00.14100911Z"),
    ],
)
def test_times_are_written_as_go_does(time_ns: int, text: str) -> None:
    """UTC, nine digits at most, no zeros at the end."""
    assert translate.format_time(time_ns) == text


def test_the_last_event_gives_the_totals() -> None:
    """All prompt tokens are counted, reused or not; durations are nanoseconds."""
    totals = translate.read_totals(last_event(cache_n=26, prompt_n=1))
    assert totals == translate.TurnTotals(
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
    totals = translate.read_totals(last_event(stop_type=stop_type))
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
        translate.read_totals({"stop": True, "timings": timings})


def test_error_events_are_the_runners_refusal() -> None:
    """An error inside the stream keeps its code and becomes a string."""
    error = {"code": 400, "message": "no", "type": "invalid_request_error"}
    with pytest.raises(UpstreamError) as caught:
        translate.read_text({"error": error})
    assert caught.value.status == 400
    assert json.loads(caught.value.body) == {"error": error}
    with pytest.raises(UpstreamError) as caught:
        translate.read_text({"error": "text"})
    assert caught.value.status == 500
    with pytest.raises(RunnerGone):
        translate.read_text({"content": None})
    assert translate.read_text(text_event("x")) == "x"


def test_lines_are_those_of_the_golden_chat_stream() -> None:
    """A streamed chat has Ollama's bytes: keys in its order, one object a line."""
    middle = translate.text_reply(
        ReplyKind.CHAT, model="smol", time_ns=TIME_NS, text=" there."
    )
    assert translate.to_line(middle) == (
        b'{"model":"smol","created_at":"2026-12-01T08:00:00.161Z",'
        b'"message":{"role":"assistant","content":" there."},"done":false}\n'
    )
    last = translate.final_reply(
        ReplyKind.CHAT,
        translate.read_totals(last_event()),
        model="smol",
        time_ns=TIME_NS,
        text="",
        total_ns=161_204_500,
        load_ns=48_210_300,
    )
    assert translate.to_line(last) == (
        b'{"model":"smol","created_at":"2026-12-01T08:00:00.161Z",'
        b'"message":{"role":"assistant","content":""},"done":true,'
        b'"done_reason":"stop","total_duration":161204500,"load_duration":48210300,'
        b'"prompt_eval_count":27,"prompt_eval_duration":12240000,"eval_count":4,'
        b'"eval_duration":55817000}\n'
    )


def test_lines_are_those_of_the_golden_generate_stream() -> None:
    """A generate line has `response`; what is zero is left out of the last one."""
    middle = translate.text_reply(
        ReplyKind.GENERATE, model="smol:latest", time_ns=TIME_NS, text="Ray"
    )
    assert translate.to_line(middle) == (
        b'{"model":"smol:latest","created_at":"2026-12-01T08:00:00.161Z",'
        b'"response":"Ray","done":false}\n'
    )
    totals = translate.TurnTotals(
        done_reason="length",
        num_prompt_tokens=35,
        num_cached_tokens=0,
        num_decoded_tokens=0,
        prefill_ns=0,
        decode_ns=0,
    )
    last = translate.final_reply(
        ReplyKind.GENERATE,
        totals,
        model="smol:latest",
        time_ns=TIME_NS,
        text="",
        total_ns=5,
        load_ns=0,
    )
    assert translate.to_line(last) == (
        b'{"model":"smol:latest","created_at":"2026-12-01T08:00:00.161Z",'
        b'"response":"","done":true,"done_reason":"length","total_duration":5,'
        b'"prompt_eval_count":35}\n'
    )


def test_load_and_unload_replies_are_golden() -> None:
    """Loading and unloading are told in one object without metrics."""
    load = translate.load_reply(
        ReplyKind.GENERATE, model="smol", time_ns=TIME_NS, done_reason="load"
    )
    assert translate.to_json(load) == (
        b'{"model":"smol","created_at":"2026-12-01T08:00:00.161Z","response":"",'
        b'"done":true,"done_reason":"load"}'
    )
    unload = translate.load_reply(
        ReplyKind.CHAT, model="smol", time_ns=TIME_NS, done_reason="unload"
    )
    assert translate.to_json(unload) == (
        b'{"model":"smol","created_at":"2026-12-01T08:00:00.161Z",'
        b'"message":{"role":"assistant","content":""},"done":true,'
        b'"done_reason":"unload"}'
    )


def test_render_only_replies_are_golden() -> None:
    """The rendered prompt is shown with Go's escapes."""
    reply = translate.rendered_reply(
        ReplyKind.CHAT, model="smol", time_ns=TIME_NS, prompt="<|im_start|>user\nHi"
    )
    assert translate.to_json(reply) == (
        b'{"model":"smol","created_at":"2026-12-01T08:00:00.161Z",'
        b'"message":{"role":"","content":""},"done":false,'
        b'"_debug_info":{"rendered_template":"\\u003c|im_start|\\u003euser\\nHi"}}'
    )


def test_goes_escapes_are_plain_json() -> None:
    """Whatever is escaped, a JSON parser reads the same text."""
    text = "<a href='x'>&\u2028\u2029\0\u00e9\U0001f600\"\\"
    line = translate.to_line({"x": text})
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert not set(b"<>&") & set(line)
    assert json.loads(line) == {"x": text}


def test_worked_example() -> None:
    """The examples in the docstrings hold."""
    assert doctest.testmod(translate).failed == 0
