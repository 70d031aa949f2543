"""Requests to prompts: the route, the ids, the body, and the bounds."""

from typing import Any

import pytest

from proxy.errors import RequestError
from proxy.ollama import prompts
from proxy.ollama.options import SamplingOptions


def sampling_body(limit: int = 100, **options: Any) -> dict[str, Any]:  # noqa: ANN401
    """Build the body for a prompt of ten tokens."""
    return prompts.sampling_body(
        SamplingOptions(**options), num_prompt_tokens=10, limit=limit
    )


def test_all_sampling_values_are_sent() -> None:
    """Nothing is left to llama-server's own defaults, which differ."""
    assert sampling_body() == {
        "n_predict": 90,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repeat_last_n": 64,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 0xFFFFFFFF,
        "stop": [],
    }


@pytest.mark.parametrize(
    ("num_predict", "sent"), [(-1, 90), (-2, 90), (0, 90), (5, 5), (90, 90), (91, 90)]
)
def test_a_reply_ends_with_the_context(num_predict: int, sent: int) -> None:
    """However many tokens are wanted, prompt and reply fit into the context."""
    assert sampling_body(num_predict=num_predict)["n_predict"] == sent


def test_values_are_put_into_the_engines_ranges() -> None:
    """-1 for the whole context, 64-bit numbers and empty stops reach no runner."""
    body = sampling_body(
        repeat_last_n=-1, top_k=2**40, seed=2**32 + 7, stop=("", "END")
    )
    assert body["repeat_last_n"] == 100
    assert body["top_k"] == 2**31 - 1
    assert body["seed"] == 7
    assert body["stop"] == ["END"]


@pytest.mark.parametrize(
    ("num_ctx", "limit"), [(None, 4096), (0, 4096), (2048, 2048), (4096, 4096)]
)
def test_num_ctx_narrows_the_context(num_ctx: int | None, limit: int) -> None:
    """A request may ask for less context than the slot has."""
    options = SamplingOptions(num_ctx=num_ctx)
    assert prompts.context_limit(options, context_tokens=4096) == limit


def test_num_ctx_cannot_widen_the_context() -> None:
    """Asking for more is refused, and the text names both numbers."""
    with pytest.raises(RequestError, match=r"num_ctx 8192 .* 4096") as caught:
        prompts.context_limit(SamplingOptions(num_ctx=8192), context_tokens=4096)
    assert caught.value.status == 400


def test_prompts_that_do_not_fit_are_refused() -> None:
    """A prompt needs room for one token of reply; the text names both numbers."""
    prompts.check_tokens_fit(9, limit=10)
    with pytest.raises(RequestError, match=r"longer than the context length.* 10 .*10"):
        prompts.check_tokens_fit(10, limit=10)


def test_texts_that_cannot_fit_never_reach_the_tokenizer() -> None:
    """The bytes alone can tell that a text is too long, whatever its tokens."""
    prompts.check_text_fits("x" * 160, limit=10, longest_token_bytes=16)
    prompts.check_text_fits("x" * 10**6, limit=10, longest_token_bytes=0)
    with pytest.raises(RequestError, match=r"at least 11 tokens.* 10"):
        prompts.check_text_fits("ä" * 81, limit=10, longest_token_bytes=16)
