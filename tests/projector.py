"""A tiny random projector: a vision encoder that a real runner loads beside a model.

The image is scaled to 32 by 32 pixels and becomes 16 tokens, one for each patch.
"""

from pathlib import Path

import gguf
import numpy as np

IMAGE_PIXELS, PATCH_PIXELS = 32, 8
NUM_TOKENS = (IMAGE_PIXELS // PATCH_PIXELS) ** 2
_WIDTH, _HEADS, _LAYERS = 32, 2, 2


def write_tiny_projector(path: Path, *, seed: int, n_embd: int = 128) -> Path:
    """Write a CLIP encoder and a projection to `n_embd`; same seed, same bytes."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("mlp")
    writer.add_vision_image_size(IMAGE_PIXELS)
    writer.add_vision_patch_size(PATCH_PIXELS)
    writer.add_vision_embedding_length(_WIDTH)
    writer.add_vision_feed_forward_length(2 * _WIDTH)
    writer.add_vision_projection_dim(n_embd)
    writer.add_vision_block_count(_LAYERS)
    writer.add_vision_head_count(_HEADS)
    writer.add_vision_attention_layernorm_eps(1e-5)
    writer.add_vision_image_mean([0.5, 0.5, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.5])
    writer.add_vision_use_gelu(True)
    random = np.random.default_rng(seed)
    for name, shape in _shapes(n_embd).items():
        is_norm = name.endswith(("ln.weight", "ln1.weight", "ln2.weight"))
        scale = 0.0 if name.endswith("bias") else 1 / shape[-1] ** 0.5
        values = np.ones(shape) if is_norm else random.normal(scale=scale, size=shape)
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(n_embd: int) -> dict[str, tuple[int, ...]]:
    width = _WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (width, 3, PATCH_PIXELS, PATCH_PIXELS),
        "v.class_embd": (width,),
        "v.position_embd.weight": (NUM_TOKENS + 1, width),
        **_with_bias("v.pre_ln", (width,)),
        **_with_bias("mm.0", (n_embd, width)),
        **_with_bias("mm.2", (n_embd, n_embd)),
    }
    for layer in range(_LAYERS):
        block = f"v.blk.{layer}"
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            shapes |= _with_bias(f"{block}.{part}", (width, width))
        shapes |= _with_bias(f"{block}.ln1", (width,))
        shapes |= _with_bias(f"{block}.ln2", (width,))
        shapes |= _with_bias(f"{block}.ffn_down", (2 * width, width))
        shapes |= _with_bias(f"{block}.ffn_up", (width, 2 * width))
    return shapes


def _with_bias(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
