"""Tails of windows and recurrent states: found in real saves, put into real slots."""

from collections.abc import Iterator

import pytest

from proxy.llamacpp import state
from tests.llamacpp.state_samples import payloads, scatter
from tests.model_shapes import SLIDING_WINDOW, Architecture
from tests.models import write_tiny_model
from tests.runners import Runner, running

PROMPT = [(7 * i * i + 13 * i) % 500 + 3 for i in range(400)]
ENDS = ([11, 12, 13], [499, 4, 5, 6, 7], PROMPT[300:340])
BLOCK_SIZE = 16
BOUNDARIES = (48, 256)
"""Less than the window, and more."""
LOGIT_TOLERANCE = 1e-2
"""Or twice what it makes to the engine itself where a prompt is cut into batches."""
MIN_PROBABILITIES = 400

WINDOWS: list[Architecture] = ["gemma3", "gpt-oss", "cohere2"]
HYBRIDS: list[Architecture] = ["lfm2", "falcon-h1", "granitehybrid", "qwen3next"]
KINDS: list[Architecture] = [*WINDOWS, *HYBRIDS, "mamba"]
FLAGS = {
    "f16": ("--flash-attn", "on"),
    "no-flash": ("--flash-attn", "off"),
    "q8_0": (
        "--flash-attn", "on", "--cache-type-k", "q8_0", "--cache-type-v", "q8_0",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def architecture(request: pytest.FixtureRequest) -> Architecture:
    """One architecture after the other."""
    name: Architecture = request.param
    return name


@pytest.fixture(scope="module", params=list(FLAGS))
def flags(request: pytest.FixtureRequest, architecture: str) -> tuple[str, ...]:
    """One form of K and V after the other."""
    if architecture == "mamba" and request.param != "f16":
        pytest.skip("it has no K and V")
    return FLAGS[str(request.param)]


@pytest.fixture(scope="module")
def runners(
    architecture: Architecture,
    flags: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Runner, Runner]]:
    """Run one runner that computes and one, with other slots, that is given."""
    model = tmp_path_factory.mktemp("model") / "m.gguf"
    write_tiny_model(model, seed=5, architecture=architecture)
    with running(model, *flags) as one, running(model, *flags, parallel=3) as other:
        for boundary in BOUNDARIES:
            one.complete(PROMPT[: boundary + 4], slot=1, num_tokens=0)
        one.complete(PROMPT, slot=1, num_tokens=3)
        yield one, other


def compose(saved: bytes, num_tokens: int, *, n_stream: int) -> bytes:
    """Make a file of the first tokens of a save, of blocks and of a tail."""
    parsed = state.parse(saved, len(saved), window_tokens=SLIDING_WINDOW)
    layout, token_ids = parsed.layout, parsed.token_ids[:num_tokens]
    if not layout.has_attention:
        n_stream = 1
    data = bytearray(state.file_bytes(layout, num_tokens, n_stream=n_stream))
    state.write_frame(data, layout, token_ids=token_ids, n_stream=n_stream)
    if layout.has_attention:
        blocks = payloads(saved, block_size=BLOCK_SIZE, window_tokens=SLIDING_WINDOW)
        places = state.block_layout_for(layout, num_tokens, block_size=BLOCK_SIZE)
        scatter(data, places, blocks)
    offset, length = parsed.tails[num_tokens]
    assert length == state.payload_bytes(layout, num_tokens)
    for place in state.tail_frame(layout, num_tokens, n_stream=n_stream).places:
        data[place : place + length] = saved[offset : offset + length]
    return bytes(data)


def log_probabilities(runner: Runner, prompt: list[int], slot: int) -> dict[int, float]:
    """Give the log probabilities of all tokens after a prompt.

    They are those before the bias, which has a token sampled that is text: of half a
    character the engine tells nothing.
    """
    (letter,) = runner.post("/tokenize", content="a")["tokens"]
    answer = runner.post(
        "/completion",
        prompt=prompt,
        id_slot=slot,
        n_predict=1,
        temperature=0.0,
        cache_prompt=True,
        n_probs=600,
        logit_bias=[[letter, 1000.0]],
    )
    (first,) = answer["completion_probabilities"]
    return {one["id"]: one["logprob"] for one in first["top_logprobs"]}


def hot_log_probabilities(
    runner: Runner, prompt: list[int], primed: int
) -> dict[int, float]:
    """Give those of a slot that holds so many tokens of the prompt."""
    runner.post("/slots/0?action=erase")
    runner.complete(prompt[:primed], slot=0, num_tokens=0)
    return log_probabilities(runner, prompt, 0)


def difference(one: dict[int, float], other: dict[int, float]) -> float:
    """Give the largest difference of two, relative where they are larger than 1.

    The logits of a random model spread as far as 60; half precision bears no more.
    """
    assert one.keys() == other.keys()
    return max(
        abs(other[token] - value) / max(1.0, abs(value)) for token, value in one.items()
    )


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_what_is_put_together_is_reused_to_the_last_token(
    runners: tuple[Runner, Runner], boundary: int
) -> None:
    """In another process, another slot, among more slots: as from the hot slot."""
    one, other = runners
    composed = compose(one.save(1, "s").read_bytes(), boundary, n_stream=3)
    for end in ENDS:
        prompt = PROMPT[:boundary] + end
        (other.slots / "composed").write_bytes(composed)
        other.restore(2, "composed")
        _, reused = other.complete(prompt, slot=2, num_tokens=1)
        assert reused == boundary
        other.restore(1, "composed")
        given = log_probabilities(other, prompt, 1)
        expected = hot_log_probabilities(one, prompt, boundary + 4)
        noise = max(
            difference(expected, hot_log_probabilities(one, prompt, primed))
            for primed in range(8, boundary + 1, boundary // 5)
        )
        assert len(expected) > MIN_PROBABILITIES
        assert difference(given, expected) < max(LOGIT_TOLERANCE, 2 * noise)


def test_a_prompt_that_leaves_before_the_boundary_is_computed(
    runners: tuple[Runner, Runner],
) -> None:
    """A state of later tokens is never taken for one of earlier ones."""
    one, other = runners
    composed = compose(one.save(1, "s").read_bytes(), 256, n_stream=3)
    prompt = [*PROMPT[:250], 9, 9, 9, 9, 9, 9, 9]
    (other.slots / "composed").write_bytes(composed)
    other.restore(2, "composed")
    _, reused = other.complete(prompt, slot=2, num_tokens=1)
    assert reused == 0


def test_tails_of_a_save_are_those_that_were_asked_for(
    runners: tuple[Runner, Runner],
) -> None:
    """A prompt of four tokens more makes one at a boundary."""
    saved = runners[0].save(1, "s").read_bytes()
    parsed = state.parse(saved, len(saved), window_tokens=SLIDING_WINDOW)
    assert set(BOUNDARIES) <= set(parsed.tails)
    assert parsed.is_contiguous
