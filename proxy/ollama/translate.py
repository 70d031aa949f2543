"""The shapes of Ollama's replies.

Rules:
1. The keys stand in Ollama's order, and the bytes are as Go writes them (`<`, `>`,
   `&` escaped).
2. What is empty or zero is left out, but for `response`, `content` and `done`.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from enum import Enum
from functools import lru_cache
from typing import Any

from proxy.durations import NANOSECONDS
from proxy.go_json import to_json
from proxy.ollama.events import NOTHING, Piece, TurnTotals
from proxy.ollama.tools import ToolCall


class ReplyKind(Enum):
    """Which route's shape a reply has."""

    GENERATE = "/api/generate"
    CHAT = "/api/chat"


def format_time(time_ns: int) -> str:
    """Write a Unix time as Go does: RFC 3339, UTC, up to 9 fraction digits.

    >>> format_time(1_796_112_000_120_034_000)
    '2026-12-01T08:00:00.120034Z'
    >>> format_time(1_796_112_000_000_000_000)
    '2026-12-01T08:00:00Z'
    """
    seconds, fraction = divmod(time_ns, NANOSECONDS)
    text = _format_second(seconds)
    digits = f"{fraction:09d}".rstrip("0")
    return f"{text}.{digits}Z" if digits else f"{text}Z"


@lru_cache(maxsize=4)
def _format_second(seconds: int) -> str:
    """Write a second; the lines of a stream share few of them."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def to_line(value: object) -> bytes:
    """Write one line of a stream."""
    return to_json(value) + b"\n"


def piece_reply(
    kind: ReplyKind, *, model: str, time_ns: int, piece: Piece
) -> dict[str, Any]:
    """Make a line in the middle of a stream."""
    reply = _head(kind, model, time_ns, piece)
    reply["done"] = False
    if piece.logprobs:
        reply["logprobs"] = piece.logprobs
    return reply


def final_reply(
    kind: ReplyKind,
    totals: TurnTotals,
    *,
    model: str,
    time_ns: int,
    piece: Piece,
    tool_calls: Sequence[ToolCall],
    context: Sequence[int] | None = None,
    total_ns: int,
    load_ns: int,
) -> dict[str, Any]:
    """Make the last line of a stream, or the one object of a reply not streamed."""
    reply = _head(kind, model, time_ns, piece)
    if tool_calls:
        holder = reply["message"] if kind is ReplyKind.CHAT else reply
        holder["tool_calls"] = [call.to_client() for call in tool_calls]
    metrics = {
        "total_duration": total_ns,
        "load_duration": load_ns,
        "prompt_eval_count": totals.num_prompt_tokens,
        "prompt_eval_duration": totals.prefill_ns,
        "eval_count": totals.num_decoded_tokens,
        "eval_duration": totals.decode_ns,
    }
    logprobs = {"logprobs": piece.logprobs} if piece.logprobs else {}
    reply |= {"done": True, "done_reason": totals.done_reason}
    if context:
        reply["context"] = context
    given = {name: value for name, value in metrics.items() if value}
    in_order = (logprobs, given) if kind is ReplyKind.CHAT else (given, logprobs)
    return {**reply, **in_order[0], **in_order[1]}


def load_reply(
    kind: ReplyKind, *, model: str, time_ns: int, done_reason: str
) -> dict[str, Any]:
    """Make the answer to a request that only loads or unloads."""
    return {
        **_head(kind, model, time_ns, NOTHING),
        "done": True,
        "done_reason": done_reason,
    }


def rendered_reply(
    kind: ReplyKind, *, model: str, time_ns: int, prompt: str
) -> dict[str, Any]:
    """Make the answer to `_debug_render_only`."""
    head = _head(kind, model, time_ns, NOTHING)
    if kind is ReplyKind.CHAT:
        head["message"] = {"role": "", "content": ""}
    return {**head, "done": False, "_debug_info": {"rendered_template": prompt}}


def error_reply(message: str) -> dict[str, Any]:
    """Make Ollama's error object; `error` is always a string."""
    return {"error": message}


def _head(kind: ReplyKind, model: str, time_ns: int, piece: Piece) -> dict[str, Any]:
    head: dict[str, Any] = {"model": model, "created_at": format_time(time_ns)}
    holder = head
    if kind is ReplyKind.CHAT:
        holder = head["message"] = {"role": "assistant", "content": piece.text}
    else:
        head["response"] = piece.text
    if piece.thinking:
        holder["thinking"] = piece.thinking
    return head
