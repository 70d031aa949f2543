"""Tensors and metadata of tiny models, one function for each architecture.

Each adds its metadata to the writer and gives the shapes of its tensors by their
names, without the suffix ".weight".
"""

from typing import Literal

import gguf

Architecture = Literal[
    "llama",
    "qwen2",
    "qwen2vl",
    "qwen3",
    "gemma3",
    "gpt-oss",
    "cohere2",
    "deci",
    "deepseek2",
    "lfm2",
    "granitehybrid",
    "falcon-h1",
    "qwen3next",
    "mamba",
]
Shapes = dict[str, tuple[int, ...]]

HEAD_DIM = 32
SLIDING_WINDOW = 64  # gemma3, gpt-oss, cohere2


def feed_forward(layer: int, n_embd: int) -> Shapes:
    """Give a gated feed-forward layer."""
    return {
        f"blk.{layer}.ffn_norm": (n_embd,),
        f"blk.{layer}.ffn_gate": (2 * n_embd, n_embd),
        f"blk.{layer}.ffn_up": (2 * n_embd, n_embd),
        f"blk.{layer}.ffn_down": (n_embd, 2 * n_embd),
    }


def attention(
    layer: int, n_embd: int, n_head: int, n_head_kv: int, *, head_dim: int = HEAD_DIM
) -> Shapes:
    """Give the projections of an attention layer."""
    return {
        f"blk.{layer}.attn_q": (n_head * head_dim, n_embd),
        f"blk.{layer}.attn_k": (n_head_kv * head_dim, n_embd),
        f"blk.{layer}.attn_v": (n_head_kv * head_dim, n_embd),
        f"blk.{layer}.attn_output": (n_embd, n_head * head_dim),
    }


def head_norms(layer: int, *, head_dim: int = HEAD_DIM) -> Shapes:
    """Give the norms of queries and keys."""
    return {
        f"blk.{layer}.attn_q_norm": (head_dim,),
        f"blk.{layer}.attn_k_norm": (head_dim,),
    }


def transformer(
    writer: gguf.GGUFWriter,
    architecture: str,
    n_layer: int,
    n_embd: int,
    n_head: int,
    n_kv: int,
    *,
    head_dim: int = HEAD_DIM,
) -> Shapes:
    """Give a dense transformer of one of the plain families."""
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(500000.0)
    if architecture == "gemma3":
        writer.add_sliding_window(SLIDING_WINDOW)
    if architecture == "qwen2vl":
        writer.add_rope_dimension_sections([4, 6, 6, 0])
    shapes: Shapes = {}
    for layer in range(n_layer):
        shapes[f"blk.{layer}.attn_norm"] = (n_embd,)
        shapes |= attention(layer, n_embd, n_head, n_kv, head_dim=head_dim)
        shapes |= feed_forward(layer, n_embd)
        if architecture in ("qwen3", "gemma3"):
            shapes |= head_norms(layer, head_dim=head_dim)
        if architecture in ("qwen2", "qwen2vl"):
            for letter, heads in (("q", n_head), ("k", n_kv), ("v", n_kv)):
                shapes[f"blk.{layer}.attn_{letter}.bias"] = (heads * head_dim,)
        if architecture == "gemma3":
            shapes[f"blk.{layer}.post_attention_norm"] = (n_embd,)
            shapes[f"blk.{layer}.post_ffw_norm"] = (n_embd,)
    return shapes


def deepseek2(
    writer: gguf.GGUFWriter, n_layer: int, n_embd: int, n_head: int
) -> Shapes:
    """Give layers of multi-head latent attention."""
    rank, query_rank, rope, nope, value = 64, 64, 32, 32, 32
    writer.add_q_lora_rank(query_rank)
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(nope + rope)
    writer.add_value_length_mla(value)
    writer.add_rope_dimension_count(rope)
    writer.add_leading_dense_block_count(n_layer)
    writer.add_expert_count(0)
    writer.add_expert_used_count(0)
    writer.add_expert_shared_count(0)
    writer.add_expert_feed_forward_length(n_embd)
    shapes: Shapes = {}
    for layer in range(n_layer):
        shapes |= {
            f"blk.{layer}.attn_norm": (n_embd,),
            f"blk.{layer}.attn_q_a": (query_rank, n_embd),
            f"blk.{layer}.attn_q_a_norm": (query_rank,),
            f"blk.{layer}.attn_q_b": (n_head * (nope + rope), query_rank),
            f"blk.{layer}.attn_kv_a_mqa": (rank + rope, n_embd),
            f"blk.{layer}.attn_kv_a_norm": (rank,),
            f"blk.{layer}.attn_k_b": (n_head, rank, nope),
            f"blk.{layer}.attn_v_b": (n_head, value, rank),
            f"blk.{layer}.attn_output": (n_embd, n_head * value),
        }
        shapes |= feed_forward(layer, n_embd)
    return shapes


def lfm2(
    writer: gguf.GGUFWriter, n_layer: int, n_embd: int, n_head: int, n_head_kv: int
) -> Shapes:
    """Give short convolutions, and attention in every second layer."""
    writer.add_head_count_kv([n_head_kv * (layer % 2) for layer in range(n_layer)])
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_shortconv_l_cache(3)
    shapes: Shapes = {}
    for layer in range(n_layer):
        shapes[f"blk.{layer}.attn_norm"] = (n_embd,)
        if layer % 2:
            shapes |= attention(layer, n_embd, n_head, n_head_kv)
            shapes |= head_norms(layer)
        else:
            shapes[f"blk.{layer}.shortconv.conv"] = (n_embd, 3)
            shapes[f"blk.{layer}.shortconv.in_proj"] = (3 * n_embd, n_embd)
            shapes[f"blk.{layer}.shortconv.out_proj"] = (n_embd, n_embd)
        shapes |= feed_forward(layer, n_embd)
    return shapes


def mamba(writer: gguf.GGUFWriter, n_layer: int, n_embd: int) -> Shapes:
    """Give layers of the first kind of state space."""
    inner, conv, state, rank = 2 * n_embd, 4, 16, 8
    writer.add_ssm_conv_kernel(conv)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    shapes: Shapes = {}
    for layer in range(n_layer):
        shapes |= {
            f"blk.{layer}.attn_norm": (n_embd,),
            f"blk.{layer}.ssm_in": (2 * inner, n_embd),
            f"blk.{layer}.ssm_conv1d": (inner, conv),
            f"blk.{layer}.ssm_conv1d.bias": (inner,),
            f"blk.{layer}.ssm_x": (rank + 2 * state, inner),
            f"blk.{layer}.ssm_dt": (inner, rank),
            f"blk.{layer}.ssm_dt.bias": (inner,),
            f"blk.{layer}.ssm_a": (inner, state),
            f"blk.{layer}.ssm_d": (inner,),
            f"blk.{layer}.ssm_out": (n_embd, inner),
        }
    return shapes


def gpt_oss(
    writer: gguf.GGUFWriter, n_layer: int, n_embd: int, n_head: int, n_head_kv: int
) -> Shapes:
    """Give a window to every second layer, attention sinks, experts with biases."""
    n_expert, n_ff = 2, n_embd
    _add_heads(writer)
    writer.add_sliding_window(SLIDING_WINDOW)
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(1)
    writer.add_expert_feed_forward_length(n_ff)
    shapes: Shapes = {}
    for layer in range(n_layer):
        shapes |= {
            f"blk.{layer}.attn_norm": (n_embd,),
            f"blk.{layer}.post_attention_norm": (n_embd,),
            f"blk.{layer}.attn_sinks": (n_head,),
            f"blk.{layer}.attn_output.bias": (n_embd,),
            f"blk.{layer}.ffn_gate_inp": (n_expert, n_embd),
            f"blk.{layer}.ffn_gate_inp.bias": (n_expert,),
        }
        shapes |= attention(layer, n_embd, n_head, n_head_kv)
        for letter, heads in (("q", n_head), ("k", n_head_kv), ("v", n_head_kv)):
            shapes[f"blk.{layer}.attn_{letter}.bias"] = (heads * HEAD_DIM,)
        for name, rows, columns in (
            ("gate", n_ff, n_embd),
            ("up", n_ff, n_embd),
            ("down", n_embd, n_ff),
        ):
            shapes[f"blk.{layer}.ffn_{name}_exps"] = (n_expert, rows, columns)
            shapes[f"blk.{layer}.ffn_{name}_exps.bias"] = (n_expert, rows)
    return shapes


def cohere2(
    writer: gguf.GGUFWriter, n_layer: int, n_embd: int, n_head: int, n_head_kv: int
) -> Shapes:
    """Give a window to three layers of four, attention beside feed-forward."""
    _add_heads(writer)
    writer.add_layer_norm_eps(1e-5)
    writer.add_sliding_window(SLIDING_WINDOW)
    writer.add_logit_scale(1.0)
    shapes: Shapes = {}
    for layer in range(n_layer):
        shapes[f"blk.{layer}.attn_norm"] = (n_embd,)
        shapes |= attention(layer, n_embd, n_head, n_head_kv)
        shapes |= feed_forward(layer, n_embd)
        del shapes[f"blk.{layer}.ffn_norm"]
    return shapes


def deci(
    writer: gguf.GGUFWriter, n_layer: int, n_embd: int, n_head: int, n_head_kv: int
) -> Shapes:
    """Give attention to every second layer, a plain projection to the others."""
    _add_heads(writer)
    writer.add_head_count_kv([n_head_kv * (1 - layer % 2) for layer in range(n_layer)])
    shapes: Shapes = {}
    for layer in range(n_layer):
        shapes[f"blk.{layer}.attn_norm"] = (n_embd,)
        if layer % 2:
            shapes[f"blk.{layer}.attn_output"] = (n_embd, n_embd)
        else:
            shapes |= attention(layer, n_embd, n_head, n_head_kv)
        shapes |= feed_forward(layer, n_embd)
    return shapes


def granitehybrid(
    writer: gguf.GGUFWriter, n_layer: int, n_embd: int, n_head: int, n_head_kv: int
) -> Shapes:
    """Give state-space layers, and attention in every second one."""
    _add_heads(writer)
    writer.add_head_count_kv([n_head_kv * (layer % 2) for layer in range(n_layer)])
    shapes: Shapes = {}
    for layer in range(n_layer):
        shapes[f"blk.{layer}.attn_norm"] = (n_embd,)
        if layer % 2:
            shapes |= attention(layer, n_embd, n_head, n_head_kv)
        else:
            shapes |= _mamba2(writer, layer, n_embd)
        shapes |= feed_forward(layer, n_embd)
    return shapes


def falcon_h1(
    writer: gguf.GGUFWriter, n_layer: int, n_embd: int, n_head: int, n_head_kv: int
) -> Shapes:
    """Give attention and a state space beside each other to each layer."""
    _add_heads(writer)
    shapes: Shapes = {}
    for layer in range(n_layer):
        shapes[f"blk.{layer}.attn_norm"] = (n_embd,)
        shapes |= _mamba2(writer, layer, n_embd)
        shapes |= attention(layer, n_embd, n_head, n_head_kv)
        shapes |= feed_forward(layer, n_embd)
    return shapes


def qwen3next(
    writer: gguf.GGUFWriter, n_layer: int, n_embd: int, n_head: int, n_head_kv: int
) -> Shapes:
    """Give gated delta nets, attention in every second layer, experts."""
    n_expert, n_ff = 2, n_embd
    state, groups, heads, conv = 32, 2, 4, 4
    key, value = state * groups, state * heads
    _add_heads(writer)
    writer.add_full_attention_interval(2)
    writer.add_ssm_conv_kernel(conv)
    writer.add_ssm_inner_size(value)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(groups)
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(1)
    writer.add_expert_feed_forward_length(n_ff)
    writer.add_expert_shared_feed_forward_length(n_ff)
    shapes: Shapes = {}
    for layer in range(n_layer):
        shapes[f"blk.{layer}.attn_norm"] = (n_embd,)
        shapes[f"blk.{layer}.post_attention_norm"] = (n_embd,)
        if layer % 2:
            shapes |= attention(layer, n_embd, n_head, n_head_kv)
            shapes[f"blk.{layer}.attn_q"] = (2 * n_head * HEAD_DIM, n_embd)
            shapes |= head_norms(layer)
        else:
            shapes |= {
                f"blk.{layer}.attn_qkv": (2 * key + value, n_embd),
                f"blk.{layer}.attn_gate": (value, n_embd),
                f"blk.{layer}.ssm_conv1d": (2 * key + value, conv),
                f"blk.{layer}.ssm_dt.bias": (heads,),
                f"blk.{layer}.ssm_a": (heads,),
                f"blk.{layer}.ssm_ba": (2 * heads, n_embd),
                f"blk.{layer}.ssm_norm": (state,),
                f"blk.{layer}.ssm_out": (n_embd, value),
            }
        shapes[f"blk.{layer}.ffn_gate_inp"] = (n_expert, n_embd)
        shapes[f"blk.{layer}.ffn_gate_inp_shexp"] = (n_embd,)
        for name in ("gate", "up", "down"):
            shapes[f"blk.{layer}.ffn_{name}_exps"] = (n_expert, n_ff, n_embd)
            shapes[f"blk.{layer}.ffn_{name}_shexp"] = (n_ff, n_embd)
    return shapes


def _add_heads(writer: gguf.GGUFWriter) -> None:
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(500000.0)


def _mamba2(writer: gguf.GGUFWriter, layer: int, n_embd: int) -> Shapes:
    """Give one layer of the second kind of state space; the metadata with the first."""
    inner, conv, state, heads, groups = 2 * n_embd, 4, 16, 8, 1
    if f"{writer.arch}.ssm.inner_size" not in writer.kv_data[0]:
        writer.add_ssm_conv_kernel(conv)
        writer.add_ssm_inner_size(inner)
        writer.add_ssm_state_size(state)
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_group_count(groups)
    mixed = inner + 2 * groups * state
    return {
        f"blk.{layer}.ssm_in": (inner + mixed + heads, n_embd),
        f"blk.{layer}.ssm_conv1d": (mixed, conv),
        f"blk.{layer}.ssm_conv1d.bias": (mixed,),
        f"blk.{layer}.ssm_dt.bias": (heads,),
        f"blk.{layer}.ssm_a": (heads, 1),
        f"blk.{layer}.ssm_d": (heads, 1),
        f"blk.{layer}.ssm_norm": (groups, inner // groups),
        f"blk.{layer}.ssm_out": (n_embd, inner),
    }
