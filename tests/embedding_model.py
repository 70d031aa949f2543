"""Tiny random encoders: models that make embeddings and no text.

The same arguments give the same bytes. The vocabulary has a word of its own for each
letter and each number below 200, so that tests can tell how many tokens a text has.
"""

from pathlib import Path
from typing import Literal

import gguf
import numpy as np

Encoder = Literal["bert", "nomic-bert"]

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_CLS, _SEP = SPECIAL_TOKENS.index("[CLS]"), SPECIAL_TOKENS.index("[SEP]")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_NUM_NUMBERS = 200
_START_OF_WORD = "▁"
_N_LAYER, _N_HEAD = 2, 2

_Shapes = dict[str, tuple[int, ...]]


def write_tiny_encoder(
    path: Path,
    *,
    seed: int,
    architecture: Encoder = "bert",
    n_embd: int = 64,
    context_length: int = 64,
    pooling: gguf.PoolingType = gguf.PoolingType.MEAN,
) -> Path:
    """Write a random encoder of 2 layers with a WordPiece vocabulary."""
    tokens, types = _vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"Tiny {architecture} {seed}")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(len(tokens))
    writer.add_block_count(_N_LAYER)
    writer.add_context_length(context_length)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(2 * n_embd)
    writer.add_head_count(_N_HEAD)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
    if architecture == "nomic-bert":
        writer.add_rope_freq_base(1000.0)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_type_count(2)
    writer.add_pad_token_id(SPECIAL_TOKENS.index("[PAD]"))
    writer.add_unk_token_id(SPECIAL_TOKENS.index("[UNK]"))
    writer.add_bos_token_id(_CLS)
    writer.add_sep_token_id(_SEP)
    writer.add_eos_token_id(_SEP)
    writer.add_mask_token_id(SPECIAL_TOKENS.index("[MASK]"))
    random = np.random.default_rng(seed)
    shapes = _shapes(architecture, len(tokens), n_embd, context_length)
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            values = np.ones(shape)
        elif name.endswith("bias"):
            values = np.zeros(shape)
        else:
            values = random.normal(scale=1 / shape[-1] ** 0.5, size=shape)
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _vocabulary() -> tuple[list[str], list[int]]:
    """Give the tokens, and their types."""
    words = [*_LETTERS, *(str(number) for number in range(10, _NUM_NUMBERS))]
    tokens = [*SPECIAL_TOKENS, *(_START_OF_WORD + word for word in words), *_LETTERS]
    types = [int(gguf.TokenType.CONTROL)] * len(SPECIAL_TOKENS)
    types += [int(gguf.TokenType.NORMAL)] * (len(tokens) - len(types))
    return tokens, types


def _shapes(
    architecture: Encoder, num_tokens: int, n_embd: int, context_length: int
) -> _Shapes:
    is_bert = architecture == "bert"
    shapes: _Shapes = {
        "token_embd.weight": (num_tokens, n_embd),
        "token_types.weight": (2, n_embd),
        **_norm("token_embd_norm", n_embd),
    }
    if is_bert:
        shapes["position_embd.weight"] = (context_length, n_embd)
    for layer in range(_N_LAYER):
        block = f"blk.{layer}"
        matrices: _Shapes = {
            "attn_output": (n_embd, n_embd),
            "ffn_up": (2 * n_embd, n_embd),
            "ffn_down": (n_embd, 2 * n_embd),
        }
        if is_bert:
            matrices |= {f"attn_{letter}": (n_embd, n_embd) for letter in "qkv"}
        else:
            matrices |= {"attn_qkv": (3 * n_embd, n_embd)}
            matrices |= {"ffn_gate": (2 * n_embd, n_embd)}
        for name, shape in matrices.items():
            shapes[f"{block}.{name}.weight"] = shape
            if is_bert:
                shapes[f"{block}.{name}.bias"] = shape[:1]
        shapes |= _norm(f"{block}.attn_output_norm", n_embd)
        shapes |= _norm(f"{block}.layer_output_norm", n_embd)
    return shapes


def _norm(name: str, n_embd: int) -> _Shapes:
    return {f"{name}.weight": (n_embd,), f"{name}.bias": (n_embd,)}
