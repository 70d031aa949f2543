"""Kinds of memory x KV types x flash attention x slots, saved by real runners."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import pytest

from proxy.llamacpp import state
from proxy.llamacpp.state_format import RecurrentTail, WindowTail
from proxy.llamacpp.state_sections import AttentionSection, RecurrentSection
from proxy.reuse.boundaries import CHECKPOINT_DISTANCE
from tests.llamacpp.state_samples import compose, payloads
from tests.model_shapes import HEAD_DIM as SMALL_HEAD_DIM
from tests.model_shapes import SLIDING_WINDOW, Architecture
from tests.models import write_tiny_model
from tests.runners import Runner, running

BLOCK_SIZE = 16
PROMPT = [(7 * i * i + 13 * i) % 500 + 3 for i in range(4 * BLOCK_SIZE)]
LONG_PROMPT = PROMPT * 6  # long enough for checkpoints
HEAD_DIM = 64  # quantised K and V of such heads are rotated
NUM_LAYERS = 2
LATENT_DIM = 96

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "iq4_nl")
MIXED = (("f16", "q8_0"), ("q8_0", "q4_0"), ("bf16", "iq4_nl"), ("q5_1", "f32"))
# V of a quantised type needs flash attention
OFF = (
    ("f32", "f32"),
    ("f16", "f16"),
    ("bf16", "bf16"),
    ("q8_0", "f16"),
    ("iq4_nl", "f32"),
)
OTHERS: tuple[Architecture, ...] = ("qwen2", "qwen3", "qwen2vl", "deci", "deepseek2")
WINDOW = "attention and a window"
HYBRID = "attention and recurrent"
RECURRENT = "recurrent"


@dataclass(frozen=True)
class Setting:
    """One runner."""

    architecture: Architecture = "llama"
    k_type: str = "f16"
    v_type: str = "f16"
    flash: str = "on"
    slots: int = 2
    is_unified: bool = False

    def __str__(self) -> str:
        shared = "unified" if self.is_unified else "split"
        return (
            f"{self.architecture}-{self.k_type}-{self.v_type}-{self.flash}-"
            f"{self.slots}-{shared}"
        )

    @property
    def flags(self) -> list[str]:
        """Flags of the runner."""
        flags = ["--flash-attn", self.flash]
        flags += ["--cache-type-k", self.k_type, "--cache-type-v", self.v_type]
        return flags + ["--kv-unified"] * self.is_unified


def attention_settings() -> list[Setting]:
    """Give every type with flash attention, some without; slots and kinds in turn."""
    pairs = [(kind, kind) for kind in KV_TYPES] + list(MIXED)
    shapes = [(1, False), (2, False), (3, True), (5, False)]
    found = [
        Setting(k_type=k, v_type=v, slots=slots, is_unified=is_unified)
        for number, (k, v) in enumerate(pairs)
        for slots, is_unified in [shapes[number % len(shapes)]]
    ]
    found += [
        Setting(k_type=k, v_type=v, flash="off", slots=slots, is_unified=is_unified)
        for number, (k, v) in enumerate(OFF)
        for slots, is_unified in [shapes[(number + 1) % len(shapes)]]
    ]
    others: tuple[Architecture, ...] = (
        "qwen2",
        "qwen3",
        "qwen2vl",
        "deci",
        "deepseek2",
    )
    for architecture in others:
        found += [
            Setting(architecture, slots=3),
            Setting(architecture, flash="off", is_unified=True),
            Setting(architecture, "q8_0", "q8_0"),
        ]
    return found


def other_settings() -> list[tuple[Setting, str]]:
    """Give the kinds that cannot be cut anywhere, and what they are."""
    kinds: dict[Architecture, str] = {
        "gemma3": WINDOW,
        "gpt-oss": WINDOW,
        "cohere2": WINDOW,
        "lfm2": HYBRID,
        "granitehybrid": HYBRID,
        "falcon-h1": HYBRID,
        "qwen3next": HYBRID,
        "mamba": RECURRENT,
    }
    return [
        (setting, reason)
        for architecture, reason in kinds.items()
        for setting in (
            Setting(architecture),
            Setting(architecture, flash="off", slots=3, is_unified=True),
            Setting(architecture, "q8_0", "q4_0", slots=1),
        )
    ]


def row_bytes(kind: str, num_elements: int) -> int:
    """Tell how many bytes a row of so many elements takes."""
    block, size = gguf.GGML_QUANT_SIZES[type_of(kind)]
    return num_elements // block * size


def type_of(kind: str) -> gguf.GGMLQuantizationType:
    """Find a type by the name that a flag has for it."""
    return gguf.GGMLQuantizationType[kind.upper()]


def write_model(folder: Path, setting: Setting) -> Path:
    """Write the model of a setting."""
    return write_tiny_model(
        folder / "m.gguf",
        seed=5,
        architecture=setting.architecture,
        head_dim=SMALL_HEAD_DIM if is_small(setting) else HEAD_DIM,
    )


@pytest.mark.parametrize("setting", attention_settings(), ids=str)
def test_attention_is_taken_apart_and_put_together(
    setting: Setting, tmp_path: Path
) -> None:
    """A save is what its settings say; its parts make a file that all is reused of."""
    last = setting.slots - 1
    with running(
        write_model(tmp_path, setting), *setting.flags, parallel=setting.slots
    ) as runner:
        runner.complete(PROMPT, slot=last, num_tokens=0)
        parsed = parse(runner, last)
        check_layout(parsed, setting)
        blocks = payloads(saved(runner, last), block_size=BLOCK_SIZE)
        composed = compose(parsed.layout, PROMPT, blocks, block_size=BLOCK_SIZE)
        (runner.slots / "composed").write_bytes(composed)
        runner.restore(0, "composed")
        # the engine saves what it was given, which is made of its own parts again
        assert saved(runner, 0) == composed
        assert payloads(composed, block_size=BLOCK_SIZE) == blocks
        _, reused = runner.complete([*PROMPT, 9, 9], slot=0, num_tokens=1)
        assert reused == len(PROMPT)


def saved(runner: Runner, slot: int) -> bytes:
    """Give what the runner saves of a slot."""
    return runner.save(slot, "saved").read_bytes()


def parse(runner: Runner, slot: int) -> state.ParsedState:
    """Read what the runner saves of a slot."""
    data = saved(runner, slot)
    return state.parse(data, len(data))


def check_layout(parsed: state.ParsedState, setting: Setting) -> None:
    """Compare a layout with what the settings ask for."""
    layout = parsed.layout
    head_dim = SMALL_HEAD_DIM if is_small(setting) else HEAD_DIM
    k_elements = v_elements = [2 * head_dim] * NUM_LAYERS
    if setting.architecture == "deepseek2":
        k_elements, v_elements = [LATENT_DIM] * NUM_LAYERS, []
    if setting.architecture == "deci":
        k_elements = v_elements = [2 * head_dim, 0]
    assert parsed.token_ids.tolist() == PROMPT
    assert parsed.is_contiguous
    assert parsed.num_media == 0
    assert layout.n_stream == (1 if setting.is_unified else setting.slots)
    assert parsed.stream == (0 if setting.is_unified else setting.slots - 1)
    assert layout.v_trans == (setting.flash == "off")  # latent: of no V at all
    assert layout.has_extended_cells == (setting.architecture == "qwen2vl")
    check_rows(layout.k_layers, setting.k_type, k_elements)
    check_rows(layout.v_layers, setting.v_type, v_elements)
    for rotation, kind in (
        (layout.n_rot_k, setting.k_type),
        (layout.n_rot_v, setting.v_type),
    ):
        is_rotated = not is_small(setting) and is_quantised(kind)
        assert rotation == (64 if is_rotated else 0)


def check_rows(
    layers: Sequence[state.RowFormat], kind: str, num_elements: Sequence[int]
) -> None:
    """Compare K or V of all layers with a type."""
    assert [rows.row_bytes for rows in layers] == [
        row_bytes(kind, count) for count in num_elements
    ]
    assert {rows.ggml_type for rows in layers} <= {type_of(kind)}


def is_small(setting: Setting) -> bool:
    """Tell whether the model has heads that no rotation is for."""
    return setting.architecture not in ("llama", "qwen2", "qwen3")


def is_quantised(kind: str) -> bool:
    """Tell whether a type has blocks of several elements."""
    return gguf.GGML_QUANT_SIZES[type_of(kind)][0] > 1


@pytest.mark.parametrize(("setting", "reason"), other_settings(), ids=str)
def test_memories_with_tails_are_read_to_their_end(
    setting: Setting, reason: str, tmp_path: Path
) -> None:
    """Saves of one token, of many and of none: all sections, and their tails."""
    slot = setting.slots - 1
    with running(
        write_model(tmp_path, setting), *setting.flags, parallel=setting.slots
    ) as runner:
        for prompt in (PROMPT[:1], LONG_PROMPT):
            runner.complete(prompt, slot=slot, num_tokens=0)
            check_memory(saved(runner, slot), setting, reason, num_tokens=len(prompt))
        runner.post(f"/slots/{slot}?action=erase")
        check_memory(saved(runner, slot), setting, reason, num_tokens=0)


def check_memory(
    data: bytes, setting: Setting, reason: str, *, num_tokens: int
) -> None:
    """Compare the sections of a save with what the kind of memory has."""
    file = state.read(data, len(data))
    assert file.token_ids.tolist() == LONG_PROMPT[:num_tokens]
    sections = file.memory.sections
    attention = [part for part in sections if isinstance(part, AttentionSection)]
    recurrent = [part for part in sections if isinstance(part, RecurrentSection)]
    assert len(attention) == {WINDOW: 2, HYBRID: 1, RECURRENT: 0}[reason]
    assert len(recurrent) == (reason != WINDOW)
    assert len(sections) == len(attention) + len(recurrent)
    for part in attention:
        assert part.n_stream == (1 if setting.is_unified else setting.slots)
    if attention:
        assert attention[0].num_cells == num_tokens
    for window in attention[1:]:
        assert window.num_cells == min(num_tokens, SLIDING_WINDOW)
        if num_tokens:
            assert window.v_trans == (setting.flash == "off")
    for state_of in recurrent:
        assert (state_of.num_cells, state_of.position) == (
            bool(num_tokens),
            num_tokens - 1,
        )
    for point in file.memory.checkpoints:
        assert 0 < point.num_tokens <= num_tokens
        (kept,) = point.sections
        assert isinstance(kept, type(sections[-1]))
    assert bool(file.memory.checkpoints) == (num_tokens == len(LONG_PROMPT))
    check_tails(data, reason, num_tokens=num_tokens)


def check_tails(data: bytes, reason: str, *, num_tokens: int) -> None:
    """Compare what can be shared of a save with what the kind of memory has."""
    window_tokens = SLIDING_WINDOW if reason == WINDOW else 0
    if reason == WINDOW:  # it is not told from other second caches
        with pytest.raises(state.UnsupportedStateError, match="known as a window"):
            state.parse(data, len(data))
    parsed = state.parse(data, len(data), window_tokens=window_tokens)
    layout = parsed.layout
    assert layout.has_attention == (reason != RECURRENT)
    assert parsed.is_contiguous
    kind = WindowTail if reason == WINDOW else RecurrentTail
    assert isinstance(layout.tail, kind)
    assert len(parsed.tails) == len(state.read(data, len(data)).memory.checkpoints)
    if num_tokens == len(LONG_PROMPT):
        assert num_tokens - CHECKPOINT_DISTANCE in parsed.tails
    for count, (offset, length) in parsed.tails.items():
        assert length == state.payload_bytes(layout, count)
        assert offset + length <= len(data)
