"""What the engine says of an answer that is complete, whatever route was asked.

Rules:
1. Counts come from the engine alone. The `timings` object has them everywhere but in
   a `/v1/responses` answer that is not streamed, which has only a `usage`.
2. `/completion` says itself whether the context was shifted. Elsewhere that is not
   told: an answer that filled the context counts as shifted.

>>> read_timings({"cache_n": 3, "prompt_n": 29, "predicted_n": 2}).prompt_tokens
32
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from proxy.errors import RunnerGone

_TELLING = re.compile(rb'"timings"|"usage"|"finish_reason":"')
"""In an event: something that is worth parsing it."""


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
    finish_reason: str = ""
    """Why an answer that was relayed has ended, in its route's word."""

    @property
    def prompt_tokens(self) -> int:
        """All tokens of the prompt."""
        return self.cached_tokens + self.prefilled_tokens


def of_pieces(totals: EngineTotals, early: Sequence[EngineTotals]) -> EngineTotals:
    """Return the totals of a prompt that was prefilled in pieces, `early` ones first.

    What the first piece found in its slot was reused, and nothing else.
    """
    if not early:
        return totals
    cached = min(early[0].cached_tokens, totals.cached_tokens)
    return replace(
        totals,
        cached_tokens=cached,
        prefilled_tokens=totals.prompt_tokens - cached,
        prefill_seconds=sum(one.prefill_seconds or 0.0 for one in (*early, totals)),
    )


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
    finish_reason: str = "",
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
            finish_reason=finish_reason,
        )
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise RunnerGone("its last event lacks the timings") from exc


def _seconds(milliseconds: object) -> float | None:
    if not isinstance(milliseconds, int | float):
        return None
    return float(milliseconds) / 1e3


class TotalsScanner:
    """Finds the totals in an answer that is relayed as it is.

    Give it whole server-sent events of a stream, or the whole body of an answer that
    is not streamed; `totals` is None until the answer is complete.
    """

    def __init__(self) -> None:
        # the mutable state
        self.totals: EngineTotals | None = None
        self._finish_reason = ""

    def feed(self, data: bytes) -> None:
        """Look at events, or at a body. What is no JSON is passed over."""
        if not _TELLING.search(data):
            return
        for document in _documents(data):
            self._look_at(document)

    def _look_at(self, document: Mapping[str, Any]) -> None:
        self._finish_reason = _finish_reason(document) or self._finish_reason
        timings, usage = document.get("timings"), document.get("usage")
        if isinstance(timings, dict):
            # with `timings_per_token` they come with every chunk
            if self._finish_reason:
                self.totals = read_timings(timings, finish_reason=self._finish_reason)
        elif isinstance(usage, dict) and document.get("object") == "response":
            self.totals = _read_usage(usage, finish_reason=self._finish_reason)


def _finish_reason(document: Mapping[str, Any]) -> str:
    """Return why an answer has ended, in the route's word; empty if it goes on."""
    match document:
        case {"choices": [{"finish_reason": str(reason)}, *_]}:
            return reason
        case {"object": "response", "status": str(reason)}:
            return reason
        case {
            "type": "response.completed" | "response.incomplete",
            "response": {"status": str(reason)},
        }:
            return reason
        case _:
            return ""


def _read_usage(usage: Mapping[str, Any], *, finish_reason: str) -> EngineTotals | None:
    """Make totals of the usage of a response that was not streamed."""
    match usage:
        case {
            "input_tokens": int(prompt),
            "output_tokens": int(decoded),
            "input_tokens_details": {"cached_tokens": int(cached)},
        }:
            return EngineTotals(
                cached_tokens=cached,
                prefilled_tokens=prompt - cached,
                decoded_tokens=decoded,
                finish_reason=finish_reason,
            )
        case _:
            return None


def _documents(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of events' data lines, or the one that a body is."""
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
