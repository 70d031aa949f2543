"""Tiny random models that real runners load. Signatures first; the bodies follow."""

from pathlib import Path
from typing import Literal

Architecture = Literal["llama", "qwen2", "qwen3", "gemma3", "lfm2", "mamba"]
Tokenizer = Literal["bpe", "spm"]


def write_tiny_model(
    path: Path,
    *,
    seed: int,
    architecture: Architecture = "llama",
    tokenizer: Tokenizer = "bpe",
    add_bos: bool = False,
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ctx_train: int = 131072,
) -> Path:
    """Write a random GGUF of `architecture`; the same arguments give the same file."""
    raise NotImplementedError


def write_tiny_llama(path: Path, *, seed: int) -> Path:
    """Write the usual tiny model: llama, 2 layers, BPE, chatml."""
    return write_tiny_model(path, seed=seed)
