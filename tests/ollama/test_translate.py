"""The shapes of replies, byte by byte."""

import doctest
import json

import pytest

from proxy.go_json import to_json
from proxy.ollama import translate
from proxy.ollama.events import NOTHING, Piece, TurnTotals
from proxy.ollama.translate import ReplyKind

TIME_NS = 1_796_112_000_161_000_000
TOTALS = TurnTotals(
    done_reason="stop",
    num_prompt_tokens=27,
    num_cached_tokens=26,
    num_decoded_tokens=4,
    prefill_ns=12_240_000,
    decode_ns=55_817_000,
)


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


def test_lines_are_those_of_the_golden_chat_stream() -> None:
    """A streamed chat has Ollama's bytes: keys in its order, one object a line."""
    middle = translate.piece_reply(
        ReplyKind.CHAT, model="smol", time_ns=TIME_NS, piece=Piece(" there.")
    )
    assert translate.to_line(middle) == (
        b'{"model":"smol","created_at":"2026-12-01T08:00:00.161Z",'
        b'"message":{"role":"assistant","content":" there."},"done":false}\n'
    )
    last = translate.final_reply(
        ReplyKind.CHAT,
        TOTALS,
        model="smol",
        time_ns=TIME_NS,
        piece=NOTHING,
        tool_calls=(),
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
    middle = translate.piece_reply(
        ReplyKind.GENERATE, model="smol:latest", time_ns=TIME_NS, piece=Piece("Ray")
    )
    assert translate.to_line(middle) == (
        b'{"model":"smol:latest","created_at":"2026-12-01T08:00:00.161Z",'
        b'"response":"Ray","done":false}\n'
    )
    totals = TurnTotals(
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
        piece=NOTHING,
        tool_calls=(),
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
    assert to_json(load) == (
        b'{"model":"smol","created_at":"2026-12-01T08:00:00.161Z","response":"",'
        b'"done":true,"done_reason":"load"}'
    )
    unload = translate.load_reply(
        ReplyKind.CHAT, model="smol", time_ns=TIME_NS, done_reason="unload"
    )
    assert to_json(unload) == (
        b'{"model":"smol","created_at":"2026-12-01T08:00:00.161Z",'
        b'"message":{"role":"assistant","content":""},"done":true,'
        b'"done_reason":"unload"}'
    )


def test_render_only_replies_are_golden() -> None:
    """The rendered prompt is shown with Go's escapes."""
    reply = translate.rendered_reply(
        ReplyKind.CHAT, model="smol", time_ns=TIME_NS, prompt="<|im_start|>user\nHi"
    )
    assert to_json(reply) == (
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
