"""Fill in the middle: prompt and suffix become one row of tokens.

Rules:
1. The tokens that stand for prefix, suffix and middle are those that the model file
   names, by their present or their older names, else those that the engine knows by
   their text.
2. Prefix, prompt, suffix, middle: the order of the engine's `/infill` and of the
   templates of most models.
"""

from dataclasses import dataclass

import numpy as np

from proxy.llamacpp.gguf_facts import ModelFacts
from proxy.prefix.hashing import TokenIds

_SUFFIX_SHARE = 4
"""One in so many tokens of a prompt that was cut are the suffix's, as in `/infill`."""

_NAMES = {"pre": "prefix", "suf": "suffix", "mid": "middle"}
_TEXTS = {
    "pre": (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "▁<PRE>",
        "<\uff5cfim▁begin\uff5c>", "<|code_prefix|>", "<|prefix|>",
    ),
    "suf": (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "▁<SUF>",
        "<\uff5cfim▁hole\uff5c>", "<|code_suffix|>", "<|suffix|>",
    ),
    "mid": (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "▁<MID>",
        "<\uff5cfim▁end\uff5c>", "<|code_middle|>", "<|middle|>",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FillTokens:
    """The tokens that mark the parts."""

    prefix: int
    suffix: int
    middle: int


def fill_tokens(facts: ModelFacts) -> FillTokens | None:
    """Find the tokens; None for a model that lacks one of them."""
    found = [_find(facts, kind) for kind in ("pre", "suf", "mid")]
    ids = [token_id for token_id in found if token_id is not None]
    return FillTokens(*ids) if len(ids) == len(found) else None


def _find(facts: ModelFacts, kind: str) -> int | None:
    for name in (f"fim_{kind}", _NAMES[kind]):
        token_id = facts.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token_id, int):
            return token_id
    known = _TEXTS[kind]
    return next((i for i, text in facts.control_tokens if text in known), None)


def fill_in_text(
    facts: ModelFacts, tokens: FillTokens, *, prompt: str, suffix: str
) -> str:
    """Show such a prompt as a text."""
    texts = dict(facts.control_tokens)
    marks = [texts.get(i, "") for i in (tokens.prefix, tokens.suffix, tokens.middle)]
    return f"{marks[0]}{prompt}{marks[1]}{suffix}{marks[2]}"


def fill_in(
    tokens: FillTokens, *, special: TokenIds, prompt: TokenIds, suffix: TokenIds
) -> TokenIds:
    """Put the parts together; `special` (a BOS) comes first."""
    marks = [
        np.array([token_id], dtype=np.int32)
        for token_id in (tokens.prefix, tokens.suffix, tokens.middle)
    ]
    return np.concatenate([special, marks[0], prompt, marks[1], suffix, marks[2]])


def cut_around(
    prompt: TokenIds, suffix: TokenIds, *, room: int
) -> tuple[TokenIds, TokenIds]:
    """Leave what is nearest to the gap, so that both have `room` tokens together.

    >>> prompt, suffix = cut_around(np.arange(9), np.arange(9), room=8)
    >>> prompt.tolist(), suffix.tolist()
    ([3, 4, 5, 6, 7, 8], [0, 1])
    """
    of_suffix = min(len(suffix), max(room // _SUFFIX_SHARE, room - len(prompt)))
    of_prompt = max(0, room - of_suffix)
    return prompt[max(0, len(prompt) - of_prompt) :], suffix[:of_suffix]
