"""An answer in one piece, gathered from a stream of the engine.

While it makes an answer in one piece, the engine looks whether its client is still
there only after a second in which none of its slots has said a word: beside a busy
one never. It would go on for somebody who has left, up to the end of the context. A
stream is written to, so it ends at once. Hence every answer is asked for as a stream.

Rules:
1. What is gathered has the fields of the engine's own answer in one piece.
2. A chat with `logprobs` is asked for in one piece: in a stream of it those of the
   tokens that nobody is shown are missing, and with tools the engine refuses it.
3. A stream that ends early is no answer, and an error in it is the answer.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.errors import RunnerGone, UpstreamError
from proxy.ollama.backend import CHAT_PATH
from proxy.v1.translators import read_events

_RESPONSE_ENDS = ("response.completed", "response.incomplete", "response.failed")


def can_gather(path: str, body: Mapping[str, Any]) -> bool:
    """Tell whether a body that asks for no stream may ask for one instead."""
    has_logprobs = bool(body.get("logprobs") or body.get("n_probs"))
    return not (path == CHAT_PATH and has_logprobs)


def as_stream(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body that asks for the same answer as a stream."""
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


class Gathering:
    """Takes the events of one answer; any of the engine's routes."""

    def __init__(self, path: str) -> None:
        self._is_chat = path == CHAT_PATH
        # the mutable state
        self._fields: dict[str, Any] = {}
        self._texts: dict[str, list[str]] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._logprobs: list[Any] = []
        self._finish_reason: str | None = None
        self._response: dict[str, Any] | None = None

    def feed(self, events: bytes) -> None:
        """Take whole events. Raises UpstreamError for an error among them."""
        for fields in read_events(events):
            error = fields.get("error")
            if error is not None:
                code = error.get("code") if isinstance(error, dict) else None
                status = code if isinstance(code, int) else 500
                raise UpstreamError(status, orjson.dumps({"error": error}).decode())
            if fields.get("type") in _RESPONSE_ENDS:
                self._response = fields["response"]
            elif "choices" in fields:
                for choice in fields.pop("choices"):
                    self._take(choice)
                self._fields |= fields

    def whole(self) -> bytes:
        """Return the answer. Raises RunnerGone where the stream ended before it."""
        if self._response is not None:
            return orjson.dumps(_response_in_one_piece(self._response))
        if "usage" not in self._fields or self._finish_reason is None:
            raise RunnerGone("the stream ended before the answer was complete")
        if self._is_chat:
            self._fields["object"] = "chat.completion"
        return orjson.dumps({"choices": [self._choice()], **self._fields})

    def _take(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta", choice)
        for name in ("text", "content", "reasoning_content"):
            if delta.get(name):
                self._texts.setdefault(name, []).append(delta[name])
        for piece in delta.get("tool_calls", ()):
            self._take_call(piece)
        logprobs = choice.get("logprobs")
        if logprobs is not None:
            self._logprobs += logprobs["content"]
        self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def _take_call(self, piece: Mapping[str, Any]) -> None:
        call = self._calls.setdefault(
            piece["index"],
            {"type": "function", "function": {"name": "", "arguments": ""}, "id": ""},
        )
        call["id"] += piece.get("id") or ""
        for name, text in piece.get("function", {}).items():
            call["function"][name] += text or ""

    def _choice(self) -> dict[str, Any]:
        logprobs = {"content": self._logprobs} if self._logprobs else None
        if not self._is_chat:
            return {
                "text": self._text("text"),
                "index": 0,
                "logprobs": logprobs,
                "finish_reason": self._finish_reason,
            }
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self._text("content"),
        }
        if thoughts := self._text("reasoning_content"):
            message["reasoning_content"] = thoughts
        if self._calls:
            message["tool_calls"] = [call for _, call in sorted(self._calls.items())]
        choice = {
            "finish_reason": self._finish_reason,
            "index": 0,
            "message": message,
        }
        return {**choice, "logprobs": logprobs} if logprobs else choice

    def _text(self, name: str) -> str:
        return "".join(self._texts.get(name, ()))


def _response_in_one_piece(response: Mapping[str, Any]) -> dict[str, Any]:
    """Add what a response at the end of a stream lacks."""
    output = [
        {**item, "status": "completed"} if item["type"] == "reasoning" else item
        for item in response["output"]
    ]
    completed_at = {"completed_at": response.get("created_at")}
    return {**completed_at, **response, "output": output}
