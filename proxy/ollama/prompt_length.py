"""Which prompts are too long, and what is left out of them.

Rules:
1. A prompt fits if it leaves room for one token of the reply.
2. Of a conversation the oldest messages are dropped, as few as possible; system
   messages and the last message stay. The number of renderings grows with the
   logarithm of the number of messages.
3. Of a single prompt, as in `/api/generate`, tokens are cut off: the first `num_keep`
   stay, and of the rest the newest, so that about half of the context is free.
4. What is refused is refused in the words that Ollama, or its runner, has for it.
5. Nothing is left out for a request that asks for a longer context than there is: it
   counts on all of its prompt being read. Many clients ask for more than they use.
"""

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np
import orjson

from proxy.errors import RequestError
from proxy.ollama.options import SamplingOptions
from proxy.prefix.hashing import TokenIds

_GUESSES = 6
"""After so many the place of the cut is searched by halving."""

Message = TypeVar("Message")
Made = TypeVar("Made")


def context_limit(options: SamplingOptions, *, context_tokens: int) -> int:
    """Tell how many tokens prompt and reply may have together.

    `num_ctx` narrows what the slot holds (`context_tokens`); it cannot widen it.
    """
    if options.num_ctx is None or options.num_ctx <= 0:
        return context_tokens
    return min(options.num_ctx, context_tokens)


def asks_for_more(
    options: SamplingOptions, *, context_tokens: int, trained_tokens: int
) -> bool:
    """Tell whether a request counts on a longer context than the slot has.

    More than the model was trained for (`trained_tokens`) is what Ollama does not
    give either.
    """
    if options.num_ctx is None:
        return False
    return context_tokens < min(options.num_ctx, trained_tokens)


def least_tokens(text: str, *, longest_token_bytes: int) -> int:
    """Tell how many tokens a text has at least; 0 where nobody knows.

    Spares the tokenizer a text of megabytes.
    """
    if longest_token_bytes <= 0:
        return 0
    return -(-len(text.encode("utf-8", "replace")) // longest_token_bytes)


def without_middle(text: str, *, limit: int, longest_token_bytes: int) -> str:
    """Leave out of a very long text what will be cut off whatever its tokens are.

    >>> without_middle("a" * 9 + "b" * 9, limit=2, longest_token_bytes=2)
    'aaaabbbb'
    """
    span = limit * longest_token_bytes
    return text if len(text) <= 2 * span else text[:span] + text[-span:]


def fits(num_tokens: int, *, limit: int) -> bool:
    """Tell whether a prompt leaves room for one token."""
    return num_tokens < limit


def exceeds_context(num_tokens: int, *, limit: int) -> RequestError:
    """Make the error of a prompt that is too long: llama-server's own, as a string."""
    error = {
        "code": 400,
        "message": f"request ({num_tokens} tokens) exceeds the available context size "
        f"({limit} tokens), try increasing it",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": num_tokens,
        "n_ctx": limit,
    }
    return RequestError(400, orjson.dumps({"error": error}).decode())


def has_less_context(
    num_tokens: int, *, num_ctx: int | None, limit: int
) -> RequestError:
    """Make the error of a prompt that would fit the context that was asked for."""
    return RequestError(
        400,
        f"num_ctx {num_ctx} is larger than the context length that this model is "
        f"served with, {limit}, and the prompt has {num_tokens} tokens or more: "
        "shorten it, or serve the model with a larger --ctx",
    )


def must_not_be_cut() -> RequestError:
    """Make the error of a prompt that is too long where `shift` is off."""
    return RequestError(
        400,
        "the prompt is longer than the context length currently available to the "
        "model; shorten the prompt, adjust the context length in settings, or use a "
        "model with a longer context length",
    )


def cut_tokens(
    token_ids: TokenIds, *, limit: int, num_keep: int, num_special: int
) -> TokenIds:
    """Cut a prompt that is too long: the first tokens and the newest stay.

    `num_special` tokens at the beginning are kept besides `num_keep`; a negative
    `num_keep` keeps as much of the beginning as there is room for.

    >>> cut_tokens(np.arange(100), limit=20, num_keep=3, num_special=1).tolist()
    [0, 1, 2, 3, 92, 93, 94, 95, 96, 97, 98, 99]
    """
    kept = (num_keep if num_keep >= 0 else len(token_ids)) + num_special
    kept = min(kept, limit - 1)
    room = max(1, room_for_prompt(limit, kept=kept))
    return np.concatenate([token_ids[:kept], token_ids[len(token_ids) - room + kept :]])


def room_for_prompt(limit: int, *, kept: int) -> int:
    """Tell how long a prompt is after it was cut: half of what is not kept is free."""
    return limit - max((limit - kept) // 2, 1)


def without_oldest(
    messages: Sequence[Message], num_dropped: int, is_system: Callable[[Message], bool]
) -> list[Message]:
    """Leave out the oldest messages, but for those of the system."""
    dropped, kept = messages[:num_dropped], messages[num_dropped:]
    return [*filter(is_system, dropped), *kept]


@dataclass(frozen=True, slots=True)
class Tried(Generic[Made]):
    """What came of a conversation without some of its messages."""

    made: Made | None
    """None if it is too long, or cannot be had."""
    num_tokens: int
    """So many, or at least so many; 0 if nobody knows."""


async def drop_oldest(
    attempt: Callable[[int], Awaitable[Tried[Made]]],
    *,
    sizes: Sequence[int],
    whole_tokens: int,
    limit: int,
) -> Made | None:
    """Find the fewest messages that have to be dropped, and what is left then.

    `attempt(n)` tries without the first n. All of them, of `sizes` in any unit and of
    `whole_tokens`, are known to be too long. Each attempt tells how many tokens a
    unit is, and so where to try next. None if even the last message is too long.
    """
    before = [0, *accumulate(sizes)]
    too_few, enough = 0, len(sizes)
    found: Made | None = None
    num_dropped, num_tokens = 0, whole_tokens
    number = 0
    while enough - too_few > 1:
        if number < _GUESSES and num_tokens:
            kept = before[-1] - before[num_dropped]
            surplus = kept * (1 - (limit - 1) / num_tokens)
            guess = bisect_left(before, before[num_dropped] + surplus)
        else:
            guess = (too_few + enough) // 2
        num_dropped = min(max(guess, too_few + 1), enough - 1)
        tried = await attempt(num_dropped)
        num_tokens = tried.num_tokens
        if tried.made is None:
            too_few = num_dropped
        else:
            found, enough = tried.made, num_dropped
        number += 1
    return found
