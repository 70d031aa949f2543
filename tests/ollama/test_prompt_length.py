"""What is too long, what is left out of it, and how soon that is found."""

import doctest
import json

import numpy as np
import pytest

from proxy.ollama import fill_in, prompt_length
from proxy.ollama.options import SamplingOptions
from proxy.ollama.prompt_length import (
    Tried,
    asks_for_more,
    context_limit,
    cut_tokens,
    drop_oldest,
    exceeds_context,
    fits,
    least_tokens,
    without_oldest,
)


@pytest.mark.parametrize("module", [prompt_length, fill_in])
def test_worked_examples(module: object) -> None:
    """The examples in the docstrings hold."""
    assert doctest.testmod(module, extraglobs={"np": np}).failed == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_ctx", "limit"),
    [(None, 4096), (0, 4096), (2048, 2048), (4096, 4096), (8192, 4096)],
)
def test_num_ctx_narrows_the_context(num_ctx: int | None, limit: int) -> None:
    """A request may ask for less context than the slot has, and gets no more."""
    options = SamplingOptions(num_ctx=num_ctx)
    assert context_limit(options, context_tokens=4096) == limit


@pytest.mark.parametrize(
    ("num_ctx", "trained_tokens", "is_more"),
    [(None, 8192, False), (0, 8192, False), (2048, 8192, False), (4096, 8192, False),
     (4097, 8192, True), (131072, 8192, True), (131072, 4096, False)],
)  # fmt: skip
def test_who_counts_on_more_context(
    num_ctx: int | None, trained_tokens: int, is_more: bool
) -> None:
    """Not who gets all that the model was trained for, whatever the number."""
    options = SamplingOptions(num_ctx=num_ctx)
    found = asks_for_more(options, context_tokens=4096, trained_tokens=trained_tokens)
    assert found == is_more


def test_a_prompt_needs_room_for_one_token_of_reply() -> None:
    """The context holds both."""
    assert fits(9, limit=10)
    assert not fits(10, limit=10)


def test_the_bytes_alone_tell_that_a_text_is_too_long() -> None:
    """No token stands for more bytes than the longest."""
    assert least_tokens("x" * 160, longest_token_bytes=16) == 10
    assert least_tokens("ä" * 81, longest_token_bytes=16) == 11
    assert least_tokens("x" * 10**6, longest_token_bytes=0) == 0


def test_the_error_is_that_of_llama_server_as_a_string() -> None:
    """Clients of Ollama find JSON inside of the string."""
    error = exceeds_context(3001, limit=2048)
    assert error.status == 400
    assert json.loads(error.message) == {
        "error": {
            "code": 400,
            "message": "request (3001 tokens) exceeds the available context size (2048 "
            "tokens), try increasing it",
            "type": "exceed_context_size_error",
            "n_prompt_tokens": 3001,
            "n_ctx": 2048,
        }
    }


@pytest.mark.parametrize(
    ("num_keep", "kept"), [(0, 1), (4, 5), (-1, 99), (500, 99), (98, 99)]
)
def test_a_cut_prompt_keeps_its_beginning_and_its_newest_tokens(
    num_keep: int, kept: int
) -> None:
    """BOS and `num_keep` tokens stay, half of the rest is free, always one is."""
    token_ids = np.arange(1000, dtype=np.int32)
    cut = cut_tokens(token_ids, limit=100, num_keep=num_keep, num_special=1)
    assert cut[:kept].tolist() == list(range(kept))
    assert len(cut) == 100 - max((100 - kept) // 2, 1)
    assert len(cut) == kept or cut[-1] == 999


def test_the_system_and_what_is_newest_stay() -> None:
    """Only messages of others are dropped."""
    messages = ["s1", "u1", "s2", "u2", "u3"]
    kept = without_oldest(messages, 3, lambda message: message.startswith("s"))
    assert kept == ["s1", "s2", "u2", "u3"]


@pytest.mark.parametrize("num_messages", [2, 3, 10, 1000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.97, 0.999])
@pytest.mark.parametrize("whole_tokens", [0, 11, 10**6])
async def test_few_attempts_find_the_fewest_messages_to_drop(
    num_messages: int, share: float, whole_tokens: int
) -> None:
    """However wrong the counts are, a thousand messages cost a dozen attempts."""
    needed = min(num_messages - 1, max(1, round(share * num_messages)))
    attempts: list[int] = []

    async def attempt(num_dropped: int) -> Tried[int]:
        attempts.append(num_dropped)
        return Tried(num_dropped if num_dropped >= needed else None, whole_tokens)

    found = await drop_oldest(
        attempt, sizes=[1] * num_messages, whole_tokens=whole_tokens, limit=10
    )
    assert found == needed
    assert len(attempts) == len(set(attempts)) <= 6 + np.log2(num_messages) + 1


@pytest.mark.parametrize("limit", [600, 4096, 50_000])
async def test_counts_that_are_right_lead_there_at_once(limit: int) -> None:
    """Messages of all sizes, with tokens that are not quite proportional to them."""
    random = np.random.default_rng(1)
    sizes = [int(size) for size in random.integers(10, 500, 1000)]
    tokens = [10 + round(size * random.uniform(0.2, 0.4)) for size in sizes]
    attempts: list[int] = []

    async def attempt(num_dropped: int) -> Tried[int]:
        attempts.append(num_dropped)
        count = sum(tokens[num_dropped:])
        return Tried(num_dropped if fits(count, limit=limit) else None, count)

    least = sum(sizes) // 16  # all that is known of a text that is not tokenized
    found = await drop_oldest(attempt, sizes=sizes, whole_tokens=least, limit=limit)
    assert found is not None
    assert sum(tokens[found:]) < limit <= sum(tokens[found - 1 :])
    assert len(attempts) <= 6


async def test_a_last_message_that_is_too_long_is_not_found_a_place() -> None:
    """Nothing is left to drop then."""

    async def attempt(num_dropped: int) -> Tried[int]:
        return Tried(None, 99)

    for sizes in ([1] * 9, [1], [0] * 9):
        made = await drop_oldest(attempt, sizes=sizes, whole_tokens=100, limit=9)
        assert made is None
