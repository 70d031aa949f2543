"""An answer of `/v1/chat/completions` in the words of Anthropic's Messages API.

Rules:
1. A block is opened by the first piece of its kind and closed before the next opens:
   thinking, text, and one block for each tool call.
2. The input tokens at the start of a stream are the prompt's as it was found; those
   at its end are the engine's own counts, cached ones apart.
3. The stream is complete only after the engine's last chunk: `message_stop`.
"""

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from proxy.ollama.gojson import is_too_deep
from proxy.v1.failures import Dialect, error_object
from proxy.v1.translators import event, is_comment, read_events

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


class MessagesAnswer:
    """Translates one answer."""

    def __init__(self, *, num_prompt_tokens: int) -> None:
        """Begin with the prompt's length as it is believed; 0 where not known."""
        self._num_prompt_tokens = num_prompt_tokens
        # the mutable state
        self._is_started = False
        self._kind = ""
        """Of the open block: empty for none, else with a call's index in it."""
        self._index = -1
        self._stop_reason = "end_turn"

    def events(self, events: bytes) -> bytes:
        """Turn chunks of a chat into events of a message."""
        if is_comment(events):
            return events
        return b"".join(
            part for chunk in read_events(events) for part in self._turn(chunk)
        )

    def whole(self, body: bytes) -> bytes:
        """Turn a whole chat completion into a message."""
        answer = orjson.loads(body)
        choice = answer["choices"][0]
        return orjson.dumps(
            {
                **_message(str(answer.get("model", ""))),
                "content": [*_blocks(choice["message"])],
                "stop_reason": _STOP_REASONS.get(choice["finish_reason"], "end_turn"),
                "stop_sequence": None,
                "usage": _usage(answer["timings"]),
            }
        )

    def failure(self, message: str) -> bytes:
        """Make an `error` event."""
        value = error_object(Dialect.ANTHROPIC, status=500, message=message)
        return event("error", value)

    def _turn(self, chunk: Mapping[str, Any]) -> Iterator[bytes]:
        if "error" in chunk:
            yield self.failure(orjson.dumps(chunk).decode())
            return
        if not self._is_started:
            self._is_started = True
            yield self._start(str(chunk.get("model", "")))
        for choice in chunk["choices"]:
            yield from self._turn_delta(choice["delta"])
            reason = choice.get("finish_reason")
            if reason is not None:
                self._stop_reason = _STOP_REASONS.get(reason, "end_turn")
        if "timings" in chunk:
            yield from self._end(chunk["timings"])

    def _start(self, model: str) -> bytes:
        usage = {"input_tokens": self._num_prompt_tokens, "output_tokens": 0}
        message = {
            **_message(model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return event("message_start", {"message": message})

    def _turn_delta(self, delta: Mapping[str, Any]) -> Iterator[bytes]:
        if thought := delta.get("reasoning_content"):
            yield from self._open("thinking", {"thinking": ""})
            yield self._delta({"type": "thinking_delta", "thinking": thought})
        if text := delta.get("content"):
            yield from self._open("text", {"text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls", ()):
            function = call.get("function", {})
            fields = {"id": call.get("id"), "name": function.get("name"), "input": {}}
            yield from self._open("tool_use", fields, part=str(call["index"]))
            if arguments := function.get("arguments"):
                yield self._delta(
                    {"type": "input_json_delta", "partial_json": arguments}
                )

    def _open(
        self, kind: str, fields: Mapping[str, Any], *, part: str = ""
    ) -> Iterator[bytes]:
        """Open a block of a kind, unless that is the one that is open."""
        if self._kind == kind + part:
            return
        yield from self._close()
        self._kind = kind + part
        self._index += 1
        block = {"type": kind, **fields}
        yield event(
            "content_block_start", {"index": self._index, "content_block": block}
        )

    def _close(self) -> Iterator[bytes]:
        if not self._kind:
            return
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        self._kind = ""
        yield event("content_block_stop", {"index": self._index})

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return event("content_block_delta", {"index": self._index, "delta": delta})

    def _end(self, timings: Mapping[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        delta = {"stop_reason": self._stop_reason, "stop_sequence": None}
        yield event("message_delta", {"delta": delta, "usage": _usage(timings)})
        yield event("message_stop", {})


def _message(model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
    }


def _usage(timings: Mapping[str, Any]) -> dict[str, int]:
    return {
        "input_tokens": timings["prompt_n"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": timings["cache_n"],
        "output_tokens": timings["predicted_n"],
    }


def _blocks(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if thought := message.get("reasoning_content"):
        yield {"type": "thinking", "thinking": thought, "signature": ""}
    if text := message.get("content"):
        yield {"type": "text", "text": text}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        yield {
            "type": "tool_use",
            "id": call["id"],
            "name": function["name"],
            "input": _arguments(function["arguments"]),
        }


def _arguments(text: str) -> dict[str, Any]:
    """Read the arguments of a call; those that broke off, or go too deep, are none."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) and not is_too_deep(value) else {}
