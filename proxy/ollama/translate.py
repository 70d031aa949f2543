"""How llama-server's `/completion` protocol and Ollama's replies map on each other.

Rules:
1. Sampling values are always sent; llama-server's own defaults are others.
2. A reply is bounded: prompt and reply together never exceed the context, so the
   engine never shifts it.
3. The counts are the engine's: all prompt tokens, reused or not, are
   `prompt_eval_count`. Durations are integer nanoseconds. What is zero is left out.
4. The keys stand in Ollama's order, and the bytes are as Go writes them (`<`, `>`,
   `&` escaped).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import orjson

from proxy.durations import NANOSECONDS
from proxy.errors import RequestError, RunnerGone, UpstreamError
from proxy.ollama.options import SamplingOptions

_NANOSECONDS_PER_MS = 1e6
_INT32_LIMIT = 2**31 - 1

_GO_ESCAPES = (
    (b"<", b"\\u003c"),
    (b">", b"\\u003e"),
    (b"&", b"\\u0026"),
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
)


class ReplyKind(Enum):
    """Which route's shape a reply has."""

    GENERATE = "/api/generate"
    CHAT = "/api/chat"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTotals:
    """What the engine says of a finished turn."""

    done_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_decoded_tokens: int
    prefill_ns: int
    decode_ns: int


def context_limit(options: SamplingOptions, *, context_tokens: int) -> int:
    """Tell how many tokens prompt and reply may have together.

    `num_ctx` narrows what the slot holds (`context_tokens`); it cannot widen it.
    Raises RequestError (400).
    """
    if options.num_ctx is None or options.num_ctx <= 0:
        return context_tokens
    if options.num_ctx > context_tokens:
        raise RequestError(
            400,
            f"num_ctx {options.num_ctx} is larger than the context length that this "
            f"model is served with, {context_tokens}: leave num_ctx out or lower it",
        )
    return options.num_ctx


def check_text_fits(text: str, *, limit: int, longest_token_bytes: int) -> None:
    """Refuse a text that is too long whatever its tokens are.

    Spares the tokenizer a text of megabytes. Raises RequestError (400).
    """
    if longest_token_bytes <= 0:
        return
    num_bytes = len(text.encode("utf-8", "replace"))
    least_tokens = -(-num_bytes // longest_token_bytes)
    if least_tokens > limit:
        raise _too_long(f"at least {least_tokens}", limit)


def check_tokens_fit(num_tokens: int, *, limit: int) -> None:
    """Refuse a prompt that leaves no room for one token. Raises RequestError (400)."""
    if num_tokens >= limit:
        raise _too_long(str(num_tokens), limit)


def _too_long(num_tokens: str, limit: int) -> RequestError:
    return RequestError(
        400,
        f"the prompt is longer than the context length: it has {num_tokens} tokens, "
        f"and the context holds {limit}, one of them for the reply",
    )


def completion_body(
    options: SamplingOptions,
    *,
    num_prompt_tokens: int,
    limit: int,
    json_schema: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Build the body of `/completion`, less what the turn source adds."""
    room = limit - num_prompt_tokens
    # Ollama takes 0 for "no limit" as well: it leaves a zero out of the body.
    wanted = options.num_predict if options.num_predict > 0 else room
    body: dict[str, Any] = {
        "n_predict": min(wanted, room),
        "temperature": options.temperature,
        "top_k": _as_int32(options.top_k),
        "top_p": options.top_p,
        "min_p": options.min_p,
        "typical_p": options.typical_p,
        # The engine refuses the -1 that stands for the whole context.
        "repeat_last_n": (
            limit if options.repeat_last_n == -1 else _as_int32(options.repeat_last_n)
        ),
        "repeat_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        # The engine takes the low 32 bits; all ones draw a random seed.
        "seed": options.seed & 0xFFFFFFFF,
        # An empty stop string would end each reply before its first token.
        "stop": [text for text in options.stop if text],
    }
    if json_schema is not None:
        body["json_schema"] = dict(json_schema)
    return body


def _as_int32(value: int) -> int:
    return max(-_INT32_LIMIT, min(_INT32_LIMIT, value))


def read_text(event: Mapping[str, Any]) -> str:
    """Tell the text that an event adds; often none.

    Raises UpstreamError for an error event.
    """
    error = event.get("error")
    if error is not None:
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) else 500
        raise UpstreamError(status, orjson.dumps({"error": error}).decode())
    text = event.get("content", "")
    if not isinstance(text, str):
        raise RunnerGone("it sent an event of an unknown shape")
    return text


def read_totals(event: Mapping[str, Any]) -> TurnTotals:
    """Read the last event of a turn. Raises RunnerGone if it is not whole."""
    timings = event.get("timings")
    try:
        if timings is None:
            raise KeyError("timings")
        return TurnTotals(
            done_reason="length" if event.get("stop_type") == "limit" else "stop",
            num_prompt_tokens=timings["cache_n"] + timings["prompt_n"],
            num_cached_tokens=timings["cache_n"],
            num_decoded_tokens=timings["predicted_n"],
            prefill_ns=round(timings["prompt_ms"] * _NANOSECONDS_PER_MS),
            decode_ns=round(timings["predicted_ms"] * _NANOSECONDS_PER_MS),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise RunnerGone("its last event lacks the timings") from exc


def format_time(time_ns: int) -> str:
    """Write a Unix time as Go does: RFC 3339, UTC, up to 9 fraction digits.

    >>> format_time(1_796_112_000_120_034_000)
    '2026-12-01T08:00:00.120034Z'
    >>> format_time(1_796_112_000_000_000_000)
    '2026-12-01T08:00:00Z'
    """
    seconds, fraction = divmod(time_ns, NANOSECONDS)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    digits = f"{fraction:09d}".rstrip("0")
    return f"{text}.{digits}Z" if digits else f"{text}Z"


def to_json(value: object) -> bytes:
    """Write a value as Go does."""
    line = orjson.dumps(value)
    for character, escape in _GO_ESCAPES:
        if character in line:
            line = line.replace(character, escape)
    return line


def to_line(value: object) -> bytes:
    """Write one line of a stream."""
    return to_json(value) + b"\n"


def text_reply(
    kind: ReplyKind, *, model: str, time_ns: int, text: str
) -> dict[str, Any]:
    """Make a line in the middle of a stream."""
    return {**_head(kind, model, time_ns, text), "done": False}


def final_reply(
    kind: ReplyKind,
    totals: TurnTotals,
    *,
    model: str,
    time_ns: int,
    text: str,
    total_ns: int,
    load_ns: int,
) -> dict[str, Any]:
    """Make the last line of a stream, or the one object of a reply not streamed."""
    metrics = {
        "total_duration": total_ns,
        "load_duration": load_ns,
        "prompt_eval_count": totals.num_prompt_tokens,
        "prompt_eval_duration": totals.prefill_ns,
        "eval_count": totals.num_decoded_tokens,
        "eval_duration": totals.decode_ns,
    }
    return {
        **_head(kind, model, time_ns, text),
        "done": True,
        "done_reason": totals.done_reason,
        **{name: value for name, value in metrics.items() if value},
    }


def load_reply(
    kind: ReplyKind, *, model: str, time_ns: int, done_reason: str
) -> dict[str, Any]:
    """Make the answer to a request that only loads or unloads."""
    return {
        **_head(kind, model, time_ns, ""),
        "done": True,
        "done_reason": done_reason,
    }


def rendered_reply(
    kind: ReplyKind, *, model: str, time_ns: int, prompt: str
) -> dict[str, Any]:
    """Make the answer to `_debug_render_only`."""
    head = _head(kind, model, time_ns, "")
    if kind is ReplyKind.CHAT:
        head["message"] = {"role": "", "content": ""}
    return {**head, "done": False, "_debug_info": {"rendered_template": prompt}}


def error_reply(message: str) -> dict[str, Any]:
    """Make Ollama's error object; `error` is always a string."""
    return {"error": message}


def _head(kind: ReplyKind, model: str, time_ns: int, text: str) -> dict[str, Any]:
    head: dict[str, Any] = {"model": model, "created_at": format_time(time_ns)}
    if kind is ReplyKind.CHAT:
        head["message"] = {"role": "assistant", "content": text}
    else:
        head["response"] = text
    return head
