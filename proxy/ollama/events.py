"""What the events of a turn say: text, thinking, calls of tools, counts.

Rules:
1. The counts are the engine's: all prompt tokens, reused or not, are
   `prompt_eval_count`. Durations are integer nanoseconds.
2. Calls of tools come with the last event, however their pieces came: as Ollama has
   it for models that llama-server renders itself.
3. An event of an unknown shape is that of a broken runner.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.errors import RunnerGone, UpstreamError
from proxy.ollama.thinking import ThinkingSplitter
from proxy.ollama.tools import CallCollector, ToolCall

_NANOSECONDS_PER_MS = 1e6

Logprob = dict[str, Any]
"""`token`, `logprob`, `bytes`, and `top_logprobs` where they were asked for."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event adds to the reply."""

    text: str = ""
    thinking: str = ""
    logprobs: tuple[Logprob, ...] = ()


NOTHING = Piece()


def join(pieces: Sequence[Piece]) -> Piece:
    """Make one piece of many."""
    return Piece(
        "".join([piece.text for piece in pieces]),
        "".join([piece.thinking for piece in pieces]),
        tuple(entry for piece in pieces for entry in piece.logprobs),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTotals:
    """What the engine says of a finished turn."""

    done_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_decoded_tokens: int
    prefill_ns: int
    decode_ns: int


class EventReader:
    """Reads the events of one turn, in their order."""

    def __init__(
        self,
        *,
        is_chat: bool,
        num_top_logprobs: int = 0,
        splitter: ThinkingSplitter | None = None,
    ) -> None:
        """Read chunks of a chat, or events of `/completion`.

        With a splitter the text of the latter holds thinking, which is told apart.
        """
        self._is_chat = is_chat
        self._splitter = splitter
        self._num_top_logprobs = num_top_logprobs
        self._calls = CallCollector()
        # the mutable state
        self.has_calls = False
        """Whether a call of a tool has begun."""
        self.tool_calls: tuple[ToolCall, ...] = ()
        self.totals: TurnTotals | None = None
        """Known after the last event."""

    def read(self, event: Mapping[str, Any]) -> Piece:
        """Tell what an event adds; often `NOTHING`.

        Raises UpstreamError for an error event, RunnerGone for an unknown shape.
        """
        error = event.get("error")
        if error is not None:
            code = error.get("code") if isinstance(error, dict) else None
            status = code if isinstance(code, int) else 500
            raise UpstreamError(status, orjson.dumps({"error": error}).decode())
        try:
            return self._read_chat(event) if self._is_chat else self._read_plain(event)
        except (KeyError, TypeError, AttributeError, IndexError) as exc:
            raise RunnerGone("it sent an event of an unknown shape") from exc

    def _read_plain(self, event: Mapping[str, Any]) -> Piece:
        """Read an event of `/completion`."""
        text = event.get("content", "")
        if not isinstance(text, str):
            raise TypeError(text)
        entries = event.get("completion_probabilities")
        if event.get("stop"):
            is_cut_off = event.get("stop_type") == "limit"
            self.totals = _read_totals(event, is_cut_off=is_cut_off)
        thinking = ""
        if self._splitter is not None:
            text, thinking = self._splitter.feed(text)
            if self.totals is not None:
                rest, more = self._splitter.finish()
                text, thinking = text + rest, thinking + more
        if not text and not thinking:
            return NOTHING  # the end of the text, whose logprob Ollama drops
        logprobs = self._logprobs(entries) if entries else ()
        return Piece(text, thinking, logprobs)

    def _read_chat(self, event: Mapping[str, Any]) -> Piece:
        """Read a chunk of `/v1/chat/completions`."""
        choices = event["choices"]
        if not choices:
            return NOTHING
        choice = choices[0]
        delta = choice["delta"]
        text = delta.get("content") or ""
        thinking = delta.get("reasoning_content") or ""
        entries = (choice.get("logprobs") or {}).get("content") or ()
        if "tool_calls" in delta:
            self.has_calls = True
            self._calls.add(delta["tool_calls"])
        reason = choice.get("finish_reason")
        if reason is not None:
            is_cut_off = reason == "length"
            self.tool_calls = self._calls.finish(is_cut_off=is_cut_off)
            self.totals = _read_totals(event, is_cut_off=is_cut_off)
        if text or thinking or entries:
            return Piece(text, thinking, self._logprobs(entries))
        return NOTHING

    def _logprobs(self, entries: Sequence[Mapping[str, Any]]) -> tuple[Logprob, ...]:
        return tuple(self._logprob(entry) for entry in entries)

    def _logprob(self, entry: Mapping[str, Any]) -> Logprob:
        logprob = _token_logprob(entry)
        if self._num_top_logprobs:
            alternatives = entry.get("top_logprobs") or ()
            logprob["top_logprobs"] = [
                _token_logprob(other)
                for other in alternatives[: self._num_top_logprobs]
            ]
        return logprob


def _token_logprob(entry: Mapping[str, Any]) -> Logprob:
    logprob = {"token": entry["token"], "logprob": entry["logprob"]}
    if entry.get("bytes"):
        logprob["bytes"] = entry["bytes"]
    return logprob


def _read_totals(event: Mapping[str, Any], *, is_cut_off: bool) -> TurnTotals:
    """Read the last event of a turn. Raises RunnerGone if it is not whole."""
    timings = event.get("timings")
    try:
        if timings is None:
            raise KeyError("timings")
        return TurnTotals(
            done_reason="length" if is_cut_off else "stop",
            num_prompt_tokens=timings["cache_n"] + timings["prompt_n"],
            num_cached_tokens=timings["cache_n"],
            num_decoded_tokens=timings["predicted_n"],
            prefill_ns=round(timings["prompt_ms"] * _NANOSECONDS_PER_MS),
            decode_ns=round(timings["predicted_ms"] * _NANOSECONDS_PER_MS),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise RunnerGone("its last event lacks the timings") from exc
