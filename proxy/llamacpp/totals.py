"""What the engine says of an answer that is complete, whatever route was asked.

Rules:
1. Counts come from the engine alone. The `timings` object has them on most routes;
   Anthropic's has only a `usage`, in two events of a stream.
2. `/completion` says itself whether the context was shifted. Elsewhere that is not
   told: an answer that filled the context counts as shifted.

>>> read_timings({"cache_n": 3, "prompt_n": 29, "predicted_n": 2}).prompt_tokens
32
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.errors import RunnerGone


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTotals:
    """Counts of tokens, and seconds where they are known."""

    cached_tokens: int
    """Prompt tokens that were not evaluated."""
    prefilled_tokens: int
    decoded_tokens: int
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    is_shifted: bool | None = None
    """Whether the context was shifted; None where the route does not tell."""
    ended_by_eos: bool = False

    @property
    def prompt_tokens(self) -> int:
        """All tokens of the prompt."""
        return self.cached_tokens + self.prefilled_tokens


def is_final(event: Mapping[str, Any]) -> bool:
    """Tell whether an event of `/completion` or of a chat is the last of its answer."""
    return bool(event.get("stop")) or ("timings" in event and "choices" in event)


def read_event(event: Mapping[str, Any]) -> EngineTotals:
    """Read the last event of an answer. Raises RunnerGone if it is not whole."""
    timings = event.get("timings")
    if not isinstance(timings, dict):
        raise RunnerGone("its last event lacks the timings")
    return read_timings(
        timings,
        is_shifted=bool(event["truncated"]) if "truncated" in event else None,
        ended_by_eos=event.get("stop_type") == "eos",
    )


def read_timings(
    timings: Mapping[str, Any],
    *,
    is_shifted: bool | None = None,
    ended_by_eos: bool = False,
) -> EngineTotals:
    """Read a `timings` object. Raises RunnerGone if it is not whole."""
    try:
        return EngineTotals(
            cached_tokens=int(timings["cache_n"]),
            prefilled_tokens=int(timings["prompt_n"]),
            decoded_tokens=int(timings["predicted_n"]),
            prefill_seconds=_seconds(timings.get("prompt_ms")),
            decode_seconds=_seconds(timings.get("predicted_ms")),
            is_shifted=is_shifted,
            ended_by_eos=ended_by_eos,
        )
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise RunnerGone("its last event lacks the timings") from exc


def _seconds(milliseconds: object) -> float | None:
    if not isinstance(milliseconds, int | float):
        return None
    return float(milliseconds) / 1e3


class TotalsScanner:
    """Finds the totals in an answer that is relayed as it is.

    Give it each server-sent event of a stream, or the whole body of an answer that is
    not streamed; `totals` is None until the answer is complete.
    """

    def __init__(self) -> None:
        # the mutable state
        self.totals: EngineTotals | None = None
        self._usage: dict[str, int] = {}

    def feed(self, data: bytes) -> None:
        """Look at one event, or one body. What is no JSON is passed over."""
        if b'"timings"' not in data and b'"usage"' not in data:
            return
        for document in _documents(data):
            self._look_at(document)

    def _look_at(self, document: Mapping[str, Any]) -> None:
        timings = document.get("timings")
        if isinstance(timings, dict):
            if not _is_unfinished(document):
                self.totals = read_timings(timings)
            return
        is_start = document.get("type") == "message_start"
        usage = (document.get("message") or {} if is_start else document).get("usage")
        if not isinstance(usage, dict) or self.totals is not None:
            return
        self._usage |= {
            name: count for name, count in usage.items() if isinstance(count, int)
        }
        if not is_start:
            self.totals = self._read_usage(usage)

    def _read_usage(self, usage: Mapping[str, Any]) -> EngineTotals | None:
        """Make totals of a usage in Anthropic's words, or of OpenAI's Responses."""
        known = self._usage
        if "input_tokens" not in known or "output_tokens" not in known:
            return None
        details = usage.get("input_tokens_details")
        if isinstance(details, dict):
            cached = int(details.get("cached_tokens", 0))
            prefilled = known["input_tokens"] - cached
        else:
            cached = known.get("cache_read_input_tokens", 0)
            prefilled = known["input_tokens"]
        return EngineTotals(
            cached_tokens=cached,
            prefilled_tokens=prefilled,
            decoded_tokens=known["output_tokens"],
        )


def _is_unfinished(document: Mapping[str, Any]) -> bool:
    """Tell whether a chunk is one of the middle: timings may come with each."""
    choices = document.get("choices") or []
    return bool(choices) and all(
        choice.get("finish_reason") is None
        for choice in choices
        if isinstance(choice, dict)
    )


def _documents(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of an event's data lines, or the one that a body is."""
    lines = [data] if data.lstrip()[:1] == b"{" else data.splitlines()
    for line in lines:
        text = line.removeprefix(b"data:").strip()
        if not text.startswith(b"{"):
            continue
        try:
            document = orjson.loads(text)
        except orjson.JSONDecodeError:
            continue
        if isinstance(document, dict):
            yield document
