"""Sequence-state files as real runners write and read them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from proxy.blocks import BlockLayout
from proxy.llamacpp import state
from tests.llamacpp.state_samples import compose, payloads
from tests.model_shapes import Architecture
from tests.models import write_tiny_model
from tests.runners import Runner, running

PROMPT = [(7 * i * i + 13 * i) % 500 + 3 for i in range(150)]
BLOCK_SIZE = 16
CUT = 96  # whole blocks, fewer than the prompt


@dataclass(frozen=True)
class Kind:
    """A model and KV settings, and what their layout must be."""

    architecture: Architecture
    flags: tuple[str, ...]
    bytes_per_token: int
    num_runs: int


KINDS = {
    "llama-f16": Kind("llama", (), 2 * 2 * 128, 1),
    "llama-q8_0": Kind(
        "llama",
        ("--cache-type-k", "q8_0", "--cache-type-v", "q8_0", "--flash-attn", "on"),
        2 * 2 * 68,
        1,
    ),
    "llama-q4_0": Kind(
        "llama",
        ("--cache-type-k", "q4_0", "--cache-type-v", "q4_0", "--flash-attn", "on"),
        2 * 2 * 36,
        1,
    ),
    "llama-mixed": Kind(
        "llama",
        ("--cache-type-k", "f32", "--cache-type-v", "q8_0", "--flash-attn", "on"),
        2 * (256 + 68),
        2,
    ),
    "llama-no-flash": Kind("llama", ("--flash-attn", "off"), 2 * 2 * 128, 3),
    "qwen3-f16": Kind("qwen3", (), 2 * 2 * 128, 1),
    "mrope-f16": Kind("qwen2vl", (), 2 * 2 * 128, 1),
    "mla-f16": Kind("deepseek2", (), 2 * 192, 1),
}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    """One kind after the other."""
    return KINDS[str(request.param)]


@pytest.fixture(scope="module")
def runner(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Run a runner of that kind with two slots; slot 1 holds the prompt."""
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    write_tiny_model(path, seed=5, architecture=kind.architecture)
    with running(path, *kind.flags) as runner:
        runner.complete(PROMPT, slot=1, num_tokens=0)
        yield runner


def compose_cut(saved: bytes, *, num_tokens: int, n_stream: int | None = None) -> bytes:
    """Make a file of the first tokens: a frame, and the rows block by block."""
    parsed = state.parse(saved, len(saved))
    return compose(
        parsed.layout,
        parsed.token_ids[:num_tokens].tolist(),
        payloads(saved, block_size=BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        n_stream=n_stream,
    )


def test_a_save_is_understood(runner: Runner, kind: Kind) -> None:
    """The parse of a real save finds tokens, stream, row sizes and runs."""
    saved = runner.save(1, "understood").read_bytes()
    parsed = state.parse(saved, len(saved))
    assert parsed.token_ids.tolist() == PROMPT
    assert parsed.num_cells == len(PROMPT)
    assert parsed.is_contiguous
    assert parsed.num_media == 0
    assert parsed.stream == 1
    assert parsed.layout.n_stream == 2
    assert parsed.layout.kv_bytes_per_token == kind.bytes_per_token
    blocks = state.block_layout(parsed, BLOCK_SIZE)
    assert len(blocks.runs) == kind.num_runs
    assert blocks.num_blocks == len(PROMPT) // BLOCK_SIZE
    assert blocks.block_bytes == BLOCK_SIZE * kind.bytes_per_token
    assert blocks.end <= len(saved)


def test_a_composed_prefix_is_what_the_engine_would_save(runner: Runner) -> None:
    """A composed file, restored into slot 0 and saved from there, comes back equal."""
    composed = compose_cut(runner.save(1, "full").read_bytes(), num_tokens=CUT)
    (runner.slots / "cut").write_bytes(composed)
    runner.restore(0, "cut")
    assert runner.save(0, "again").read_bytes() == composed


def test_cells_in_stream_0_restore_into_slot_1(runner: Runner) -> None:
    """A file with its cells in stream 0 of 2 lands in the stream of slot 1."""
    full = runner.save(1, "full").read_bytes()
    composed = compose_cut(full, num_tokens=CUT)
    assert state.parse(composed, len(composed)).stream == 0
    (runner.slots / "cut").write_bytes(composed)
    runner.restore(1, "cut")
    again = runner.save(1, "again").read_bytes()
    (runner.slots / "full").write_bytes(full)
    runner.restore(1, "full")
    assert state.parse(again, len(again)).stream == 1
    assert compose_cut(again, num_tokens=CUT) == composed


def test_a_longer_file_restores(runner: Runner) -> None:
    """What follows the state in a slot file does no harm."""
    composed = compose_cut(runner.save(1, "full").read_bytes(), num_tokens=CUT)
    (runner.slots / "long").write_bytes(composed + b"\xa5" * 12345)
    runner.restore(0, "long")
    assert runner.save(0, "again").read_bytes() == composed


def test_a_restored_prefix_decodes_like_the_hot_slot(runner: Runner) -> None:
    """After a restore all tokens of the cut are reused, and the reply is the same."""
    prompt = PROMPT[: CUT + 20]
    runner.complete(PROMPT[:CUT], slot=0, num_tokens=0)
    composed = compose_cut(runner.save(0, "hot").read_bytes(), num_tokens=CUT)
    hot, hot_reused = runner.complete(prompt, slot=0, num_tokens=24)
    (runner.slots / "cut").write_bytes(composed)
    runner.post("/slots/0?action=erase")
    runner.restore(0, "cut")
    restored, reused = runner.complete(prompt, slot=0, num_tokens=24)
    assert (hot_reused, reused) == (CUT, CUT)
    assert restored == hot
    assert len(set(hot)) > 4


def test_an_empty_slot_has_no_layers(runner: Runner) -> None:
    """The save of an erased slot parses as a file without tokens and rows."""
    runner.post("/slots/0?action=erase")
    saved = runner.save(0, "empty").read_bytes()
    parsed = state.parse(saved, len(saved))
    assert parsed.num_cells == len(parsed.token_ids) == 0
    assert parsed.layout.k_layers == ()
    assert state.block_layout(parsed, BLOCK_SIZE) == BlockLayout((), 0)


def test_a_generated_reply_is_in_the_file_but_for_its_last_token(
    tmp_path: Path,
) -> None:
    """The saved token list is the prompt and all generated tokens but the last."""
    model = write_tiny_model(tmp_path / "m.gguf", seed=1)
    with running(model) as runner:
        reply, _ = runner.complete(PROMPT, slot=0, num_tokens=8)
        saved = runner.save(0, "s").read_bytes()
    parsed = state.parse(saved, len(saved))
    assert np.array_equal(parsed.token_ids, PROMPT + reply[:-1])


@pytest.mark.parametrize("architecture", ["gemma3", "lfm2", "mamba"])
def test_whole_files_of_other_kinds_carry_checkpoints(
    architecture: Architecture, tmp_path: Path
) -> None:
    """Restored whole, they serve a prompt that extends them or leaves them late."""
    model = write_tiny_model(tmp_path / "m.gguf", seed=1, architecture=architecture)
    prompt = PROMPT * 2
    with running(model) as a, running(model) as b:
        a.complete(prompt, slot=0, num_tokens=4)
        saved = a.save(0, "s").read_bytes()
        assert saved.count(b"SCKP") == 1
        (b.slots / "s").write_bytes(saved)
        b.restore(1, "s")
        _, reused = b.complete([*prompt, 9, 9, 9], slot=1, num_tokens=1)
        assert len(prompt) - 8 <= reused < len(prompt)
        b.restore(1, "s")
        _, reused = b.complete([*prompt[:100], 9, 9, 9], slot=1, num_tokens=1)
        assert reused == 0
